"""The picture of what is answered against what is wrong, of a small made bundle, its rows and its
run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from docs import answered
from probes_store.bundle import Bundle
from service.trainer.publish import risks_document
from tests.kit.bundles import make_draft, write_bundle

ROWS = 240


def made_rows() -> list[dict[str, Any]]:
    """Of every four rows one has a passage; the kind tells most of what is right; every twentieth
    asks for no fact."""
    rows: list[dict[str, Any]] = []
    for number in range(ROWS):
        kind = ("known", "rare")[number % 2]
        form = ("lone", "greeting", "passage_right", "polite")[number % 4]
        label = int((kind == "known") is (number % 10 != 0))
        messages = [{"role": "user", "content": f"What is thing {number} of the {kind} ones?"}]
        rows.append(
            {"id": str(number), "kind": kind, "form": form, "messages": messages, "label": label}
        )
        if number % 20 == 0:
            rows.append(
                {
                    "id": f"task {number}",
                    "kind": "task",
                    "form": "task",
                    "messages": messages,
                    "applies": False,
                }
            )
    return rows


def made_bundle(folder: Path, rows: list[dict[str, Any]]) -> Bundle:
    label = np.array([row["label"] for row in rows if "label" in row], np.int64)
    number = np.arange(len(label))
    risk = np.where(label == 1, 0.2, 0.8) + 0.001 * (number % 7)
    document = {
        "out_of_fold": {"risks": risks_document(risk, label, number // 2)},
        "threshold": {"threshold": 0.6},
    }
    draft = make_draft(threshold=0.5)
    draft.evaluation = document
    return write_bundle(draft, folder)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return made_rows()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> Bundle:
    return made_bundle(tmp_path_factory.mktemp("made") / "bundle", rows)


def test_the_questions_are_those_without_a_passage_and_each_signal_has_their_scores(
    bundle: Bundle, rows: list[dict[str, Any]]
) -> None:
    entropy = np.stack([np.zeros(len(rows)), np.arange(len(rows), dtype=np.float64)], axis=1)
    own = answered.questions("made", bundle, rows, entropy)
    numbers = [
        number
        for number, row in enumerate(rows)
        if "label" in row and row["form"] != "passage_right"
    ]
    assert len(own.wrong) == len(numbers) == ROWS * 3 // 4
    assert own.wrong.tolist() == [1.0 - rows[number]["label"] for number in numbers]
    assert own.scores["first-token entropy"].tolist() == [float(number) for number in numbers], (
        "of rows that ask, in order"
    )
    assert (own.scores["the bundle"] > 0.5).tolist() == (own.wrong == 1.0).tolist()
    assert (own.threshold, own.guaranteed, own.break_even) == (0.5, False, 0.6)
    without_model = own.scores["kind + form + text, no model"]
    assert without_model[own.wrong == 1].mean() > without_model[own.wrong == 0].mean()
    assert "first-token entropy" not in answered.questions("made", bundle, rows, None).scores


def test_rows_or_a_run_of_another_training_are_refused(
    bundle: Bundle, rows: list[dict[str, Any]]
) -> None:
    other = [*rows]
    other[0] = rows[0] | {"label": 1 - rows[0]["label"]}
    for wrong in (other, rows[:-1]):
        with pytest.raises(
            ValueError, match="the labels of the rows are not those that tiny:1 records"
        ):
            answered.questions("made", bundle, wrong, None)
    with pytest.raises(ValueError, match="the run has 3 prompts"):
        answered.questions("made", bundle, rows, np.zeros((3, 2)))


def test_the_curve_is_the_share_of_wrong_answers_below_each_share_answered() -> None:
    wrong, score = np.array([0.0, 1.0, 0.0, 1.0]), np.array([0.1, 0.2, 0.3, 0.4])
    curve = answered.wrong_among_answered(wrong, score)
    at = {
        share: float(curve[np.argmin(abs(answered.SHARES - share))])
        for share in (0.25, 0.5, 0.75, 1.0)
    }
    assert at == pytest.approx({0.25: 0.0, 0.5: 0.5, 0.75: 1 / 3, 1.0: 0.5})
    doubled = answered.wrong_among_answered(wrong, score, np.array([2.0, 2.0, 2.0, 2.0]))
    assert doubled == pytest.approx(curve)
    without_first = answered.wrong_among_answered(wrong, score, np.array([0.0, 1.0, 1.0, 1.0]))
    assert without_first[0] == 1.0
    low, high = answered.band(np.tile(wrong, 20), np.tile(score, 20), np.arange(80))
    assert (low <= high).all()
    assert low[-1] < 0.5 < high[-1]


def test_the_picture_is_drawn_of_files_and_says_what_it_shows(
    tmp_path: Path,
    bundle: Bundle,
    rows: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, run, target = tmp_path / "rows.jsonl.gz", tmp_path / "run", tmp_path / "answered.svg"
    file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    (run / "train").mkdir(parents=True)
    np.zeros((len(rows), 2)).tofile(run / "train" / "first_token.f64")
    monkeypatch.setattr(answered, "group_draws", lambda group: [np.ones(len(group))] * 3)
    arguments = [
        "answered.py",
        "--to",
        str(target),
        "--model",
        "Made",
        str(bundle.path),
        str(file),
        str(run),
    ]
    monkeypatch.setattr("sys.argv", [*arguments, "--model", "Twin", str(bundle.path), str(file)])
    assert answered.main() == 0
    assert target.read_text(encoding="utf-8").startswith("<?xml")
    printed = capsys.readouterr().out
    assert printed.count("180 questions without a passage") == 2
    entropy = next(line for line in printed.splitlines() if "first-token entropy" in line)
    assert entropy.endswith("AUROC within kind x form 0.500")
    assert printed.count("first-token entropy") == 1
    assert "at the threshold 0.500 (by cost)" in printed
    picture = target.read_bytes()
    monkeypatch.setattr("sys.argv", arguments[:3])
    assert answered.main() == 0
    assert target.read_bytes() == picture, "from the curves that were kept"
