"""A window of risks beside those of training, and labels beside a guarantee."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ks_2samp

from benchmarks import drift
from probes_store.bundle import load_bundle
from probes_store.store import SHIPPED
from service.judging.drift import (
    BINS,
    MOST_ALIKE,
    DriftLimits,
    LabelTest,
    Reference,
    alike_of,
    compare,
    reference_of,
)
from tests.kit.bundles import write_bundle
from tests.kit.reseal import without_in_evaluation
from tests.matching import matching_draft
from tests.scripted_engine import ScriptedEngine


def of(risks: list[float]) -> Reference:
    values = np.sort(np.array(risks))
    return Reference(values, np.quantile(values, np.arange(1, BINS) / BINS), None)


@pytest.mark.parametrize("ties", [False, True])
def test_the_distance_is_kolmogorov_and_smirnovs(ties: bool) -> None:
    draw = np.random.default_rng(0)
    first, second = draw.random(300), draw.random(700) ** 1.5
    if ties:
        first, second = first.round(1), second.round(1)
    found = compare(first, None, of(list(second))).ks
    assert found == pytest.approx(ks_2samp(first, second).statistic, abs=1e-12)


def test_the_stability_index_is_large_where_half_moves_and_finite_where_bins_are_empty() -> None:
    known = of(list(np.linspace(0, 1, 1000)))
    same = compare(np.linspace(0, 1, 500), None, known)
    assert same.psi < 0.01
    assert same.ks < 0.01
    half = compare(np.linspace(0, 0.499, 500), None, known)
    assert half.psi > 0.25
    assert half.shift == pytest.approx(-0.25, abs=2e-3)
    assert np.isfinite(compare(np.full(500, 0.3), None, known).psi)
    # By hand, for shares of .2 and none in tenths 0 to 4 and 5 to 9, half a count in each bin:
    now, before = np.array([100.5] * 5 + [0.5] * 5) / 505, np.full(10, 100.5) / 1005
    assert half.psi == pytest.approx(np.sum((now - before) * np.log(now / before)), rel=1e-3)


def test_the_reference_is_what_the_bundle_keeps(tmp_path: Path) -> None:
    bare = without_in_evaluation(
        SHIPPED / "demo" / "1", tmp_path / "demo" / "1", "out_of_fold", "risks"
    )
    assert reference_of(load_bundle(bare)) is None
    draft = matching_draft(ScriptedEngine(), "kept", 0)
    draft.evaluation["out_of_fold"] = {"risks": {"risk": "0.5 0.25 0.75", "hallucinated": "1 0 1"}}
    kept = reference_of(write_bundle(draft, tmp_path / "kept"))
    assert kept is not None
    assert kept.risks.tolist() == [0.25, 0.5, 0.75]


def test_labels_like_the_guarantee_break_it_as_rarely_as_it_says() -> None:
    draw, broken = np.random.default_rng(3), 0
    for _ in range(1000):
        test, wrong = LabelTest(0.1, error=0.05), draw.random(400) < 0.1
        places = np.flatnonzero(wrong)  # a right answer lowers the evidence
        broken += any(test.broken(count, int(place) + 1) for count, place in enumerate(places, 1))
    assert broken <= 0.05 * 1000


@pytest.mark.parametrize(("right", "wrong"), [(0.2, 0.4), (0.02, 0.9), (0.0, 1.0)])
def test_whoever_chooses_what_to_label_does_not_break_it(right: float, wrong: float) -> None:
    """Labels of a chosen part of the drawn answers: wrong ones are labelled more often than right
    ones."""
    draw, broken = np.random.default_rng(3), 0
    for _ in range(300):
        test, is_wrong = LabelTest(0.1), draw.random(400) < 0.1
        labelled = draw.random(400) < np.where(is_wrong, wrong, right)
        places = np.flatnonzero(is_wrong & labelled)
        broken += any(test.broken(count, int(place) + 1) for count, place in enumerate(places, 1))
    assert broken <= 0.01 * 300 + 3


def test_labels_that_are_worse_break_it_soon() -> None:
    draw, needed = np.random.default_rng(4), []
    for _ in range(100):
        test = LabelTest(0.1)
        wrong = 0
        drawn = 0
        while not test.broken(wrong, drawn):
            wrong, drawn = wrong + bool(draw.random() < 0.3), drawn + 1
        needed.append(drawn)
    assert np.median(needed) < 60
    assert LabelTest(0.1).evidence(0, 0) == pytest.approx(0.0)


@pytest.mark.parametrize(("run", "least", "most"), [(1, 1.0, 1.4), (10, 3.0, 9.0), (50, 8.0, 40.0)])
def test_prompts_that_are_alike_tell_less(run: int, least: float, most: float) -> None:
    """Of runs that share half of their variance about (1 + run) / 2 count as one."""
    draw = np.random.default_rng(6)
    found = [
        alike_of(drift.means(draw, 1000, run=run, shared=0.5 if run > 1 else 0.0))
        for _ in range(50)
    ]
    assert least <= float(np.median(found)) <= most
    assert all(one >= 1 for one in found)
    assert alike_of(np.full(1000, 0.3)) == 1.0  # a gate that is blind is no dependence
    known = of(list(np.linspace(0, 1, 1000)))
    assert compare(np.linspace(0, 1, 500), None, known).independent == 500 / MOST_ALIKE


def test_limits_are_wider_where_prompts_are_few_and_alike_and_never_hide_everything() -> None:
    limits = DriftLimits()
    assert (limits.of_ks(1000, 4000), limits.of_psi(1000, 4000), limits.of_outside(1000, 0.01)) == (
        0.12,
        0.2,
        0.05,
    )
    least = limits.window / MOST_ALIKE
    assert limits.of_ks(least, 4000) == pytest.approx(2.7 * (1 / least + 1 / 4000) ** 0.5)
    assert 0.2 < limits.of_ks(least, 4000) < 0.3
    assert 0.2 < limits.of_psi(least, 4000) < 0.5
    assert 0.1 < limits.of_outside(least, 0.1) < 0.25


def test_a_shift_is_seen_either_way_and_a_blind_gate_at_once() -> None:
    """The long version, with false alarms: benchmarks/drift.py."""
    limits, draw = DriftLimits(), np.random.default_rng(5)
    for name, most in (
        ("depth mean + 0.5 deviations", 1000),
        ("depth mean - 0.5 deviations", 1000),
        ("depth mean + 1 deviation", 1000),
        ("a constant (a blind gate)", 500),
    ):
        for _ in range(5):
            before = drift.risks(drift.means(draw, limits.window))
            watch = drift.watching(draw, limits)
            shifted = drift.risks(drift.SHIFTS[name](drift.means(draw, 3000)))
            seen = drift.until_seen(shifted, before, watch)
            assert seen is not None
            assert seen <= most, name


@pytest.mark.parametrize("kind", [kind for kind in drift.TRAFFIC if "200" not in kind])
def test_traffic_that_repeats_itself_or_comes_in_runs_is_no_drift(kind: str) -> None:
    limits, draw = DriftLimits(), np.random.default_rng(8)
    for _ in range(3):
        mean, prompts = drift.TRAFFIC[kind](draw, drift.PIECE)
        assert drift.alarms(drift.risks(mean), prompts, drift.watching(draw, limits)) == 0
