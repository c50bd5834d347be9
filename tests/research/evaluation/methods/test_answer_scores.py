"""EigenScore, P(True), MIND's features and network, semantic-entropy probes, against independent computations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from hallutracer_research.evaluation.methods.eigenscore import eigen_score, middle
from hallutracer_research.evaluation.methods.mind import features, mind
from hallutracer_research.evaluation.methods.p_true import asked, candidates, log_odds
from hallutracer_research.evaluation.methods.sep import best_split, sep
from service.engines.base import Completion, TracedAnswer
from service.errors import EngineError, TrainingError
from service.fitting.scores import risk_auroc
from tests.engines import tiny
from tests.research.evaluation.methods.made import made_inputs, split


def test_eigenscore_is_the_paper_s_equation() -> None:
    states = np.random.default_rng(0).normal(2.0, 3.0, (4, 9))
    z = states.T  # [d, K]
    centring = np.eye(9) - np.ones((9, 9)) / 9
    _, log_det = np.linalg.slogdet(z.T @ centring @ z + 1e-3 * np.eye(4))
    assert eigen_score(states) == pytest.approx(log_det / 4)
    assert eigen_score(states + 100.0) == pytest.approx(
        log_det / 4
    )  # a common height of all coordinates is centred away
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


def test_p_true_of_a_real_model_is_that_of_its_softmax() -> None:
    engine = cast(Any, tiny.shared_engine("llama"))
    yes, no = candidates(engine)
    prompts = tiny.prompts([6, 9])
    found = log_odds(engine, prompts)
    for prompt, value in zip(prompts, found, strict=True):
        with torch.no_grad():
            p = torch.softmax(tiny.modules(engine).model(torch.tensor([prompt])).logits[0, -1].double(), -1)
        assert value == pytest.approx(float(torch.log(p[yes].sum() / p[no].sum())), abs=1e-4)


def test_a_tokenizer_without_such_tokens_is_refused() -> None:
    engine = _Words()
    engine.known = {"A": 1}
    with pytest.raises(EngineError, match="p-true needs tokens for A, True and B, False"):
        candidates(cast(Any, engine))
    engine.known = {"A": 1, "B": 1}
    with pytest.raises(EngineError, match="p-true needs tokens"):
        candidates(cast(Any, engine))


def test_mind_reads_the_last_token_over_layers_and_the_last_layer_over_tokens() -> None:
    last, mean = np.arange(12.0).reshape(3, 4), 100 + np.arange(12.0).reshape(3, 4)
    answer = TracedAnswer(Completion("", (1, 2), "stop"), np.zeros(2), last.astype("f4"), mean.astype("f4"))
    np.testing.assert_array_equal(features(answer), [4, 5, 6, 7, 108, 109, 110, 111])


def test_mind_can_be_repeated_and_leaves_torch_as_it_was(tmp_path: Path) -> None:
    data = made_inputs(tmp_path, strength=1.0)
    train, test = split(data)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = mind(data, train, test, 1)
    assert torch.equal(torch.get_rng_state(), state)
    assert mind(data, train, test, 1).tobytes() == first.tobytes()
    assert mind(data, train, test, 2).tobytes() != first.tobytes()
    assert risk_auroc(data.label[test], first) > 0.85
    rare = replace(data, answers=replace(data.answers, states=data.answers.states * 1e3 + 1e5))  # type: ignore[operator]
    assert risk_auroc(data.label[test], mind(rare, train, test, 1)) > 0.85  # standardised by the training side


def test_the_best_split_is_that_of_all_thresholds() -> None:
    values = np.round(np.random.default_rng(1).gamma(2.0, size=40), 1)

    def lost(at: float) -> float:
        sides = values[values < at], values[values >= at]
        return float(sum(((side - side.mean()) ** 2).sum() for side in sides))

    every = np.unique(values)[1:]
    assert lost(best_split(values)) == pytest.approx(min(map(lost, every)))
    assert best_split(np.array([0.0, 0.0, 5.0, 5.0, 4.0])) == 4.0
    with pytest.raises(TrainingError, match="the same semantic entropy"):
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
