"""How often the promise is broken, and what it answers, in a thousand calibrations that are drawn
from known truths.

The product's own plan, choice of rows to label and tests run on each draw; only engine and files
are left out."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from service.fitting.thresholds import GateProfile, gate_profile
from service.judging.guarantee import Shape, Standing
from service.trainer.guarantee import CalibrationRows, GuaranteePlan, strata_tests
from service.trainer.prepare import UNKNOWN_LABEL
from service.trainer.strata import StratumResult

ALPHA = 0.2
DELTA = 0.1
DRAWS = 1000
ROWS = 1200
BESIDE, ALONE = (Standing(Shape("0", passage=passage, system=False)) for passage in (True, False))
Truth = Callable[[np.ndarray], np.ndarray]  # P(wrong) by the risk that is told

TRUTHS: dict[str, Truth] = {
    "calibrated": lambda risk: risk,
    "told too low": lambda risk: np.minimum(1.4 * risk + 0.04, 1.0),
    "wrong where it is surest": lambda risk: np.where(risk < 0.08, 0.5, risk / 2),
    "just above alpha everywhere": lambda risk: np.full(len(risk), ALPHA + 0.003),
}


def drawn(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return risk and passage [rows]: with a passage most risks are low, without one few are."""
    passage = rng.random(rows) < 0.45
    return np.where(passage, rng.beta(1.2, 4, rows), rng.beta(1.3, 2.2, rows)), passage


def labels(rng: np.random.Generator, risk: np.ndarray, truth: Truth) -> np.ndarray:
    return (rng.random(len(risk)) >= truth(risk)).astype(np.int64)


def profiles() -> tuple[GateProfile, dict[bool, GateProfile]]:
    """Return what training recorded, which took its risks for the truth: of all rows, and by
    passage."""
    rng = np.random.default_rng(5)
    risk, passage = drawn(rng, 4000)
    label, group = labels(rng, risk, TRUTHS["calibrated"]), np.arange(4000)
    parts = {
        beside: gate_profile(label[rows], risk[rows], group[rows])
        for beside in (False, True)
        for rows in [passage == beside]
    }
    return gate_profile(label, risk, group), parts


def share_wrong(truth: Truth) -> Callable[[bool, float], float]:
    """Return the true share of wrong among the answered, by stratum and threshold."""
    risk, passage = drawn(np.random.default_rng(6), 400_000)
    found = {}
    for beside in (False, True):
        ranked = np.sort(risk[passage == beside])
        found[beside] = ranked, np.cumsum(truth(ranked)) / np.arange(1, len(ranked) + 1)

    def share(beside: bool, threshold: float) -> float:
        ranked, mean = found[beside]
        return float(mean[np.searchsorted(ranked, threshold) - 1])

    return share


def results_of(
    rng: np.random.Generator,
    truth: Truth,
    made_of: tuple[GateProfile, dict[bool, GateProfile]],
    seed: int,
) -> list[StratumResult]:
    """Return the tests of one calibration, two rows to a group, as a run makes them."""
    (risk, passage), (gates, parts) = drawn(rng, ROWS), made_of
    rows: Any = SimpleNamespace(
        dataset=SimpleNamespace(groups=np.arange(ROWS) // 2),
        bundle=SimpleNamespace(manifest=SimpleNamespace(prompt_format="chat")),
        options=SimpleNamespace(alphas=(ALPHA,), delta=DELTA, seed=seed),
    )
    made = GuaranteePlan(rows, gates, parts)
    made.__dict__["standings"] = tuple(BESIDE if beside else ALONE for beside in passage)
    label = np.where(made.wants_label(risk), labels(rng, risk, truth), UNKNOWN_LABEL)
    return strata_tests(made, CalibrationRows(np.arange(ROWS), risk, label, 0), ALPHA)


QUICK = "just above alpha everywhere"  # where the bound is nearly reached


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == QUICK else pytest.mark.long) for name in TRUTHS],
)
def test_the_promises_of_both_strata_are_broken_no_more_often_than_delta(name: str) -> None:
    truth, made_of = TRUTHS[name], profiles()
    share, rng = share_wrong(truth), np.random.default_rng(7)
    broken = 0
    each = {False: 0, True: 0}
    served = {False: 0, True: 0}
    for seed in range(DRAWS):
        wrong = set()
        for one in results_of(rng, truth, made_of, seed):
            beside, threshold = bool(one.stratum.passage), one.test and one.test.threshold
            assert one.stratum.delta == DELTA / 2
            assert one.labelled < one.rows
            served[beside] += threshold is not None
            if threshold is not None and share(beside, threshold) > ALPHA:
                wrong.add(beside)
                each[beside] += 1
        broken += bool(wrong)
    assert broken <= binom.ppf(0.999, DRAWS, DELTA)
    assert max(each.values()) <= binom.ppf(0.999, DRAWS, DELTA / 2)
    if name == "calibrated":
        assert min(served.values()) > 0.8 * DRAWS
    if name == QUICK:
        assert broken > 0.4 * DELTA * DRAWS, (
            "the bound is nearly reached, so that a test of it means something"
        )
