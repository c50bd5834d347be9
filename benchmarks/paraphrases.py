"""Are paraphrases found, and are other questions left apart?

``python -m benchmarks.paraphrases [ROWS.jsonl ...]``: on the demo model's training questions and on files of rows that
name their groups.  Recall: of 150 questions of different groups, each with four paraphrases of different kinds, which
paraphrases share the number of the question.  Falsely joined: rows that share a number with a row of another group.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hallutracer_research.data.files import BRIEFLY
from service.data.near_duplicates import near_duplicates
from service.demo.questions import questions

BEFORE = ("Tell me: ", "Could you please tell me, ", "Hi! ", "Quick question: ", "I would like to know: ",
          "Please answer this question: ", "Hello there, can you help me? ",
          "Do you happen to know this? ")  # fmt: skip
AFTER = (" Answer briefly.", " Thanks!", " Please be concise.", " Reply in one word.", " Think step by step.",
         " Give only the name.", " I am curious.")  # fmt: skip
NUMBERS = ("{} (2)", "{} #3", "{} 4", "2. {}", "{} [7]", "Q5: {}", "{} (copy 3)", "{} (variant 12)")


def reordered(text: str, draw: random.Random) -> str:
    """The words from a random place on in front of the others."""
    words = text.rstrip("?.").split()
    place = draw.randrange(1, len(words))
    return " ".join(words[place:] + words[:place]) + "?"


def mistyped(text: str, draw: random.Random) -> str:
    """Two letters of a long word change places."""
    words = text.split()
    place = max(range(len(words)), key=lambda one: (len(words[one]) > 4, draw.random()))
    word = words[place]
    if len(word) > 3:
        at = draw.randrange(1, len(word) - 2)
        words[place] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return " ".join(words)


KINDS: dict[str, Callable[[str, random.Random], str]] = {
    "case": lambda text, draw: draw.choice([text.upper(), text.lower(), text.title()]),
    "punctuation": lambda text, draw: draw.choice([text.rstrip("?."), f"{text}?", f'"{text}"', f" {text} ..."]),
    "word order": reordered,
    "politeness": lambda text, draw: draw.choice(BEFORE) + text[:1].lower() + text[1:],
    "suffix": lambda text, draw: text + draw.choice(AFTER),
    "numbered": lambda text, draw: draw.choice(NUMBERS).format(text),
    "contraction": lambda text, draw: re.sub(r"\b(What|Who|Where|When) is\b", r"\1's", text),
    "typo": mistyped,
}


def recall(texts: Sequence[str]) -> dict[str, float]:
    """By kind of paraphrase, over 40 draws of 150 of ``texts``, which ask different things."""
    hits: dict[str, list[bool]] = {kind: [] for kind in KINDS}
    for seed in range(40):
        draw = random.Random(seed)
        rows = []
        for place, text in enumerate(draw.sample(texts, min(150, len(texts)))):
            rows.append((place, "", text))
            rows += [(place, kind, KINDS[kind](text, draw)) for kind in draw.sample(list(KINDS), 4)]
        number = near_duplicates([[text] for _, _, text in rows]).tolist()
        of_question = {place: one for one, (place, kind, _) in zip(number, rows, strict=True) if not kind}
        for one, (place, kind, _) in zip(number, rows, strict=True):
            if kind:
                hits[kind].append(one == of_question[place])
    return {kind: float(np.mean(found)) for kind, found in hits.items()}


def falsely_joined(number: NDArray[np.int64], groups: Sequence[str]) -> float:
    """Share of rows that share a number with a row of another group: [N], [N]."""
    among: dict[int, set[str]] = {}
    for one, group in zip(number.tolist(), groups, strict=True):
        among.setdefault(one, set()).add(group)
    return float(np.mean([len(among[one]) > 1 for one in number.tolist()]))


def main() -> None:
    """Print a row for each file."""
    files = {"demo, " + split: questions(split) for split in ("train", "dev", "test")}
    for path in map(Path, sys.argv[1:]):
        files[path.stem] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for name, rows in files.items():
        texts = [[row["prompt"]] if "prompt" in row else [turn["content"] for turn in row["messages"]] for row in rows]
        begun = time.monotonic()
        number = near_duplicates(texts)
        seconds = time.monotonic() - begun
        asked = {row["group"]: text[-1].removesuffix(BRIEFLY) for row, text in zip(rows, texts, strict=True)}
        found = " | ".join(f"{kind} {share:.3f}" for kind, share in recall(list(asked.values())).items())
        joined = falsely_joined(number, [row["group"] for row in rows])
        print(f"{name} | {len(rows):,} | joined across groups {joined:.4f} | {found} | {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
