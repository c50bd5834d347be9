"""Nested cross-validation: a row is scored once per seed by a fold without its group; no test side
is seen."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.model_selection import StratifiedGroupKFold

from service.errors import TrainingError
from service.fitting import estimator
from service.fitting.context import PromptLabels
from service.fitting.estimator import DepthMeanProbe
from service.fitting.folds import OuterFold, group_folds, outer_folds, unchecked_folds
from service.fitting.nested_cv import (
    CLOSED_BOOK,
    KIND_AND_FORM,
    Columns,
    Inputs,
    _without_a_model,
    by_row,
    evaluate,
    nested_cv,
    probe_columns,
)
from service.fitting.probes import ActivationArray, ProbeFit, Readouts
from service.fitting.scores import auroc
from service.readout import Site
from tests.fitting.made import readouts
from tests.fitting.test_estimator import PROBE, noise, signal


def inputs(strength: float, count: int = 300) -> Inputs:
    rows, label = noise(count, seed=4)
    rows[:, :, 0, 3] += strength * (2 * label[:, None] - 1)
    rng = np.random.default_rng(5)
    first, tokens = np.c_[-rng.random(count), rng.random(count)], rng.integers(5, 9, count)
    strata = tuple({"kind": "ab"[int(k)]} for k in rng.integers(0, 2, count))
    return Inputs(readouts(rows, label), np.arange(count) // 2, first, tokens, strata)


def columns(
    given: Inputs, train: np.ndarray, test: np.ndarray, probe: DepthMeanProbe = PROBE
) -> tuple[float, Columns]:
    return probe_columns(given.readouts, given.group, given.first_token, train, test, 0, probe)


def test_too_few_groups_of_a_class_are_named_with_their_number_and_the_cure() -> None:
    group, every = np.arange(40) // 4, np.arange(40)
    label = (group < 8).astype(int)  # two hallucinated groups for five folds
    few = every[:8]  # no class has as many rows as folds: scikit-learn would raise ValueError
    cases = [
        ((label, group, every), "need 5 groups with a hallucinated row, there are 2: .*--folds"),
        ((1 - label, every, every[:36]), "need 5 groups with a factual row, there are 4"),
        ((every % 2, every, few), "need 5 groups with a hallucinated row, there are 4"),
        ((label, every // 20, every), "need 5 groups, there are 2"),
    ]
    for rows, problem in cases:
        with pytest.raises(TrainingError, match=problem):
            group_folds(*rows, 5, seed=1)
    with pytest.raises(TrainingError, match="hallucinated row, there are 4"):
        unchecked_folds(every % 2, every, few, 5, seed=1)
    assert len(unchecked_folds(label, group, every, 5, seed=1)) == 5  # whose sides may lack a class


@given(st.integers(0, 10_000), st.integers(2, 5), st.floats(0.1, 0.9))
@settings(max_examples=10, deadline=None)
def test_the_folds_are_scikit_learn_s(seed: int, folds: int, share: float) -> None:
    """Of some rows of a set, and so disjoint by group."""
    rng = np.random.default_rng(seed)
    label, group = (rng.random(70) < share).astype(int), rng.integers(0, 25, 70)
    rows = np.flatnonzero(rng.random(70) < 0.85)
    theirs = StratifiedGroupKFold(folds, shuffle=True, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pairs = list(theirs.split(label[rows], label[rows], group[rows]))
    ours = unchecked_folds(label, group, rows, folds, seed)
    for expected, sides in zip(pairs, ours, strict=True):
        assert [side.tolist() for side in sides] == [rows[side].tolist() for side in expected]


def test_every_row_is_scored_once_per_seed_by_a_fold_without_its_group() -> None:
    label, group = np.arange(60) % 2, np.arange(60) // 3
    outer = outer_folds(label, group, folds=4, seeds=(5, 0))
    numbers = [(seed, fold) for seed in (5, 0) for fold in range(4)]
    assert [(fold.seed, fold.fold) for fold in outer] == numbers
    seen: list[OuterFold] = []

    def fit(fold: OuterFold) -> dict[str, np.ndarray]:
        assert not set(group[fold.train]) & set(group[fold.test])
        seen.append(fold)
        number = np.full(len(fold.test), 10.0 * fold.seed + fold.fold)
        return {"row": fold.test.astype(float), "fold": number}

    scores = nested_cv(outer, fit)
    assert list(scores) == ["row", "fold"]
    assert seen == outer
    # No NaN: every row was tested.
    np.testing.assert_array_equal(by_row(scores["row"], 60), [np.arange(60.0)] * 2)
    of_rows = by_row(scores["fold"], 60)
    for fold, scored in zip(outer, scores["fold"], strict=True):
        assert np.all(of_rows[int(fold.seed == 0), scored.test] == 10 * fold.seed + fold.fold)


def test_columns_of_the_nested_classifiers_are_out_of_fold() -> None:
    """Probes that memorise noise rank the rows that they were fitted on; nothing of that may be in
    their columns."""
    given = inputs(0.0)
    train = np.arange(260)
    probe = DepthMeanProbe(1.0)
    inside = probe.refit(given.readouts, train, train, 1.0).trajectory.mean(axis=1)
    assert auroc(given.label[train], inside) > 0.75
    _, found = columns(given, train, np.arange(260, 300), probe)
    assert len(found) == 8
    for name, (of_train, _) in found:
        assert 0.35 < auroc(given.label[train], of_train[:, 0]) < 0.65, name
        assert np.all(np.isfinite(of_train))


def test_within_kind_and_form_rows_with_a_passage_are_in_no_pair() -> None:
    planted = inputs(0.8)
    rng = np.random.default_rng(6)
    strata = tuple(
        row | {"form": "xy"[int(form)]}
        for row, form in zip(planted.strata, rng.integers(0, 2, 300), strict=True)
    )
    passage = np.arange(300) % 3 == 0
    stated = np.where(passage, planted.label == 1, False)
    prompts = PromptLabels(passage, stated, planted.prompt_tokens)
    rows = replace(planted, strata=strata, prompts=prompts)
    stratum = rows.stratum_of_rows()
    assert set(stratum) == {"kind", "form", CLOSED_BOOK}
    _, sizes = np.unique(stratum[CLOSED_BOOK][passage], return_counts=True)
    assert (len(sizes), sizes.max()) == (100, 1)
    assert len(np.unique(stratum[CLOSED_BOOK][~passage])) == 4
    assert not set(stratum[CLOSED_BOOK][~passage]) & set(stratum[CLOSED_BOOK][passage])
    signals = evaluate(rows, folds=3, seeds=(0,), probe=PROBE).document["signals"]
    within = f"auroc_within_{CLOSED_BOOK}"
    assert signals["depth_mean_unit_norm"][within]["low"] > 0.6
    assert signals[KIND_AND_FORM][within]["mean"] == 0.5


def test_what_is_known_without_a_model_is_the_share_of_each_kind_and_form() -> None:
    """Additive: kind a is right three times as often in either form; a value that training never
    had tells nothing."""
    names = [(kind, form) for kind in "ab" for form in "xy"]
    label = np.concatenate([np.arange(100) < count for count in (75, 60, 25, 10)]).astype(np.int64)
    strata = tuple({"kind": kind, "form": form} for kind, form in names for _ in range(100))
    data = readouts(noise(400, seed=4)[0], label)
    rows = replace(inputs(0.0, 400), readouts=data, strata=strata)

    def known(strata: tuple[dict[str, str], ...]) -> dict[str, np.ndarray]:
        some = np.array([0, 100, 200, 300])
        return _without_a_model(rows, np.arange(400), replace(rows, strata=strata), some)

    expected = pytest.approx([0.25, 0.4, 0.75, 0.9], abs=0.05)
    assert known(strata)[KIND_AND_FORM].tolist() == expected
    assert 0.4 < known(({"kind": "c", "form": "z"},) * 400)[KIND_AND_FORM][0] < 0.7
    assert known(({},) * 400) == {}


@pytest.mark.parametrize("site", list(Site))
def test_no_fit_of_an_outer_fold_sees_its_test_side(site: Site) -> None:
    """Poison: rows of the test side are replaced by huge values, their labels turned; the fold must
    not notice."""
    given = inputs(1.0, 240)
    train, test = np.arange(180), np.arange(180, 240)
    file = given.readouts.file
    assert isinstance(file, ActivationArray)
    values = file.values if site is Site.ATTENTION_HEAD else file.values.reshape(240, 3, 1, 60)

    def fitted(turned: np.ndarray, size: float = 1e6) -> tuple[float, list[np.ndarray]]:
        label = np.where(turned, 1 - given.label, given.label)
        poisoned = np.where(turned[:, None, None, None], np.float32(size), values)
        data = Readouts(ActivationArray(poisoned, site), np.arange(240), label)
        c, of_all = columns(replace(given, readouts=data), train, test)
        return c, [of_train for _, (of_train, _) in of_all]

    rows = np.arange(240)
    (c, before), (again, after) = fitted(rows < 0), fitted(rows >= 180)
    assert c == again
    assert all(np.array_equal(*pair) for pair in zip(before, after, strict=True))
    assert not np.array_equal(before[0], fitted(rows < 60, 1.0)[1][0])


@pytest.mark.parametrize(
    ("site", "heads"),
    [
        (Site.ATTENTION_HEAD, [1]),
        (Site.ATTENTION_HEAD, [0, 1]),
        (Site.RESIDUAL_STREAM, [0, 1]),
    ],
)
def test_a_layer_may_be_constant_in_one_fold(
    monkeypatch: pytest.MonkeyPatch, site: Site, heads: list[int]
) -> None:
    """Of one of its heads, nobody notices; of all, the fits there have no direction."""
    kept, fit_probes = list[ProbeFit](), estimator.fit_probes

    def watched(*arguments: Any, **options: Any) -> list[ProbeFit]:
        fits = fit_probes(*arguments, **options)
        kept.extend(fits if options.get("retry_larger_c") else ())  # not the choice of C
        return fits

    monkeypatch.setattr(estimator, "fit_probes", watched)
    probe = DepthMeanProbe(0.3, folds=3, inner_folds=2, seeds=(0,))
    (rows, label), plain = signal(240, 2.0), inputs(0.0, 240)
    [fold, *_] = outer_folds(label, plain.group, folds=3, seeds=(0,))
    rows[np.ix_(fold.train, [2], heads)] = 3.0
    data = readouts(rows if site is Site.ATTENTION_HEAD else rows.reshape(240, 3, 60), label, site)
    whole = clone(probe).fit_readouts(data, plain.group)
    assert np.linalg.norm(whole.probes_.direction, axis=1) == pytest.approx(1.0)
    found = evaluate(replace(plain, readouts=data), folds=3, seeds=(0,), probe=probe)
    assert found.document["signals"]["depth_mean_unit_norm"]["auroc"]["mean"] > 0.75
    for side, _ in found.tests["depth_mean_unit_norm"]:
        assert not set(plain.group[side]) & set(np.delete(plain.group, side)), "groups are whole"
    # The cross-fit's fold, and in the nested evaluation its outer fold and that one's inner folds.
    zeros = sum(not fit.direction.any(axis=1).all() for fit in kept)
    assert zeros == (0 if heads == [1] else 2 + 2)
