"""What the plugin refuses before vLLM starts, what it has vLLM load, how it reads a request's body;
without vLLM."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import sys
import tracemalloc
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from hallutracer_start import check_vllm
from service.access.routes import MESSAGES_ROUTE, RESPONSES_ROUTE
from service.demo import MODEL_DIR
from service.errors import HalluTracerError
from service.judging.guarantee import Shape, shape_of
from service.serving.metrics import Metrics
from service.vllm_plugin import front_end, load
from service.vllm_plugin.engine_gate import open_gate
from service.vllm_plugin.front_end import GROUPS, name_plugins, unguarded
from service.vllm_plugin.middleware import RiskNotes
from service.vllm_plugin.model_check import short_name_problem
from service.vllm_plugin.note import CURRENT, Note
from service.vllm_plugin.options import missing_bundle, read_options, unread


def variables_of(line: str) -> dict[str, str]:
    """Variables as a shell has them in front of a command, ours without their prefix."""
    pairs = (word.partition("=") for word in line.split())
    return {
        name if name.startswith("VLLM_") else f"HALLUTRACER_{name}": value
        for name, _, value in pairs
    }


def environment(line: str) -> dict[str, str]:
    return {"HALLUTRACER_BUNDLE": "demo"} | variables_of(line)


FALLBACK = '[a]\naction = "fallback"\nupstream = "http://b/v1"\nupstream_model = "m"'


@pytest.mark.parametrize(
    ("variables", "policies", "words"),
    [
        ("", '[a]\naction = "annotate"', "action 'annotate' needs HalluTracer's own service"),
        ("", '[a]\naction = "retrieve"', "action 'retrieve' needs"),
        ("", FALLBACK, "action 'fallback' needs"),
        ("", '[[rule]]\npolicy = "gate"', "[[rule]] in the policies file needs"),
        ("AUDIT_REQUIRED=true", "", "HALLUTRACER_AUDIT_REQUIRED needs HALLUTRACER_AUDIT_LOG"),
        ("AUDIT_LOG=no/folder/audit.jsonl", "", "cannot write the audit log"),
        (
            "STORE=no/such/folder",
            "",
            "HALLUTRACER_STORE: there is no folder no/such/folder; correct it",
        ),
        ("", '[a]\naction = "block"', None),
    ],
)
def test_what_only_our_own_service_has_or_cannot_be_kept(
    tmp_path: Path, variables: str, policies: str, words: str | None
) -> None:
    (path := tmp_path / "policies.toml").write_text(policies)
    given = environment(f"POLICIES={path} {variables}")
    if words is None:
        assert "a" in read_options(given).policies.named
        return
    with pytest.raises(HalluTracerError) as refused:
        read_options(given)
    assert words in str(refused.value)


@pytest.mark.parametrize("field", ["recheck = true", "stop_at = 0.5"])
def test_the_gate_in_an_engine_s_core_reads_no_answers(tmp_path: Path, field: str) -> None:
    (path := tmp_path / "policies.toml").write_text(f'[a]\naction = "block"\n{field}')
    options = read_options(environment(f"POLICIES={path} POLICY=a"))  # which `vllm serve` takes
    with pytest.raises(
        HalluTracerError, match=f"policy 'a': {field.split()[0]} needs `vllm serve`"
    ):
        open_gate(None, options)


POLICIES = '[mine]\naction = "block"\n\n[watch]\naction = "observe"\n'


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            "POLICY=gate",
            (
                "HALLUTRACER_POLICY=gate is set and HALLUTRACER_BUNDLE is not: nothing would be"
                " withheld"
            ),
        ),
        (
            "POLICY=block BUNDLE=",
            "HALLUTRACER_POLICY=block is set and HALLUTRACER_BUNDLE is empty",
        ),
        (
            "POLICY=gate BUNDEL=demo AUDIT_LOG=a.jsonl MAX_QUEUE=x",
            "did you mean HALLUTRACER_BUNDLE?",
        ),
        ("POLICY=gaet", "HALLUTRACER_POLICY=gaet is set"),
        ("POLICY=mine POLICIES=FILE", "HALLUTRACER_POLICY=mine is set"),
        ("POLICY=watch POLICIES=no/file", "HALLUTRACER_POLICY=watch is set"),
        ("POLICIES=FILE", "HALLUTRACER_POLICIES=FILE is set"),
        ("POLICIES=no/file POLICY=", "HALLUTRACER_POLICIES=no/file is set"),
        ("THRESHOLD=0.5", "HALLUTRACER_THRESHOLD=0.5 is set"),
        ("POLICY=observe AUDIT_REQUIRED=true", "HALLUTRACER_AUDIT_REQUIRED=true is set"),
        ("POLICY=watch POLICIES=FILE", None),
        ("POLICY=observe THRESHOLD=0.5 POLICIES=FILE", None),
        ("POLICY=observe", None),
        ("AUDIT_REQUIRED=false STORE=/probes DEADLINE_S=9", None),
        ("BUNDEL=demo", None),
        ("POLICY= BUNDLE=", None),
        ("POLICY=gate BUNDLE=demo", None),
        ("", None),
    ],
)
def test_a_gate_that_is_asked_for_needs_a_bundle(
    tmp_path: Path, variables: str, words: str | None
) -> None:
    (path := tmp_path / "policies.toml").write_text(POLICIES)
    reason = missing_bundle(variables_of(variables.replace("FILE", str(path))))
    assert (reason is None) == (words is None), reason
    if words is not None:
        assert words.replace("FILE", str(path)) in str(reason)
        assert "Set HALLUTRACER_BUNDLE to the bundle that reads this model" in str(reason)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ("POLICY=observe", "HALLUTRACER_POLICY=observe is set and HALLUTRACER_BUNDLE is not"),
        (
            "BUNDEL=demo",
            "HALLUTRACER_BUNDEL is not read here; did you mean HALLUTRACER_BUNDLE?",
        ),
        ("STORE=/probes", None),
        ("BUNDLE=demo POLICY=observe BUNDEL=demo", None),
        ("", None),
    ],
)
def test_a_server_that_may_have_meant_to_observe_says_that_it_tells_no_risk(
    variables: str, words: str | None
) -> None:
    line = unread(variables_of(variables))
    assert line is None if words is None else words in str(line)


def test_a_misspelt_policy_is_none_that_observes() -> None:
    match = "HALLUTRACER_POLCY is not read, and HALLUTRACER_POLICY is not set"
    with pytest.raises(HalluTracerError, match=match):
        read_options(variables_of("BUNDLE=demo POLCY=gate"))


@pytest.mark.parametrize(
    ("variables", "argv", "cure"),
    [
        ("VLLM_PLUGINS=other,hallutracer VLLM_USE_RUST_FRONTEND=1", "", None),
        ("VLLM_PLUGINS=hallutracer2", "", "add hallutracer"),
        ("VLLM_PLUGINS=", "", "unset it"),
        ("VLLM_API_KEY=REPLACE-ME-app-one", "", "placeholder"),
        ("", f"--api-key {'k' * 40} REPLACE-ME-app-one", "placeholder"),
        ("", "--api-key=REPLACE-ME-app-one", "placeholder"),
        ("", f"--api-key {'k' * 40} --served-model-name change-me", None),
        ("", "", None),
        ("VLLM_PLUGINS=other,hallutracer", "", None),
        ("VLLM_USE_RUST_FRONTEND=0", "", None),
    ],
)
def test_an_unguarded_front_end_is_named_with_its_cure(
    variables: str, argv: str, cure: str | None
) -> None:
    problem = unguarded(argv.split(), environment(variables))
    assert problem is None if cure is None else cure in str(problem)


def test_naming_the_guard_leaves_no_other_plugin_out() -> None:
    variables: dict[str, str] = {}
    name_plugins(variables)
    named = set(variables["VLLM_PLUGINS"].split(","))
    assert "hallutracer" in named
    assert {
        plugin.name for group in GROUPS for plugin in entry_points(group=f"vllm.{group}_plugins")
    } <= named
    name_plugins(chosen := {"VLLM_PLUGINS": "hallutracer"})
    assert chosen == {"VLLM_PLUGINS": "hallutracer"}


def test_a_plugin_that_cannot_be_made_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM logs other exceptions of a plugin and starts without it."""
    monkeypatch.setitem(sys.modules, "service.vllm_plugin.plugin", None)  # an import that fails
    with pytest.raises(SystemExit, match="does not start without it"):
        load()


def test_a_guard_that_cannot_be_loaded_ends_the_process_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM loads general plugins once, even where one has raised."""
    vllm_plugins = SimpleNamespace(plugins_loaded=True)
    monkeypatch.setitem(sys.modules, "vllm.plugins", vllm_plugins)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "service.vllm_plugin.front_end", None)
    monkeypatch.delenv("HALLUTRACER_BUNDLE", raising=False)
    check_vllm()  # an app that wants no risks
    assert vllm_plugins.plugins_loaded
    monkeypatch.setenv("HALLUTRACER_BUNDLE", "demo")
    with pytest.raises(
        SystemExit, match="HALLUTRACER_BUNDLE is set, and the guard cannot be loaded: .*front_end"
    ):
        check_vllm()
    assert not vllm_plugins.plugins_loaded
    monkeypatch.setenv("HALLUTRACER_BUNDLE", "")
    for variable, value in (
        ("POLICY", "gate"),
        ("POLICIES", "policies.toml"),
        ("THRESHOLD", "0.5"),
    ):
        with monkeypatch.context() as asking:
            asking.setenv(f"HALLUTRACER_{variable}", value)
            with pytest.raises(
                SystemExit, match=f"HALLUTRACER_{variable} is set, and the guard cannot be loaded"
            ):
                check_vllm()
    monkeypatch.setenv("HALLUTRACER_THRESHOLD", "0.5")
    monkeypatch.setenv("HALLUTRACER_POLICY", "observe")
    monkeypatch.setenv("HALLUTRACER_AUDIT_REQUIRED", "false")
    check_vllm()
    monkeypatch.setenv("HALLUTRACER_AUDIT_REQUIRED", "Yes")
    with pytest.raises(
        SystemExit, match="HALLUTRACER_AUDIT_REQUIRED is set, and the guard cannot be loaded"
    ):
        check_vllm()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ("BUNDLE=none-such", "none-such"),
        ("BUNDLE=demo POLICY=gaet", "no policy 'gaet'"),
        ("POLICY=gate", "HALLUTRACER_POLICY=gate is set and HALLUTRACER_BUNDLE is not"),
    ],
)
def test_what_ends_a_start_is_in_vllms_log_with_time_and_level(
    monkeypatch: pytest.MonkeyPatch, variables: str, words: str
) -> None:
    vllms, out = logging.getLogger("vllm"), io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        logging.Formatter("%(levelname)s %(asctime)s %(message)s", "%m-%d %H:%M:%S")
    )  # as vLLM's
    monkeypatch.setattr(vllms, "handlers", [handler])
    monkeypatch.setattr(
        logging.getLogger(), "handlers", []
    )  # a program's own, which would get it, too
    monkeypatch.setattr(front_end, "log", logging.Logger("hallutracer"))
    monkeypatch.delenv("HALLUTRACER_BUNDLE", raising=False)
    for name, value in variables_of(variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="^hallutracer: "):
        front_end._options() if "BUNDLE" in variables else front_end._refuse_missing_bundle()
    [line] = out.getvalue().splitlines()
    assert re.match(r"CRITICAL \d\d-\d\d [\d:]{8} hallutracer: ", line)
    assert words in line


def noted(path: str, parts: Iterator[Message], held: list[int] | None = None) -> Note:
    """The note of a request whose body comes in ``parts``; ``held``: the memory once the app has
    read it."""

    async def receive() -> Message:
        return next(parts)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive).body()
        if held is not None:
            held.append(tracemalloc.get_traced_memory()[0])
        assert (note := CURRENT.get()) is not None
        notes.append(note)
        await Response()(scope, receive, send)

    async def send(message: Message) -> None:
        pass

    notes: list[Note] = []
    scope = {"type": "http", "method": "POST", "path": path, "headers": []}
    asyncio.run(RiskNotes(app, Metrics(), refuses=lambda: True)(scope, receive, send))
    return notes[0]


@pytest.mark.parametrize(
    ("path", "status", "counted"),
    [
        ("/v1/chat/completions", 200, "200"),
        ("/v1/messages", 503, "503"),
        ("/v1/completions", None, "500"),
        ("/tokenize", 200, None),
        ("/v1/risk/score", 200, None),
    ],
)
def test_requests_for_answers_are_counted_by_status(
    path: str, status: int | None, counted: str | None
) -> None:
    """Those of our own route are counted where it is served."""

    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}"}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if status is None:
            raise RuntimeError("vLLM's own")
        await Response(status_code=status)(scope, receive, send)

    async def send(message: Message) -> None:
        pass

    metrics = Metrics()
    with suppress(RuntimeError):
        scope = {"type": "http", "method": "POST", "path": path, "headers": []}
        asyncio.run(RiskNotes(app, metrics, refuses=lambda: False)(scope, receive, send))
    lines = [
        line
        for line in metrics.render()[0].decode().splitlines()
        if line.startswith("hallutracer_http_requests")
    ]
    ones = [] if counted is None else [f'hallutracer_http_requests_total{{status="{counted}"}} 1.0']
    assert [line for line in lines if not line.endswith(" 0.0")] == ones
    assert "hallutracer_requests_in_flight 0.0" in metrics.render()[0].decode().splitlines()


def test_only_a_completion_s_body_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = list[bytes]()
    monkeypatch.setattr(
        "service.vllm_plugin.middleware.read", lambda note, body: bodies.append(body)
    )
    for path in ("/v1/completions", "/tokenize", "/v1/embeddings", "/v1/chat/completions"):
        noted(path, iter([{"type": "http.request", "body": path.encode()}]))
    assert bodies == [b"/v1/completions", b"/v1/chat/completions"]


def test_a_request_s_texts_are_searched_once_for_all_its_prompts() -> None:
    searched = list[list[str]]()

    def search(texts: Iterable[str]) -> str | None:
        searched.append(list(texts))
        return "<s>"

    note = Note(written=(["a", {"b": "c"}],))
    assert [note.special_token(search) for _ in range(3)] == ["<s>"] * 3
    assert [sorted(texts) for texts in searched] == [["a", "b", "c"]]


def test_a_body_is_kept_once() -> None:
    part = 64 * 1024
    count = 128
    held = list[int]()

    def parts() -> Iterator[Message]:
        first = b'{"vllm_xargs": {"hallutracer_policy": "gate"}, "use_beam_search": true}'
        for number in range(count):
            if number == count - 1:
                held.append(tracemalloc.get_traced_memory()[0])
            body = (b"" if number else first).ljust(part)
            yield {"type": "http.request", "body": body, "more_body": number < count - 1}

    tracemalloc.start()
    try:
        note = noted("/v1/completions", parts(), held)
    finally:
        tracemalloc.stop()
    assert note.xargs == {"hallutracer_policy": "gate"}
    assert max(held) < 1.5 * part * count, held


ASKED = [{"role": "user", "content": "What is the capital of Nauru?"}]
AGAIN = [
    {"role": "system", "content": "Be brief."},
    *ASKED,
    {"role": "assistant", "content": None},
    *ASKED,
]
CHAT, BATCH, EITHER = "/v1/chat/completions", "/v1/chat/completions/batch", "/invocations"
NOTHING = Shape("0", passage=False, system=False, asks="elsewhere")
FIRST, SECOND = Shape("0", passage=False, system=False), Shape("1", passage=False, system=True)


@pytest.mark.parametrize(
    ("path", "body", "shapes"),
    [
        (CHAT, {"messages": ASKED}, [FIRST]),
        (CHAT, {"messages": AGAIN}, [SECOND]),
        (CHAT, {"messages": ASKED, "chat_template": "{{ messages }}"}, []),
        (CHAT, {"messages": ASKED, "kv_transfer_params": {"prompt_token_ids": [1]}}, []),
        (CHAT, {"messages": [3, None]}, [None]),
        (CHAT, {"messages": []}, [NOTHING]),
        (CHAT, {"messages": "x"}, []),
        (BATCH, {"messages": [AGAIN, ASKED, None]}, [SECOND, FIRST, NOTHING]),
        (EITHER, {"messages": ASKED}, [FIRST]),
        (EITHER, {"messages": ASKED, "prompt": "x"}, []),
        ("/v1/completions", {"prompt": "x"}, []),
        ("/v1/completions", {"prompt": "x", "messages": ASKED}, []),
        (MESSAGES_ROUTE, {"messages": ASKED}, [FIRST]),
        (
            MESSAGES_ROUTE,
            {"messages": AGAIN[1:], "system": [{"type": "text", "text": "Be brief."}]},
            [SECOND],
        ),
        (MESSAGES_ROUTE, {"messages": ASKED, "chat_template_kwargs": {"a": 1}}, []),
        (RESPONSES_ROUTE, {"input": "What is the capital of Nauru?"}, [FIRST]),
        (RESPONSES_ROUTE, {"input": AGAIN[1:], "instructions": "Be brief."}, [SECOND]),
        (RESPONSES_ROUTE, {"input": ASKED, "previous_response_id": "resp_1"}, []),
        (RESPONSES_ROUTE, {"input": [3, None]}, [None]),
    ],
)
def test_a_chats_shape_is_noted_where_its_messages_are_what_is_read(
    path: str, body: dict[str, Any], shapes: list[Shape | None]
) -> None:
    """Of vLLM's own renderer: test_rendering."""
    part: Message = {"type": "http.request", "body": json.dumps(body).encode()}
    note = noted(path, iter([part]))
    known = [note.conversation(note.add({"prompt_token_ids": [1]})) for _ in range(len(shapes) + 1)]
    assert [None if turns is None else shape_of(turns) for turns in known] == [*shapes, None]


@pytest.mark.parametrize(
    ("asked", "moves"),
    [
        ({"enable_thinking": False}, False),
        ({"enable_thinking": True}, True),
        ({"other": False}, True),
        ({"enable_thinking": False, "other": 1}, True),
        ({}, False),
        (None, False),
        ("enable_thinking", True),
    ],
)
def test_template_arguments_of_training_move_nothing(asked: Any, moves: bool) -> None:
    body = {"messages": ASKED, "chat_template_kwargs": asked}
    note = noted(CHAT, iter([{"type": "http.request", "body": json.dumps(body).encode()}]))
    note.trained_with({"enable_thinking": False, "style": "short"})
    assert note.moves == (("chat_template_kwargs",) if moves else ())


def test_a_short_name_of_ours_is_told_what_vllm_takes_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(MODEL_DIR) in (short_name_problem("demo") or "")
    assert "'smollm2' is a short name of HalluTracer's own commands" in (
        short_name_problem("smollm2") or ""
    )
    for name in ("Qwen/Qwen2.5-0.5B", str(MODEL_DIR), "demo/demo"):
        assert short_name_problem(name) is None
    (tmp_path / "demo").mkdir()
    assert short_name_problem("demo") is None


@pytest.mark.parametrize(
    "command",
    ["vllm serve demo", "vllm serve --port 1 --model demo", "api_server.py --model=demo --port 1"],
)
def test_the_plugin_ends_a_program_that_was_given_a_short_name(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALLUTRACER_BUNDLE", "demo")
    monkeypatch.setattr("sys.argv", command.split())
    with pytest.raises(SystemExit, match="'demo' is a short name of HalluTracer's own commands"):
        check_vllm()
