"""The mass-mean direction against the closed form, with correlated columns and with fewer rows than columns."""

from __future__ import annotations

import numpy as np
import pytest

from hallutracer_research.evaluation.methods.mass_mean import SHRINKAGE, discriminant
from service.fitting.scores import auroc


def made(rows: int, width: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """x [n, d], label [n], the covariance [d, d] within the classes, the difference of their means [d]."""
    rng = np.random.default_rng(seed)
    mixed = np.eye(width) + 3.0 * rng.standard_normal((width, 1)) @ rng.standard_normal((1, width))
    shift = rng.standard_normal(width)
    label = (rng.random(rows) < 0.3).astype(np.int64)
    x = rng.standard_normal((rows, width)) @ mixed.T + label[:, None] * shift + 5.0
    return x.astype(np.float32), label, mixed @ mixed.T, shift


def test_with_many_rows_it_is_the_covariance_s_inverse_times_the_difference_of_means() -> None:
    x, label, covariance, shift = made(40_000, 5)
    probes = np.concatenate([np.zeros((1, 5)), np.eye(5)]).astype(np.float32)
    found = discriminant(None, x, label, probes)
    direction = found[1:] - found[0]
    expected = np.linalg.solve(covariance, shift)
    cosine = direction @ expected / np.linalg.norm(direction) / np.linalg.norm(expected)
    assert cosine > 0.999
    means = [x[label == value].mean(axis=0) for value in (0, 1)]
    np.testing.assert_allclose(discriminant(None, x, label, np.stack(means).mean(axis=0)[None]), 0.0, atol=1e-3)


def test_fewer_rows_than_columns_are_enough() -> None:
    x, label, _, shift = made(400, 150)
    train, test = np.arange(100), np.arange(100, 400)
    found = auroc(label[test], discriminant(None, x[train], label[train], x[test]))
    plain = auroc(label[test], (x[test] - x[train].mean(axis=0)) @ shift)  # the true difference, uncorrected
    assert found > max(plain, 0.9)


def test_constant_columns_are_ignored_and_separable_rows_stay_finite() -> None:
    label = np.arange(40) % 2
    x = np.stack([np.full(40, 7.1), label.astype(float)], axis=1).astype(np.float32)
    found = discriminant(None, x, label, np.array([[1e6, 0.0], [7.1, 1.0]], np.float32))
    assert np.isfinite(found).all()
    assert found[0] < 0 < found[1]


def test_full_shrinkage_is_the_difference_of_means_of_standardised_columns() -> None:
    x, label, _, _ = made(300, 6)
    z = (x - x.mean(axis=0)) / x.std(axis=0)
    means = [z[label == value].mean(axis=0) for value in (0, 1)]
    expected = (z - (means[0] + means[1]) / 2) @ (means[1] - means[0])
    found = discriminant(1.0, x, label, x)
    scale = found @ expected / (expected @ expected)
    assert scale > 0
    np.testing.assert_allclose(found, scale * expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("shrinkage", SHRINKAGE)
def test_copies_of_rows_are_no_reason_to_trust_the_covariance(shrinkage: float | None) -> None:
    """Each row five times over changes a fixed share's direction by nothing, and Ledoit and Wolf's towards overfit."""
    x, label, _, _ = made(60, 50)
    once = discriminant(shrinkage, x, label, x[:5])
    often = discriminant(shrinkage, np.tile(x, (5, 1)), np.tile(label, 5), x[:5])
    assert np.allclose(once, often, rtol=1e-3, atol=1e-3) == (shrinkage is not None)
