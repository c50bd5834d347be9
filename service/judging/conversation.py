"""The shape of a conversation, for ``/metrics``: how far it has come and what stands around its question.

A passage is guessed from the form of the last user message, and never looked for in more than ``LONG`` characters, so
that it is cheap enough for every request.  Examples in front of the question, the options of a multiple choice, or much
junk on lines of its own look the same and count too; a passage in a system prompt does not, which ``system`` shows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Turns = Literal["0", "1", "2-4", "5+"]
LONG = 400  # characters, about 60 words: hardly any question alone is longer
BESIDE = 60  # characters, about ten words, on other lines than the question's: more than a greeting or "Answer:"
QUESTION = ("?", "\uff1f", "\u061f")  # as Chinese and Arabic write it, too
_MARKER = re.compile(
    r"^[ \t#*<]*(?:contexts?|documents?|passages?|background|sources?|search results?|references?|excerpts?)"
    r"[ \t]*\d*[ \t]*(?:[:*>]|$)",
    re.IGNORECASE | re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Shape:
    """``turns`` are the assistant's earlier ones."""

    turns: Turns
    passage: bool  # the last user message brings text along
    system: bool  # a system prompt stands above it

    def __str__(self) -> str:
        """As a guarantee names it."""
        passage, system = ("a" if there else "no" for there in (self.passage, self.system))
        turns = "1 earlier turn" if self.turns == "1" else f"{self.turns} earlier turns"
        return f"{turns}, {passage} passage, {system} system prompt"


SHAPES = tuple(
    Shape(turns, passage, system)
    for turns in get_args(Turns)
    for passage in (False, True)
    for system in (False, True)
)  # fmt: skip
"""All there are."""


def shape_of(messages: Sequence[object]) -> Shape:
    """Of messages as anybody may send them: what is no message, or has no text, counts as nothing said."""
    known = [one for one in messages if isinstance(one, Mapping)]
    roles = [one.get("role") for one in known]
    asked = next((one for one in reversed(known) if one.get("role") == "user"), None)
    return Shape(
        turns=_turns(roles[:-1].count("assistant")),  # one at the end is the answer's beginning
        passage=asked is not None and has_passage(_text(asked.get("content"))),
        system="system" in roles or "developer" in roles,
    )


def has_passage(text: str) -> bool:
    """Whether it is long, names a passage ("Context:", "Documents:"), or has text on other lines than its question's.

    The question is the last line that ends in a question mark, else the last that does not end in a colon.
    """
    text = text.strip()
    if len(text) > LONG:
        return True
    lines = [line for part in text.splitlines() if (line := part.strip())]
    asks = [line for line in lines if line.endswith(QUESTION)] or [line for line in lines if not line.endswith(":")]
    beside = sum(map(len, lines)) - len((asks or lines or [""])[-1])
    return beside > BESIDE or _MARKER.search(text) is not None


def _turns(answers: int) -> Turns:
    return "0" if answers == 0 else "1" if answers == 1 else "2-4" if answers < 5 else "5+"


def _text(content: object) -> str:
    """A text, or the texts of its parts, each on lines of its own."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    return "\n".join(text for text in texts if isinstance(text, str))
