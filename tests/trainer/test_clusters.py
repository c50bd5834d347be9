"""Kinds of rows that name none."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from service.data.training_rows import Dataset, read_dataset
from service.trainer.clusters import LEAST_ROWS, with_clusters
from tests.fitting.planted import planted_rows, write_rows
from tests.trainer.made import run

WORDINGS = (
    "Which city is the capital of country {}?",
    "How do I reset the password of account {}?",
    "In which year did the band release album {}?",
)


def of_traffic(path: Path, count: int, **more: Any) -> Dataset:
    rows = [
        {"prompt": WORDINGS[at % 3].format(f"n{at // 3}"), "answers": ["x"], **more}
        for at in range(count)
    ]
    return read_dataset(write_rows(path, rows), "generate", folds=None)


def kinds(data: Dataset) -> list[str]:
    return [row.strata.get("kind", "") for row in data.rows]


def test_rows_that_name_no_kind_get_clusters_of_their_words(tmp_path: Path) -> None:
    data, test = of_traffic(tmp_path / "a.jsonl", 420), of_traffic(tmp_path / "b.jsonl", 30)
    named, held = with_clusters(data, test)
    assert named.clustered
    assert held is not None
    names = kinds(named)
    for at, wording in enumerate(WORDINGS):
        counts = Counter(names[at::3])
        [(most, count), *_] = counts.most_common()
        assert count >= 135, "one wording, one kind, but for a row or two with a rare word"
        assert len(set(most.split(", ")) & set(wording.lower().rstrip("?").split())) == 2, most
        assert Counter(kinds(held)[at::3]).most_common(1)[0][0] == most
    assert named.digest == data.digest, "the file is the same"
    again, _ = with_clusters(data, test)
    assert kinds(again) == names


@pytest.mark.parametrize(
    ("count", "more"), [(LEAST_ROWS - 1, {}), (300, {"kind": "mine"}), (300, {"applies": False})]
)
def test_few_rows_and_rows_with_kinds_stay_as_they_are(
    tmp_path: Path, count: int, more: dict[str, Any]
) -> None:
    rows = [{"prompt": f"a {at} b{at % 7}", "answers": ["x"]} for at in range(count)]
    if more.get("applies") is False:
        rows = [
            row if at < 10 else {"prompt": row["prompt"], **more} for at, row in enumerate(rows)
        ]
    else:
        rows[-1] |= more
    data = read_dataset(write_rows(tmp_path / "a.jsonl", rows), "generate", folds=None)
    assert with_clusters(data, None) == (data, None)


def test_rows_without_words_to_tell_apart_have_no_kinds(tmp_path: Path) -> None:
    rows = [{"prompt": f"n{at}", "answers": ["x"]} for at in range(300)]
    data = read_dataset(write_rows(tmp_path / "a.jsonl", rows), "generate", folds=None)
    assert with_clusters(data, None) == (data, None)


def test_the_card_says_that_kinds_are_clusters(tmp_path: Path) -> None:
    rows = planted_rows(240)
    for at, row in enumerate(rows):
        del row["kind"]
        row["prompt"] += " harbour bridge" if at % 2 == 0 else " market square"
    bundle, console = run(tmp_path, rows=rows)
    assert any(line.startswith("no row names a kind, so kinds are 2 ") for line in console.lines)
    evaluation = bundle.evaluation()
    assert evaluation["data"]["kinds"] == "clusters"
    assert len(evaluation["recommendation"]["by_kind"]) == 2
    assert "| kinds | clusters of the questions' words, since no row names a kind" in bundle.card()
    assert "\n\nKinds are clusters of the questions' words.\n\n" in bundle.card()
