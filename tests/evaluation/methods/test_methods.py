"""What holds for every method: names, shapes, direction, and that the test labels are never looked at."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from service.errors import TrainingError
from service.evaluation.methods import METHODS
from service.evaluation.methods.base import MethodInputs, gather, in_processes, inner_pairs
from service.fitting.fit import Readouts
from service.fitting.scores import risk_auroc
from tests.evaluation.methods.made import material, split

NAMES = ["iti", "fact-probe", "iris", "halluguard", "first-token-max-prob", "first-token-entropy", "prompt-length"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> MethodInputs:
    return material(tmp_path_factory.mktemp("rows"), strength=1.2)


def relabelled(data: MethodInputs, label: np.ndarray) -> MethodInputs:
    def again(readouts: Readouts | None) -> Readouts | None:
        return None if readouts is None else replace(readouts, label=label)

    heads = again(data.heads)
    assert heads is not None
    return replace(data, label=label, heads=heads, residual=again(data.residual))


def test_the_names_are_those_of_the_table() -> None:
    assert list(METHODS) == NAMES
    for name, make in METHODS.items():
        method = make()
        assert method.name == name
        assert method.title
        assert len({METHODS[other]().title for other in NAMES}) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_scores_rise_with_hallucination_and_never_see_test_labels(data: MethodInputs, name: str) -> None:
    train, test = split(data)
    found = METHODS[name](jobs=1).fit(data, train, test, 3)
    assert found.test.shape == (len(test),)
    assert np.isfinite(found.test).all()
    assert risk_auroc(data.label[test], found.test) > 0.7
    assert found.note
    assert found.train_oof is not None
    assert found.train_oof.shape == (len(train),)
    assert risk_auroc(data.label[train], found.train_oof) > 0.65  # each by a fit on two thirds of them

    label = data.label.copy()
    label[test] = 1 - label[test]
    again = METHODS[name](jobs=1).fit(relabelled(data, label), train, test, 3)
    assert again.test.tobytes() == found.test.tobytes()
    assert again.train_oof is not None
    assert again.train_oof.tobytes() == found.train_oof.tobytes()
    assert again.note == found.note


@pytest.mark.parametrize("name", NAMES)
def test_a_row_s_score_does_not_depend_on_the_rows_beside_it(data: MethodInputs, name: str) -> None:
    train, test = split(data)
    whole = METHODS[name](jobs=1).fit(data, train, test, 0)
    some = METHODS[name](jobs=1).fit(data, train, test[5:9], 0)
    np.testing.assert_allclose(some.test, whole.test[5:9], rtol=1e-4, atol=1e-5)  # float32 products of other shapes


def test_what_was_not_made_is_asked_for(data: MethodInputs) -> None:
    train, test = split(data)
    with pytest.raises(TrainingError, match="residual_stream, which was not extracted"):
        METHODS["fact-probe"]().fit(replace(data, residual=None), train, test, 0)
    with pytest.raises(TrainingError, match="none were scored"):
        METHODS["halluguard"]().fit(replace(data, halluguard=None), train, test, 0)


def test_inner_splits_keep_groups_whole(data: MethodInputs) -> None:
    train, _ = split(data)
    pairs = inner_pairs(data, train, 3, 0, "fold")
    assert len(pairs) == 3
    for fit, held in pairs:
        assert not set(data.group[fit]) & set(data.group[held])
        assert set(fit) | set(held) == set(train)
    assert inner_pairs(data, train, 0, 0, "fold") == []


def test_held_out_scores_are_put_into_the_order_of_the_training_rows() -> None:
    train = np.array([7, 3, 5, 9])
    parts = [(np.array([9, 3]), np.array([0.9, 0.3])), (np.array([5, 7]), np.array([0.5, 0.7]))]
    assert gather(train, parts) is not None
    np.testing.assert_array_equal(gather(train, parts), [0.7, 0.3, 0.5, 0.9])  # type: ignore[arg-type]
    assert gather(train, []) is None
    with pytest.raises(AssertionError, match="every training row"):
        gather(train, parts[:1])


def test_processes_keep_the_order() -> None:
    assert in_processes(abs, [-3, 2, -1], 2) == [3, 2, 1]
    assert in_processes(abs, [-3, 2, -1], 1) == [3, 2, 1]


def test_fitting_processes_load_no_transformers() -> None:
    code = (
        "import sys\nfrom service.evaluation.methods import METHODS\nMETHODS['iti'](); METHODS['fact-probe']()\n"
        "print('transformers' in sys.modules)"
    )
    root = Path(__file__).parents[3]
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
