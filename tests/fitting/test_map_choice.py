"""The choice among maps: by held-out groups, for the simpler one where it is as good, and never for the look of it."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from scipy.special import expit, logit

from probes_store.records import Recalibration
from service.errors import TrainingError
from service.fitting.map_choice import SEEDS, Choice, choose_map, squared_calibration_error
from service.fitting.prior_shift import Traffic, most_likely_share, shift_to
from service.fitting.scores import debiased_calibration_error
from tests.fitting.shifted import PRIOR, rows


def distorted(truth: Recalibration, seed: int, count: int) -> Choice:
    """The choice on rows whose true risk is ``truth`` of the served one."""
    rng = np.random.default_rng(seed)
    risk = rng.beta(1.2, 1.6, count)
    return choose_map((rng.random(count) >= truth(risk)).astype(int), risk, np.arange(count))


def test_a_calibrated_risk_stays_as_it_is() -> None:
    names = [distorted(Recalibration("intercept"), seed, 200).chosen.name for seed in range(12)]
    assert names.count("identity") >= 9


@pytest.mark.parametrize(
    ("truth", "count", "expected"),
    [
        (Recalibration("intercept", c=1.5), 300, {"intercept"}),
        (Recalibration("platt", 0.4, 0.4, 0.3), 1_000, {"platt"}),
        (Recalibration("beta", 0.3, 3.0, 1.0), 2_000, {"beta"}),
        (Recalibration("isotonic", knots=(0, 0.3, 0.31, 1), values=(0.04, 0.05, 0.8, 0.85)), 2_000, {"isotonic"}),
    ],
)
def test_the_simplest_map_that_fits_is_chosen(truth: Recalibration, count: int, expected: set[str]) -> None:
    choices = [distorted(truth, seed, count) for seed in range(2)]
    names = [choice.chosen.name for choice in choices]
    assert sum(name in expected for name in names) == 2, names
    for choice in choices:
        assert choice.chosen.gain_interval.low > 0
        assert choice.chosen.log_loss == pytest.approx(choice.before.log_loss - choice.chosen.gain)
        assert choice.chosen.error < choice.before.error
        assert choice.best.log_loss <= choice.chosen.log_loss
        assert [one.name for one in choice.candidates] == ["identity", "intercept", "platt", "beta", "isotonic"]


def test_prior_shift_needs_few_labels() -> None:
    """Of 40 labelled rows and 600 others: better than what the labels alone can do."""
    gains: dict[str, list[float]] = {"prior_shift": [], "intercept": [], "isotonic": []}
    names = []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        risk, _, group = rows(rng, 600, 0.75)
        traffic = Traffic(risk, group)
        few, label, of_few = rows(rng, 40, 0.75)

        def fit(label: np.ndarray, risk: np.ndarray, traffic: Traffic) -> Recalibration:
            return shift_to(most_likely_share(traffic, PRIOR, label), PRIOR, 640)

        choice = choose_map(label, few, of_few, partial(fit, traffic=traffic))
        names.append(choice.chosen.name)
        fresh, truth, _ = rows(rng, 4_000, 0.75)
        bad = truth == 0
        for one in choice.candidates:
            if one.name in gains and one.map is not None:
                after = one.map(fresh)
                gains[one.name].append(float(-np.log(np.where(bad, after, 1 - after)).mean()))
    mean = {name: np.mean(losses) for name, losses in gains.items()}
    assert mean["prior_shift"] < mean["intercept"] < mean["isotonic"]
    assert names.count("prior_shift") >= 4, names
    assert not {"beta", "isotonic"} & set(names)


def test_a_map_is_judged_on_groups_that_it_has_not_seen() -> None:
    """Each group has a risk and a class of its own: who has seen the group knows the class, who has not, nothing."""
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(60), 12)
    risk = rng.uniform(0.3, 0.7, 60)[group] + 1e-4 * rng.standard_normal(720)
    label = np.resize([0, 1], 60)[rng.permutation(60)][group]
    known = {int(one): float(label[group == one][0]) for one in range(60)}

    def remembers(of_rows: np.ndarray, risks: np.ndarray) -> Recalibration:
        """Isotonic in name: the class of every risk that it was shown, the share elsewhere."""
        seen = {round(float(value), 3) for value in risks}
        knots = np.linspace(0.001, 0.999, 999)
        nearest = [int(group[np.abs(risk - knot).argmin()]) for knot in knots]
        values = [
            0.9 - 0.8 * known[one] if round(float(knot), 3) in seen else 0.5
            for knot, one in zip(knots, nearest, strict=True)
        ]
        return Recalibration("isotonic", knots=tuple(knots.tolist()), values=tuple(values))

    choice = choose_map(label, risk, group, remembers)
    (found,) = [one for one in choice.candidates if one.name == "prior_shift"]
    assert found.log_loss == pytest.approx(np.log(2), abs=0.12)
    assert choice.chosen.name == "identity"


def test_intervals_count_groups() -> None:
    rng = np.random.default_rng(4)
    risk, label, _ = rows(rng, 100, 0.6)
    alone = choose_map(label, risk, np.arange(100))
    copied = choose_map(np.repeat(label, 5), np.repeat(risk, 5), np.repeat(np.arange(100), 5))
    widths = [one.before.log_loss_interval.high - one.before.log_loss_interval.low for one in (alone, copied)]
    assert widths[1] == pytest.approx(widths[0], rel=0.15)


def test_the_calibration_error_is_that_of_the_scores() -> None:
    rng = np.random.default_rng(5)
    risk = rng.uniform(0, 1, 600)
    label = (rng.random(600) >= expit(0.5 * logit(risk))).astype(int)
    squared, without = squared_calibration_error(label, risk, np.arange(600) // 3)
    assert np.sqrt(squared) == pytest.approx(debiased_calibration_error(label, risk), abs=1e-9)
    assert len(without) == 200
    assert np.ptp(without) > 0
    assert without.mean() == pytest.approx(squared, rel=0.02)
    found = choose_map(label, risk, np.arange(600)).before
    assert found.error_interval.low <= found.error <= found.error_interval.high


def test_too_few_rows_of_a_class_are_said() -> None:
    label = np.array([0] * 3 + [1] * 40)
    with pytest.raises(TrainingError, match="no hallucinated row"):
        choose_map(label, np.linspace(0.1, 0.9, 43), np.arange(43))
    assert len(SEEDS) == 3
