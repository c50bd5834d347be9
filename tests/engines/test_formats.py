"""Schemas from requests: bounded, compiled with limits, and refused with the reason."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from service.engines import formats
from service.engines.formats import Format, Grammars, Held, Waiting, check_schema, written_out
from service.errors import EngineError, Overloaded, RequestError
from tests.engines import tiny
from tests.running import until


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    yield (made := Grammars(tiny.tokenizer(), tiny.VOCABULARY, frozenset({tiny.EOS})))
    made.close()


def prepared(grammars: Grammars, schema: dict[str, Any], *options: Any) -> Format:
    return grammars.prepared(Format(json.dumps(schema), "response_format"), *options)


def allowed(held: Held) -> int:
    """A bit for each token that may come next."""
    return int.from_bytes(held.allowed(), "little")


def tokens_of(text: str) -> list[int]:
    return list(tiny.tokenizer()(text, add_special_tokens=False)["input_ids"])


OPENS, CLOSES = tokens_of("{}")


PATTERN = ".*a.{20}b.*"


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def definitions(last: dict[str, Any], twice: str) -> dict[str, Any]:
    """Each level has the next one twice: as a tree they are 2 ** 25."""
    parts = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(25)}
    levelled = {
        name: {twice: [reference, reference]}
        if twice == "allOf"
        else {"type": "object", "properties": {"a": reference, "b": reference}}
        for name, reference in parts.items()
    }
    return {"$defs": levelled | {"d25": last}, "$ref": "#/$defs/d0"}


# Schemas as requests have them, by what becomes of them, and where they are refused with the words.
SCHEMAS = json.loads(Path(__file__).with_name("schemas.json").read_text(encoding="utf-8"))
CHAIN = {f"d{n}": {"pattern": PATTERN, "$ref": f"#/$defs/d{n + 1}"} for n in range(19)}
LONG_CHAIN = {f"{n}": {"$ref": f"#/$defs/{n + 1}"} for n in range(600)}
BEYOND = SCHEMAS["beyond"] | {
    "levels": (nested(40), "levels"),
    "characters": ({"enum": ["x" * 40_000]}, "characters"),
    "patterns in a chain": ({"$defs": CHAIN | {"d19": {}}, "$ref": "#/$defs/d0"}, "patterns"),
    "a tree of patterns": (definitions({"pattern": PATTERN}, "allOf"), "patterns"),
    "a long chain": ({"$defs": LONG_CHAIN, "allOf": [{"$ref": "#/$defs/0"}, {}]}, "chain"),
    "no JSON": ({"minimum": float("nan")}, "JSON"),
}


@pytest.mark.parametrize(("schema", "words"), BEYOND.values(), ids=BEYOND)
def test_a_schema_is_bounded_before_it_is_compiled(schema: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_schema(schema)


def test_what_a_pattern_repeats_is_counted() -> None:
    for pattern, size in SCHEMAS["written out"].items():
        assert written_out(pattern) == size, pattern
    check_schema({"type": "string", "pattern": "^.{0,5000}$"})
    for unfinished in ("[", "(", "{1", "{9999999999}", "\\p{", "{1,", "a{9999999999}"):
        written_out(unfinished * 5_000)


REFUSED = SCHEMAS["refused"]


@pytest.mark.parametrize(("schema", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_compiled_is_refused_with_its_field_and_the_reason(
    schema: Any, words: str, grammars: Grammars
) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        grammars.prepared(Format(check_schema(schema), "text.format"))
    assert refused.value.param == "text.format"
    assert refused.value.message.startswith("text.format: the schema cannot be compiled: ")
    assert len(refused.value.message) < 400


HOSTILE: dict[str, dict[str, Any]] = SCHEMAS["hostile"] | {
    "alternatives": {"type": "string", "pattern": "|".join(f".*a.{{{n}}}b.*" for n in range(60))},
    "a tree of references": definitions({"type": "string"}, "properties"),
    "a tree of conjunctions": definitions({"type": "string"}, "allOf"),
    "alternatives of all": {
        "allOf": [
            {"anyOf": [{"properties": {f"p{n}": {}}}, {"properties": {f"q{n}": {}}}]}
            for n in range(40)
        ]
    },
    "many properties": {
        "type": "object",
        "properties": {f"k{n}": {"type": "integer", "maximum": 10**15 + n} for n in range(400)},
    },
    "deep": nested(20),
    "a large list": {"enum": [f"value {n}" for n in range(2_000)]},
    "properties by patterns": {
        "type": "object",
        "patternProperties": {f"^{n}.*a.{{20}}b$": {} for n in range(40)},
    },
}


def test_an_answer_of_the_format_is_complete_when_nothing_may_follow(grammars: Grammars) -> None:
    properties = {"a": {"enum": [1, "é"]}}
    compiled = prepared(
        grammars,
        {
            "type": "object",
            "properties": properties,
            "required": ["a"],
            "additionalProperties": False,
        },
    )
    for text in ('{"a": 1}', '{"a": "é"}'):
        held, tokens = Held(compiled), tokens_of(text)
        for position, token in enumerate(tokens):
            assert allowed(held) >> token & 1, text
            assert held.take(token) == (position == len(tokens) - 1)
    opens, quote = tokens_of('{"')
    held = Held(compiled)
    assert allowed(held) == 1 << opens, (
        "no answer ends before it begins, or begins with something else"
    )
    held.take(opens)
    bits = allowed(held)
    assert bits >> quote & 1
    spaces = tokens_of(" \n\t\r")
    assert not any(bits >> token & 1 for token in spaces), "they could go on for ever"


def refers_to_itself(names: int) -> dict[str, Any]:
    own = {"type": "object", "properties": {f"k{n}": {"$ref": "#/$defs/a"} for n in range(names)}}
    return {"$defs": {"a": own}, "$ref": "#/$defs/a"}


def either(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {
            "anyOf": [
                {"type": "object", "properties": {name: schema}, "required": [name]}
                for name in "ab"
            ]
        }
    return schema


DIVISORS = {f"p{n}": {"type": "integer", "multipleOf": 999_983 + n} for n in range(200)}
COSTLY: dict[str, dict[str, Any]] = SCHEMAS["costly"] | {
    "many divisors": {"type": "object", "properties": DIVISORS}
}
LARGE: dict[str, dict[str, Any]] = SCHEMAS["large"] | {
    "long texts": {"enum": [f"{n}" * 200 for n in range(50)]},
    "itself": refers_to_itself(100),
    "alternatives": either(12),
    "patterns": {"anyOf": [{"type": "string", "pattern": f".*a{{{n}}}.*b"} for n in range(200)]},
}


def processes(grammars: Grammars) -> list[int]:
    """Those of the formats that are in use."""
    assert grammars._process is not None
    running = []
    for entry in os.listdir("/proc"):
        try:
            state, parent = Path(f"/proc/{entry}/stat").read_text().rpartition(") ")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if state != "Z" and parent == str(grammars._process.pid):
            running.append(int(entry))
    return running


Processes = Callable[[], list[int]]


@pytest.fixture
def in_use(grammars: Grammars) -> Processes:
    """The processes of the formats that are in use, none of an earlier test: what failed there is
    kept with its error's frames."""
    gc.collect()
    return partial(processes, grammars)


REPEATS = "a million repeats"


@pytest.mark.parametrize(
    ("name", "cpu_s", "megabytes"),
    [*((name, 0.3, 32) for name in COSTLY), (REPEATS, 60.0, 32), (REPEATS, 0.3, 4096)],
)
def test_what_costs_too_much_to_compile_is_refused_and_leaves_nothing(
    name: str,
    cpu_s: float,
    megabytes: int,
    grammars: Grammars,
    in_use: Processes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By each of the two limits alone, too."""
    monkeypatch.setattr(formats, "CPU_S", cpu_s)
    monkeypatch.setattr(formats, "MEMORY", megabytes << 20)
    words = f"it takes more than {cpu_s:g} s of time or {megabytes} MB of memory"
    with pytest.raises(RequestError, match=words) as refused:
        prepared(grammars, COSTLY[name])
    assert refused.value.param == "response_format"
    until(lambda: not in_use())


def test_a_format_that_nobody_uses_any_more_is_not_given_to_another_request(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    known_while_closing = list[int]()

    class Channel(socket.socket):
        def close(self) -> None:
            known_while_closing.append(len(list(grammars._live.items())))
            super().close()

    def pair() -> tuple[socket.socket, socket.socket]:
        ours, theirs = real_pair()
        return Channel(fileno=ours.detach()), theirs

    prepared(grammars, {"const": "the process of all formats runs"})
    gc.collect()
    real_pair = socket.socketpair
    monkeypatch.setattr(socket, "socketpair", pair)
    prepared(grammars, {"const": "used once"})
    until(lambda: len(known_while_closing) == 1)
    assert known_while_closing == [0]


@pytest.mark.parametrize("name", [*HOSTILE, *LARGE])
def test_a_hostile_schema_ends_soon_whatever_becomes_of_it_and_leaves_nothing(
    name: str, grammars: Grammars, in_use: Processes
) -> None:
    """Compiled, or refused; and as many steps as it lets an answer take.  Without the limits some
    take minutes."""

    def answer() -> None:
        large = name in LARGE  # which is compiled, whatever the first check says of it
        text = json.dumps(LARGE[name]) if large else check_schema(HOSTILE[name])
        held = Held(grammars.prepared(Format(text, "response_format")))
        for _ in range(40):
            bits = allowed(held)
            token = (bits if large else bits & -bits).bit_length() - 1
            if token == tiny.EOS or held.take(token):
                break

    with suppress(RequestError, ValueError):
        answer()
    until(lambda: not in_use())


def test_what_takes_longer_than_the_request_has_ends_with_it(
    grammars: Grammars, in_use: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "MEMORY", 1 << 30)
    with pytest.raises(TimeoutError):
        prepared(grammars, COSTLY["a large divisor"], "", 0.3)
    until(lambda: not in_use(), 60)  # of a busy machine's: two CPU seconds are left to it


def test_requests_of_a_caller_with_one_schema_share_a_process_that_ends_with_them(
    grammars: Grammars,
    in_use: Processes,
) -> None:
    first, second = (prepared(grammars, {"type": "object"}, "a") for _ in range(2))
    other = prepared(grammars, {"type": "object"}, "b")
    assert first.compiled is second.compiled is not other.compiled
    assert len(in_use()) == 2
    answer, another = Held(first), Held(second)
    assert not another.take(OPENS)  # in any order: each has its own
    at_first = answer.allowed()
    assert not answer.take(OPENS)
    answer.close()
    assert another.take(CLOSES)
    assert Held(first).allowed() == at_first
    del first, second, other, answer, another
    until(lambda: not in_use())


def test_a_mask_that_takes_too_long_ends_its_own_answer(
    grammars: Grammars, in_use: Processes
) -> None:
    slow = prepared(grammars, {"type": "object"}, "a")
    [process] = in_use()
    other = Held(prepared(grammars, {"type": "object"}, "b"))
    os.kill(process, signal.SIGSTOP)  # as if it were computing one
    held = Held(slow)
    with pytest.raises(RequestError, match="which tokens may come next takes more than") as refused:
        held.allowed()
    assert refused.value.param == "response_format"
    os.kill(process, signal.SIGCONT)
    assert other.allowed()
    assert not other.take(OPENS)
    with pytest.raises(RequestError):
        Held(slow).allowed()
    again = Held(prepared(grammars, {"type": "object"}, "a"))
    assert again.allowed(), "the next request is not given it"


def test_the_masks_of_a_callers_answers_have_one_account_of_waiting(
    grammars: Grammars, in_use: Processes
) -> None:
    def compiled(const: int, caller: str) -> Any:
        return prepared(grammars, {"const": const}, caller).compiled

    first, second, other = compiled(0, "slow"), compiled(1, "slow"), compiled(1, "other")
    assert first is not second
    assert first.waiting is second.waiting is not other.waiting
    account = first.waiting
    del first, second
    until(lambda: len(in_use()) == 1)
    assert compiled(2, "slow").waiting is account, "a new request does not begin a new account"


def test_waiting_is_spent_and_comes_back_with_time_and_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(formats, "time", SimpleNamespace(monotonic=lambda: now))
    waiting = Waiting()
    assert waiting.left() == formats.WAIT_S
    waiting.spend(10.0)
    assert waiting.left() == 0.0
    assert waiting.left(formats.WAIT_PER_TOKEN_S) == pytest.approx(formats.WAIT_PER_TOKEN_S)
    now += 2.0
    assert waiting.left() == pytest.approx(formats.WAIT_PER_TOKEN_S + 2 * formats.WAIT_SHARE)
    now += 1000.0
    assert waiting.left(1.0) == formats.WAIT_S


@pytest.mark.usefixtures("in_use")
def test_formats_in_use_are_bounded_by_caller_and_in_all(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "MAX_LIVE_OF_CALLER", 2)
    monkeypatch.setattr(formats, "MAX_LIVE", 3)
    live = [prepared(grammars, {"const": n}, "a") for n in range(2)]
    with pytest.raises(Overloaded, match="2 formats of this caller"):
        prepared(grammars, {"const": 2}, "a")
    prepared(grammars, {"const": 1}, "a")
    live.append(prepared(grammars, {"const": 2}, "b"))
    with pytest.raises(Overloaded, match="3 in all"):
        prepared(grammars, {"const": 2}, "c")
    del live[0]
    prepared(grammars, {"const": 2}, "a")


def test_after_its_process_has_been_killed_formats_are_made_again(grammars: Grammars) -> None:
    left = Held(prepared(grammars, {"type": "object"}))
    assert left.allowed()
    assert grammars._process is not None
    grammars._process.kill()
    grammars._process.wait()
    assert Held(prepared(grammars, {"const": 1})).allowed()
    with pytest.raises(RequestError):
        left.take(OPENS)


def test_closing_ends_what_is_being_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "CPU_S", 600.0)
    monkeypatch.setattr(formats, "MEMORY", 16 << 30)
    closing, failures = Grammars(tiny.tokenizer(), tiny.VOCABULARY, frozenset()), []

    def compile_it() -> None:
        try:
            prepared(closing, COSTLY["many divisors"])
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=compile_it, daemon=True)
    thread.start()
    until(lambda: closing._process is not None and processes(closing))
    closing.close()
    thread.join(60)
    assert [type(failure) for failure in failures] == [EngineError]
    with pytest.raises(EngineError, match="closed"):
        prepared(closing, {"type": "object"})
