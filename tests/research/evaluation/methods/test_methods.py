"""What holds for every method: names, shapes, direction, and that the test labels are never looked at."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from hallutracer_research.evaluation.methods import METHODS, fit_method
from hallutracer_research.evaluation.methods.base import AnswerReadings, MethodInputs, in_processes
from hallutracer_research.evaluation.options import OF_OWN_ANSWERS
from service.errors import TrainingError
from service.fitting.scores import risk_auroc
from tests.research.evaluation.methods.made import made_inputs, split

NAMES = list(METHODS)
SIGNED = ("first-token-max-prob", "first-token-entropy", "prompt-length")  # by the training side


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> MethodInputs:
    return made_inputs(tmp_path_factory.mktemp("rows"), strength=1.2)


def relabelled(data: MethodInputs, label: np.ndarray) -> MethodInputs:
    heads, residual = (replace(readouts, label=label) for readouts in (data.heads, data.residual))
    return replace(data, label=label, heads=heads, residual=residual)


def test_methods_have_titles_of_their_own() -> None:
    assert len({method.title for method in METHODS.values()}) == len(METHODS) == 19


@pytest.mark.parametrize("name", NAMES)
def test_scores_rise_with_hallucination_and_never_see_test_labels(data: MethodInputs, name: str) -> None:
    train, test = split(data)
    scores = fit_method(name, data, train, test, 3, jobs=1)
    assert scores.shape == (len(test),)
    assert np.isfinite(scores).all()
    assert risk_auroc(data.label[test], scores) > 0.7
    label = data.label.copy()
    label[test] = 1 - label[test]
    again = fit_method(name, relabelled(data, label), train, test, 3, jobs=1)
    assert again.tobytes() == scores.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_a_row_s_score_does_not_depend_on_the_rows_beside_it(data: MethodInputs, name: str) -> None:
    train, test = split(data)
    whole = fit_method(name, data, train, test, 0, jobs=1)
    some = fit_method(name, data, train, test[5:9], 0, jobs=1)
    np.testing.assert_allclose(some, whole[5:9], rtol=1e-4, atol=1e-5)  # float32 products of other shapes


@pytest.mark.parametrize("name", ["halluguard", *OF_OWN_ANSWERS])
def test_methods_that_read_answers_need_them(data: MethodInputs, name: str) -> None:
    without = replace(data, halluguard=None, answers=AnswerReadings())
    with pytest.raises(TrainingError, match=rf"{name}.*(none were|there are none).*leave") as caught:
        fit_method(name, without, *split(data), 0)
    assert caught.value.param == "methods"


@pytest.mark.parametrize("name", ["halluguard", "perplexity", "p-true", "semantic-entropy", "eigenscore"])
def test_scores_of_answers_keep_the_sign_of_their_papers(data: MethodInputs, name: str) -> None:
    """Whatever the labels say: on labels that are turned round they do worse than chance."""
    train, test = split(data)
    turned = relabelled(data, 1 - data.label)
    assert fit_method(name, turned, train, test, 0).tobytes() == fit_method(name, data, train, test, 0).tobytes()


def test_a_subset_has_the_readings_of_its_own_rows(data: MethodInputs) -> None:
    rows = np.array([5, 3, 11])
    some = data.subset(rows).answers
    for field in fields(AnswerReadings):
        whole = getattr(data.answers, field.name)
        np.testing.assert_array_equal(getattr(some, field.name), whole[rows])
    assert AnswerReadings().subset(rows).entropy is None


def test_processes_keep_the_order() -> None:
    assert in_processes(abs, [-3, 2, -1], 2) == [3, 2, 1]
    assert in_processes(abs, [-3, 2, -1], 1) == [3, 2, 1]


def test_fitting_processes_load_no_transformers() -> None:
    modules = "iti, fact_probe, iris, p_ik, saplma, mass_mean, sep, mind, references"
    package = "hallutracer_research.evaluation.methods"
    code = f"import sys; from {package} import {modules}; print('transformers' in sys.modules)"
    root = Path(__file__).parents[4]
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_text_and_kind_know_nothing_of_the_model(data: MethodInputs) -> None:
    train, test = split(data)
    nothing = replace(data, text=("why?",) * len(data.label), kind=np.full(len(data.label), "all"))
    for name in ("text-ngrams", "kind-prior"):
        scores = fit_method(name, nothing, train, test, 0)
        assert len(set(scores.round(9).tolist())) == 1
    unknown = replace(data, kind=np.where(np.arange(len(data.label)) < len(train), data.kind, "new"))
    share = 1 - data.label[train].mean()
    np.testing.assert_allclose(fit_method("kind-prior", unknown, train, test, 0), share)


@pytest.mark.parametrize("name", SIGNED)
def test_the_sign_of_a_free_number_is_learned_from_the_training_rows(tmp_path: Path, name: str) -> None:
    base = made_inputs(tmp_path, 60)
    train, test = split(base)
    values = np.random.default_rng(0).permutation(60).astype(np.float64)
    for sign in (1.0, -1.0):
        turned = values.copy()
        turned[train] = np.sort(values[train])[np.argsort(np.argsort(sign * (1 - base.label[train]), kind="stable"))]
        data = replace(base, first_token=np.stack([turned, turned], axis=1), prompt_tokens=turned.astype(np.int64))
        np.testing.assert_array_equal(fit_method(name, data, train, test, 0), sign * turned[test])


def test_each_free_number_is_its_own(data: MethodInputs) -> None:
    train, test = split(data)
    own = (data.first_token[:, 0], data.first_token[:, 1], data.prompt_tokens)
    for name, values in zip(SIGNED, own, strict=True):
        assert set(np.abs(fit_method(name, data, train, test, 0))) == set(np.abs(values[test]))
