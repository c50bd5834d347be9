"""The ridge over a trajectory: it weighs layers where the mean cannot, and falls back on nothing else."""

from __future__ import annotations

import numpy as np

from hallutracer_research.evaluation.methods.trajectory_ridge import trajectory_ridge
from service.fitting.scores import risk_auroc


def made(rows: int, known: tuple[int, ...], seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Trajectories [n, 8], labels and groups of two rows; a strong common level, and the class at the ``known``."""
    rng = np.random.default_rng(seed)
    group = np.arange(rows) // 2
    label = (rng.random(rows // 2) < 0.5).astype(np.int64)[group]
    trajectory = rng.standard_normal((rows, 8)) + 3.0 * rng.standard_normal((rows, 1))
    trajectory[:, known] += 1.5 * (2 * label - 1)[:, None]
    return trajectory, label, group


def test_it_sees_what_the_mean_hides_and_rises_with_hallucination() -> None:
    trajectory, label, group = made(500, (2, 5))
    train, test = np.arange(300), np.arange(300, 500)
    found = trajectory_ridge(trajectory[train], label[train], group[train], trajectory[test], 0)
    assert risk_auroc(label[test], found) > 0.9
    assert risk_auroc(label[test], -trajectory[test].mean(axis=1)) < 0.7


def test_a_fit_repeats_and_rows_do_not_depend_on_each_other() -> None:
    trajectory, label, group = made(200, (1, 6))
    whole = trajectory_ridge(trajectory[:150], label[:150], group[:150], trajectory[150:], 3)
    some = trajectory_ridge(trajectory[:150], label[:150], group[:150], trajectory[155:160], 3)
    np.testing.assert_allclose(some, whole[5:10], rtol=1e-9)


def test_rows_without_signal_give_chance() -> None:
    trajectory, label, group = made(2000, ())
    found = trajectory_ridge(trajectory[:1000], label[:1000], group[:1000], trajectory[1000:], 0)
    assert abs(risk_auroc(label[1000:], found) - 0.5) < 0.05
