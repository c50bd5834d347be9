"""The questions that a run keeps in its bundle: which, and that nothing is fitted on them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from service.data.judges import parts
from service.data.training_rows import Dataset, read_dataset
from service.judging.evaluation import Sample, sample_of
from service.trainer.options import TrainOptions
from service.trainer.training_set import SAMPLE_SHARE, SAMPLE_SIZE, draw_sample
from tests.fitting.planted import Quiet, planted_rows, write_rows
from tests.kit.chats import turns
from tests.kit.present import present
from tests.kit.rows import Options, Row, Rows
from tests.trainer.made import ONE, run


def dataset(path: Path, rows: Rows) -> Dataset:
    return read_dataset(write_rows(path, rows), "given", folds=None)


def drawn(
    folder: Path, rows: Rows, test: Rows | None = None, **options: Any
) -> tuple[Dataset, Sample | None]:
    data = dataset(folder / "rows.jsonl", rows)
    held = None if test is None else dataset(folder / "test.jsonl", test)
    return draw_sample(
        TrainOptions(data=(str(data.path),), name="a", **options), data, held, Quiet()
    )


def test_questions_leave_training_with_their_groups_and_the_seed_alone_decides(
    tmp_path: Path,
) -> None:
    rows = planted_rows(1000)
    left, sample = drawn(tmp_path, rows)
    assert sample is not None
    by_id = {row["id"]: row for row in rows}
    gone = by_id.keys() - {row.id for row in left.rows}
    assert len(gone) == 50 == SAMPLE_SHARE * len(rows)
    assert {by_id[name]["group"] for name in gone}.isdisjoint(row.group for row in left.rows)
    asked = [question.prompt for question in sample.questions]
    assert len(asked) == 25 == len({row["group"] for row in rows if row["prompt"] in asked})
    assert set(asked) <= {by_id[name]["prompt"] for name in gone}
    assert all(question.answers == ("Paris",) for question in sample.questions)
    # The file is what the records name; a run on part of it is another run.
    whole = dataset(tmp_path / "rows.jsonl", rows)
    assert (left.file_digest, left.digest != whole.digest) == (whole.digest, True)
    assert sample == drawn(tmp_path, [row | {"label": 1 - row["label"]} for row in rows])[1]
    assert sample != drawn(tmp_path, rows, seeds=(7,))[1]


def test_kinds_take_turns_and_the_first_ones_are_a_sample_too(tmp_path: Path) -> None:
    rows = planted_rows(2400)
    for number, row in enumerate(rows):
        row["kind"] = "rare" if number < 40 else "frequent"
    _, sample = drawn(tmp_path, rows)
    assert sample is not None
    assert len(sample.questions) == SAMPLE_SIZE
    kinds = Counter(question.kind for question in sample.questions[:10])
    assert kinds == {"rare": 5, "frequent": 5}


def test_of_held_out_rows_training_loses_none(tmp_path: Path) -> None:
    test = planted_rows(200, seed=3)
    left, sample = drawn(tmp_path, planted_rows(240), test)
    assert sample is not None
    assert (len(left), sample.file, len(sample.questions)) == (240, "test.jsonl", SAMPLE_SIZE)
    assert {question.prompt for question in sample.questions} <= {row["prompt"] for row in test}


def test_of_questions_in_several_forms_the_plain_ones_are_shown(tmp_path: Path) -> None:
    pairs = (("wording_chatty", "wording_plain"), ("polite", "lone"))
    test: Rows = []
    for number, row in enumerate(planted_rows(96)):
        for form in pairs[number % 2]:
            changes = {"form": form, "group": str(number), "id": f"{number}-{form}"}
            test.append(row | changes | {"prompt": f"{row['prompt']} in {len(test)}"})
    _, sample = drawn(tmp_path, planted_rows(240), test)
    assert sample is not None
    form_of = {row["prompt"]: row["form"] for row in test}
    shown = Counter(form_of[question.prompt] for question in sample.questions)
    assert (set(shown), shown.total()) == ({"lone", "wording_plain"}, SAMPLE_SIZE)


SYSTEM = turns("{}", system="x")
OPENAI = {
    "labels": "generate",
    "judge": "openai",
    "judge_url": "http://127.0.0.1:1/v1",
    "judge_model": "judge",
}


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ({}, {"keep_sample": False}),
        ({}, OPENAI),
        ({}, {"labels": "generate", "answer_pattern": "A: (.*)"}),
        ({"answers": None}, {}),
        ({"answers": ["?!"]}, {}),  # nothing is left of it to compare
        ({"answers": [parts(["Paris"], ["Rome"])]}, {}),  # more than one question
        ({"prompt": None, "messages": SYSTEM}, {}),
        ({"prompt": "{}" + "x" * 500}, {}),
    ],
)
def test_what_cannot_be_shown(tmp_path: Path, change: Row, options: Options) -> None:
    """In ``change`` "{}" stands for the row's own prompt, None for a field that is left out."""
    rows = []
    for row in planted_rows(400):
        text = json.dumps(row | change).replace("{}", row["prompt"])
        fields: Row = json.loads(text)
        rows.append({name: value for name, value in fields.items() if value is not None})
    left, sample = drawn(tmp_path, rows, **options)
    assert (len(left), sample) == (400, None)


def test_few_rows_and_few_groups_of_a_class_stay(tmp_path: Path) -> None:
    left, sample = drawn(tmp_path, planted_rows(140))
    assert (len(left), sample) == (140, None)
    rows = planted_rows(400, per_group=1)
    right, wrong = ([row for row in rows if row["label"] == label] for label in (1, 0))
    for seed in range(20):  # some draws take one of the five
        left, _ = drawn(tmp_path, wrong[:5] + right, seeds=(seed,))
        assert sum(row.label == 0 for row in left.rows) == 5


def test_a_run_keeps_the_sample_in_the_bundle(tmp_path: Path) -> None:
    bundle, console = run(tmp_path, rows=planted_rows(600), keep_sample=True, **ONE)
    sample, data = present(sample_of(bundle)), bundle.evaluation()["data"]
    assert len(sample.questions) == 15
    assert data["rows"] == bundle.manifest.training.rows == 570
    whole = dataset(tmp_path / "rows.jsonl", planted_rows(600)).digest
    assert data["digest"] == bundle.manifest.training.data_digest == whole
    line = console.line("15 questions")
    assert "left out of training" in line
    assert "(30 rows;" in line
    again, _ = run(tmp_path, keep_sample=True, **ONE)  # resumes
    assert sample_of(again) == sample
