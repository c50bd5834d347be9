from __future__ import annotations

import json

import numpy as np
import pytest

from hallutracer_research.paper.diagnostics import classes
from service.errors import TrainingError


def test_pooled_covariance_weighs_unbiased_class_covariances_by_their_share() -> None:
    rng = np.random.default_rng(0)
    x, factual = rng.standard_normal((50, 3)) * [1, 2, 3], np.arange(50) < 15
    expected = 0.3 * np.cov(x[:15], rowvar=False) + 0.7 * np.cov(x[15:], rowvar=False)
    assert np.allclose(classes.pooled_covariance(x, factual), expected, rtol=1e-12)
    assert np.allclose(classes.pooled_variance(x, factual), np.diag(expected), rtol=1e-12)


def test_a_class_without_rows_or_a_strange_label_is_named() -> None:
    with pytest.raises(TrainingError, match=r"0 rows are factual"):
        classes.factual_rows(np.zeros(5))
    with pytest.raises(TrainingError, match=r"0 or 1: found \[0, 1, 2\]"):
        classes.factual_rows(np.array([0, 1, 2]))
    with pytest.raises(TrainingError, match="trajectory holds 1 numbers that are not finite"):
        classes.as_float([[1.0, np.nan]], "trajectory", 2)


@pytest.mark.parametrize(("m", "count"), [(28, 18), (32, 20), (48, 30), (64, 40), (80, 48)])
def test_middle_layers_are_as_many_as_the_paper_counts(m: int, count: int) -> None:
    assert len(classes.middle_layers(m)) == count
    assert len(classes.middle_transitions(m)) == count


def test_three_layers_have_a_middle() -> None:
    assert list(classes.middle_layers(3)) == [0, 1, 2]
    assert list(classes.middle_transitions(3)) == [0, 1]


def test_a_document_has_null_for_what_is_undefined_and_is_json() -> None:
    document = classes.as_document({"a": np.array([1.0, np.nan]), "b": (np.float64(2), np.inf, "x", None, np.int64(3))})
    assert document == {"a": [1.0, None], "b": [2.0, None, "x", None, 3]}
    json.dumps(document, allow_nan=False)


def test_effect_size_of_two_shifted_normals() -> None:
    rng = np.random.default_rng(1)
    factual = np.arange(20_000) < 5_000
    x = rng.standard_normal(20_000) * 2 + 3.0 * factual
    assert classes.effect_size(x, factual) == pytest.approx(1.5, abs=0.05)
    assert np.isnan(classes.effect_size(np.ones((4, 1)), np.array([True, True, False, False]))).all()
