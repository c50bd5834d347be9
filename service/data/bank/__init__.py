"""The question bank: questions with accepted answers that come with the package, to train without
rows of one's own.

``ATTRIBUTION.md`` names their sources and licences; ``hallutracer_research.data.bank`` makes the
two files."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any, Literal, get_args

Split = Literal["train", "held-out"]
SPLITS: tuple[Split, ...] = get_args(Split)
ATTRIBUTION = Path(__file__).with_name("ATTRIBUTION.md")


def bank_file(split: Split) -> Path:
    """Return the packed file of one half."""
    return Path(__file__).with_name(f"{split}.jsonl.xz")


def bank_rows(split: Split = "train") -> list[dict[str, Any]]:
    """Return the questions of one half as rows to train on.

    Each row has ``id``, ``prompt``, ``answers``, ``group`` and ``kind``; a fact also its
    ``relation`` and ``subject``, and the ``statement`` that a passage makes of it.

    The rows stand in a drawn order, those of one group behind each other, so that each beginning is
    a sample of the whole.  The halves share no group.

    >>> row = bank_rows("train")[0]
    >>> sorted(row)
    ['answers', 'group', 'id', 'kind', 'prompt']
    >>> len(bank_rows("train")), len(bank_rows("held-out"))
    (9593, 1800)"""
    with lzma.open(bank_file(split), "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]
