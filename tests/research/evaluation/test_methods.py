"""What holds for every method, and what each of them is: whose rows it reads, what it picks, what
it fits there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from hallutracer_research.evaluation.methods import (
    METHODS,
    base,
    fit_method,
    networks,
    own_answers,
    probes,
)
from hallutracer_research.evaluation.methods.base import (
    AnswerReadings,
    MethodInputs,
    Penalty,
    fit_linear,
)
from hallutracer_research.evaluation.splits import trajectory_ridge
from service.engines.base import Completion, TracedAnswer
from service.errors import EngineError, TrainingError
from service.fitting.scores import auroc, risk_auroc
from service.readout import Site
from tests.engines import tiny
from tests.kit.tables import cells
from tests.research.made import (
    BEST,
    GEOMETRY,
    WIDE,
    fold,
    method_inputs,
    noise,
    plant,
    readouts,
    sides,
    turned,
)

RIVALS = [name for name, method in METHODS.items() if method.fit is not None]
SIGNED = ("first-token-max-prob", "first-token-entropy", "prompt-length")  # by the training side
OF_ANSWERS = ("halluguard", "perplexity", "p-true", "semantic-entropy", "eigenscore")
D = GEOMETRY.head_dim
LAST = GEOMETRY.num_layers - 1


def scores(name: str, data: MethodInputs, seed: int = 0) -> np.ndarray:
    return fit_method(name, fold(data, seed))


def quality(data: MethodInputs, risk: np.ndarray) -> float:
    """AUROC on the test side."""
    return risk_auroc(data.label[sides(data)[1]], risk)


def hidden(data: MethodInputs, layer: int, site: str = "residual") -> np.ndarray:
    """The labelled rows of one layer."""
    return np.asarray(getattr(data, site).file.layer(layer)[3:])


def fitted(x: np.ndarray, data: MethodInputs, c: float, kind: Penalty = "l2") -> np.ndarray:
    """Scores of the test side by a linear fit of the training side's columns x [n, d]."""
    train, test = sides(data)
    return -fit_linear(x[train], data.label[train], c, kind).logits(x[test])


def planted(
    folder: Path, site: Site, plan: Callable[[np.ndarray, np.ndarray], Any], count: int = 120
) -> MethodInputs:
    """Inputs whose rows of one site ``plan`` changes: rows [n, m, width], label [n]; each row is
    its own group."""
    inputs, label = method_inputs(folder, count), np.arange(count) % 2
    rows = noise(default_rng(1), count, site)
    plan(rows, label)
    name = "heads" if site is Site.ATTENTION_HEAD else "residual"
    changed: dict[str, Any] = {name: readouts(folder, rows, label, site)}
    return replace(inputs, label=label, group=np.arange(count), **changed)


@pytest.mark.parametrize("name", RIVALS)
def test_scores_rise_with_hallucination_and_neither_test_labels_nor_other_test_rows_matter(
    data: MethodInputs, name: str
) -> None:
    test = sides(data)[1]
    risk = scores(name, data, 3)
    assert risk.shape == (len(test),)
    assert quality(data, risk) > 0.7
    some = fit_method(name, replace(fold(turned(data, test), 3), test=test[5:9]))
    # float32 products of other shapes
    assert_allclose(some, risk[5:9], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name", [name for name in RIVALS if METHODS[name].reads != "prompt" or name == "halluguard"]
)
def test_methods_that_read_more_than_the_prompt_need_it(data: MethodInputs, name: str) -> None:
    without = replace(
        data, halluguard=None, answers=AnswerReadings(), positions=None, embedding=None, behind=None
    )
    with pytest.raises(TrainingError, match=rf"{name}.*leave") as caught:
        scores(name, without)
    assert caught.value.param == "methods"


@pytest.mark.parametrize("name", ["saplma", "sep"])
def test_a_probe_at_the_answer_s_end_is_the_prompt_s_on_what_was_read_there(
    data: MethodInputs, name: str
) -> None:
    risk = scores(f"answer-{name}", data, 3).tobytes()
    assert risk == scores(name, replace(data, residual=data.behind.residual), 3).tobytes()
    assert risk != scores(name, data, 3).tobytes()


@pytest.mark.parametrize("name", OF_ANSWERS)
def test_scores_of_answers_keep_the_sign_of_their_papers(data: MethodInputs, name: str) -> None:
    swapped = turned(data, np.arange(len(data.label)))
    assert scores(name, swapped).tobytes() == scores(name, data).tobytes()


def test_a_subset_has_the_readings_of_its_own_rows(data: MethodInputs) -> None:
    rows = np.array([5, 3, 11])
    for name, values in vars(data.subset(rows).answers).items():
        whole = getattr(data.answers, name)
        assert_array_equal(values, None if whole is None else whole[rows])
    assert AnswerReadings().subset(rows).entropy is None


def test_processes_keep_the_order_change_nothing_and_load_no_transformers(tmp_path: Path) -> None:
    alone = fold(method_inputs(tmp_path, 60), 1)
    for name in ("iti", "fact-probe"):
        shared = fit_method(name, replace(alone, jobs=2))
        assert fit_method(name, alone).tobytes() == shared.tobytes()
    modules = ", ".join(
        f"__import__('hallutracer_research.evaluation.methods.{name}')"
        for name in {str(METHODS[name].fit).partition(".")[0] for name in RIVALS}
    )
    items = [f"({modules}, 'transformers' in __import__('sys').modules)[-1]", "-3", "2"]
    assert base.in_processes(eval, items, 2) == [False, -3, 2]


def test_text_and_kind_know_nothing_of_the_model(data: MethodInputs) -> None:
    train, count = sides(data)[0], len(data.label)
    nothing = replace(data, text=("why?",) * count, kind=np.full(count, "all"))
    for name in ("text-ngrams", "kind-prior"):
        assert len(set(scores(name, nothing).round(9).tolist())) == 1
    unknown = replace(data, kind=np.where(np.arange(count) < len(train), data.kind, "new"))
    assert_allclose(scores("kind-prior", unknown), 1 - data.label[train].mean())


def test_the_sign_of_a_free_number_is_learned_from_the_training_rows(data: MethodInputs) -> None:
    train, test = sides(data)
    values = default_rng(0).permutation(len(data.label)).astype(np.float64)
    for sign in (1.0, -1.0):
        column = values.copy()
        column[train] = np.sort(values[train])[
            np.argsort(np.argsort(sign * (1 - data.label[train]), kind="stable"))
        ]
        first = np.stack([column, column + 0.5], axis=1)
        three = replace(data, first_token=first, prompt_tokens=column.astype(int))
        for name, values_of in zip(SIGNED, (column, column + 0.5, column), strict=True):
            assert_array_equal(scores(name, three), sign * values_of[test])


@pytest.mark.parametrize("penalty", ["l1", "l2"])
def test_raw_logits_are_the_standardised_pipeline_s(penalty: Penalty) -> None:
    rng = default_rng(1)
    label = (rng.random(400) < 0.3).astype(np.int64)
    x = rng.standard_normal((400, 6)) * [1, 20, 0.1, 3, 1, 1] + [0, 50, -2, 0, 0, 0]
    x[:, 1] += 9 * label
    x[:, 5] = 7.1  # constant
    fitted = fit_linear(x.astype(np.float32), label, 0.2, penalty)
    z = StandardScaler().fit_transform(x)
    z[:, 5] = 0.0
    ratio = 1.0 if penalty == "l1" else 0.0
    saga = LogisticRegression(
        C=0.2, l1_ratio=ratio, solver="saga", class_weight="balanced", tol=1e-8, max_iter=20000
    )
    expected = saga.fit(z, label).decision_function(z)  # saga does not penalise the intercept
    assert_allclose(fitted.logits(x), expected, atol=0.01 * expected.std())
    assert fitted.weight[5] == 0.0
    constant = fit_linear(x[:50], label[:50], 1e-6, "l1")
    assert not constant.weight.any()
    assert np.ptp(constant.logits(np.tile(x, (13, 1)))) == 0.0  # of many rows at a time


def test_iti_finds_the_planted_head_and_averages_three_probes(data: MethodInputs) -> None:
    train, test = sides(data)
    layer, head, training_auroc = probes.best_head(data.heads, train, 1.0, 1)
    assert (layer, head) == BEST
    whole = fold(data, 5)
    c, *chosen = probes.iti_head(whole)
    assert tuple(chosen) == BEST
    x = hidden(data, BEST[0], "heads")[:, BEST[1] * D : (BEST[1] + 1) * D]
    rng = default_rng(5)
    expected = np.zeros(len(test))
    for _ in range(3):
        drawn = train[probes.group_bootstrap(data.label[train], data.group[train], rng)]
        expected -= fit_linear(x[drawn], data.label[drawn], c, "l2").logits(x[test]) / 3
    assert_allclose(probes.iti(whole), expected, rtol=1e-9)
    fitted = fit_linear(x[train], data.label[train], 1.0, "l2")
    assert training_auroc == pytest.approx(auroc(data.label[train], fitted.logits(x[train])))
    pairs = whole.folds(base.INNER_FOLDS, "fold")
    assert c == base.best_c(x, data.label, pairs, probes.ITI_GRID)[0]


def test_principal_components_are_those_of_all_layers_and_know_no_test_row(
    data: MethodInputs,
) -> None:
    train, test = sides(data)
    rows = np.r_[train, test]
    found = probes.principal_components(data.heads, train, rows, 5)
    layers = [hidden(data, layer, "heads") for layer in range(GEOMETRY.num_layers)]
    x = np.concatenate(layers, axis=1).astype(np.float64)
    z = (x - x[train].mean(axis=0)) / x[train].std(axis=0)
    fitted = PCA(5).fit(z[train])
    expected = fitted.transform(z[rows])
    expected *= np.sign((expected * found)[: len(train)].sum(axis=0))  # which neither fixes
    assert_allclose(found, expected, atol=1e-8 * np.abs(expected).max())
    few = probes.principal_components(data.heads, train[:8], train[:8], 50)
    assert few.shape == (8, 7)  # eight rows differ in seven directions


def test_ties_go_to_the_lowest_layer_and_head_and_the_first_fit(tmp_path: Path) -> None:
    def heads(rows: np.ndarray, label: np.ndarray) -> None:
        plant(rows, label, 2, D, 2.0)
        for layer, head in ((2, 2), (4, 0), (5, 2)):  # the same head again, later
            rows[:, layer, head * D : (head + 1) * D] = rows[:, 2, D : 2 * D]

    def layers(rows: np.ndarray, label: np.ndarray) -> None:
        plant(rows, label, 2, 2, 2.0)
        rows[:, 4] = rows[:, 2]

    data = planted(tmp_path, Site.ATTENTION_HEAD, heads)
    assert probes.best_head(data.heads, sides(data)[0], 1.0, 1)[:2] == (2, 1)
    data = planted(tmp_path, Site.RESIDUAL_STREAM, layers)
    assert base.choose(fold(data), [1, 2, 4], probes.FITS[1:2] * 2, "fold") == (2, 0)


def test_the_bootstrap_draws_whole_groups_with_replacement() -> None:
    group, label = np.array([5, 5, 5, 2, 2, 9]), np.array([1, 1, 1, 0, 0, 1])
    rng = default_rng(0)
    seen = set()
    for _ in range(50):
        counts = np.bincount(probes.group_bootstrap(label, group, rng), minlength=6)
        # all rows of a group, equally often
        assert all(len(set(counts[group == name])) == 1 for name in (5, 2, 9))
        times = tuple(int(counts[group == name][0]) for name in (5, 2, 9))
        assert sum(times) == 3
        assert times[1] > 0  # the only hallucinated group: a sample without it is drawn again
        seen.add(times)
    assert len(seen) > 3
    with pytest.raises(TrainingError, match="only one class"):
        probes.group_bootstrap(np.ones(4, np.int64), np.arange(4), rng)


def test_fact_probe_reads_a_signal_spread_over_layers_from_a_window(tmp_path: Path) -> None:
    data = method_inputs(tmp_path, 400)
    start, size, c, _ = probes.search(fold(data, 2))
    assert (start, size) == (WIDE[0], len(WIDE))
    x = np.concatenate([hidden(data, layer) for layer in WIDE], axis=1)
    assert_array_equal(base.window(data.residual, 1, 5, np.arange(400)), x)
    assert_allclose(scores("fact-probe", data, 2), fitted(x, data, c, "l1"), rtol=1e-9)


def test_of_equally_good_windows_the_smallest_is_taken_and_they_are_thinned_evenly(
    tmp_path: Path,
) -> None:
    # separable: every window that holds layer 3 is perfect
    plan = partial(plant, layer=3, column=2, strength=8.0)
    data = planted(tmp_path, Site.RESIDUAL_STREAM, plan, 200)
    assert probes.search(fold(data)) == (3, 1, 0.1, 1.0)
    assert probes.starts(12, 1) == list(range(12))
    assert (probes.starts(6, 5), probes.starts(4, 5)) == ([0, 1], [])
    for layers, size in ((13, 1), (28, 1), (28, 5), (80, 5)):
        starts = probes.starts(layers, size)
        assert (len(starts), starts[0], starts[-1]) == (12, 0, layers - size)
        assert np.ptp(np.diff(starts)) <= 1


def test_the_best_layer_and_fit_of_the_inner_folds_are_taken(tmp_path: Path) -> None:
    assert base.at_depths(30, base.DEPTHS) == [6, 12, 17, 23, 29]
    assert (base.at_depths(2, (0.5, 0.75, 1.0)), base.at_depths(1, (0.5, 1.0))) == ([0, 1], [0])
    data = method_inputs(tmp_path, 200)
    layers, whole = base.at_depths(6, base.DEPTHS), fold(data, 2)

    def held_out(layer: int, c: float) -> float:
        x, aurocs = hidden(data, layer), []
        for inside, held in whole.folds(base.INNER_FOLDS, "fold"):
            fit = fit_linear(x[inside], data.label[inside], c, "l2").logits(x[held])
            aurocs.append(auroc(data.label[held], fit))
        return float(np.mean(aurocs))

    best = max((held_out(layer, c), layer, c) for layer in layers for c in probes.C_GRID)
    layer, fit = base.choose(whole, layers, probes.FITS, "fold")
    assert (layer, probes.C_GRID[fit]) == best[1:]
    expected = fitted(hidden(data, layer), data, probes.C_GRID[fit])
    assert_allclose(probes.p_ik(whole), expected, rtol=1e-9)


def test_a_fold_that_lacks_a_class_is_left_out_and_the_method_named_where_all_do(
    tmp_path: Path,
) -> None:
    data = method_inputs(tmp_path, 60)
    train, label = sides(data)[0], np.zeros(60, np.int64)
    label[train[0]] = 1
    with pytest.raises(TrainingError, match=r"p\(IK\)"):
        scores("p-ik", replace(data, label=label))
    label[train[:2]] = 1  # one in each of two folds' test sides; the third has none
    few = fold(replace(data, label=label, group=np.arange(60)))
    assert [label[held].sum() for _, held in few.usable_folds("fold")] == [1, 1]
    base.choose(few, [1, 2], probes.FITS, "fold")


def correlated(rows: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """x [n, d], label [n], the covariance [d, d] within the classes, the difference of their means
    [d]."""
    rng = default_rng(0)
    mixed = np.eye(width) + 3.0 * rng.standard_normal((width, 1)) @ rng.standard_normal((1, width))
    shift = rng.standard_normal(width)
    label = (rng.random(rows) < 0.3).astype(np.int64)
    x = rng.standard_normal((rows, width)) @ mixed.T + label[:, None] * shift + 5.0
    return x.astype(np.float32), label, mixed @ mixed.T, shift


def test_mass_mean_is_the_covariance_s_inverse_times_the_difference_of_means() -> None:
    x, label, covariance, shift = correlated(40_000, 5)
    found = probes.discriminant(
        None, x, label, np.concatenate([np.zeros((1, 5)), np.eye(5)]).astype(np.float32)
    )
    direction, expected = found[1:] - found[0], np.linalg.solve(covariance, shift)
    assert direction @ expected / np.linalg.norm(direction) / np.linalg.norm(expected) > 0.999
    means = [x[label == value].mean(axis=0) for value in (0, 1)]
    halfway = np.stack(means).mean(axis=0)[None]
    assert_allclose(probes.discriminant(None, x, label, halfway), 0.0, atol=1e-3)
    # fully shrunk: the difference of means of standardised columns
    x, label, _, _ = correlated(300, 6)
    z = (x - x.mean(axis=0)) / x.std(axis=0)
    means = [z[label == value].mean(axis=0) for value in (0, 1)]
    plain = (z - (means[0] + means[1]) / 2) @ (means[1] - means[0])
    found = probes.discriminant(1.0, x, label, x)
    scale = found @ plain / (plain @ plain)
    assert scale > 0
    assert_allclose(found, scale * plain, rtol=1e-3, atol=1e-3)


def test_mass_mean_needs_fewer_rows_than_columns_and_ignores_constant_ones() -> None:
    x, label, _, shift = correlated(400, 150)
    train, test = np.arange(100), np.arange(100, 400)
    found = auroc(label[test], probes.discriminant(None, x[train], label[train], x[test]))
    plain = auroc(
        label[test], (x[test] - x[train].mean(axis=0)) @ shift
    )  # the true difference, uncorrected
    assert found > max(plain, 0.9)
    label = np.arange(40) % 2
    x = np.stack([np.full(40, 7.1), label.astype(float)], axis=1).astype(np.float32)
    low, high = probes.discriminant(None, x, label, np.array([[1e6, 0.0], [7.1, 1.0]], np.float32))
    assert -np.inf < low < 0 < high < np.inf


def test_the_ridge_weighs_layers_where_the_mean_cannot() -> None:
    """A strong level that all layers have in common, and the class at two of them."""
    rng = default_rng(0)
    group = np.arange(500) // 2
    label = (rng.random(250) < 0.5).astype(np.int64)[group]
    trajectory = rng.standard_normal((500, 8)) + 3.0 * rng.standard_normal((500, 1))
    trajectory[:, (2, 5)] += 1.5 * (2 * label - 1)[:, None]

    def ridge(test: slice) -> np.ndarray:
        return trajectory_ridge(trajectory[:300], label[:300], group[:300], trajectory[test], 0)

    risk = ridge(slice(300, 500))
    plain = risk_auroc(label[300:], -trajectory[300:].mean(axis=1))
    assert risk_auroc(label[300:], risk) > 0.9 > 0.7 > plain
    assert_allclose(ridge(slice(305, 310)), risk[5:10], rtol=1e-9)


@pytest.fixture(scope="module")
def pooled(data: MethodInputs) -> np.ndarray:
    return networks.attention_pooled(fold(data))


def test_an_attention_pooled_probe_finds_the_token_that_knows(
    data: MethodInputs, pooled: np.ndarray
) -> None:
    tokens = data.positions.states
    there = tokens[:, 1].any(axis=2, keepdims=True)
    mean = tokens[:, 1].sum(axis=1, dtype=np.float64) / there.sum(axis=1)
    found = quality(data, pooled)
    assert found > max(0.9, quality(data, fitted(mean, data, 0.1)) + 0.05)
    # what is not there is not read
    padded = np.concatenate([np.zeros_like(tokens[:, :, :5]), tokens], axis=2)
    again = replace(data, positions=replace(data.positions, states=padded))
    assert quality(data, scores("attention-pooled", again)) == pytest.approx(found, abs=0.02)


def test_an_attention_pooled_probe_with_soft_targets_learns_the_share_of_right_samples(
    data: MethodInputs, pooled: np.ndarray
) -> None:
    # never 0 nor 1, and as wrong where the label is: a fit of the labels has no part
    right = 0.2 + 0.5 * data.label
    right[0] = np.nan  # none of its samples was judged: its label stands for them
    soft = replace(data, answers=replace(data.answers, right=right))
    found = networks.attention_pooled_soft(fold(soft))
    assert quality(data, found) > 0.9
    assert np.ptp(found) < 0.8 * np.ptp(pooled), "it is taught to be less sure"
    with pytest.raises(TrainingError, match="sampled answers, and there are none"):
        networks.attention_pooled_soft(fold(replace(data, answers=AnswerReadings())))


def test_a_semantic_entropy_probe_sees_neither_labels_nor_test_samples(data: MethodInputs) -> None:
    test = sides(data)[1]
    risk, entropy = scores("sep", data), data.answers.entropy
    # it predicts the entropy, and not the label only
    assert np.corrcoef(risk, entropy[test])[0, 1] > 0.7
    turned = entropy.copy()
    turned[test] = 1000.0 - turned[test]
    answers = replace(data.answers, entropy=turned)
    blind = replace(data, label=data.label[::-1].copy(), answers=answers)
    assert scores("sep", blind).tobytes() == risk.tobytes()


def test_the_best_split_is_that_of_all_thresholds() -> None:
    values = np.round(default_rng(1).gamma(2.0, size=40), 1)

    def lost(at: float) -> float:
        sides = values[values < at], values[values >= at]
        return float(sum(((side - side.mean()) ** 2).sum() for side in sides))

    assert lost(probes.best_split(values)) == pytest.approx(min(map(lost, np.unique(values)[1:])))
    assert probes.best_split(np.array([0.0, 0.0, 5.0, 5.0, 4.0])) == 4.0
    with pytest.raises(TrainingError):
        probes.best_split(np.full(4, 2.3))


def ring(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Points whose class is their distance from the centre, which no line separates."""
    x = default_rng(0).standard_normal((rows, 4)) * [1, 30, 0.1, 1] + [0, 50, -2, 0]
    radius = ((x - [0, 50, -2, 0]) / [1, 30, 0.1, 1])[:, :3]
    return x.astype(np.float32), (np.sum(radius**2, axis=1) < 2.4).astype(np.int64)


def test_the_network_has_the_papers_widths() -> None:
    network = networks.mlp(15, 2, dropout=0.2)
    shapes = [tuple(one.weight.shape) for one in network if isinstance(one, torch.nn.Linear)]
    assert shapes == [(256, 15), (128, 256), (64, 128), (2, 64)]
    assert sum(isinstance(one, torch.nn.ReLU) for one in network) == 3
    assert [one.p for one in network if isinstance(one, torch.nn.Dropout)][0] == 0.2


@pytest.mark.parametrize("name", ["iris", "saplma", "mind"])
def test_a_fit_repeats_bit_by_bit_and_leaves_torch_alone(tmp_path: Path, name: str) -> None:
    data = method_inputs(tmp_path, 120)
    x, label = ring(160)

    def fit(seed: int) -> bytes:
        if name == "saplma":
            return networks.saplma_logits(seed, x[:120], label[:120], x[120:]).tobytes()
        return scores(name, data, seed).tobytes()

    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    first = fit(4)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    torch.rand(3)
    assert fit(4) == first != fit(5)


def test_the_loss_of_iris_against_hand_computed_values() -> None:
    q = np.array([[0.25, 0.75], [0.9, 0.1]])
    label, logits = torch.tensor([1, 1]), torch.tensor(np.log(q))
    cross_entropy, entropy = -(np.log(0.75) + np.log(0.1)) / 2, -np.sum(q * np.log(q)) / 2
    for beta, expected in (
        (1.0, cross_entropy),
        (0.0, entropy),
        (0.8, 0.8 * cross_entropy + 0.2 * entropy),
    ):
        assert float(networks.soft_bootstrapping(logits, label, beta)) == pytest.approx(expected)
    # Gradients run through the target: d/dz of the entropy part is q (log q + H) negated.
    z = torch.tensor([[0.3, -0.9]], dtype=torch.float64, requires_grad=True)
    networks.soft_bootstrapping(z, torch.tensor([0]), 0.0).backward()
    p = torch.softmax(z.detach(), dim=-1)
    torch.testing.assert_close(z.grad, -p * (p.log() - (p * p.log()).sum()))


def test_iris_reads_the_last_layer_and_learns_what_no_line_can(tmp_path: Path) -> None:
    rng = default_rng(0)
    rows = noise(rng, 600, Site.ATTENTION_HEAD)
    z = (rows[:, LAST] - rows[:, LAST].mean(axis=0)) / rows[:, LAST].std(axis=0)
    # columns of two heads; each alone says nothing
    label = (z[:, 1] * z[:, 12] > 0).astype(np.int64)
    inputs = replace(method_inputs(tmp_path, 600), label=label, group=np.arange(600))

    def iris() -> float:
        heads = readouts(tmp_path, rows, label, Site.ATTENTION_HEAD)
        return quality(inputs, scores("iris", replace(inputs, heads=heads)))

    assert iris() > 0.75
    assert quality(inputs, fitted(rows[:, LAST], inputs, 1.0)) < 0.6
    rows[:, LAST] = rows[rng.permutation(600), LAST]  # the other layers keep everything
    assert iris() < 0.65


def test_iris_stops_early_and_keeps_the_best_epoch(tmp_path: Path) -> None:
    blind = fold(method_inputs(tmp_path, 120, strength=0.0))
    long, epochs, best = networks.fit_iris(blind)
    assert best + 5 == epochs < 100
    assert networks.fit_iris(blind, max_epochs=best)[0].tobytes() == long.tobytes()


def test_saplma_learns_what_no_line_can_and_ignores_a_constant_column() -> None:
    x, label = ring(1200)
    assert auroc(label[800:], networks.saplma_logits(0, x[:800], label[:800], x[800:])) > 0.9
    x, label = x[:160], label[:160]
    x[:, 3] = 0.1
    scores = networks.saplma_logits(0, x[:120], label[:120], x[120:])
    x[120:, 3] = 1e6  # never varied in training, so nothing is known about it
    assert networks.saplma_logits(0, x[:120], label[:120], x[120:]).tobytes() == scores.tobytes()


def test_mind_reads_the_last_token_over_layers_and_the_last_layer_over_tokens(
    data: MethodInputs,
) -> None:
    last, mean = np.arange(12.0).reshape(3, 4), 100 + np.arange(12.0).reshape(3, 4)
    answer = TracedAnswer(
        Completion("", (1, 2), "stop"), np.zeros(2), last.astype("f4"), mean.astype("f4")
    )
    assert_array_equal(networks.features(answer), [4, 5, 6, 7, 108, 109, 110, 111])
    states: Any = data.answers.states
    rare = replace(data, answers=replace(data.answers, states=states * 1e3 + 1e5))
    assert quality(data, scores("mind", rare, 1)) > 0.85, "standardised by the training side"


def test_eigenscore_is_the_paper_s_equation() -> None:
    states = default_rng(0).normal(2.0, 3.0, (4, 9))
    z = states.T  # [d, K]
    centring = np.eye(9) - np.ones((9, 9)) / 9
    _, log_det = np.linalg.slogdet(z.T @ centring @ z + 1e-3 * np.eye(4))
    for same in (states, states + 100.0):  # a common height of all coordinates is centred away
        assert own_answers.eigen_score(same) == pytest.approx(log_det / 4)
    assert own_answers.eigen_score(np.ones((4, 9))) == pytest.approx(np.log(1e-3))
    assert own_answers.eigen_score(np.repeat(states[:1], 4, axis=0)) < own_answers.eigen_score(
        states
    )


class Words:
    """A tokenizer of whole words, with a token of its own in front; 9 begins what it does not
    know."""

    known = {"A": 1, " A": 2, "True": 3, "B": 5, " B": 5, " False": 6}

    def tokenize(self, text: str) -> list[int]:
        return [0, *([self.known[text]] if text in self.known else [9, 9] if text else [])]


def test_a_follow_up_is_what_the_template_writes_behind_an_answer() -> None:
    engine = tiny.shared_engine("llama")
    for form, text in (("text", "\nIs it?"), ("chat", "\nuser: Is it?\n")):
        assert engine.detokenize(own_answers.follow_up(engine, "Is it?", form)) == text


def test_p_true_sums_the_forms_of_its_answers() -> None:
    engine = Words()
    assert own_answers.candidates(engine) == ([1, 2, 3], [5, 6])
    text = own_answers.asked("Who?", "Me.")
    assert text.startswith("Question: Who?\nProposed Answer: Me.\n")
    assert text.endswith("The proposed answer is:")
    for engine.known in ({"A": 1}, {"A": 1, "B": 1}):
        with pytest.raises(EngineError, match="p-true"):
            own_answers.candidates(engine)
    real = tiny.shared_engine("llama")
    yes, no = own_answers.candidates(real)
    prompts = tiny.prompts([6, 9])
    for prompt, value in zip(prompts, own_answers.log_odds(real, prompts), strict=True):
        with torch.no_grad():
            p = torch.softmax(
                tiny.modules(real).model(torch.tensor([prompt])).logits[0, -1].double(), -1
            )
        assert value == pytest.approx(float(torch.log(p[yes].sum() / p[no].sum())), abs=1e-4)


@pytest.mark.parametrize(
    ("groups", "log_prob", "expected"),
    [
        ([0, 0, 1, 2], None, 0.5 * math.log(2) + 0.5 * math.log(4)),
        ([0] * 5, None, 0.0),
        # Of mean tokens; shares 3/4 and 1/4.
        ([0, 1, 0], np.log([0.4, 0.2, 0.2]), -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))),
        ([0, 1], [-2000.0, -2000.0], math.log(2)),  # exp underflows to 0
    ],
)
def test_semantic_entropy_by_counts_and_by_likelihood(
    groups: list[int], log_prob: Any, expected: float
) -> None:
    weights = None if log_prob is None else np.array(log_prob)
    assert own_answers.semantic_entropy(np.array(groups), weights) == pytest.approx(expected)


# A question, and answers to it, each behind the number of its meaning.
MEANINGS = cells(
    """
    What is the capital of France? | 0 The capital of France is Paris.; 0 Paris; 0 paris!; 1 Rome
    What is the capital of France? | 0 Paris; 1 It is Rome.; 0 PARIS, of course; 1 Rome
    Is the earth flat? | 0 Yes.; 1 No.; 1 No, the earth is not flat.; 1 no; 0 Yes, it is.
    Who wrote Hamlet | 0 Shakespeare wrote it; 1 Shakespeare never wrote it; 2 It wasn't Shakespeare
    When was the moon landing? | 0 1969; 0 In July 1969; 1 1996; 0 in 1,969
    Name a colour | 0 Name a colour; 0 name a colour!; 1 colour; 2 Red
    Why? | 0 ; 0 ; 1 So
    """
)


@pytest.mark.parametrize(("question", "answers"), MEANINGS)
def test_answers_that_mean_the_same(question: str, answers: str) -> None:
    meanings, texts = zip(*(answer.split(" ", 1) for answer in answers.split("; ")), strict=True)
    assert own_answers.clusters(question, texts).tolist() == [*map(int, meanings)]
