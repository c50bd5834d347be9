"""What a body may hold, counted before anything walks it; which thread reads it; texts that are no
Unicode."""

from __future__ import annotations

import json
import random
import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi._compat import ModelField

from service.api import formats_schema, json_body
from service.api.json_body import INLINE, MOST_THREADS
from service.engines.formats import check_schema
from service.json_limits import (
    MOST_CONTAINERS,
    MOST_ELEMENTS,
    MOST_KEYS,
    _outside_texts,
    excess,
    lone_surrogate,
    size_within,
)
from service.serving.admission import OneAtATime
from tests.kit.api import CHAT, RESPONSES, Wire, request_of
from tests.running import App, app_of_module

JSON = {"content-type": "application/json"}
LITELLM = "/beta/litellm_basic_guardrail_api"


app = app_of_module()


NUMBERS = ("[" + "1," * MOST_ELEMENTS + "1]").encode()
NAMES = ("{" + ",".join(f'"{n}":1' for n in range(MOST_KEYS + 1)) + "}").encode()
LISTS = b"[" + b"[]," * MOST_CONTAINERS + b"[]]"
# Route, body with a place for what is too much, what there is too much of.  Of further routes:
# refusals.json.
MANY: dict[str, tuple[str, bytes, str]] = {
    "a function": (
        RESPONSES.route,
        b'{"input":"a","tools":[{"parameters":{"enum":%b}}],"tool_choice":"none"}',
        "values",
    ),
    "a bias": (CHAT.route, b'{"logit_bias":%b}', "keys"),
    "options": ("/score", b'{"prompt":"a","generate":%b}', "keys"),
    "what is not read": (LITELLM, b'{"texts":["a"],"x":%b}', "keys"),
    "texts": ("/classify", b'{"inputs":%b}', "lists and objects"),
}


@pytest.mark.parametrize("case", MANY)
def test_too_much_is_refused_by_its_bytes(
    app: App, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Nothing is made of it: no parser, no validation, no walk."""
    parsed = list[Any]()
    monkeypatch.setattr(
        json_body,
        "json",
        SimpleNamespace(loads=parsed.append, JSONDecodeError=json.JSONDecodeError),
    )
    route, body, what = MANY[case]
    answer = app.client.post(
        route, content=body % {"values": NUMBERS, "keys": NAMES}.get(what, LISTS), headers=JSON
    )
    assert (answer.status_code, parsed) == (413, []), answer.text
    assert re.search(rf"the body has more than \d+ {what}", answer.text)


def plainly(document: bytes) -> bytes:
    """What stands outside of texts, by an expression."""
    return re.sub(rb'"(?:[^"\\]|\\.)*(?:"|$)', b"", document, flags=re.DOTALL)


def test_what_stands_in_texts_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the pieces end, in an escape or before one."""
    draw = random.Random(1)
    monkeypatch.setattr("service.json_limits._CHUNK", 5)
    for _ in range(3000):
        texts = [
            '"'
            + "".join(draw.choices(["a", "[", ",", ":", '\\"', "\\\\", "\\n"], k=draw.randrange(9)))
            + '"'
        ]
        texts += ["[", "]", "{", "}", ":", ",", "1", " "] * 2
        document = "".join(draw.choices(texts, k=draw.randrange(40))).encode()
        document = document[: draw.randrange(len(document) + 1)]
        if re.search(rb"\\$", plainly(document)):
            continue  # cut within an escape
        assert b"".join(_outside_texts(document)).replace(b'"', b"") == plainly(document), document


@pytest.mark.parametrize(
    ("unit", "fit", "message"),
    [
        (b"1", MOST_ELEMENTS, f"{MOST_ELEMENTS} values"),  # the list itself is one
        (b'"a":1', MOST_KEYS, f"{MOST_KEYS} keys"),
        (b"[]", MOST_CONTAINERS - 1, f"{MOST_CONTAINERS} lists and objects"),
    ],
)
def test_a_limit_is_taken_and_one_more_is_not(unit: bytes, fit: int, message: str) -> None:
    most, more = (b"[" + b",".join([unit] * number) + b"]" for number in (fit, fit + 1))
    assert (excess(most), excess(more)) == (None, f"more than {message}")
    texts = json.dumps([more.decode(), "\\"] * 3).encode()
    assert (excess(texts), excess(texts + more)) == (None, f"more than {message}")


def test_a_value_is_measured_no_further_than_its_limits() -> None:
    assert size_within({"ab": [1, "cde"], "f": {}}, levels=2) >= len("abcdef")
    for value, said in (
        ([1] * 11, "10 values"),
        ({str(n): 1 for n in range(6)}, "10 values"),
        (["a" * 101], "100 char"),
    ):
        with pytest.raises(ValueError, match=f"at most {said}"):
            size_within(value, levels=3, values=10, characters=100)
    deep: list[Any] = []
    for _ in range(3):
        deep = [deep]
    assert size_within(deep, levels=4) > 0
    assert size_within(deep, levels=10**15) > 0  # no level is looked at that is not there
    with pytest.raises(ValueError, match="at most 3 levels"):
        size_within(deep, levels=3)


# --- where a long body is read ---


def test_only_a_long_body_is_read_in_a_thread(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsed and validated; what it was validated to is the value that the route gets.

    That a caller's bodies wait for each other and for nobody else: tests/serving/test_admission.py,
    of formats."""
    assert isinstance(app.app.state.long_bodies, OneAtATime)
    assert MOST_THREADS > 1, "one is left for others, whatever a caller sends"
    seen = list[tuple[str, bool, str]]()
    validate, parse = ModelField.validate, json_body.parse

    def where() -> str:
        return "thread" if threading.current_thread().name.startswith("body") else "loop"

    def noted(self: Any, value: Any, *more: Any, **options: Any) -> Any:
        seen.append(("validate", isinstance(value, dict), where()))
        return validate(self, value, *more, **options)

    monkeypatch.setattr(ModelField, "validate", noted)
    monkeypatch.setattr(
        json_body, "parse", lambda body: seen.append(("parse", True, where())) or parse(body)
    )
    body = b'{"prompt": "a"}'
    assert app.client.post("/score", content=body.ljust(INLINE), headers=JSON).status_code == 200
    assert seen == [("parse", True, "loop"), ("validate", True, "loop")]
    seen.clear()
    assert (
        app.client.post("/score", content=body.ljust(INLINE + 1), headers=JSON).status_code == 200
    )
    assert seen == [
        ("parse", True, "thread"),
        ("validate", True, "thread"),
        ("validate", False, "loop"),
    ]


SCHEMA = {"name": "f", "schema": {"enum": [{}] * 1500}}
OF_CHATS = {"response_format": {"type": "json_schema", "json_schema": SCHEMA}}
OF_RESPONSES = {"text": {"format": {"type": "json_schema"} | SCHEMA}}


@pytest.mark.parametrize(("wire", "fields"), [(CHAT, OF_CHATS), (RESPONSES, OF_RESPONSES)])
def test_a_schema_of_some_kilobytes_is_checked_once_and_in_a_thread(
    app: App, monkeypatch: pytest.MonkeyPatch, wire: Wire, fields: dict[str, Any]
) -> None:
    """Milliseconds each: many such requests at once would hold up the event loop, and with it the
    health checks."""
    threads = list[str]()

    def checked(schema: Any) -> str:
        threads.append(threading.current_thread().name)
        return check_schema(schema)

    monkeypatch.setattr(formats_schema, "check_schema", checked)
    assert app.client.post(wire.route, json=request_of(wire, **fields)).status_code < 500
    assert len(threads) == 1
    assert threads[0].startswith("body")


# --- texts that are no Unicode; those of half a character: refusals.json ---


def test_whole_pairs_and_what_only_looks_like_half_of_one_are_taken(app: App) -> None:
    for text in (r"\ud83d\ude00", r"\\ud83d", r"\u00fc\ud83c\uddfa"):
        assert (
            app.client.post("/score", content=f'{{"prompt": "{text}"}}', headers=JSON).status_code
            == 200
        )
    assert lone_surrogate({"a": ["\U0001f600", 1, None, {"b": "c"}]}) is None
