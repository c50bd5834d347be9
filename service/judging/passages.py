"""Whether a message brings text along, guessed from its form; never looked for in more than ``LONG`` characters."""

from __future__ import annotations

import re
from collections.abc import Mapping

LONG = 400  # characters, about 60 words: hardly any question alone is longer
BESIDE = 60  # characters, about ten words, on other lines than the question's: more than a greeting or "Answer:"
QUESTION = ("?", "\uff1f", "\u061f")  # as Chinese and Arabic write it, too
_MARKER = re.compile(
    r"^[ \t#*<]*(?:contexts?|documents?|passages?|background|sources?|search results?|references?|excerpts?)"
    r"[ \t]*\d*[ \t]*(?:[:*>]|$)",
    re.IGNORECASE | re.MULTILINE,
)


def has_passage(text: str) -> bool:
    """Return whether it is long, names a passage ("Context:"), or has text on other lines than its question's.

    The question is the last line that ends in a question mark, else the last that does not end in a colon."""
    text = text.strip()
    if len(text) > LONG:
        return True
    lines = [line for part in text.splitlines() if (line := part.strip())]
    asks = [line for line in lines if line.endswith(QUESTION)] or [line for line in lines if not line.endswith(":")]
    beside = sum(map(len, lines)) - len((asks or lines or [""])[-1])
    return beside > BESIDE or _MARKER.search(text) is not None


def text_of(content: object) -> str:
    """Return the text of a message's content, which may come in parts; "" where it has none."""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) and isinstance(content, list) else part for part in parts]
    return "\n".join(text for text in texts if isinstance(text, str))
