"""EigenScore, P(True), semantic entropy and its probe, against independent computations and numbers done by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from hallutracer_research.evaluation.methods.eigenscore import eigen_score, middle
from hallutracer_research.evaluation.methods.p_true import asked, candidates, log_odds
from hallutracer_research.evaluation.methods.semantic_entropy import clusters, semantic_entropy
from hallutracer_research.evaluation.methods.sep import best_split, sep
from service.errors import EngineError, TrainingError
from tests.engines import tiny
from tests.research.evaluation.methods.made import made_inputs, split


def test_eigenscore_is_the_paper_s_equation() -> None:
    states = np.random.default_rng(0).normal(2.0, 3.0, (4, 9))
    z = states.T  # [d, K]
    centring = np.eye(9) - np.ones((9, 9)) / 9
    _, log_det = np.linalg.slogdet(z.T @ centring @ z + 1e-3 * np.eye(4))
    for same in (states, states + 100.0):  # a common height of all coordinates is centred away
        assert eigen_score(same) == pytest.approx(log_det / 4)
    assert eigen_score(np.ones((4, 9))) == pytest.approx(np.log(1e-3))
    assert eigen_score(np.repeat(states[:1], 4, axis=0)) < eigen_score(states)
    assert (middle(30), middle(3), middle(1)) == (15, 1, 0)


class _Words:
    """A tokenizer of whole words, with a token of its own in front; 9 begins what it does not know."""

    known = {"A": 1, " A": 2, "True": 3, "B": 5, " B": 5, " False": 6}

    def tokenize(self, text: str) -> list[int]:
        return [0, *([self.known[text]] if text in self.known else [9, 9] if text else [])]

    def next_token(self, prompts: Any, tokens: Any) -> np.ndarray:
        table = np.log(np.array([0.0, 0.1, 0.2, 0.05, 0.0, 0.25, 0.15]), where=np.arange(7) % 4 != 0, out=np.zeros(7))
        return np.array([table[list(tokens)]] * len(prompts))


def test_p_true_sums_the_forms_of_its_answers() -> None:
    engine = cast(Any, _Words())
    assert candidates(engine) == ([1, 2, 3], [5, 6])
    np.testing.assert_allclose(log_odds(engine, [[1], [2]]), np.log([0.35 / 0.4] * 2))
    text = asked("Who?", "Me.")
    assert text.startswith("Question: Who?\nProposed Answer: Me.\n")
    assert text.endswith("The proposed answer is:")
    for engine.known in ({"A": 1}, {"A": 1, "B": 1}):
        with pytest.raises(EngineError, match="p-true"):
            candidates(engine)


def test_p_true_of_a_real_model_is_that_of_its_softmax() -> None:
    engine = cast(Any, tiny.shared_engine("llama"))
    yes, no = candidates(engine)
    prompts = tiny.prompts([6, 9])
    for prompt, value in zip(prompts, log_odds(engine, prompts), strict=True):
        with torch.no_grad():
            p = torch.softmax(tiny.modules(engine).model(torch.tensor([prompt])).logits[0, -1].double(), -1)
        assert value == pytest.approx(float(torch.log(p[yes].sum() / p[no].sum())), abs=1e-4)


def test_semantic_entropy_by_counts_and_by_likelihood() -> None:
    assert semantic_entropy(np.array([0, 0, 1, 2])) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(4))
    assert semantic_entropy(np.zeros(5, np.int64)) == 0.0
    assert semantic_entropy(np.arange(10)) == pytest.approx(math.log(10))
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


def test_the_best_split_is_that_of_all_thresholds() -> None:
    values = np.round(np.random.default_rng(1).gamma(2.0, size=40), 1)

    def lost(at: float) -> float:
        sides = values[values < at], values[values >= at]
        return float(sum(((side - side.mean()) ** 2).sum() for side in sides))

    assert lost(best_split(values)) == pytest.approx(min(map(lost, np.unique(values)[1:])))
    assert best_split(np.array([0.0, 0.0, 5.0, 5.0, 4.0])) == 4.0
    with pytest.raises(TrainingError, match="same semantic entropy"):
        best_split(np.full(4, 2.3))


def test_a_semantic_entropy_probe_sees_neither_labels_nor_test_samples(tmp_path: Path) -> None:
    data = made_inputs(tmp_path, strength=1.2)
    train, test = split(data)
    scores = sep(data, train, test, 0, jobs=1)
    entropy = data.answers.entropy
    assert entropy is not None
    assert np.corrcoef(scores, entropy[test])[0, 1] > 0.7  # it predicts the entropy, and not the label only
    other = entropy.copy()
    other[test] = 1000.0 - other[test]
    blind = replace(data, label=data.label[::-1].copy(), answers=replace(data.answers, entropy=other))
    assert sep(blind, train, test, 0, jobs=1).tobytes() == scores.tobytes()
