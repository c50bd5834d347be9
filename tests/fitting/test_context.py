"""Probes of what a prompt is: found where planted, out of fold, calibrated, and absent where rows
are few."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from sklearn.base import clone

from service.fitting import context
from service.fitting.context import (
    LEAST,
    SIDES,
    ContextFit,
    PromptLabels,
    fit_context_probe,
    fit_passage_probes,
)
from service.fitting.estimator import DepthMeanProbe
from service.fitting.nested_cv import CONTEXT_NAMES, KIND_AND_FORM, NAMES, Inputs, evaluate
from service.fitting.scores import auroc, ece
from tests.fitting.made import readouts
from tests.kit.present import present

PROBE = DepthMeanProbe(0.3, folds=3, seeds=(0,))
ROWS, LAYERS = 480, 4
EVERY, LENGTHS = np.arange(ROWS), np.full(ROWS, 50)
KNOWN, PASSAGE, STATED = 1, 2, 0  # heads where each is planted


def planted(signs: Mapping[int, np.ndarray], strength: float = 1.0, dim: int = 8) -> np.ndarray:
    """Noise [n, 4, 3, dim], and in each head of ``signs`` a direction of every layer, times the
    row's sign [n]."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((len(next(iter(signs.values()))), LAYERS, 3, dim))
    for head, sign in signs.items():
        direction = rng.standard_normal((LAYERS, dim))
        direction /= np.linalg.norm(direction, axis=1, keepdims=True)
        a[:, :, head] += strength * sign[:, None, None] * direction
    return a


def halves(share: float, seed: int, count: int = ROWS) -> np.ndarray:
    return np.random.default_rng(seed).random(count) < share


def signs(values: np.ndarray) -> np.ndarray:
    return np.where(values, 1.0, -1.0)


def fitted(
    a: np.ndarray, label: np.ndarray, rows: np.ndarray | None = None, least: int = LEAST
) -> ContextFit | None:
    every = np.arange(len(label))
    rows = every if rows is None else rows
    return fit_context_probe("passage", readouts(a, label), every // 2, rows, PROBE, least)


def served(a: np.ndarray, found: ContextFit) -> np.ndarray:
    """What the probe on all of its rows says of every row."""
    chosen = a[:, np.arange(LAYERS), found.probe.head].astype(np.float32)
    return (
        np.einsum("nld,ld->nl", chosen, found.probe.direction) + found.probe.bias
    ) / found.probe.scale


def test_the_probability_is_calibrated_on_rows_it_learnt_from_and_on_fresh_ones() -> None:
    passage = halves(0.4, 2, 3000)
    found = present(fitted(planted({PASSAGE: signs(passage)}, 0.4), passage, np.arange(600)))
    assert 0.7 < found.record.auroc < 0.95
    for part in (slice(0, 600), slice(600, None)):
        assert ece(passage[part].astype(np.int64), 1 - found.probability[part]) < 0.07
    assert found.probability[600:].mean() == pytest.approx(passage[600:].mean(), abs=0.05)


def test_rows_that_took_part_have_logits_by_probes_that_never_saw_them() -> None:
    """Of labels that mean nothing, probes fitted on these rows would rank them far better than
    chance."""
    a = planted({PASSAGE: np.zeros(ROWS)}, dim=40)  # room to learn rows by heart
    for seed in (3, 4):
        label = halves(0.5, seed).astype(np.int64)
        found = present(fit_context_probe("stated", readouts(a, label), EVERY, EVERY, PROBE))
        assert auroc(label, served(a, found).mean(axis=1)) > 0.7  # what is avoided
        assert 0.38 < auroc(label, found.logits.mean(axis=1)) < 0.6
        assert found.record.auroc < 0.6
        assert found.record.weight > 0  # of a probe that tells nothing, too
    # Rows that took no part are read by the served probe.
    passage = halves(0.4, 5)
    a = planted({PASSAGE: signs(passage)})
    found = present(fitted(a, passage, EVERY[::2]))
    np.testing.assert_allclose(found.logits[1::2], served(a, found)[1::2], rtol=1e-6, atol=1e-6)
    assert not np.allclose(found.logits[::2], served(a, found)[::2], rtol=1e-3)


def test_too_few_groups_of_a_class_give_none() -> None:
    """Groups count, not rows: these come in pairs."""
    passage, more = EVERY >= ROWS - 2 * (LEAST - 1), EVERY >= ROWS - 2 * LEAST
    a = planted({PASSAGE: signs(passage)})
    assert fitted(a, passage) is fitted(a, ~passage) is None
    assert fitted(a, passage, least=LEAST - 1) is not None
    assert fitted(a, more) is not None
    assert fitted(a, more, EVERY[:-2]) is None  # only those that it may learn from
    labels = PromptLabels(more, passage & (EVERY % 4 < 2), LENGTHS)
    assert fit_passage_probes(readouts(a, passage), labels, EVERY // 2, EVERY, PROBE) is None


def test_the_larger_class_is_cut_to_three_rows_for_one() -> None:
    rows, group = np.arange(1000), np.arange(1000) // 2  # pairs, which stay together
    label = (rows % 20 == 0).astype(np.int64)

    def balanced(label: np.ndarray, rows: np.ndarray, seed: int = 7) -> list[int]:
        return list(context._balanced(label, group, rows, seed).tolist())

    kept = np.array(balanced(label, rows))
    zeros = kept[label[kept] == 0]
    assert (label[kept] == 1).sum() == 50
    assert SIDES * 50 - 1 <= len(zeros) <= SIDES * 50  # groups are whole
    assert np.array_equal(np.flatnonzero(np.isin(group, group[zeros]) & (label == 0)), zeros)
    assert np.all(np.diff(kept) > 0)
    assert balanced(1 - label, rows) == kept.tolist() != balanced(label, rows, 8)
    assert set(balanced(label, rows[::2])) <= set(rows[::2].tolist())
    even = (rows % 4 == 0).astype(np.int64)
    assert balanced(even, rows[:400]) == list(range(400))  # 3:1 already


@pytest.mark.parametrize(
    ("tokens", "told"),
    [([20, 80], True), ([21, 80], False), ([50] * 99 + [5000], False), ([50] * 9 + [5000], True)],
)
def test_the_length_is_read_where_passages_differ_in_it(tokens: list[int], told: bool) -> None:
    stated = np.arange(400) < 200
    lengths = np.where(
        stated, np.resize(tokens, 400), np.resize([1, 9999], 400)
    )  # the others do not matter
    assert PromptLabels(stated, stated, lengths).tells_length is told
    assert not PromptLabels(stated, np.zeros(400, np.bool_), lengths).tells_length


def both() -> tuple[np.ndarray, PromptLabels]:
    passage = halves(0.6, 6)
    stated = passage & halves(0.5, 7)
    a = planted(
        {PASSAGE: signs(passage), STATED: signs(stated) * passage, KNOWN: signs(halves(0.5, 8))}
    )
    return a, PromptLabels(passage, stated, np.resize([40, 400], ROWS))


def test_passage_probes_learn_from_their_own_rows_and_give_the_columns() -> None:
    """Which rows and heads those are: tests/trainer/test_context.py, through a whole run."""
    a, labels = both()
    fits = present(fit_passage_probes(readouts(a, halves(0.5, 9)), labels, EVERY, EVERY, PROBE))
    passage, stated = fits
    assert np.linalg.norm(passage.probe.direction, axis=1) == pytest.approx(1.0)
    assert passage.record.weight > 0
    ranked = auroc(labels.passage.astype(int), passage.logits.mean(axis=1))
    assert 0.95 < passage.record.auroc == pytest.approx(ranked)
    columns = context.context_columns(fits, labels)
    product = passage.probability * stated.probability
    expected = (passage.probability, product, product * np.log(labels.tokens))
    assert np.array_equal(columns, np.stack(expected, axis=1))
    short = replace(labels, tokens=np.resize([100, 399], ROWS))
    assert np.array_equal(context.context_columns(fits, short), columns[:, :2])
    assert columns[labels.stated, 1].mean() > 0.75
    assert columns[~labels.passage, :2].max(axis=1).mean() < 0.25
    z = passage.record.weight * passage.logits.mean(axis=1) + passage.record.intercept
    np.testing.assert_allclose(passage.probability, 1 / (1 + np.exp(-z)), rtol=1e-6)
    with pytest.raises(AssertionError):
        context.context_columns((stated, passage), labels)


@pytest.fixture(scope="module")
def reading() -> Inputs:
    """Where a passage states the answer it is right; elsewhere that is half known, and weakly told
    by the readouts."""
    a, labels = both()
    known = halves(0.5, 8)
    noisy = np.where(halves(0.75, 10), known, ~known)
    label = np.where(labels.stated, halves(0.95, 11), noisy & ~halves(0.3, 12))
    rng = np.random.default_rng(13)
    first, tokens = np.c_[-rng.random(ROWS), rng.random(ROWS)], rng.integers(5, 9, ROWS)
    return Inputs(
        readouts(a, label), EVERY // 2, first, tokens, tuple({} for _ in range(ROWS)), labels
    )


def test_the_nested_evaluation_reads_the_context_where_rows_have_passages(reading: Inputs) -> None:
    found = evaluate(reading, folds=3, seeds=(0,), probe=PROBE)
    signals = found.document["signals"]
    assert (*signals, KIND_AND_FORM) == NAMES, "no row names its kind"
    assert all(np.all(np.isfinite(found.risk[name])) for name in CONTEXT_NAMES)
    assert set(found.document["folds"][0]["signals"]) == set(signals)
    for scale in ("unit_norm", "standardized"):
        for plain, name in (("depth_mean", "context"), ("fused", "fused_context")):
            without, with_it = (signals[f"{kind}_{scale}"] for kind in (plain, name))
            assert with_it["auroc"]["mean"] > without["auroc"]["mean"] + 0.02
            assert with_it["brier"]["mean"] < without["brier"]["mean"] - 0.005


def test_every_fold_reads_the_context_where_all_rows_allow_it(reading: Inputs) -> None:
    """With two folds a training side has half of the passages: a run that reads them must have them
    in every fold.  Without passages: tests/trainer/test_run.py."""
    labels = present(reading.prompts)
    stated = np.isin(EVERY, np.flatnonzero(labels.stated)[: LEAST + 5])
    few, halved = replace(labels, stated=stated), clone(PROBE).set_params(folds=2)
    assert fit_passage_probes(reading.readouts, few, EVERY, EVERY, halved) is not None
    found = evaluate(replace(reading, group=EVERY, prompts=few), folds=2, seeds=(0, 1), probe=PROBE)
    assert set(CONTEXT_NAMES) <= set(found.risk)
