"""Rows that ask the same in other words: "What is the capital of France?" and "Tell me: what's the capital of france".

Two prompts are near-duplicates where the words of content of one are all among those of the other and carry at least
half of the other's weight.  A word weighs by its rarity among the prompts, so "Berlin is the capital of which country?"
and "Avarua is the capital of which country?" differ, and a suffix that many rows have counts little."""

from __future__ import annotations

import math
import re
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

SHARE = 0.5  # of the longer prompt's weight that the shorter one's words carry at least
INSTRUCTION = 0.05, 20  # a last paragraph that more rows have, as a share and in rows, asks nothing by itself
_FILLER = """
a an the this that these those there it its i me my we us our you your am is are was were be been being do does did has
have had can could would will shall should may might of in on at to for from by with and or as if what which please
kindly tell give say know let want like wonder just only answer question reply briefly concise concisely thanks thank
hello hi
"""
FILLER = frozenset(_FILLER.split())
_NUMBERING = re.compile(
    r"^\W{0,4}(?:q(?:uestion)?\s{0,4})?\d{1,6}[.):\]]{1,2}\s"  # "2. ", "[3] ", "Q5: "
    r"|(?<=[.?!])[\W_]{0,4}(?:(?:copy|version|variant|v)\s{0,4})?\d{1,6}\W{0,4}$",  # " (2)", " #3", " (copy 4)"
    re.IGNORECASE,
)
_CONTRACTED = re.compile(r"['\u2019](?:s|re|d|ll|ve|m|t)\b", re.IGNORECASE)
_TOKEN = re.compile(r"\w+|[.?!:\n]")

Content = tuple[frozenset[str], tuple[str, ...]]  # the words, and those with a digit in their order


def content_of(text: str) -> Content:
    """Return a text without filler, numbering, case, punctuation and, except for numbers, the order of words."""
    text = unicodedata.normalize("NFKC", text)
    text = short if re.search(r"\w", short := _NUMBERING.sub("", text)) else text
    kept, every, before = [], [], ""
    for token in _TOKEN.findall(_CONTRACTED.sub(" ", text)):
        if token in ".?!:\n":
            before = ""
            continue
        word = sys.intern(token.casefold())
        name = token[0].isupper() and before[:1].islower() and token != "I"  # "the element with the symbol In"
        if word not in FILLER or name:
            kept.append(word)
        every.append(word)
        before = token
    words = kept or every or [text.strip()]
    return frozenset(words), tuple(word for word in words if any(char.isdigit() for char in word))


def near_duplicates(prompts: Sequence[Sequence[str]]) -> NDArray[np.int64]:
    """Return the same number for prompts that are near-duplicates, also by way of a third one: [N].

    Each prompt is the texts of its messages.  Of a prompt of several paragraphs in one message the last paragraph is
    compared, since a passage may stand before the question, unless many prompts have the same one."""
    from scipy.cluster.hierarchy import DisjointSet  # a service imports this module, and compares no prompts

    compared = _compared(prompts)
    contents = list(dict.fromkeys(compared))
    having: dict[str, set[int]] = defaultdict(set)
    for number, (words, _) in enumerate(contents):
        for word in words:
            having[word].add(number)
    rarity = {word: math.log((len(contents) + 1) / len(numbers)) ** 2 for word, numbers in having.items()}
    weight = [math.fsum(rarity[word] for word in words) for words, _ in contents]
    joined = DisjointSet(number for number in range(len(contents)))
    for number, (words, digits) in enumerate(contents):
        found = sorted((having[word] for word in words), key=len)
        if len(found[0]) == 1:  # a word that no other prompt has
            continue
        for other in set.intersection(*found):
            if weight[number] >= SHARE * weight[other] and _in_order(digits, contents[other][1]):
                joined.merge(number, other)
    place = {content: joined[number] for number, content in enumerate(contents)}
    return np.array([place[content] for content in compared], np.int64)


def _compared(prompts: Sequence[Sequence[str]]) -> list[Content]:
    asked: list[Content | None] = []
    for texts in prompts:
        before, _, last = texts[-1].strip().rpartition("\n\n")
        content = content_of(last) if before and len(texts) == 1 else None
        asked.append(content if content and len(content[0]) > 1 else None)
    share, rows = INSTRUCTION
    most = max(share * len(prompts), rows)
    often = Counter(content for content in asked if content)
    return [
        content if content and often[content] <= most else content_of("\n".join(texts))
        for texts, content in zip(prompts, asked, strict=True)
    ]


def _in_order(some: Iterable[str], every: Iterable[str]) -> bool:
    """Return whether ``every`` has all of ``some`` in their order, others between them or not."""
    rest = iter(every)
    return all(one in rest for one in some)
