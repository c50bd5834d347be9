"""Semantic entropy: the formulas against numbers done by hand, and which answers are taken to mean the same."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hallutracer_research.evaluation.methods.meaning import clusters, semantic_entropy


def test_by_counts() -> None:
    found = semantic_entropy(np.array([0, 0, 1, 2]))  # shares 1/2, 1/4, 1/4
    assert found == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(4))
    assert semantic_entropy(np.zeros(5, np.int64)) == 0.0
    assert semantic_entropy(np.arange(10)) == pytest.approx(math.log(10))


def test_by_likelihood() -> None:
    log_prob = np.log(np.array([0.4, 0.2, 0.2]))  # of mean tokens; shares 3/4 and 1/4
    found = semantic_entropy(np.array([0, 1, 0]), log_prob)
    assert found == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    far = semantic_entropy(np.array([0, 1]), np.array([-2000.0, -2000.0]))  # exp underflows to 0
    assert far == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    ("question", "answers", "expected"),
    [
        ("What is the capital of France?",
         ["The capital of France is Paris.", "Paris", "paris!", "It is Rome.", "PARIS, of course", "Rome"],
         [0, 0, 0, 1, 0, 1]),
        ("Is the earth flat?", ["Yes.", "No.", "No, the earth is not flat.", "no", "Yes, it is."], [0, 1, 1, 1, 0]),
        ("Who wrote Hamlet?", ["Shakespeare wrote it", "Shakespeare never wrote it", "It wasn't Shakespeare"],
         [0, 1, 2]),
        ("When was the moon landing?", ["1969", "In July 1969", "1996", "in 1,969"], [0, 0, 1, 0]),
        ("Name a colour", ["Name a colour", "name a colour!", "colour", "Red"], [0, 0, 1, 2]),
        ("Why?", ["", "", "So"], [0, 0, 1]),
    ],
)  # fmt: skip
def test_answers_that_mean_the_same(question: str, answers: list[str], expected: list[int]) -> None:
    assert clusters(question, answers).tolist() == expected
