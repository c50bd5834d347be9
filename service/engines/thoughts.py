"""What a model that thinks aloud says, without its thoughts."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NAME = r"(?:[a-z]+:)?(?:think(?:ing)?|thoughts?|reasoning|reflection)"
# What opens a thought, and what closes it: tags as of DeepSeek, Qwen and Seed, Mistral's and
# Cohere's, the channels of gpt-oss and of Gemma. Of a closing tag alone the opening one stands in
# the prompt, where the chat template writes it.
_PAIRS = (
    (rf"<{_NAME}>", rf"</{_NAME}>"),
    (r"\[think\]", r"\[/think\]"),
    (r"<\|start_thinking\|>", r"<\|end_thinking\|>"),
    (r"<\|(?:begin|start)_of_thought\|>", r"<\|end_of_thought\|>"),
    (r"◁think▷", r"◁/think▷"),
    (r"<\|channel>thought", r"<channel\|>"),
    (r"<\|channel\|>\s*(?:analysis|commentary)\b", r"<\|channel\|>\s*final\s*(?:<\|message\|>)?"),
)
_FLAGS = re.IGNORECASE | re.DOTALL
_OPENING = re.compile("|".join(f"({opening})" for opening, _ in _PAIRS), _FLAGS)
_CLOSINGS = [re.compile(closing, _FLAGS) for _, closing in _PAIRS]  # of each group of ``_OPENING``
_CLOSING = re.compile("|".join(closing for _, closing in _PAIRS), _FLAGS)
_OPENED_LAST = re.compile(rf"(?:{_OPENING.pattern})\s*(?:<\|message\|>)?\s*\Z", _FLAGS)
# special tokens that are a part of a mark
_PARTS = ("<|channel|>", "<|message|>", "<|channel>", "<channel|>")
TAIL = 32  # last tokens of a prompt, which hold any mark
OPENED = "<think>"  # stands for whatever a template opens a thought with


def spoken(answer: str) -> str | None:
    """Return an answer without what its model thought first; None where the thought never ends."""
    rest = _outside(answer)
    *_, last = (0, *(match.end() for match in _CLOSING.finditer(rest)))
    rest = rest[last:]
    if _OPENING.search(rest):
        return None
    return rest if rest == answer else rest.strip()


def _outside(answer: str) -> str:
    """Return what stands outside thoughts that end.

    An answer may come back in a request and be full of openings: once one kind of them is known to
    have no end behind it, no further end of that kind is looked for."""
    parts, end, start, endless = list[str](), 0, 0, set[int]()
    while (opening := _OPENING.search(answer, start)) is not None:
        kind = (opening.lastindex or 1) - 1
        closing = None if kind in endless else _CLOSINGS[kind].search(answer, opening.end())
        if closing is None:
            endless.add(kind)
            start = opening.start() + 1
        else:
            parts.append(answer[end : opening.start()])
            start = end = closing.end()
    return "".join((*parts, answer[end:]))


def opens_thought(prompt: str) -> bool:
    """Return whether a prompt ends with what opens a thought, as where the chat template ends in
    ``<think>``."""
    return _OPENED_LAST.search(prompt) is not None


def with_marks(text: str, spelt: str, special_tokens: Iterable[str]) -> str:
    """Return an answer's text, with those of the special tokens, which are only in ``spelt``, that
    mark a thought."""
    if spoken(text) != text or spoken(spelt) == spelt:
        return text
    for token in special_tokens:
        if (
            token not in _PARTS
            and _OPENING.search(token) is None
            and _CLOSING.search(token) is None
        ):
            spelt = spelt.replace(token, "")
    return spelt
