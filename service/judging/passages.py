"""Guesses from the form of a message whether it contains a passage; it reads at most ``LONG``
characters."""

from __future__ import annotations

import re
from collections.abc import Mapping

LONG = 400  # characters, about 60 words; very few questions alone are longer
# characters, about ten words, outside the question's line; a greeting or "Answer:" is shorter
BESIDE = 60
QUESTION = ("?", "\uff1f", "\u061f")  # question marks, also of Chinese and Arabic
_MARKER = re.compile(
    r"^[ \t#*<]*(?:contexts?|documents?|passages?|background|sources?|search"
    r" results?|references?|excerpts?)"
    r"[ \t]*\d*[ \t]*(?:[:*>]|$)",
    re.IGNORECASE | re.MULTILINE,
)


def has_passage(text: str) -> bool:
    """Return whether a text is long, names a passage ("Context:"), or has text on other lines than
    its question.

    The question is the last line that ends in a question mark, else the last that does not end in a
    colon."""
    text = text.strip()
    if len(text) > LONG:
        return True
    lines = list(filter(None, map(str.strip, text.splitlines())))
    asks = [line for line in lines if line.endswith(QUESTION)] or [
        line for line in lines if not line.endswith(":")
    ]
    beside = sum(map(len, lines)) - len((asks or lines or [""])[-1])
    return beside > BESIDE or _MARKER.search(text) is not None


def text_of(content: object) -> str:
    """Return the text of a message's content, which may have parts; "" if it has none."""
    parts = content if isinstance(content, list) else [content]
    texts = [
        part.get("text") if isinstance(part, Mapping) and isinstance(content, list) else part
        for part in parts
    ]
    return "\n".join(text for text in texts if isinstance(text, str))
