"""The linear fit against another solver and pipeline."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from hallutracer_research.evaluation.methods.linear import Penalty, fit_linear


@pytest.mark.parametrize("penalty", ["l1", "l2"])
def test_raw_logits_are_the_standardised_pipeline_s(penalty: Penalty) -> None:
    rng = np.random.default_rng(1)
    label = (rng.random(400) < 0.3).astype(np.int64)
    x = rng.standard_normal((400, 6)) * [1, 20, 0.1, 3, 1, 1] + [0, 50, -2, 0, 0, 0]
    x[:, 1] += 9 * label
    x[:, 5] = 7.1  # constant
    fitted = fit_linear(x.astype(np.float32), label, 0.2, penalty)
    z = StandardScaler().fit_transform(x)
    z[:, 5] = 0.0
    reference = LogisticRegression(
        C=0.2,
        l1_ratio=1.0 if penalty == "l1" else 0.0,
        solver="saga",
        class_weight="balanced",
        tol=1e-8,
        max_iter=20000,
    ).fit(z, label)
    expected = reference.decision_function(z)  # saga does not penalise the intercept
    np.testing.assert_allclose(fitted.logits(x), expected, atol=0.01 * expected.std())
    assert fitted.weight[5] == 0.0


def test_logits_of_many_rows_are_the_same_as_of_few() -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((5000, 3)).astype(np.float32)
    fitted = fit_linear(x[:200], (x[:200, 0] > 0).astype(np.int64), 1.0, "l2")
    np.testing.assert_allclose(fitted.logits(x), x.astype(np.float64) @ fitted.weight + fitted.bias, rtol=1e-12)


def test_a_strong_l1_penalty_leaves_a_constant() -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((50, 4))
    fitted = fit_linear(x, np.arange(50) % 2, 1e-6, "l1")
    assert not fitted.weight.any()
    assert np.ptp(fitted.logits(x)) == 0.0
