"""Turns that a chat template leaves out, or cuts short: refused by name, since nobody would
notice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from service.engines.checks import MOST_SHAPES, Tokens
from service.errors import RequestError
from tests.engines import tiny
from tests.engines.test_chat import TURNS
from tests.engines.tool_template import TOOL_TEMPLATE

# Templates; turns, of which they leave one out; and turns that they write otherwise.
TABLE = json.loads(Path(__file__).with_name("left_out.json").read_text(encoding="utf-8"))
TEMPLATES: dict[str, str] = TABLE["templates"]
CALLS_ALONE = TOOL_TEMPLATE.replace("{{ m.role }}: {{ m.content }}{% for call", "{% for call")


def turns(*lines: str) -> list[Any]:
    return [dict(zip(("role", "content"), line.split(": ", 1), strict=True)) for line in lines]


@pytest.mark.parametrize(("template", "lines", "left_out", "role"), TABLE["left out"])
def test_what_a_template_leaves_out_is_refused_by_name(
    template: str, lines: list[str], left_out: int, role: str
) -> None:
    tokens = Tokens(tiny.tokenizer(template=TEMPLATES[template]))
    for _ in range(2):  # also once its shape is known
        with pytest.raises(RequestError, match="this model's chat template leaves out") as caught:
            tokens.render_chat(turns(*lines))
        assert f"messages.{left_out}, of the role {role!r}" in caught.value.message
        assert caught.value.param == f"messages.{left_out}"


TURNS_WITH_CALL = [*turns("user: Who?"), TURNS[1] | {"content": "I look."}, TURNS[2]]


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        *((TEMPLATES[template], turns(*lines)) for template, lines in TABLE["taken"]),
        (CALLS_ALONE, TURNS_WITH_CALL),
    ],
)
def test_what_a_template_writes_otherwise_is_taken(template: str, messages: Any) -> None:
    tokens = Tokens(tiny.tokenizer(template=template))
    assert tokens.render_chat(messages) == tokens.encode_chat(messages)


def test_a_template_is_asked_once_about_each_sequence_of_roles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = Tokens(tiny.tokenizer(template=TEMPLATES["plain"]))
    rendered = Mock(wraps=tokens._templated)
    monkeypatch.setattr(tokens, "_templated", rendered)
    for number in range(5):
        tokens.render_chat(turns(f"user: question {number}"))
    assert rendered.call_count == 6
    for count in range(1, MOST_SHAPES + 2):
        tokens.render_chat(turns("user: Hi") * count)
    assert tokens._left_out.cache_info().currsize == MOST_SHAPES
