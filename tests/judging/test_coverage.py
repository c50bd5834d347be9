"""What thresholds answer and get wrong, by what a bundle keeps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes_store.bundle import Bundle, load_bundle
from probes_store.records import Recalibration
from probes_store.store import SHIPPED
from service.fitting.scores import at_threshold, coverage_curve
from service.judging.evaluation import THRESHOLDS, Coverage, CoverageGate, coverage
from service.trainer.publish import risks_document
from tests.probes_store.factory import GUARANTEE, make_draft, write_bundle

N = 2000


def rows() -> tuple[np.ndarray, np.ndarray]:
    """label [n] (1: right), risk [n]."""
    rng = np.random.default_rng(3)
    label = (rng.random(N) < 0.4).astype(int)
    return label, (1 / (1 + np.exp(-(rng.normal(size=N) - 1.5 * label + 0.7)))).round(6)


def bundle_with(folder: Path, evaluation: dict[str, Any], signals: Any = ("depth_mean",), **changes: Any) -> Bundle:
    """``changes`` are fields of the manifest."""
    draft = make_draft(evaluation=evaluation, signals=signals)
    draft.manifest = dataclasses.replace(draft.manifest, **changes)
    return write_bundle(draft, folder / "one")


def as_dict(gate: CoverageGate | None) -> dict[str, float]:
    assert gate is not None
    return {key: value or 0.0 for key, value in dataclasses.asdict(gate).items() if key != "threshold"}


def test_kept_risks_are_counted_as_the_trainer_counts(tmp_path: Path) -> None:
    label, risk = rows()
    kept = {"out_of_fold": {"risks": risks_document(risk, label, np.arange(N))}}
    found = coverage(bundle_with(tmp_path, kept))
    assert found.source == "out_of_fold_risks"
    assert [gate.threshold for gate in found.gates] == list(THRESHOLDS)
    for gate in found.gates:
        assert as_dict(gate) == pytest.approx(at_threshold(label, risk, gate.threshold))
    assert found.gates[0].wrong_among_answered is None  # nothing is answered below 0
    answered, wrong = coverage_curve(label, risk)
    place = int((risk < 0.5).sum()) - 1
    assert (found.gates[50].answered, found.gates[50].wrong_among_answered) == (answered[place], wrong[place])


def test_a_recalibrated_bundles_rows_are_read_on_the_new_scale(tmp_path: Path) -> None:
    label, risk = rows()
    kept = {"out_of_fold": {"risks": risks_document(risk, label, np.arange(N))}}
    moved = Recalibration("intercept", c=-1.0)
    found = coverage(bundle_with(tmp_path, kept, recalibration=moved))
    assert as_dict(found.gates[30]) == pytest.approx(at_threshold(label, moved(risk), 0.3))


@pytest.mark.parametrize(
    ("evaluation", "changes"),
    [
        ({}, {}),
        ({"out_of_fold": 3}, {}),
        ({"out_of_fold": {"risks": {"risk": "0.1 0.2", "hallucinated": "1"}}}, {}),
        ({"out_of_fold": {"risks": {"risk": "0.1 7.0", "hallucinated": "1 0"}}}, {}),
        ({"out_of_fold": {"risks": {"risk": "", "hallucinated": ""}}}, {}),
        ({"out_of_fold": {"risks": {"risk": "nan", "hallucinated": "1"}}}, {}),
        ({"cross_validation": {"at_threshold": {"answered": "x"}}, "recalibrations": []}, {}),
    ],
)
def test_too_little_is_said_and_never_an_error(tmp_path: Path, evaluation: dict[str, Any], changes: Any) -> None:
    assert coverage(bundle_with(tmp_path, evaluation, **changes)) == Coverage("own_threshold", 11, 5 / 11, (), None, ())


def test_what_was_measured_at_the_own_threshold(tmp_path: Path) -> None:
    point = {"answered": 0.5, "wrong_among_answered": 0.25, "right_withheld": 0.1}
    kept = {"cross_validation": {"at_threshold": point}}
    assert as_dict(coverage(bundle_with(tmp_path / "a", kept)).own) == point
    after = {"at_threshold": {"before": point, "after": point | {"answered": 0.4}}}
    moved = coverage(bundle_with(tmp_path / "b", kept | {"recalibrations": [after, after]}))
    assert as_dict(moved.own)["answered"] == 0.4
    # a calibration moved the threshold: what was measured was another one
    assert coverage(bundle_with(tmp_path / "c", kept, guarantee=GUARANTEE, threshold=GUARANTEE.threshold)).own is None


@pytest.mark.parametrize("name", ["smollm2", "smollm2-fused"])
def test_the_shipped_bundles(name: str) -> None:
    bundle = load_bundle(SHIPPED / name / "1")
    found = coverage(bundle)
    assert found.source == "out_of_fold_risks"
    assert found.own is not None
    assert 0.08 < found.own.answered < 0.12
    nearest = found.gates[round(100 * bundle.manifest.threshold)]
    assert nearest.answered == pytest.approx(found.own.answered, abs=0.03)
    assert nearest.wrong_among_answered == pytest.approx(found.own.wrong_among_answered, abs=0.02)


def test_tenths_hold_the_rows_in_their_order_by_risk(tmp_path: Path) -> None:
    label, risk = rows()
    kept = {"out_of_fold": {"risks": risks_document(risk, label, np.arange(N))}}
    found = coverage(bundle_with(tmp_path, kept)).tenths
    order = np.argsort(risk)
    assert len(found) == 10
    for place, tenth in enumerate(found):
        own = order[place * 200 : (place + 1) * 200]
        assert (tenth.low, tenth.high) == (pytest.approx(risk[own].min()), pytest.approx(risk[own].max()))
        assert tenth.right == pytest.approx(label[own].mean())
    assert found[0].right > 0.5 > found[-1].right


def test_few_rows_have_no_tenths(tmp_path: Path) -> None:
    label, risk = rows()
    kept = {"out_of_fold": {"risks": risks_document(risk[:99], label[:99], np.arange(99))}}
    found = coverage(bundle_with(tmp_path, kept))
    assert (found.source, found.tenths) == ("out_of_fold_risks", ())
