"""What sets of questions have in common: how a question is asked, and when two are the same."""

from __future__ import annotations

import re
import unicodedata

BRIEFLY = " Answer briefly."


def question_group(text: str) -> str:
    """One name for a question in all sets: its words in lower case, without punctuation."""
    return "question/" + " ".join(words_of(text))


def words_of(text: str) -> list[str]:
    """Its words in lower case, without punctuation."""
    return re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())
