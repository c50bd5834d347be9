"""Finds rows that ask the same in other words.

Two prompts are near-duplicates if the content words of the first are all among those of the second
and carry at least half of the second's weight.  A word's weight is its rarity among the prompts.
So "Berlin is the capital of which country?" and "Avarua is the capital of which country?" differ,
and a suffix that many rows share counts little."""

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
INSTRUCTION = (
    0.05,
    20,
)  # a last paragraph in more rows than this share, and than this number, is only an instruction
_FILLER = """
a an the this that these those there it its i me my we us our you your am is are was were be been
being do does did has have had can could would will shall should may might of in on at to for from
by with and or as if what which please kindly tell give say know let want like wonder just only
answer question reply briefly concise concisely thanks thank hello hi
"""
FILLER = frozenset(_FILLER.split())
_NUMBERING = re.compile(
    r"^\W{0,4}(?:q(?:uestion)?\s{0,4})?\d{1,6}[.):\]]{1,2}\s"  # "2. ", "[3] ", "Q5: "
    # " (2)", " #3", " (copy 4)"
    r"|(?<=[.?!])[\W_]{0,4}(?:(?:copy|version|variant|v)\s{0,4})?\d{1,6}\W{0,4}$",
    re.IGNORECASE,
)
_CONTRACTED = re.compile(r"['\u2019](?:s|re|d|ll|ve|m|t)\b", re.IGNORECASE)
_TOKEN = re.compile(r"\w+|[.?!:\n]")

Content = tuple[
    frozenset[str], tuple[str, ...]
]  # the content words, and in their order those with a digit


def content_of(text: str) -> Content:
    """Return a text's content words without filler, numbering, case and punctuation; only numbers
    have an order."""
    text = unicodedata.normalize("NFKC", text)
    text = short if re.search(r"\w", short := _NUMBERING.sub("", text)) else text
    content: list[str] = []
    all_words: list[str] = []
    previous = ""
    for token in _TOKEN.findall(_CONTRACTED.sub(" ", text)):
        if token in ".?!:\n":
            previous = ""
            continue
        word = sys.intern(token.casefold())
        name = (
            token[0].isupper() and previous[:1].islower() and token != "I"
        )  # "the element with the symbol In"
        if word not in FILLER or name:
            content.append(word)
        all_words.append(word)
        previous = token
    words = content or all_words or [text.strip()]
    return frozenset(words), tuple(filter(_has_digit, words))


def _has_digit(word: str) -> bool:
    return any(map(str.isdigit, word))


def near_duplicates(prompts: Sequence[Sequence[str]]) -> NDArray[np.int64]:
    """Return a number for each prompt, [N]: near-duplicates, and chains of them, have the same
    number.

    Each prompt is the texts of its messages.  Of a single message with several paragraphs the last
    paragraph is compared, since a passage may stand before the question, unless many prompts have
    the same last paragraph."""
    from scipy.cluster.hierarchy import (
        DisjointSet,
    )  # a service imports this module, and compares no prompts

    compared = _compared(prompts)
    contents = list(dict.fromkeys(compared))
    having: dict[str, set[int]] = defaultdict(set)
    for number, (words, _) in enumerate(contents):
        for word in words:
            having[word].add(number)
    rarity = {
        word: math.log((len(contents) + 1) / len(numbers)) ** 2 for word, numbers in having.items()
    }
    weight = [math.fsum(map(rarity.__getitem__, words)) for words, _ in contents]
    joined = DisjointSet(number for number in range(len(contents)))
    for number, (words, digits) in enumerate(contents):
        having_word = sorted((having[word] for word in words), key=len)
        if len(having_word[0]) == 1:  # a word that no other prompt has
            continue
        for candidate in set.intersection(*having_word):
            if weight[number] >= SHARE * weight[candidate] and _in_order(
                digits, contents[candidate][1]
            ):
                joined.merge(number, candidate)
    code = {content: joined[number] for number, content in enumerate(contents)}
    return np.array([code[content] for content in compared], np.int64)


def _compared(prompts: Sequence[Sequence[str]]) -> list[Content]:
    last_paragraphs: list[Content | None] = []
    for texts in prompts:
        passage, _, last = texts[-1].strip().rpartition("\n\n")
        content = content_of(last) if passage and len(texts) == 1 else None
        last_paragraphs.append(content if content and len(content[0]) > 1 else None)
    share, rows = INSTRUCTION
    most = max(share * len(prompts), rows)
    often = Counter(content for content in last_paragraphs if content)
    contents = []
    for texts, content in zip(prompts, last_paragraphs, strict=True):
        if content is None or often[content] > most:
            content = content_of("\n".join(texts))
        contents.append(content)
    return contents


def _in_order(some: Iterable[str], every: Iterable[str]) -> bool:
    """Return whether ``some`` is a subsequence of ``every``."""
    remaining = iter(every)
    return all(item in remaining for item in some)
