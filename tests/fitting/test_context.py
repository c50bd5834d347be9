"""Probes of what a prompt is: found where planted, out of fold, calibrated, and absent where rows are few."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from service.data.run_folder import RowsFile
from service.fitting.context import (
    LEAST,
    SIDES,
    ContextFit,
    PromptLabels,
    _balanced,
    context_columns,
    fit_context_probe,
    fit_passage_probes,
)
from service.fitting.estimator import DepthMeanProbe
from service.fitting.nested_cv import CONTEXT_NAMES, NAMES, Inputs, evaluate
from service.fitting.probes import Readouts
from service.fitting.scores import auroc, ece
from service.readout import Geometry, Site
from tests.fitting.planted import GEOMETRY

PROBE = DepthMeanProbe(0.3)
WIDE = Geometry(num_layers=4, num_heads=3, head_dim=40, hidden_size=120)  # room to learn rows by heart
ROWS = 480
KNOWN, PASSAGE, STATED = 1, 2, 0  # heads where each is planted
Bools = NDArray[np.bool_]


def planted(
    folder: Path,
    signs: Mapping[int, NDArray[np.floating]],
    strength: float = 1.0,
    seed: int = 0,
    geometry: Geometry = GEOMETRY,
) -> RowsFile:
    """Noise, and in each head of ``signs`` a direction of every layer, times the row's sign [n]."""
    rng = np.random.default_rng(seed)
    count = len(next(iter(signs.values())))
    shape = (geometry.num_layers, count, geometry.num_heads, geometry.head_dim)
    a = rng.standard_normal(shape)
    for head, sign in signs.items():
        direction = rng.standard_normal((geometry.num_layers, geometry.head_dim))
        direction /= np.linalg.norm(direction, axis=1, keepdims=True)
        a[:, :, head] += strength * sign[None, :, None] * direction[:, None]
    path = folder / f"rows-{seed}.f32"
    a.reshape(geometry.num_layers, count, -1).astype("<f4").tofile(path)
    return RowsFile(path, geometry, Site.ATTENTION_HEAD, count)


def halves(share: float, seed: int, count: int = ROWS) -> Bools:
    return np.random.default_rng(seed).random(count) < share


def signs(values: Bools) -> NDArray[np.float64]:
    return np.where(values, 1.0, -1.0)


def fitted(
    file: RowsFile, label: Bools, rows: NDArray[np.int64] | None = None, least: int = LEAST
) -> ContextFit | None:
    everything = np.arange(len(label))
    readouts = Readouts(file, everything, label.astype(np.int64))
    group = everything // 2
    return fit_context_probe("passage", readouts, group, everything if rows is None else rows, 3, 0, PROBE, least)


def test_a_planted_direction_is_found_in_its_head(tmp_path: Path) -> None:
    passage = halves(0.4, 1)
    found = fitted(planted(tmp_path, {PASSAGE: signs(passage)}), passage)
    assert found is not None
    assert found.probe.head.tolist() == [PASSAGE] * GEOMETRY.num_layers
    assert np.linalg.norm(found.probe.direction, axis=1) == pytest.approx(1.0)
    record = found.record
    assert (record.name, record.rows, record.positive) == ("passage", ROWS, int(passage.sum()))
    assert record.weight > 0
    assert record.auroc > 0.95
    assert record.auroc == pytest.approx(auroc(passage.astype(np.int64), found.logits.mean(axis=1)))


def test_the_probability_is_calibrated_on_rows_it_learnt_from_and_on_fresh_ones(tmp_path: Path) -> None:
    passage = halves(0.4, 2, 3000)
    file = planted(tmp_path, {PASSAGE: signs(passage)}, 0.4)
    rows = np.arange(600)
    found = fitted(file, passage, rows)
    assert found is not None
    assert 0.7 < found.record.auroc < 0.95
    fresh = slice(600, None)
    for part, most in ((slice(0, 600), 0.07), (fresh, 0.07)):
        assert ece(passage[part].astype(np.int64), 1 - found.probability[part]) < most
    assert found.probability[fresh].mean() == pytest.approx(passage[fresh].mean(), abs=0.05)


def test_rows_that_took_part_have_logits_by_probes_that_never_saw_them(tmp_path: Path) -> None:
    """Of labels that mean nothing, probes fitted on these rows would rank them far better than chance."""
    file = planted(tmp_path, {PASSAGE: np.zeros(ROWS)}, geometry=WIDE)
    for seed in (3, 4):
        label = halves(0.5, seed)
        readouts = Readouts(file, np.arange(ROWS), label.astype(np.int64))
        found = fit_context_probe("stated", readouts, np.arange(ROWS), np.arange(ROWS), 3, 0, PROBE)
        assert found is not None
        inside = Readouts(file, np.arange(ROWS), label.astype(np.int64))
        a = np.stack([file.head(layer, int(head)) for layer, head in enumerate(found.probe.head)], axis=1)
        seen = np.einsum("nld,ld->nl", a[inside.index], found.probe.direction) + found.probe.bias
        assert auroc(inside.label, (seen / found.probe.scale).mean(axis=1)) > 0.7  # what is avoided
        assert 0.38 < auroc(inside.label, found.logits.mean(axis=1)) < 0.6
        assert found.record.auroc < 0.6
        assert found.record.weight > 0  # of a probe that tells nothing, too


def test_rows_that_took_no_part_are_read_by_the_served_probe(tmp_path: Path) -> None:
    passage = halves(0.4, 5)
    file = planted(tmp_path, {PASSAGE: signs(passage)})
    rows = np.arange(0, ROWS, 2)
    found = fitted(file, passage, rows)
    assert found is not None
    others = np.setdiff1d(np.arange(ROWS), rows)
    for layer, head in enumerate(found.probe.head.tolist()):
        served = file.head(layer, head) @ found.probe.direction[layer] + found.probe.bias[layer]
        served = served / found.probe.scale[layer]
        np.testing.assert_allclose(found.logits[others, layer], served[others], rtol=1e-6, atol=1e-6)
        assert not np.allclose(found.logits[rows, layer], served[rows], rtol=1e-3)


def test_too_few_groups_of_a_class_give_none(tmp_path: Path) -> None:
    """Groups count, not rows: these come in pairs."""
    passage = np.arange(ROWS) >= ROWS - 2 * (LEAST - 1)
    file = planted(tmp_path, {PASSAGE: signs(passage)})
    assert fitted(file, passage) is None
    assert fitted(file, passage, least=LEAST - 1) is not None
    assert fitted(file, ~passage) is None
    more = np.arange(ROWS) >= ROWS - 2 * LEAST
    assert fitted(file, more) is not None
    assert fitted(file, more, np.arange(ROWS - 2)) is None  # only those that it may learn from
    stated = passage & (np.arange(ROWS) % 4 < 2)
    readouts, group = Readouts(file, np.arange(ROWS), passage.astype(np.int64)), np.arange(ROWS) // 2
    assert fit_passage_probes(
        readouts, PromptLabels(more, stated, LENGTHS), group, np.arange(ROWS), 3, 0, PROBE
    ) is None  # fmt: skip


GROUP = np.arange(4000) // 2  # pairs, which stay together


def test_the_larger_class_is_cut_to_three_rows_for_one() -> None:
    label = (np.arange(1000) % 20 == 0).astype(np.int64)
    rows = np.arange(0, 1000)
    kept = _balanced(label, GROUP, rows, 7)
    assert (label[kept] == 1).sum() == 50
    assert SIDES * 50 - 1 <= (label[kept] == 0).sum() <= SIDES * 50  # groups are whole
    zeros = kept[label[kept] == 0]
    siblings = np.flatnonzero(np.isin(GROUP[:1000], GROUP[zeros]) & (label == 0))
    assert np.array_equal(siblings, zeros)
    assert np.all(np.diff(kept) > 0)
    assert np.array_equal(kept, _balanced(label, GROUP, rows, 7))
    assert not np.array_equal(kept, _balanced(label, GROUP, rows, 8))
    assert set(_balanced(label, GROUP, rows[::2], 7).tolist()) <= set(rows[::2].tolist())
    other = _balanced(1 - label, GROUP, rows, 7)
    assert np.array_equal(other, kept)
    even = (np.arange(400) % 4 == 0).astype(np.int64)
    assert np.array_equal(_balanced(even, GROUP, np.arange(400), 7), np.arange(400))  # 3:1 already


LENGTHS = np.full(ROWS, 50)


@pytest.mark.parametrize(
    ("tokens", "told"), [([20, 80], True), ([21, 80], False), ([50] * 99 + [5000], False), ([50] * 9 + [5000], True)]
)
def test_the_length_is_read_where_passages_differ_in_it(tokens: list[int], told: bool) -> None:
    stated = np.arange(400) < 200
    lengths = np.where(stated, np.resize(tokens, 400), np.resize([1, 9999], 400))  # the others do not matter
    assert PromptLabels(stated, stated, lengths).tells_length is told
    none = np.zeros(400, np.bool_)
    assert not PromptLabels(stated, none, lengths).tells_length


def both(folder: Path, count: int = ROWS) -> tuple[RowsFile, PromptLabels]:
    passage = halves(0.6, 6, count)
    stated = passage & halves(0.5, 7, count)
    values = {PASSAGE: signs(passage), STATED: signs(stated) * passage, KNOWN: signs(halves(0.5, 8, count))}
    return planted(folder, values), PromptLabels(passage, stated, np.resize([40, 400], count))


def test_passage_probes_learn_from_their_own_rows_and_give_the_columns(tmp_path: Path) -> None:
    file, labels = both(tmp_path)
    everything = np.arange(ROWS)
    readouts = Readouts(file, everything, halves(0.5, 9).astype(np.int64))
    found = fit_passage_probes(readouts, labels, everything, everything, 3, 0, PROBE)
    assert found is not None
    passage, stated = found
    assert [fit.record.name for fit in found] == ["passage", "stated"]
    assert (passage.record.rows, passage.record.positive) == (ROWS, int(labels.passage.sum()))
    assert (stated.record.rows, stated.record.positive) == (int(labels.passage.sum()), int(labels.stated.sum()))
    assert passage.probe.head.tolist() == [PASSAGE] * GEOMETRY.num_layers
    assert stated.probe.head.tolist() == [STATED] * GEOMETRY.num_layers
    columns = context_columns(found, labels)
    assert columns.shape == (ROWS, 3)
    assert np.array_equal(columns[:, 0], passage.probability)
    assert np.array_equal(columns[:, 1], passage.probability * stated.probability)
    assert np.array_equal(columns[:, 2], passage.probability * stated.probability * np.log(labels.tokens))
    alike = replace(labels, tokens=np.resize([100, 399], ROWS))
    assert np.array_equal(context_columns(found, alike), columns[:, :2])
    assert columns[labels.stated, 1].mean() > 0.75
    assert columns[~labels.passage, :2].max(axis=1).mean() < 0.25
    mean = passage.logits.mean(axis=1)
    expected = 1 / (1 + np.exp(-(passage.record.weight * mean + passage.record.intercept)))
    np.testing.assert_allclose(passage.probability, expected, rtol=1e-6)
    with pytest.raises(AssertionError):
        context_columns((stated, passage), labels)


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Where a passage states the answer it is right; elsewhere that is half known, and weakly told by the readouts."""
    file, labels = both(tmp_path_factory.mktemp("rows"))
    known = halves(0.5, 8)
    noisy = np.where(halves(0.75, 10), known, ~known)
    label = np.where(labels.stated, halves(0.95, 11), noisy & ~halves(0.3, 12)).astype(np.int64)
    rng = np.random.default_rng(13)
    return Inputs(
        Readouts(file, np.arange(ROWS), label),
        np.arange(ROWS) // 2,
        np.c_[-rng.random(ROWS), rng.random(ROWS)],
        rng.integers(5, 9, ROWS),
        tuple({} for _ in range(ROWS)),
        labels,
    )


def test_the_nested_evaluation_reads_the_context_where_rows_have_passages(reading: Inputs) -> None:
    found = evaluate(reading, folds=3, seeds=(0,), probe=PROBE)
    signals = found.document["signals"]
    assert tuple(signals) == NAMES
    assert all(np.all(np.isfinite(found.risk[name])) for name in CONTEXT_NAMES)
    assert set(found.document["folds"][0]["signals"]) == set(NAMES)
    for scale in ("unit_norm", "standardized"):
        for plain, name in (("depth_mean", "context"), ("fused", "fused_context")):
            without, with_it = (signals[f"{kind}_{scale}"] for kind in (plain, name))
            assert with_it["auroc"]["mean"] > without["auroc"]["mean"] + 0.02
            assert with_it["brier"]["mean"] < without["brier"]["mean"] - 0.005


def test_without_passages_no_signal_reads_the_context(reading: Inputs) -> None:
    expected = tuple(name for name in NAMES if name not in CONTEXT_NAMES)
    no = np.zeros(ROWS, np.bool_)
    for prompts in (None, PromptLabels(no, no, LENGTHS)):
        found = evaluate(replace(reading, prompts=prompts), folds=3, seeds=(0,), probe=PROBE)
        assert tuple(found.document["signals"]) == expected
        assert set(found.risk) == set(found.tests) == set(expected)


def test_what_all_rows_allow_every_fold_allows(reading: Inputs) -> None:
    """With two folds a training side has half of the passages: a run that reads them must have them in every fold."""
    assert reading.prompts is not None
    least = np.flatnonzero(reading.prompts.stated)[: LEAST + 5]
    stated = np.zeros(ROWS, np.bool_)
    stated[least] = True
    prompts = PromptLabels(reading.prompts.passage, stated, reading.prompts.tokens)
    assert fit_passage_probes(reading.readouts, prompts, np.arange(ROWS), np.arange(ROWS), 2, 0, PROBE) is not None
    given = replace(reading, group=np.arange(ROWS), prompts=prompts)
    found = evaluate(given, folds=2, seeds=(0, 1, 2), probe=PROBE)
    assert set(CONTEXT_NAMES) <= set(found.risk)
