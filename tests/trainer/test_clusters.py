"""Kinds of rows that name none."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from service.data.training_rows import Dataset, read_dataset
from service.trainer.clusters import LEAST_ROWS, with_clusters
from tests.fitting.planted import dataset_of, planted_rows, write_rows
from tests.kit.rows import Rows
from tests.trainer.made import run

WORDINGS = (
    "Which city is the capital of country {}?",
    "How do I reset the password of account {}?",
    "In which year did the band release album {}?",
)


def worded(path: Path, count: int) -> Dataset:
    """Traffic in three wordings, which take turns."""
    rows = [
        {"prompt": WORDINGS[number % 3].format(f"n{number // 3}"), "answers": ["x"]}
        for number in range(count)
    ]
    return read_dataset(write_rows(path, rows), "generate", folds=None)


def kinds(data: Dataset) -> list[str]:
    return [row.strata.get("kind", "") for row in data.rows]


def test_rows_that_name_no_kind_get_clusters_of_their_words(tmp_path: Path) -> None:
    data, test = worded(tmp_path / "a.jsonl", 420), worded(tmp_path / "b.jsonl", 30)
    named, held = with_clusters(data, test)
    assert named.clustered
    assert held is not None
    names = kinds(named)
    for number, wording in enumerate(WORDINGS):
        [(most, count), *_] = Counter(names[number::3]).most_common()
        assert count >= 135, "one wording, one kind, but for a row or two with a rare word"
        assert len(set(most.split(", ")) & set(wording.lower().rstrip("?").split())) == 2, most
        assert Counter(kinds(held)[number::3]).most_common(1)[0][0] == most
    assert named.digest == data.digest, "the file is the same"
    again, _ = with_clusters(data, test)
    assert kinds(again) == names


def numbered(count: int, text: str = "a {0} b{1}") -> Rows:
    return [{"prompt": text.format(n, n % 7), "answers": ["x"]} for n in range(count)]


NO_QUESTIONS = [{"prompt": row["prompt"], "applies": False} for row in numbered(300)]


@pytest.mark.parametrize(
    "rows",
    [
        numbered(LEAST_ROWS - 1),
        [*numbered(300)[:-1], {"prompt": "c", "answers": ["x"], "kind": "mine"}],
        [*numbered(10), *NO_QUESTIONS[10:]],
        numbered(300, "n{0}"),  # no words to tell them apart
    ],
)
def test_few_rows_and_rows_with_kinds_or_without_words_stay_as_they_are(
    tmp_path: Path, rows: Rows
) -> None:
    data = dataset_of(tmp_path, rows)
    assert with_clusters(data, None) == (data, None)


def test_the_card_says_that_kinds_are_clusters(tmp_path: Path) -> None:
    rows = planted_rows(240)
    for at, row in enumerate(rows):
        del row["kind"]
        row["prompt"] += " harbour bridge" if at % 2 == 0 else " market square"
    bundle, console = run(tmp_path, rows=rows, seeds=(0,), folds=2)
    assert console.line("no row names a kind, so kinds are 2 ")
    evaluation = bundle.evaluation()
    assert evaluation["data"]["kinds"] == "clusters"
    assert len(evaluation["recommendation"]["by_kind"]) == 2
    assert "| kinds | clusters of the questions' words, since no row names a kind" in bundle.card()
    assert "\n\nKinds are clusters of the questions' words.\n\n" in bundle.card()
