"""A sample of a judge's verdicts for a person to read, and what that person's own say of the
judge."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from hallutracer_research.data import judge_audit
from hallutracer_research.data.judge_audit import measure, read, sample
from service.data.training_rows import Dataset, read_dataset
from service.errors import DataError, RunMismatch
from tests.command_line import ended, hallutracer
from tests.research.data.samples import write_lines


@pytest.fixture
def run(tmp_path: Path) -> tuple[Dataset, Path]:
    """200 rows, 40 of them judged factual, 10 abstained; the answer of row 0 begins like a
    formula."""
    path, folder = tmp_path / "rows.jsonl", tmp_path / "run" / "train"
    folder.mkdir(parents=True)
    rows = [
        {"id": f"r{n}", "prompt": f"Question {n}?", "answers": ["Ann", "Bob"], "kind": "art"}
        for n in range(200)
    ]
    write_lines(path, rows)
    answers = [
        {"row": n, "answer": "=1+1" if n == 0 else f"Answer {n}"} for n in reversed(range(200))
    ]
    write_lines(folder / "answers.jsonl", answers)
    verdicts = ["factual"] * 40 + ["abstained"] * 10 + ["hallucinated"] * 150
    write_lines(
        folder / "labels-x.jsonl",
        [{"id": f"r{n}", "verdict": one} for n, one in enumerate(verdicts)],
    )
    return read_dataset(path, "generate", folds=0), tmp_path / "run"


def test_half_of_each_class_is_drawn_and_weighted_by_its_share(run: tuple[Dataset, Path]) -> None:
    rows = sample(*run, 60)
    assert Counter(row["verdict"] for row in rows) == {"factual": 30, "hallucinated": 30}
    of_factual = (float(row["share"]) for row in rows if row["verdict"] == "factual")
    assert sum(of_factual) == pytest.approx(40 / 190, abs=1e-6)
    assert sum(float(row["share"]) for row in rows) == pytest.approx(1, abs=1e-6)
    for row in rows:
        number = int(row["id"][1:])
        assert row["question"] == f"Question {number}?"
        assert row["accepted"] == "Ann | Bob"
        assert row["read"] == ""
        assert row["answer"] in (f"Answer {number}", "=1+1")
    assert [row["id"] for row in rows] == [row["id"] for row in sample(*run, 60)]
    assert [row["id"] for row in rows] != [row["id"] for row in sample(*run, 60, seed=1)]
    assert len(sample(*run, 1000)) == 190


def test_rates_are_weighted_and_the_ceiling_is_that_of_a_perfect_predictor() -> None:
    """20 % judged right, of which 90 % are; 80 % judged wrong, of which 75 % are."""
    rows = [
        {
            "id": f"{verdict}{n}",
            "verdict": verdict,
            "share": str(share / 40),
            "read": said if n < agreed else other,
        }
        for verdict, share, said, other, agreed in (
            ("factual", 0.2, "right", "wrong", 36),
            ("hallucinated", 0.8, "wrong", "right", 30),
        )
        for n in range(40)
    ]
    found = measure(rows)
    assert found.right_if_judged_right.value == pytest.approx(0.9)
    assert found.wrong_if_judged_wrong.value == pytest.approx(0.75)
    assert found.agreement.value == pytest.approx(0.2 * 0.9 + 0.8 * 0.75)
    # A predictor that knows the truth, on rows as they are: ties count half.
    truth = np.array([row["read"] == "wrong" for row in rows], float)
    judged = np.array([row["verdict"] == "hallucinated" for row in rows])
    higher = truth[judged][:, None] > truth[~judged]
    same = truth[judged][:, None] == truth[~judged]
    assert found.ceiling.value == pytest.approx((higher + same / 2).mean())
    assert found.ceiling.low < found.ceiling.value < found.ceiling.high
    assert found.read == 80
    assert len(found.disagreed) == 14


def test_the_commands(run: tuple[Dataset, Path], tmp_path: Path) -> None:
    dataset, folder = run
    drawn = ended(
        hallutracer("data", "audit", str(dataset.path), "--sample", str(folder), "--rows", "400"), 0
    )
    rows = list(csv.DictReader(drawn.splitlines()))
    assert len(rows) == 190
    assert next(row for row in rows if row["id"] == "r0")["answer"] == "'=1+1"
    path = tmp_path / "audit.csv"
    path.write_text(drawn)
    audit = ("data", "audit", str(path))
    ended(hallutracer(*audit), 1, "'read' is ''; write right, wrong, unclear")
    with path.open("w", newline="") as file:
        judge_audit.write(
            [row | {"read": " Right" if row["verdict"] == "factual" else "wrong"} for row in rows],
            file,
        )
    assert json.loads(ended(hallutracer(*audit, "--json"), 0))["agreement"]["value"] == 1
    ended(hallutracer(*audit), 0, "1.000 [0.9")


def test_other_rows_are_refused_and_a_run_that_asked_in_forms_names_its_own(
    run: tuple[Dataset, Path], tmp_path: Path
) -> None:
    other = read_dataset(
        write_lines(tmp_path / "other.jsonl", [{"id": "r0", "prompt": "?", "answers": ["Ann"]}]),
        "generate",
        folds=0,
    )
    with pytest.raises(RunMismatch, match="judged other rows"):
        sample(other, run[1], 10)
    spread = tmp_path / "run" / "train-forms.jsonl"
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    poem = json.dumps({"id": "poem", "prompt": "Write a poem.", "applies": False})
    spread.write_text("\n".join([poem, *lines]))  # neither answered nor judged
    dataset = read_dataset(spread, "generate", folds=0)
    answers = [{"row": n + 1, "answer": f"Answer {n}"} for n in range(200)]
    write_lines(run[1] / "train" / "answers.jsonl", answers)
    for row in sample(dataset, run[1], 60):
        assert (row["question"], row["answer"]) == (
            f"Question {row['id'][1:]}?",
            f"Answer {row['id'][1:]}",
        )
    with pytest.raises(RunMismatch, match=r"judged other rows.*give .*train-forms\.jsonl"):
        sample(other, run[1], 10)


def test_a_class_that_nobody_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "audit.csv"
    path.write_text("id,verdict,share,read\na,factual,0.5,right\nb,hallucinated,0.5,unclear\n")
    with pytest.raises(DataError, match="no row judged hallucinated was read"):
        read(path)
    path.write_text("id,verdict\na,factual\n")
    with pytest.raises(DataError, match="names no column 'share'"):
        read(path)
