"""Turns that a chat template leaves out, or cuts short: refused by name, since nobody would
notice."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from service.engines.checks import MOST_SHAPES, Tokens
from service.errors import RequestError
from tests.engines import tiny
from tests.engines.test_chat import TURNS
from tests.engines.tool_template import TOOL_TEMPLATE

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}>"
CHATS_ALONE = (
    "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.role }}: {{ m.content }}\n{%"
    " endfor %}>"
)
LAST_ALONE = "{{ messages[-1].role }}: {{ messages[-1].content }}\n>"
USERS_ALONE = "{% for m in messages if m.role == 'user' %}{{ m.content }}\n{% endfor %}>"
CUT = "{% for m in messages %}{{ m.role }}: {{ m.content[:10] }}\n{% endfor %}>"
CUT_EARLIER = (
    "{% for m in messages %}{{ m.content if loop.last else m.content[:20] }}\n{% endfor %}>"
)
LAST_SYSTEM = (
    "{% for m in messages %}{{ m.content if m.role != 'system' or not loop.first }}\n{% endfor %}>"
)
BOTH_ENDS = "{% for m in messages %}{{ m.content[:8] ~ m.content[-8:] }}\n{% endfor %}>"


def turns(*lines: str) -> list[dict[str, str]]:
    return [dict(zip(("role", "content"), line.split(": ", 1), strict=True)) for line in lines]


LONG = "What is the capital of the country that borders Italy, France and Austria in the Alps?"
DIALOGUE = turns(
    "system: Hi", "user: Hi", "assistant: Hi", "user: Hi"
)  # whose words occur elsewhere


@pytest.mark.parametrize(
    ("template", "messages", "left_out", "role"),
    [
        (CHATS_ALONE, turns("system: Answer in French.", "user: Hi"), 0, "system"),
        (CHATS_ALONE, turns("developer: Answer in French.", "user: Hi"), 0, "developer"),
        (CHATS_ALONE, turns("user: Hi", "system: Be brief.", "user: Where?"), 1, "system"),
        (CHATS_ALONE, DIALOGUE, 0, "system"),
        (LAST_ALONE, DIALOGUE[1:], 0, "user"),
        (USERS_ALONE, DIALOGUE, 0, "system"),
        (USERS_ALONE, DIALOGUE[1:], 1, "assistant"),
        (LAST_SYSTEM, DIALOGUE, 0, "system"),
        (CUT, turns(f"user: {LONG}"), 0, "user"),
        (BOTH_ENDS, turns(f"user: {LONG}"), 0, "user"),
        (CUT_EARLIER, turns("user: Hi", f"assistant: {LONG}", "user: Hi"), 1, "assistant"),
        (CUT_EARLIER, turns("user: Hi", f"assistant: {LONG}", f"user: {LONG}"), 1, "assistant"),
        (CHATS_ALONE, turns("system: </s>", "user: Hi"), 0, "system"),
    ],
)
def test_what_a_template_leaves_out_is_refused_by_name(
    template: str, messages: Any, left_out: int, role: str
) -> None:
    tokens = Tokens(tiny.tokenizer(template=template))
    for _ in range(2):  # also once its shape is known
        with pytest.raises(RequestError, match="this model's chat template leaves out") as caught:
            tokens.render_chat(messages)
        assert f"messages.{left_out}, of the role {role!r}" in caught.value.message
        assert caught.value.param == f"messages.{left_out}"


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (PLAIN, DIALOGUE),
        (PLAIN, turns("developer: Be brief.", "user: \n Hi </s> \n")),
        (PLAIN.replace("m.content", "m.content | trim"), turns("user:  Hi \n")),
        (
            PLAIN.replace("m.content", "m.content.split() | join(' ')"),
            turns("user: two\n\nlines   and more"),
        ),
        (PLAIN.replace("m.content", "m.content | upper"), DIALOGUE),
        (PLAIN.replace("m.content", "m | tojson"), turns('user: "Hi"\nhe said: é')),
        (
            PLAIN.replace("m.content", "m.content.split('</think>')[-1]"),
            turns("user: Hi", "assistant: <think>\nLyon?\n</think>\n\nParis.", "user: Sure?"),
        ),
        (PLAIN, turns("user: Hi", "assistant: ", "user: Hi")),
        (CUT, turns("user: Hi")),
        (LAST_ALONE, turns("user: Hi")),
        # A system prompt inside the last turn of the user, as Mistral's templates have it.
        (
            (
                "{% for m in messages[1:] %}{% if loop.last %}{{ messages[0].content }}\n\n{% endif"
                " %}{{ m.content }}\n{% endfor %}>"
            ),
            DIALOGUE,
        ),
        (
            TOOL_TEMPLATE.replace("{{ m.role }}: {{ m.content }}{% for call", "{% for call"),
            [
                *turns("user: Who?"),
                TURNS[1] | {"content": "I look."},
                TURNS[2],
            ],
        ),
    ],
)
def test_what_a_template_writes_otherwise_is_taken(template: str, messages: Any) -> None:
    tokens = Tokens(tiny.tokenizer(template=template))
    assert tokens.render_chat(messages) == tokens.encode_chat(messages)


def test_a_template_is_asked_once_about_each_sequence_of_roles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = Tokens(tiny.tokenizer(template=PLAIN))
    rendered = Mock(wraps=tokens._templated)
    monkeypatch.setattr(tokens, "_templated", rendered)
    for number in range(5):
        tokens.render_chat(turns(f"user: question {number}"))
    assert rendered.call_count == 6
    for count in range(1, MOST_SHAPES + 2):
        tokens.render_chat(turns("user: Hi") * count)
    assert tokens._left_out.cache_info().currsize == MOST_SHAPES
