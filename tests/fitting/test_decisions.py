"""What a threshold does and is worth: known answers, and brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from sklearn.metrics import roc_curve

from service.fitting import decisions
from tests.fitting.test_scores import labelled

SIX = np.array([1, 1, 0, 1, 0, 0]), np.array([0.1, 0.2, 0.3, 0.6, 0.7, 0.9])


def test_known_answers() -> None:
    label, risk = SIX
    gates = [tuple(decisions.at_threshold(label, risk, cut).values()) for cut in (0.5, 0.1)]
    assert gates == [pytest.approx((0.5, 1 / 3, 1 / 3)), (0.0, 0.0, 1.0)]
    answered, wrong = decisions.coverage_curve(label, risk)
    assert answered.tolist() == pytest.approx([k / 6 for k in range(1, 7)])
    assert wrong.tolist() == pytest.approx([0, 0, 1 / 3, 1 / 4, 2 / 5, 1 / 2])
    # A perfect order has 1/4, 2/5 and 3/6 of wrong answers at its end, and 0 before.
    assert decisions.excess_aurc(label, risk) == pytest.approx((1 / 3 + 1 / 4 - 1 / 4) / 6)
    assert decisions.excess_aurc(label, 1.0 - label) == 0.0
    caught = decisions.caught(label, risk, (0.0, 0.2, 1 / 3, 1.0))
    assert caught.tolist() == pytest.approx([2 / 3, 2 / 3, 1.0, 1.0])
    names = "e_aurc caught_at_5 caught_at_10 caught_at_20"
    assert " ".join(decisions.decisions(label, risk)) == names


@pytest.mark.parametrize(
    ("cost", "saved", "by_withholding_all"),
    [
        # At a cost of 1 the gate is at 0.5: two of three wrong ones withheld, for one right one.
        (1.0, 1 / 6, 0.0),
        # At a cost of 4 it is at 0.2: all three, for two right ones.
        (4.0, (3 - 2 / 4) / 6, (3 - 3 / 4) / 6),
    ],
)
def test_known_benefits(cost: float, saved: float, by_withholding_all: float) -> None:
    label, risk = SIX
    for seeds in (risk, np.stack([risk, risk])):
        benefit = decisions.net_benefit(label, seeds, cost)
        assert list(benefit.values()) == pytest.approx([saved, by_withholding_all])


@pytest.mark.parametrize("seed", range(30))
def test_equal_risks_count_as_on_average_over_their_orders(seed: int) -> None:
    label, risk = labelled(seed)
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(400):
        order = rng.permutation(len(label))
        wrong = 1 - label[order][np.argsort(risk[order], kind="stable")]
        drawn.append(np.cumsum(wrong) / np.arange(1, len(wrong) + 1))
    curve, excess = decisions.coverage_curve(label, risk)[1], decisions.excess_aurc(label, risk)
    assert curve == pytest.approx(np.mean(drawn, axis=0), abs=0.1)
    assert excess >= 0.0
    equal = decisions.excess_aurc(label, np.zeros(len(label)))
    assert equal == pytest.approx(excess + np.mean((1 - label).mean() - curve))


@pytest.mark.parametrize("seed", range(30))
def test_what_is_caught_is_the_roc_curve(seed: int) -> None:
    label, risk = labelled(seed)
    false, true, _ = roc_curve(1 - label, risk, drop_intermediate=False)
    for withheld in (0.05, 0.31, 0.5, 1.0):
        step = true[false == withheld]  # a vertical one counts by its upper end
        expected = step.max() if len(step) else np.interp(withheld, false, true)
        assert decisions.caught(label, risk, [withheld])[0] == pytest.approx(expected)


def test_a_gate_is_worth_more_than_answering_or_withholding_all_where_the_risk_is_true() -> None:
    rng = np.random.default_rng(1)
    risk = rng.beta(1, 1, 20_000)
    label = (rng.random(20_000) >= risk).astype(np.int64)
    for cost, seed in itertools.product((0.25, 1.0, 4.0), (0, 1)):
        own = decisions.net_benefit(label, risk, cost)
        guessed = decisions.net_benefit(label, np.random.default_rng(seed).permutation(risk), cost)
        assert own["net_benefit"] > max(0.0, own["withholding_all"], guessed["net_benefit"])
