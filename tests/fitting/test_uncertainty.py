"""The reference and the interval hold what they say, on rows that they never saw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from sklearn.base import clone

from service.fitting.estimator import DepthMeanProbe
from service.fitting.nested_cv import evaluate
from service.fitting.uncertainty import (
    OUTSIDE_SHARE,
    TrajectoryReference,
    fit_interval,
    fit_reference,
)
from service.judging.uncertainty import distance
from tests.fitting.made import labelled_inputs, readouts
from tests.kit.present import present

LAYERS = 20
OTHER = 4.0  # shift of prompts that do not apply


def trajectories(rng: np.random.Generator, count: int, shift: float = 0.0) -> np.ndarray:
    """Correlated layers of growing scale, [n, m]."""
    walk = np.cumsum(rng.normal(size=(count, LAYERS)) + shift, axis=1) + rng.normal(
        size=(count, LAYERS)
    )
    return walk * np.exp(np.linspace(0, 3, LAYERS))


def reference(
    rows: np.ndarray,
    others: tuple[np.ndarray, np.ndarray] | None = None,
    seed: int = 0,
    seeds: int = 1,
) -> TrajectoryReference:
    label, group = np.arange(len(rows)) % 2, np.arange(len(rows))
    return fit_reference(
        np.stack([rows] * seeds), label, group, 5, range(seed, seed + seeds), others
    )


def outside(made: TrajectoryReference, rows: np.ndarray) -> float:
    return float(np.mean(distance(rows, made.mean, made.whitening) >= 1))


@pytest.mark.parametrize("count", [120, 1000])
def test_one_fresh_row_in_a_hundred_lies_outside(count: int) -> None:
    """A cutoff from distances to a reference that the rows are part of would flag several times as
    many at 120 rows."""
    rng = np.random.default_rng(count)
    fresh, other = trajectories(rng, 5000), trajectories(rng, 500, shift=2.0)
    made = [reference(trajectories(rng, count), seed=seed) for seed in range(20)]
    assert (
        0.6 * OUTSIDE_SHARE < np.mean([outside(one, fresh) for one in made]) < 1.4 * OUTSIDE_SHARE
    )
    assert np.mean([outside(one, other) for one in made]) > 0.5


def test_a_change_of_the_pattern_alone_lies_outside() -> None:
    """The same depth mean, and each layer within its range: only the covariance tells."""
    rng = np.random.default_rng(1)
    made, rows = reference(trajectories(rng, 1000)), trajectories(rng, 500)
    assert outside(made, rows) < 0.03
    assert outside(made, np.stack([rng.permutation(column) for column in rows.T], axis=1)) > 0.5


def test_a_distance_is_by_a_fold_that_lacks_the_row_and_constant_layers_are_left_out() -> None:
    rows = trajectories(np.random.default_rng(2), 100)
    rows[7] += 1e4
    made = reference(rows)
    assert made.distance[0, 7] > 50 * np.median(made.distance)
    rows = trajectories(np.random.default_rng(3), 300)
    rows[:, 4] = 0.25
    made, moved = reference(rows), rows[:5].copy()
    moved[:, 4] += 9.0
    own, other = (distance(some, made.mean, made.whitening) for some in (rows[:5], moved))
    assert other == pytest.approx(own, rel=1e-9)
    few = reference(trajectories(np.random.default_rng(4), 40))  # place no small quantile
    assert (few.share, few.distance.max()) == (pytest.approx(1 / 41), 1)


def with_others(
    rng: np.random.Generator, count: int = 600, others: int = 200
) -> list[TrajectoryReference]:
    """Of labelled rows alone, and with prompts elsewhere that belong to training as well, five to a
    group."""
    rows, more = trajectories(rng, count), trajectories(rng, others, shift=OTHER)
    return [reference(rows), reference(rows, (more, 10_000 + np.arange(others) // 5), seeds=2)]


def test_prompts_without_a_label_belong_to_training() -> None:
    rng = np.random.default_rng(6)
    alone, both = with_others(rng)
    like_others, fresh = trajectories(rng, 2000, shift=OTHER), trajectories(rng, 2000)
    stranger = trajectories(rng, 500) + 4 * (-1.0) ** np.arange(LAYERS) * np.exp(
        np.linspace(0, 3, LAYERS)
    )
    assert outside(alone, like_others) > 0.9
    assert max(outside(both, like_others), outside(both, fresh)) < 0.06
    assert outside(both, stranger) > 0.5
    assert both.distance.shape == (2, 600)  # of the labelled rows
    assert (alone.rows, both.rows, both.share) == (600, 800, OUTSIDE_SHARE)


def test_a_group_of_others_is_compared_with_a_reference_that_lacks_all_of_it() -> None:
    """Copies in one group would otherwise vouch for each other, and move the cutoff to where they
    lie."""
    rng = np.random.default_rng(8)
    rows, away = trajectories(rng, 300), trajectories(rng, 1, shift=12.0)
    copies = np.repeat(away, 40, axis=0) * (1 + 0.01 * rng.standard_normal((40, LAYERS)))
    one, many = (
        reference(rows, (copies, number)).distance.max()
        for number in (np.zeros(40, int), np.arange(40))
    )
    assert one < 0.5 * many  # one group: the cutoff lies far out, at its distance from all others


def test_the_half_width_is_that_of_another_training() -> None:
    """Two trainings differ by a deviation of sqrt(2) times their own."""
    rng = np.random.default_rng(5)
    away = rng.permutation(np.repeat(np.linspace(0.2, 0.9, 20), 300))
    z = np.linspace(-3, 3, 6000)
    deviation = np.sqrt(0.01 + 0.04 * z**2 + 0.25 * away**2)
    # Of fits that lack one fold of five each, where fits on other rows have that deviation in log
    # odds.
    risks = 1 / (1 + np.exp(z + rng.normal(size=(3, 6000)) * deviation / 2))
    interval = present(
        fit_interval(risks, TrajectoryReference(np.zeros(1), np.eye(1), away[None]), 5)
    )
    assert interval.fits == 15

    def half(log_odds: np.ndarray) -> np.ndarray:
        return np.array(list(map(interval.half_width, log_odds, away)))

    assert half(z) / (1.96 * np.sqrt(2) * deviation) == pytest.approx(1, rel=0.15)
    own, other = (z + rng.normal(size=6000) * deviation for _ in range(2))
    assert np.mean(np.abs(own - other) <= half(own)) == pytest.approx(0.95, abs=0.015)


def test_one_seed_has_no_interval_and_fits_that_agree_or_say_0_and_1_have_finite_ones() -> None:
    made = TrajectoryReference(np.zeros(1), np.eye(1), np.full((1, 50), 0.5))
    assert fit_interval(np.full((1, 50), 0.3), made, 5) is None
    for risks in (np.full((2, 50), 0.3), np.tile([0.0, 1.0], (2, 25))):
        found = present(fit_interval(risks, made, 5))
        assert np.isfinite(found.half_width(0.0, 1.0))


# --- real refits ---

FOLDS = 5
SEEDS = (0, 1, 2)
FRESH = 500
N = 200
PROBE = DepthMeanProbe(0.1, folds=FOLDS, seeds=SEEDS)


def world(rng: np.random.Generator) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """Return what draws n activations [n, 6, 3, 16] and labels; ``shift`` moves to prompts of
    another kind."""
    shape = (6, 3, 16)
    direction = rng.normal(size=shape)
    truth = direction / np.linalg.norm(direction, axis=2, keepdims=True)
    truth *= np.linspace(0.1, 0.4, 6)[:, None, None] * np.array([0.0, 0.8, 1.0])[:, None]
    shared, scale = rng.normal(size=(8, *shape)) * 0.4, np.exp(np.linspace(0, 2, 6))[:, None, None]
    elsewhere = rng.normal(size=shape) * 0.8

    def draw(n: int, shift: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        label = (rng.normal(size=n) > 0.3).astype(np.int64)
        x = rng.normal(size=(n, *shape)) + np.einsum(
            "nq,qmkd->nmkd", rng.normal(size=(n, 8)), shared
        )
        return (x + shift * elsewhere + (2 * label - 1)[:, None, None, None] * truth) * scale, label

    return draw


def trained(
    x: np.ndarray, label: np.ndarray, fresh: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The trainer's whole way: log odds, distances and half widths of the fresh prompts."""
    group = np.arange(N)
    inputs = replace(labelled_inputs(label, group), readouts=readouts(x, label))
    risk = evaluate(inputs, folds=FOLDS, seeds=SEEDS, probe=PROBE).risk["depth_mean_unit_norm"]
    probe = clone(PROBE).fit(x, label, groups=group)
    made = fit_reference(probe.out_of_fold_, label, group, FOLDS, SEEDS)
    interval = present(fit_interval(risk, made, FOLDS))
    logits, classifier = probe.trajectory(fresh), probe.classifier_
    z = logits.mean(axis=1) * classifier.weight[0] + classifier.intercept
    away = distance(logits, made.mean, made.whitening)
    half = map(interval.half_width, z.tolist(), away.tolist())
    return z, away, np.array(list(half))


@pytest.mark.long
def test_an_interval_holds_what_other_training_sets_say() -> None:
    """Half the width is what the jackknife would give without its factor."""
    draw = world(np.random.default_rng(3))
    fresh = np.concatenate([draw(FRESH)[0], draw(500, 3.0)[0]])
    fits = [trained(*draw(N), fresh) for _ in range(4)]
    pairs = permutations(fits, 2)
    apart = [(np.abs(z - other) / half)[:FRESH] for (z, _, half), (other, *_) in pairs]
    assert 0.93 <= np.mean(np.less_equal(apart, 1.0)) <= 0.998
    assert np.mean(np.less_equal(apart, 0.5)) < 0.92
    assert np.mean([away[:FRESH] >= 1 for _, away, _ in fits]) < 0.03
    assert np.mean([away[FRESH:] >= 1 for _, away, _ in fits]) > 0.3
