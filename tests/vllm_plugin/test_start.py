"""How vLLM's own server starts with the plugin, on a scripted engine: it says what judges, or it
ends."""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import FastAPI, HTTPException
from prometheus_client import REGISTRY

from probes_store.errors import GoldenMismatch
from service.demo import MODEL_DIR
from service.engines.scheduler import Scheduled
from service.errors import EngineError, NotReady, ProbeReplaced
from service.judging.guarantee import OTHER_RENDERING
from service.policies.policy import Policies, built_in, load_policies
from service.settings import ServiceSettings
from tests.engines.vllm.installed import vllm_or_skip
from tests.matching import matching_bundle
from tests.scripted_engine import ScriptedEngine
from tests.vllm_plugin.conftest import ending

vllm_or_skip()

from vllm import SamplingParams  # noqa: E402

from service.vllm_plugin import generation, plugin  # noqa: E402
from service.vllm_plugin.note import CURRENT, Note  # noqa: E402
from service.vllm_plugin.options import PluginOptions  # noqa: E402
from service.vllm_plugin.plugin import TRIES, HalluTracerPlugin  # noqa: E402
from service.vllm_plugin.turn import TurnDriver  # noqa: E402


class Client:
    """vLLM's engine."""

    def __init__(self, *, errored: bool = False) -> None:
        model = SimpleNamespace(
            model=str(MODEL_DIR),
            revision=None,
            trust_remote_code=False,
            skip_tokenizer_init=True,
            quantization=None,
            dtype="float32",
            max_model_len=64,
        )
        cache = SimpleNamespace(cache_dtype="auto")
        self.engine_core = SimpleNamespace(client_count=1, client_index=0)
        self.ready = set[int]()  # of its API servers, as the workers know them
        self.errored = errored
        self.vllm_config = SimpleNamespace(model_config=model, cache_config=cache)

    async def generate(
        self, prompt: Any, parameters: Any, name: str, *, lora_request: Any = None
    ) -> Any:
        yield "an answer that nobody has judged"

    async def add_lora(self, request: Any) -> bool:
        return True

    async def collective_rpc(self, name: str, *, args: tuple[int, ...] = ()) -> Any:
        if name == "hallutracer_ready":
            self.ready.update(args)
            return [len(self.ready)] * 2
        return [{"weights": 7}]

    async def reset_prefix_cache(self) -> None:
        pass


class Server:
    """A server whose plugin is to read with ``around``, once for each time that it loads."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = ScriptedEngine(model="base")
        self.engine: Any = Scheduled(model)
        self.engine.slots = SimpleNamespace()
        self.bundle = matching_bundle(model, folder, "mine")
        self.policies = Policies(built_in())
        self.client = Client()
        self.arguments = Namespace()
        self.around: Callable[[], Any] = lambda: self.engine
        self.loads = 0
        self.patch = monkeypatch

    def run(self, policy: str, then: Callable[[HalluTracerPlugin], Any] | None = None) -> None:
        """Start it, wait until it has loaded, and have ``then`` look at it.  Raises SystemExit
        where it ends."""

        def around(*_: Any) -> Any:
            self.loads += 1
            return self.around()

        store: Any = SimpleNamespace(aliases=lambda name: {})
        options = PluginOptions(
            store, {"mine": self.bundle}, self.policies, ServiceSettings(policy=policy)
        )
        self.patch.setattr(plugin, "read_options", lambda: options)
        self.patch.setattr(plugin.VllmEngine, "around", around)
        guard = HalluTracerPlugin()
        guard.attach_router(FastAPI())

        async def scenario() -> None:
            models = SimpleNamespace(
                openai_serving_models=SimpleNamespace(lora_requests={}, load_lora_adapter=None)
            )
            await guard.init_state(self.client, models, self.arguments)
            assert guard._loading is not None
            await guard._loading
            if then is not None:
                await then(guard)

        try:
            asyncio.run(scenario())
        finally:
            REGISTRY.unregister(guard.service.metrics.collector)
            self.guard = guard

    def asks(self, prompt: Sequence[int] = (), note: Note | None = None, **xargs: Any) -> Any:
        """What vLLM's serving code gets for a request."""
        token, parameters = CURRENT.set(note or Note()), SamplingParams(extra_args=xargs)
        try:
            return cast(Any, self.client).generate({"prompt_token_ids": [*prompt]}, parameters, "1")
        finally:
            CURRENT.reset(token)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server(tmp_path, monkeypatch)
    yield server
    server.engine.close()


def raised(error: Exception) -> Callable[[], Any]:
    def around() -> Any:
        raise error

    return around


@pytest.mark.parametrize("policy", ["observe", "gate"])
@pytest.mark.parametrize(
    "error", [EngineError("self-test: wrong"), GoldenMismatch("golden"), KeyError("a fault")]
)
def test_a_server_that_would_never_be_ready_ends_with_the_reason(
    server: Server, policy: str, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    server.around = raised(error)
    with pytest.raises(SystemExit) as ended:
        server.run(policy)
    (record,) = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert (
        f"the server ends, since it would never be ready: {type(error).__name__}: {error}"
        in record.getMessage()
    )
    assert (
        ended.value.code == record.getMessage()
    )  # a text: status 1, and the last line that is printed


def test_a_policy_that_the_bundle_cannot_serve_ends_the_server(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (path := tmp_path / "policies.toml").write_text('[again]\naction = "abstain"\nrecheck = true\n')
    server.policies = load_policies(path, "No.", "observe")
    with pytest.raises(SystemExit):
        server.run("observe")
    assert "policy 'again' has recheck, and bundle mine:1 has no probes of answers" in caplog.text


def test_a_command_line_that_renders_chats_otherwise_ends_the_server(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Where no caller of the engine's start had that command line."""
    server.arguments = Namespace(chat_template=None, default_chat_template_kwargs={"a": 1})
    server.bundle = plugin_bundle()
    with pytest.raises(SystemExit):
        server.run("observe")
    assert '--default-chat-template-kwargs {"a": 1} renders every chat otherwise' in caplog.text


def plugin_bundle() -> Any:
    from probes_store.store import SHIPPED, Store

    return Store(Path("/nonexistent"), fallbacks=[SHIPPED]).load("demo")


@pytest.mark.parametrize("failed", [False, True])
def test_nothing_passes_a_gate_that_is_not_open_yet_or_has_failed(
    server: Server, failed: bool
) -> None:
    """An engine that has died is vLLM's to report, and its server's to end."""
    server.client = Client(errored=True)
    server.around = raised(EngineError("self-test: wrong"))

    async def then(guard: HalluTracerPlugin) -> None:
        if not failed:
            guard.service.lifecycle.error = None
        words = "loading failed: EngineError: self-test: wrong" if failed else "still loading"
        for given in ({}, {"hallutracer_policy": "observe"}, {"hallutracer_policy": "block"}):
            with pytest.raises(HTTPException, match=words) as refused:
                server.asks(**given)
            assert refused.value.status_code == 503

    server.run("gate", then)

    async def passes(guard: HalluTracerPlugin) -> None:
        answer = server.asks()
        assert [piece async for piece in answer] == ["an answer that nobody has judged"]
        with pytest.raises(HTTPException):
            server.asks(hallutracer_policy="gate")

    server.client = Client(errored=True)
    server.run("observe", passes)


def test_a_probe_that_another_api_server_replaced_is_written_again(server: Server) -> None:
    left = [ProbeReplaced("another server")] * 2
    server.around = lambda: raised(left.pop())() if left else server.engine

    async def then(guard: HalluTracerPlugin) -> None:
        assert guard.service.lifecycle.is_ready

    server.run("gate", then)
    assert server.loads == 3
    server.around = raised(ProbeReplaced("another server"))
    server.loads = 0
    server.client = Client()
    with pytest.raises(SystemExit):
        server.run("gate")
    assert server.loads == TRIES


def test_one_of_several_api_servers_is_ready_once_all_are(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "MEET_S", 0.0)
    server.client.engine_core = SimpleNamespace(client_count=3, client_index=2)

    async def then(guard: HalluTracerPlugin) -> None:
        lifecycle, meeting = guard.service.lifecycle, guard._meeting
        assert meeting is not None
        for other in (0, 1):
            for _ in range(5):
                await asyncio.sleep(0)
            with pytest.raises(
                NotReady, match="other API servers of this engine are still loading"
            ):
                lifecycle.check_serves()
            assert (lifecycle.is_ready, lifecycle.serves) == (
                False,
                True,
            )  # what comes here is answered all the same
            server.client.ready.add(other)
        await meeting
        assert (server.client.ready, lifecycle.is_ready) == ({0, 1, 2}, True)

    server.run("gate", then)


def ready_series(guard: HalluTracerPlugin) -> float | None:
    """What vLLM's ``/metrics`` says of whether this API server is ready."""
    return guard.service.metrics.collector.get_sample_value("hallutracer_ready")


def test_the_series_of_readiness_follows_readiness(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "MEET_S", 0.0)
    monkeypatch.setattr(plugin, "READY_S", 0.0)
    server.client.engine_core = SimpleNamespace(client_count=2, client_index=0)

    async def then(guard: HalluTracerPlugin) -> None:
        lifecycle, meeting = guard.service.lifecycle, guard._meeting
        assert meeting is not None

        async def seen() -> tuple[bool, float | None]:
            for _ in range(5):
                await asyncio.sleep(0)
            return lifecycle.is_ready, ready_series(guard)

        assert await seen() == (False, 0)
        server.client.ready.add(1)
        await meeting
        assert await seen() == (True, 1)
        lifecycle.error = EngineError("the engine broke")
        assert await seen() == (False, 0)
        lifecycle.error = None
        assert await seen() == (True, 1)

    server.run("gate", then)


def test_a_replay_that_fails_later_does_not_end_the_server(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    async def then(guard: HalluTracerPlugin) -> None:
        server.around = raised(GoldenMismatch("golden"))
        server.engine.slots.on_changed()
        assert guard._loading is not None
        await guard._loading
        assert guard.service.lifecycle.reload_error is not None

    server.run("gate", then)
    assert "the weights have changed, and no request is read any more: golden" in caplog.text


def test_a_healthy_start_says_what_judges(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hallutracer")
    server.run("gate")
    (line,) = [record.getMessage() for record in caplog.records if "ready" in record.getMessage()]
    manifest = server.bundle.manifest
    assert (
        line == f"hallutracer ready: bundle mine:1 ({manifest.digest[:19]}) judges by policy gate"
        f" (abstain) from threshold {manifest.threshold:.3g} on; it reads base (float32) at the"
        f" site {manifest.readout.site} of {manifest.model.num_layers} layers"
    )


def test_a_prompt_that_the_template_did_not_make_of_its_messages_is_noticed(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kept(TurnDriver):
        def outputs(self, start: Any) -> Any:
            return self

    monkeypatch.setattr(generation, "_reported", lambda note, outputs: outputs)
    monkeypatch.setattr(generation, "TurnDriver", Kept)
    server.engine.encode_chat = server.engine.render_chat
    asked = [{"role": "user", "content": "Who?"}]

    async def then(guard: HalluTracerPlugin) -> None:
        prompt = server.engine.render_chat(asked)
        for ids, other in ((prompt, False), ([*prompt, 10], True), ([10, *prompt], True)):
            driver = server.asks(ids, note := Note(turns=(asked,)))
            await driver._check_rendering()
            assert (driver._standing.other_rendering, OTHER_RENDERING in note.violations) == (
                other,
                other,
            )
            assert driver.policy.withhold_outside is (True if other else None)
        driver = server.asks(prompt, Note())  # whose messages nobody knows
        await driver._check_rendering()
        assert driver._standing.other_rendering

    server.run("gate", then)


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        (
            [],
            {"BUNDLE": "", "POLICY": "gate"},
            "HALLUTRACER_POLICY=gate is set and HALLUTRACER_BUNDLE is empty",
        ),
        (
            [],
            {"BUNDLE": "smollm2"},
            "HALLUTRACER_BUNDLE is set, and field model.fingerprint: bundle smollm2:1 was",
        ),
        (
            ["--worker-cls", "tests.parity.faulty.RowTooEarly"],
            {},
            "it would never be ready: EngineError: self-test: ",
        ),
    ],
    ids=["no bundle", "another model", "never ready"],
)
def test_vllms_server_ends_where_its_gate_would_not_be_there(
    tmp_path: Path, arguments: list[str], variables: dict[str, str], words: str
) -> None:
    """Of a chat template and of other starts, in this process: test_no_gate."""
    log = tmp_path / "log"
    given = {f"HALLUTRACER_{name}": value for name, value in variables.items()}
    assert ending(log, *arguments, **given) == 1, log.read_text()[-3000:]
    text = log.read_text()
    assert any(line.startswith("hallutracer: ") and words in line for line in text.splitlines()), (
        text[-3000:]
    )
    assert ("Starting to load model" in text) == (
        "self-test" in words
    )  # the others before the weights are read
