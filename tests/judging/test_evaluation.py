"""What a bundle's evaluation.json keeps, as it is read: coverage, the table by form, the sample."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes_store.bundle import Bundle, load_bundle
from probes_store.records import Recalibration
from probes_store.store import SHIPPED
from service.data.forms import FORMS as EVERY_FORM
from service.fitting.decisions import at_threshold
from service.judging import evaluation
from service.judging.evaluation import (
    Coverage,
    CoverageGate,
    Sample,
    SampleQuestion,
    coverage,
    form_table,
    sample_of,
)
from service.trainer.publish import by_stratum, risks_document
from tests.kit.bundles import GUARANTEE, make_draft, write_bundle
from tests.kit.rows import Document, Options
from tests.serve_process import ROOT

CALIBRATED = {"guarantee": GUARANTEE, "threshold": GUARANTEE.threshold}
MOVED = Recalibration("intercept", c=-1.0)


def bundle_with(folder: Path, evaluation: Document, **changes: Any) -> Bundle:
    """``changes`` are fields of the manifest."""
    draft = make_draft(evaluation=evaluation)
    draft.manifest = dataclasses.replace(draft.manifest, **changes)
    return write_bundle(draft, folder / "one")


# --- coverage ---

RNG = np.random.default_rng(3)
LABEL = (RNG.random(2000) < 0.4).astype(int)  # 1: right
RISK = (1 / (1 + np.exp(-(RNG.normal(size=2000) - 1.5 * LABEL + 0.7)))).round(6)


def kept(rows: int = 2000) -> Document:
    return {"out_of_fold": {"risks": risks_document(RISK[:rows], LABEL[:rows], np.arange(rows))}}


def as_dict(gate: CoverageGate | None) -> dict[str, float]:
    assert gate is not None
    values = dataclasses.asdict(gate)
    del values["threshold"]
    return {name: value or 0.0 for name, value in values.items()}


def test_kept_risks_are_counted_as_the_trainer_counts(tmp_path: Path) -> None:
    kept_by = coverage(bundle_with(tmp_path, kept()))
    assert kept_by.source == "out_of_fold_risks"
    assert [gate.threshold for gate in kept_by.gates] == list(evaluation.THRESHOLDS)
    for gate in kept_by.gates:
        assert as_dict(gate) == pytest.approx(at_threshold(LABEL, RISK, gate.threshold))
    assert kept_by.gates[0].wrong_among_answered is None  # nothing is answered below 0
    assert len(kept_by.tenths) == 10
    for tenth, own in zip(kept_by.tenths, np.argsort(RISK).reshape(10, 200), strict=True):
        ends = (RISK[own].min(), RISK[own].max(), LABEL[own].mean())
        assert (tenth.low, tenth.high, tenth.right) == pytest.approx(ends)
    few = coverage(bundle_with(tmp_path / "few", kept(99)))
    assert (few.source, few.tenths) == ("out_of_fold_risks", ())


def test_a_recalibrated_bundles_rows_are_read_on_the_new_scale(tmp_path: Path) -> None:
    found = coverage(bundle_with(tmp_path, kept(), recalibration=MOVED))
    assert as_dict(found.gates[30]) == pytest.approx(at_threshold(LABEL, MOVED(RISK), 0.3))


@pytest.mark.parametrize(
    "evaluation",
    [
        {},
        {"out_of_fold": 3},
        {"out_of_fold": {"risks": {"risk": "0.1 0.2", "hallucinated": "1"}}},
        {"out_of_fold": {"risks": {"risk": "0.1 7.0", "hallucinated": "1 0"}}},
        {"out_of_fold": {"risks": {"risk": "", "hallucinated": ""}}},
        {"out_of_fold": {"risks": {"risk": "nan", "hallucinated": "1"}}},
        {"cross_validation": {"at_threshold": {"answered": "x"}}, "recalibrations": []},
    ],
)
def test_too_little_is_said_and_never_an_error(tmp_path: Path, evaluation: Document) -> None:
    assert coverage(bundle_with(tmp_path, evaluation)) == Coverage(
        "own_threshold", 11, 5 / 11, (), None, ()
    )


def test_what_was_measured_at_the_own_threshold(tmp_path: Path) -> None:
    point = {"answered": 0.5, "wrong_among_answered": 0.25, "right_withheld": 0.1}
    measured = {"cross_validation": {"at_threshold": point}}
    assert as_dict(coverage(bundle_with(tmp_path / "a", measured)).own) == point
    after = {"at_threshold": {"before": point, "after": point | {"answered": 0.4}}}
    moved = coverage(bundle_with(tmp_path / "b", measured | {"recalibrations": [after, after]}))
    assert as_dict(moved.own)["answered"] == 0.4
    # a calibration moved the threshold: what was measured was another one
    assert coverage(bundle_with(tmp_path / "c", measured, **CALIBRATED)).own is None


@pytest.mark.parametrize("name", ["smollm2", "smollm2-fused"])
def test_the_shipped_bundles(name: str) -> None:
    bundle = load_bundle(SHIPPED / name / "1")
    kept_by = coverage(bundle)
    own, nearest = kept_by.own, kept_by.gates[round(100 * bundle.manifest.threshold)]
    assert kept_by.source == "out_of_fold_risks"
    assert own is not None
    assert 0.08 < own.answered < 0.12
    assert nearest.answered == pytest.approx(own.answered, abs=0.03)
    assert nearest.wrong_among_answered == pytest.approx(own.wrong_among_answered, abs=0.02)


# --- forms ---

FORMS = [{"form": "lone"}] * 6 + [{"form": "turn_own"}] * 4
RIGHT = np.array([1, 0, 0, 0, 0, 1, 0, 0, 0, 0])
RISKS = np.array([[0.1, 0.9, 0.8, 0.7, 0.3, 0.6, 0.9, 0.8, 0.8, 0.9]])
MADE = by_stratum(RIGHT, RISKS, FORMS, 0.5)
KEPT = {"cross_validation": {"by_form": MADE}}


def table(folder: Path, evaluation: Document, **changes: Any) -> evaluation.FormTable:
    found = form_table(bundle_with(folder, evaluation, **changes))
    assert found is not None
    return found


def test_the_shipped_bundle_has_a_table_of_the_held_out_rows_forms() -> None:
    bundle = load_bundle(SHIPPED / "smollm2" / "1")
    forms = form_table(bundle)
    assert forms is not None
    with gzip.open(ROOT / "docs/smollm2-test-rows.jsonl.gz", "rt", encoding="utf-8") as lines:
        held_out = {json.loads(line)["form"] for line in lines}
    assert {row.form for row in forms.data} == held_out
    assert set(EVERY_FORM) <= bundle.evaluation()["cross_validation"]["by_form"].keys()


def test_the_table_by_form_is_the_trainers(tmp_path: Path) -> None:
    out_of_fold = table(tmp_path, KEPT)
    assert out_of_fold.source == "out_of_fold"
    assert [row.form for row in out_of_fold.data] == list(MADE) == ["lone", "turn_own"]
    for row in out_of_fold.data:
        trained = MADE[row.form] | {"form": row.form}
        for field, value in dataclasses.asdict(row).items():
            assert value == trained[field], field
    held_out = {"by_form": by_stratum(RIGHT[:6], RISKS[:, :6], FORMS[:6], 0.5)}
    held = table(tmp_path / "h", KEPT | {"held_out": held_out})
    assert (held.source, [row.form for row in held.data]) == ("held_out", ["lone"])
    calibrated = table(tmp_path / "c", KEPT, **CALIBRATED)  # it has another threshold
    assert {(row.answered, row.wrong_among_answered) for row in calibrated.data} == {(None, None)}
    assert calibrated.data[0].mean_risk == pytest.approx(MADE["lone"]["mean_risk"])
    # other risks are served than those that were measured
    assert form_table(bundle_with(tmp_path / "r", KEPT, recalibration=MOVED)) is None


@pytest.mark.parametrize(
    "evaluation",
    [
        {},
        {"cross_validation": [KEPT]},
        *(
            {"cross_validation": one}
            for one in (None, {"by_form": {}}, {"by_form": [1]}, {"by_form": "lone"})
        ),
        *(
            {"cross_validation": {"by_form": {"lone": MADE["lone"] | row}}}
            for row in ({"rows": 0}, {"rows": "6"}, {"wrong": 1.5}, {"auroc": "high"})
        ),
        *(
            {"cross_validation": {"by_form": {"lone": row}}}
            for row in (None, {"rows": 6, "wrong": 0.5})
        ),
    ],
)
def test_no_table_where_none_can_be_read(tmp_path: Path, evaluation: Document) -> None:
    assert form_table(bundle_with(tmp_path, evaluation)) is None


# --- sample ---

QUESTIONS = (
    SampleQuestion("Capital of France?", ("Paris",), "capital"),
    SampleQuestion("2 + 2?", ("4", "four"), ""),
)
SAMPLE = Sample("rows.jsonl", "contains", r"(?i)not sure", 16, QUESTIONS)


def test_the_sample_that_the_trainer_writes_is_read(tmp_path: Path) -> None:
    assert sample_of(bundle_with(tmp_path, {"sample": SAMPLE.document()})) == SAMPLE
    assert sample_of(bundle_with(tmp_path / "none", {})) is None
    long = sample_of(
        bundle_with(tmp_path / "long", {"sample": SAMPLE.document() | {"max_tokens": 10**9}})
    )
    assert long is not None
    assert long.max_tokens == evaluation.MOST_TOKENS


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"questions": [{"prompt": "a", "answers": ["a"], "kind": ""} | one]}
            for one in ({"answers": []}, {"answers": [1]}, {"prompt": 1})
        ),
        *({"questions": one} for one in ([], None, [1])),
        {"judge": "openai"},
        {"max_tokens": 0},
        {"max_tokens": "many"},
        {"abstain_pattern": None},
        {"abstain_pattern": "("},
    ],
)
def test_a_sample_that_reads_otherwise_is_none(tmp_path: Path, change: Options) -> None:
    assert sample_of(bundle_with(tmp_path, {"sample": SAMPLE.document() | change})) is None
