"""Where a bundle is named, every engine of vLLM's has a gate before it or in it, or does not
start."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from probes_store.errors import WrongChatTemplate
from probes_store.store import SHIPPED, Store
from service.demo import MODEL_DIR
from service.engines import checkpoint
from service.engines.base import EngineOptions
from service.engines.vllm.engine import VllmEngine
from service.engines.vllm.launch import WORKER
from service.engines.vllm.wire import GATED, KEY
from service.errors import HalluTracerError, ModelLoadError
from service.vllm_plugin import engine_gate
from service.vllm_plugin.front_end import RAY_PREFIXES, SERVERS, check
from service.vllm_plugin.model_check import ChatOptions, check_rendering
from tests.engines.vllm.installed import vllm_or_skip
from tests.kit import vllm_programs
from tests.kit.forks import Program

vllm_or_skip()

from transformers import AutoTokenizer  # noqa: E402

SAME: dict[str, Any] = {
    "model": str(MODEL_DIR),
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 64,
}
LINE = ["--model", str(MODEL_DIR), "--dtype", "float32", "--enforce-eager", "--max-model-len", "64"]
BLIND = "vllm.v1.worker.cpu_worker.CPUWorker"
UNSAID = f"--worker-cls {BLIND} does not read the model"


def vllm(name: str) -> Any:
    """Import what ``vllm.NAME`` is, late: vLLM's import takes ten seconds."""
    try:
        return importlib.import_module(f"vllm.{name}")
    except ModuleNotFoundError:
        module, _, last = f"vllm.{name}".rpartition(".")
        return getattr(importlib.import_module(module), last)


class Chosen(Exception):
    """An executor's class was asked for: the next step would start the engine."""


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Configurations whose engines would have started.

    ``check`` has run with a bundle named; vLLM is as before afterwards."""
    yield from checked(monkeypatch, "BUNDLE", "demo")


@pytest.fixture
def no_bundle(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The same where a gate was asked for, and no bundle named."""
    monkeypatch.delenv("HALLUTRACER_BUNDLE", raising=False)
    yield from checked(monkeypatch, "POLICY", "gate")


def checked(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> Iterator[list[Any]]:
    configs: list[Any] = []
    args = vllm("EngineArgs")
    executor = vllm("v1.executor.abstract.Executor")
    core = vllm("v1.engine.core")

    own = executor.get_class

    def choose(config: Any) -> Any:
        if (
            sys._getframe(2).f_code.co_name == "__post_init__"
        ):  # vLLM 0.32 asks while it makes the configuration, too
            return own(config)
        configs.append(config)
        raise Chosen

    monkeypatch.setenv(f"HALLUTRACER_{variable}", value)
    monkeypatch.setenv("VLLM_PLUGINS", "hallutracer")  # put back as it was
    monkeypatch.delenv("VLLM_PLUGINS")
    monkeypatch.setenv("_HALLUTRACER_FOLLOW", "")
    monkeypatch.setattr(args, "create_engine_config", args.create_engine_config)
    monkeypatch.setattr(executor, "get_class", staticmethod(choose))
    monkeypatch.setattr(executor, "__init__", executor.__init__)
    monkeypatch.setattr(core.EngineCore, "__init__", core.EngineCore.__init__)
    monkeypatch.setattr(core.EngineCore, "add_request", core.EngineCore.add_request)
    for kind in (core.EngineCoreProc, core.DPEngineCoreProc):
        monkeypatch.setattr(kind, "run_busy_loop", kind.run_busy_loop)
    renderer = vllm("renderers.BaseRenderer")
    monkeypatch.setattr(renderer, "render_chat_async", renderer.render_chat_async)
    monkeypatch.setenv(RAY_PREFIXES, "MINE_")
    monkeypatch.setattr(core.EngineCoreProc, "run_engine_core", core.EngineCoreProc.run_engine_core)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    check()
    yield configs
    for number, handler in handlers.items():
        signal.signal(number, handler)


def served(*more: str) -> Namespace:
    """As ``vllm serve`` parses its command line."""
    where = (
        "common" if importlib.util.find_spec("vllm.entrypoints.common.cli_args") else "launchers"
    )  # as before 0.33
    make = vllm(f"entrypoints.{where}.cli_args.make_arg_parser")
    arguments: Namespace = make(vllm("utils.argparse_utils.FlexibleArgumentParser")()).parse_args(
        [*LINE, *more]
    )
    return arguments


def offline(**more: Any) -> None:
    vllm("LLM")(**SAME, **more)


def replica(**more: Any) -> None:
    vllm("v1.engine.async_llm.AsyncLLM").from_engine_args(vllm("AsyncEngineArgs")(**SAME, **more))


def runtime(**more: Any) -> None:
    """With the function that vLLM's server starts its engine with, but without the server."""

    async def run() -> None:
        async with vllm("entrypoints.launchers.api_server.entry.build_async_engine_client")(
            served(*line(more))
        ):
            pass

    asyncio.run(run())


def batch(**more: Any) -> None:
    run_batch = vllm("entrypoints.launchers.run_batch")
    parser = run_batch.make_arg_parser(run_batch.FlexibleArgumentParser())
    body = {"model": str(MODEL_DIR), "prompt": "a"}
    request = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    with tempfile.NamedTemporaryFile(
        "w", suffix=".jsonl"
    ) as asked:  # vLLM 0.33 reads it before it makes an engine
        print(json.dumps(request), file=asked, flush=True)
        asyncio.run(
            run_batch.main(parser.parse_args(["-i", asked.name, "-o", "out", *LINE, *line(more)]))
        )


def in_a_thread(**more: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(replica, **more).result()


def line(more: dict[str, Any]) -> list[str]:
    return [
        part for name, value in more.items() for part in (f"--{name.replace('_', '-')}", str(value))
    ]


STARTS = [offline, replica, runtime, batch, in_a_thread]


@pytest.mark.parametrize("start", STARTS)
def test_an_engine_of_any_program_reads(engines: list[Any], start: Callable[[], None]) -> None:
    """It judges what it reads: test_engine_gate."""
    with pytest.raises(Chosen):
        start()
    (made,) = engines
    assert made.parallel_config.worker_cls == WORKER
    assert made.additional_config[KEY]["sites"]
    assert made.additional_config[GATED] is False


@pytest.mark.parametrize("start", STARTS)
def test_an_engine_that_does_not_read_is_not_started(
    engines: list[Any], start: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(SystemExit) as ended:
        start(worker_cls=BLIND)
    assert f"HALLUTRACER_BUNDLE is set, and {UNSAID}" in str(ended.value)
    assert not engines
    assert (
        UNSAID in caplog.text
    )  # with time and level, as SystemExit does not; in a thread it is silent


@pytest.mark.parametrize("start", STARTS)
def test_no_engine_starts_where_the_guard_cannot_be_loaded(
    engines: list[Any], start: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at a second try either."""
    monkeypatch.setitem(sys.modules, "service.vllm_plugin.front_end", None)
    monkeypatch.setattr(vllm("plugins"), "plugins_loaded", False)
    for _ in range(2):
        with pytest.raises(SystemExit, match="the guard cannot be loaded"):
            start()
    assert not engines


@pytest.mark.parametrize("wrong", [HalluTracerError("another model"), AssertionError("a fault")])
def test_a_core_that_was_made_before_the_guard_runs_only_behind_a_gate(
    engines: list[Any], monkeypatch: pytest.MonkeyPatch, wrong: Exception
) -> None:
    """As Ray's actors make one: from a configuration of another process, so plugins load when it is
    half made."""
    opened: list[Any] = []

    def open_gate(core: Any, options: Any) -> None:
        opened.append(core)
        raise wrong

    module = vllm("v1.engine.core")
    monkeypatch.setattr(engine_gate, "open_gate", open_gate)
    for kind in (module.EngineCoreProc, module.DPEngineCoreProc):
        core = object.__new__(kind)
        core.vllm_config = SimpleNamespace(additional_config={GATED: False})
        core.shutdown = lambda: None
        for run in (
            core.run_busy_loop,
            lambda core=core: module.EngineCore.add_request(core, "r"),
        ) * 2:
            with pytest.raises((SystemExit, AssertionError), match=str(wrong)):
                run()
    assert len(opened) == 8


def test_rays_workers_get_our_variables(engines: list[Any]) -> None:
    names = vllm("ray.ray_env.get_env_vars_to_copy")()
    assert "HALLUTRACER_BUNDLE" in names
    assert os.environ[RAY_PREFIXES] == "MINE_,HALLUTRACER_"


def test_an_engine_is_left_alone_where_no_bundle_is_named(
    engines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HALLUTRACER_BUNDLE")
    with pytest.raises(Chosen):
        replica()
    (made,) = engines
    assert made.parallel_config.worker_cls != WORKER


def api_server(*more: str) -> None:
    asyncio.run(
        vllm("entrypoints.launchers.api_server.entry.run_server_worker")("", None, served(*more))
    )


def api_servers() -> None:
    vllm("entrypoints.cli.serve").run_multi_api_server(served("--api-server-count", "2"))


def headless() -> None:
    vllm("entrypoints.cli.serve").run_headless(served("--headless", "--api-server-count", "0"))


@pytest.mark.parametrize("start", [api_server, api_servers, headless])
def test_every_way_of_vllms_own_server_reads_and_is_gated(
    engines: list[Any], start: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = vllm("entrypoints.cli.serve")
    monkeypatch.setattr(serve, "setup_server", lambda *_args, **_options: ("", None))
    monkeypatch.setattr(serve, "setup_multiprocess_prometheus", lambda: None)
    with pytest.raises(Chosen):
        start()
    (made,) = engines
    assert made.additional_config[GATED] is True
    assert made.additional_config[KEY]["sites"]
    assert made.parallel_config.worker_cls == WORKER
    assert "hallutracer" in os.environ["VLLM_PLUGINS"].split(",")


@pytest.mark.parametrize("start", [*STARTS, api_server, api_servers, headless])
def test_no_engine_starts_ungated_where_a_gate_was_asked_for(
    no_bundle: list[Any], start: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = vllm("entrypoints.cli.serve")
    monkeypatch.setattr(serve, "setup_server", lambda *_args, **_options: ("", None))
    monkeypatch.setattr(serve, "setup_multiprocess_prometheus", lambda: None)
    with pytest.raises(
        SystemExit, match="HALLUTRACER_POLICY=gate is set and HALLUTRACER_BUNDLE is not: nothing"
    ):
        start()
    assert not no_bundle


def test_no_engine_of_another_processs_configuration_starts_ungated_either(
    no_bundle: list[Any],
) -> None:
    module, choose = vllm("v1.engine.core"), vllm("v1.executor.abstract.Executor").get_class
    config, stopped = SimpleNamespace(additional_config={}), list[str]()
    core = object.__new__(module.EngineCoreProc)
    core.vllm_config, core.shutdown = config, lambda: stopped.append("core")
    for run in (
        core.run_busy_loop,
        lambda: module.EngineCore.add_request(core, "r"),
        lambda: choose(config),
    ):
        with pytest.raises(
            SystemExit, match="HALLUTRACER_POLICY=gate is set and HALLUTRACER_BUNDLE is not"
        ):
            run()
    assert (stopped, no_bundle) == (["core", "core"], [])


@pytest.mark.parametrize(
    ("policy", "bundle", "line"),
    [
        (
            "observe",
            "",
            "no risk is told: HALLUTRACER_POLICY=observe is set and HALLUTRACER_BUNDLE is empty",
        ),
        ("", "", ""),
    ],
)
def test_an_engine_that_may_answer_ungated_starts_plain(
    no_bundle: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    policy: str,
    bundle: str,
    line: str,
) -> None:
    monkeypatch.setenv("HALLUTRACER_POLICY", policy)
    monkeypatch.setenv("HALLUTRACER_BUNDLE", bundle)
    with pytest.raises(Chosen):
        replica()
    (made,) = no_bundle
    assert made.parallel_config.worker_cls != WORKER
    messages = [record.getMessage() for record in caplog.records if record.name == "hallutracer"]
    assert messages == ([f"hallutracer: {line}"] if line else [])


def test_our_own_engine_starts_where_its_bundle_is_on_its_command_line(
    no_bundle: list[Any],
) -> None:
    """As ``hallutracer serve --engine vllm --bundle demo`` does with HALLUTRACER_POLICY=gate."""
    with pytest.raises(ModelLoadError, match="Chosen"):
        VllmEngine.load(
            EngineOptions(model=str(MODEL_DIR), dtype="float32", extra={"max_model_len": "64"})
        )
    (made,) = no_bundle
    assert made.additional_config[GATED] is True


@pytest.mark.parametrize("start", [*STARTS, api_server])
def test_a_bundle_of_another_model_is_refused_before_the_weights(
    engines: list[Any], start: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALLUTRACER_BUNDLE", "smollm2")
    with pytest.raises(
        SystemExit, match="HALLUTRACER_BUNDLE is set, and .*bundle smollm2:1 was trained on other"
    ):
        start()
    assert not engines


def test_every_bundle_of_a_server_is_compared_and_the_first_of_a_gate_in_a_core(
    engines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALLUTRACER_BUNDLE", "demo smollm2")
    with pytest.raises(SystemExit, match="bundle smollm2:1 was trained on other"):
        api_server()
    with pytest.raises(Chosen):
        replica()


def test_another_tokenizer_is_refused_before_the_weights(
    engines: list[Any], tmp_path: Path
) -> None:
    shutil.copytree(MODEL_DIR, tmp_path / "same")
    shutil.copytree(MODEL_DIR, tmp_path / "other")
    other = AutoTokenizer.from_pretrained(tmp_path / "other")
    other.chat_template += " "
    other.save_pretrained(tmp_path / "other")
    for start in (api_server, lambda *more: batch(tokenizer=more[1])):
        with pytest.raises(SystemExit, match="demo:1 was trained on another chat template"):
            start("--tokenizer", str(tmp_path / "other"))
        with pytest.raises(Chosen):
            start("--tokenizer", str(tmp_path / "same"))
    assert len(engines) == 2


def test_weights_that_are_still_to_be_downloaded_are_compared_later(
    engines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:

    def incomplete(folder: Path) -> list[Path]:
        raise ModelLoadError("an index names what is not there")

    for missing in (lambda folder: list[Path](), incomplete):
        monkeypatch.setattr(checkpoint, "weight_files", missing)
        monkeypatch.setattr(checkpoint, "check_folder", lambda folder: None)
        with pytest.raises(Chosen):
            replica()
        monkeypatch.setenv("HALLUTRACER_BUNDLE", "smollm2")
        with pytest.raises(SystemExit, match="bundle smollm2:1 was trained on another shape"):
            replica()
        monkeypatch.setenv("HALLUTRACER_BUNDLE", "demo")


OWN = AutoTokenizer.from_pretrained(MODEL_DIR).chat_template
LEFT_OUT, OTHERWISE = None, "renders every chat otherwise than in the training of bundle demo:1"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--chat-template", OWN], LEFT_OUT),
        (["--chat-template", "FILE", OWN], LEFT_OUT),
        (["--chat-template", "FILE", OWN + "\n"], LEFT_OUT),
        (["--chat-template", "FILE", OWN + "{{ '\\n' }}"], OTHERWISE),
        (["--chat-template", "FILE", ""], OTHERWISE),
        (["--chat-template", "{{ messages }}"], OTHERWISE),
        (
            ["--chat-template", "template_chatml.jinja"],
            OTHERWISE,
        ),  # which vLLM looks for among its own
        (["--default-chat-template-kwargs", "{}"], LEFT_OUT),
        (["--default-chat-template-kwargs", '{"enable_thinking": false}'], OTHERWISE),
    ],
)
def test_a_server_that_renders_chats_otherwise_is_refused_before_the_weights(
    engines: list[Any], tmp_path: Path, options: list[str], words: str | None
) -> None:
    if len(options) == 3:
        (tmp_path / "chat.jinja").write_text(options.pop())
        options[1] = str(tmp_path / "chat.jinja")
    for start in (api_server, lambda *more: batch(**{more[0][2:].replace("-", "_"): more[1]})):
        with pytest.raises(Chosen if words is None else SystemExit) as ended:
            start(*options)
        assert words is None or (
            "HALLUTRACER_BUNDLE is set, and " in str(ended.value) and words in str(ended.value)
        )
    assert len(engines) == (2 if words is None else 0)


def test_a_bundle_of_plain_text_is_read_under_any_chat_template() -> None:
    manifest = Store(Path("/nonexistent"), fallbacks=[SHIPPED]).load("demo").manifest
    options = ChatOptions("{{ messages }}", {"a": 1})
    with pytest.raises(WrongChatTemplate, match="expected a template of the digest"):
        check_rendering(manifest, options, OWN)
    check_rendering(replace(manifest, prompt_format="text"), options, OWN)


def test_a_bundle_of_template_arguments_is_read_where_vllm_gives_them_too() -> None:
    manifest = Store(Path("/nonexistent"), fallbacks=[SHIPPED]).load("demo").manifest
    template = replace(
        manifest.chat_template, arguments={"enable_thinking": False, "style": "it's"}
    )
    trained = replace(manifest, chat_template=template)
    given = dict(template.arguments or {})
    for options in (ChatOptions(variables=given, known=True), ChatOptions()):
        check_rendering(trained, options, OWN)
    less, more = ChatOptions(variables={"style": "it's"}), ChatOptions(variables=given | {"a": 1})
    for options in (ChatOptions.of(Namespace()), less, more):
        with pytest.raises(WrongChatTemplate, match="--default-chat-template-kwargs") as caught:
            check_rendering(trained, options, OWN)
        command = shlex.split(str(caught.value).split("Start vLLM with ")[1].split("; requests")[0])
        assert json.loads(command[1]) == given
    with pytest.raises(WrongChatTemplate, match="Leave the option out"):
        check_rendering(manifest, ChatOptions(variables=given), OWN)


def test_our_own_engine_starts_with_a_bundle_named(engines: list[Any]) -> None:
    with pytest.raises(ModelLoadError, match="Chosen"):
        VllmEngine.load(
            EngineOptions(model=str(MODEL_DIR), dtype="float32", extra={"max_model_len": "64"})
        )
    (made,) = engines
    assert made.additional_config[GATED] is True


@pytest.mark.parametrize(
    ("worker", "starts"),
    [(BLIND, False), (WORKER, True), ("tests.parity.faulty.RowTooEarly", True)],
)
def test_a_server_whose_worker_does_not_read_is_not_started(
    engines: list[Any], worker: str, starts: bool
) -> None:
    with pytest.raises(Chosen if starts else SystemExit) as ended:
        api_server("--worker-cls", worker)
    if not starts:
        assert f"--worker-cls {worker} does not read the model; leave it out" in str(ended.value)
    assert len(engines) == starts


def test_a_server_without_the_plugins_routes_is_not_started(
    engines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(SystemExit, match="HALLUTRACER_BUNDLE is set, and .*VLLM_PLUGINS"):
        api_server()
    assert not engines


def test_the_rust_front_end_has_the_gate_in_the_engine(
    engines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(Chosen):
        api_server()
    (made,) = engines
    assert made.additional_config[GATED] is False
    assert made.parallel_config.worker_cls == WORKER


def test_vllm_has_the_functions_that_its_server_is_known_by() -> None:
    for module, name in SERVERS:
        assert callable(getattr(importlib.import_module(module), name))


# The plugin has done nothing in this process when the engine starts; the engine's process loads it
# again.
LATE = f"""\
import os

from vllm import EngineArgs, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

if __name__ == "__main__":
    bundle = os.environ.pop("HALLUTRACER_BUNDLE")
    config = EngineArgs(**{SAME}).create_engine_config()
    os.environ["HALLUTRACER_BUNDLE"] = bundle
    engine = LLMEngine.from_vllm_config(config)
    engine.add_request("1", "x", SamplingParams())
    print("ANSWERED", engine.step())
"""


@pytest.mark.long
def test_an_engine_that_the_plugin_found_made_ends_with_the_reason(tmp_path: Path) -> None:
    (script := tmp_path / "program.py").write_text(LATE)
    variables = {"HALLUTRACER_BUNDLE": "demo", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    program = Program(str(script), forks=False)
    ran = vllm_programs.run(program, [], tmp_path, 240, **variables)
    output = ran.stdout + ran.stderr
    assert "ANSWERED" not in ran.stdout, output[-3000:]
    assert ran.returncode not in (0, None), output[-3000:]
    assert f"HALLUTRACER_BUNDLE is set, and {UNSAID}" in output, output[-3000:]
