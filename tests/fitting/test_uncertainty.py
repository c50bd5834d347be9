"""The reference and the interval hold what they say, on rows that they never saw."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import refits
from service.fitting.estimator import DepthMeanProbe
from service.fitting.folds import group_folds
from service.fitting.uncertainty import OUTSIDE_SHARE, TrajectoryReference, fit_interval, fit_reference
from service.judging.uncertainty import distance

LAYERS = 20


def trajectories(rng: np.random.Generator, count: int, shift: float = 0.0) -> np.ndarray:
    """Correlated layers of growing scale, [n, m]."""
    walk = np.cumsum(rng.normal(size=(count, LAYERS)) + shift, axis=1) + rng.normal(size=(count, LAYERS))
    return walk * np.exp(np.linspace(0, 3, LAYERS))


def reference(rows: np.ndarray, seed: int, folds: int = 5) -> TrajectoryReference:
    label = np.arange(len(rows)) % 2
    return fit_reference(rows[None], label, np.arange(len(rows)), folds, (seed,))


@pytest.mark.parametrize("count", [120, 1000])
def test_one_fresh_row_in_a_hundred_lies_outside(count: int) -> None:
    """A cutoff from distances to a reference that the rows are part of would flag several times as many at 120 rows."""
    rng = np.random.default_rng(count)
    fresh, other = trajectories(rng, 5000), trajectories(rng, 500, shift=2.0)
    found, elsewhere = [], []
    for seed in range(20):
        made = reference(trajectories(rng, count), seed)
        found.append(np.mean(distance(fresh, made.mean, made.whitening) >= 1))
        elsewhere.append(np.mean(distance(other, made.mean, made.whitening) >= 1))
    assert 0.6 * OUTSIDE_SHARE < np.mean(found) < 1.4 * OUTSIDE_SHARE
    assert np.mean(elsewhere) > 0.5


def test_a_change_of_the_pattern_alone_lies_outside() -> None:
    """The same depth mean, and each layer within its range: only the covariance tells."""
    rng = np.random.default_rng(1)
    made = reference(trajectories(rng, 1000), 0)
    rows = trajectories(rng, 500)
    shuffled = np.stack([rng.permutation(column) for column in rows.T], axis=1)
    assert np.mean(distance(rows, made.mean, made.whitening) >= 1) < 0.03
    assert np.mean(distance(shuffled, made.mean, made.whitening) >= 1) > 0.5


def test_the_rows_distances_are_by_folds_that_lack_them() -> None:
    rng = np.random.default_rng(2)
    rows = trajectories(rng, 100)
    rows[7] += 1e4
    made = reference(rows, 0)
    label, group = np.arange(100) % 2, np.arange(100)
    ((train, _),) = [pair for pair in group_folds(label, group, np.arange(100), 5, 0) if 7 in pair[1]]
    assert 7 not in train
    assert made.distance[0, 7] > 50 * np.median(made.distance)


def test_a_layer_that_never_varies_is_left_out() -> None:
    rng = np.random.default_rng(3)
    rows = trajectories(rng, 300)
    rows[:, 4] = 0.25
    made = reference(rows, 0)
    moved = rows[:5].copy()
    moved[:, 4] += 9.0
    assert distance(moved, made.mean, made.whitening) == pytest.approx(
        distance(rows[:5], made.mean, made.whitening), rel=1e-9
    )


def test_few_rows_place_no_small_quantile() -> None:
    made = reference(trajectories(np.random.default_rng(4), 40), 0)
    assert made.share == pytest.approx(1 / 41)
    assert made.distance.max() == 1


OTHER = 4.0  # shift of prompts that do not apply


def with_others(
    rng: np.random.Generator, count: int = 600, others: int = 200
) -> tuple[TrajectoryReference, TrajectoryReference]:
    """Of labelled rows alone, and with prompts elsewhere that belong to training as well, five to a group."""
    rows, more = trajectories(rng, count), trajectories(rng, others, shift=OTHER)
    label, group = np.arange(count) % 2, np.arange(count)
    given = more, 10_000 + np.arange(others) // 5
    return reference(rows, 0), fit_reference(np.stack([rows, rows]), label, group, 5, (0, 1), given)


def test_prompts_without_a_label_belong_to_training() -> None:
    rng = np.random.default_rng(6)
    alone, both = with_others(rng)
    like_others, fresh = trajectories(rng, 2000, shift=OTHER), trajectories(rng, 2000)
    stranger = trajectories(rng, 500) + 4 * (-1.0) ** np.arange(LAYERS) * np.exp(np.linspace(0, 3, LAYERS))
    assert np.mean(distance(like_others, alone.mean, alone.whitening) >= 1) > 0.9
    for rows in (like_others, fresh):
        assert np.mean(distance(rows, both.mean, both.whitening) >= 1) < 0.06
    assert np.mean(distance(stranger, both.mean, both.whitening) >= 1) > 0.5
    assert both.distance.shape == (2, 600)  # of the labelled rows


def test_the_share_outside_holds_over_all_prompts_of_training() -> None:
    found = []
    for seed in range(8):
        rng = np.random.default_rng(100 + seed)
        _, both = with_others(rng, 300, 100)
        fresh = np.concatenate([trajectories(rng, 3000), trajectories(rng, 1000, shift=OTHER)])
        found.append(np.mean(distance(fresh, both.mean, both.whitening) >= 1))
    assert 0.5 * OUTSIDE_SHARE < np.mean(found) < 1.5 * OUTSIDE_SHARE


def test_rows_that_gave_the_cutoff_are_counted_with_those_without_a_label() -> None:
    alone, both = with_others(np.random.default_rng(7), 60, 200)
    assert (alone.rows, both.rows) == (60, 260)
    assert alone.share == pytest.approx(1 / 61)
    assert both.share == OUTSIDE_SHARE


def test_a_group_of_others_is_compared_with_a_reference_that_lacks_all_of_it() -> None:
    """Copies in one group would otherwise vouch for each other, and move the cutoff to where they lie."""
    rng = np.random.default_rng(8)
    rows, away = trajectories(rng, 300), trajectories(rng, 1, shift=12.0)
    label, group = np.arange(300) % 2, np.arange(300)
    copies = np.repeat(away, 40, axis=0) * (1 + 0.01 * rng.standard_normal((40, LAYERS)))
    largest = [
        fit_reference(rows[None], label, group, 5, (0,), (copies, number)).distance.max()
        for number in (np.zeros(40, np.int64), np.arange(40))
    ]
    assert largest[0] < 0.5 * largest[1]  # one group: the cutoff lies far out, at its distance from all others


def spread(rng: np.random.Generator, deviation: np.ndarray, folds: int, seeds: int) -> np.ndarray:
    """Risks [seeds, n] of fits that lack one fold each, where fits on other rows have ``deviation`` [n] in log odds."""
    z = np.linspace(-3, 3, len(deviation))
    return 1 / (1 + np.exp(z + rng.normal(size=(seeds, len(z))) * deviation / np.sqrt(folds - 1)))


def test_the_half_width_is_that_of_another_training() -> None:
    """Two trainings differ by a deviation of sqrt(2) times their own."""
    rng = np.random.default_rng(5)
    away = np.repeat(np.linspace(0.2, 0.9, 20), 300)
    rng.shuffle(away)
    made = TrajectoryReference(np.zeros(1), np.eye(1), away[None])
    z = np.linspace(-3, 3, 6000)
    deviation = np.sqrt(0.01 + 0.04 * z**2 + 0.25 * away**2)
    found = fit_interval(spread(rng, deviation, 5, 3), made, 5)
    assert found is not None
    assert found.fits == 15
    half = np.array([found.half_width(*pair) for pair in zip(z, away, strict=True)])
    assert half / (1.96 * np.sqrt(2) * deviation) == pytest.approx(1, rel=0.15)
    other = z + rng.normal(size=6000) * deviation
    own = z + rng.normal(size=6000) * deviation
    half = np.array([found.half_width(*pair) for pair in zip(own, away, strict=True)])
    assert np.mean(np.abs(own - other) <= half) == pytest.approx(0.95, abs=0.015)


def test_one_seed_has_no_interval() -> None:
    made = TrajectoryReference(np.zeros(1), np.eye(1), np.full((1, 50), 0.5))
    assert fit_interval(np.full((1, 50), 0.3), made, 5) is None


def test_fits_that_agree_and_risks_at_the_ends_give_finite_widths() -> None:
    made = TrajectoryReference(np.zeros(1), np.eye(1), np.full((1, 50), 0.5))
    for risks in (np.full((2, 50), 0.3), np.tile([0.0, 1.0], (2, 25))):
        found = fit_interval(risks, made, 5)
        assert found is not None
        assert np.isfinite(found.half_width(0.0, 1.0))


@pytest.mark.long
def test_an_interval_holds_what_other_training_sets_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the width is what the jackknife would give without its factor."""
    monkeypatch.setattr(refits, "FRESH", 500)
    said = list(refits.simulated(4, 200, 1, 3, DepthMeanProbe(0.1, folds=5, seeds=(0, 1, 2))))
    pairs = [(one, other) for one in said for other in said if one is not other]

    def held(stretch: float) -> float:
        inside = [np.abs(one.log_odds - other.log_odds) <= stretch * one.half_width for one, other in pairs]
        return float(np.mean(inside))

    assert 0.93 <= held(1.0) <= 0.998
    assert held(0.5) < 0.92
    assert np.mean([one.distance >= 1 for one in said]) < 0.03
    assert np.mean([one.elsewhere >= 1 for one in said]) > 0.3
