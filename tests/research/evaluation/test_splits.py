"""One split: nothing of the test side reaches the fits, and kept results are read back, not
computed again."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal

from hallutracer_research.evaluation import splits
from hallutracer_research.evaluation.methods.base import BehindAnswers, MethodInputs
from hallutracer_research.evaluation.splits import (
    HeadProbes,
    Split,
    fit_all_heads,
    kept_split,
    outer_splits,
)
from service.errors import TrainingError
from service.fitting.probes import Task, fit_probes
from service.fitting.scores import auroc, risk_auroc
from service.readout import Site
from tests.research.made import COUNT, OPTIONS, level_inputs, noise, plant, readouts, turned

CHOSEN = replace(OPTIONS, seeds=1)
TASK = Task(np.arange(0, 160), np.arange(160, COUNT), 0.3)


@pytest.fixture
def inputs(tmp_path: Path) -> MethodInputs:
    return level_inputs(tmp_path, strength=0.8)


def first_split(folder: Path, inputs: MethodInputs) -> Split:
    return kept_split(folder, inputs, outer_splits(inputs, CHOSEN)[0], CHOSEN)


def arrays(value: Split | HeadProbes) -> dict[str, bytes]:
    found = {field.name: getattr(value, field.name) for field in fields(value)}
    inner = arrays(found["probes"]) if "probes" in found else {}
    return inner | {
        name: array.tobytes() for name, array in found.items() if isinstance(array, np.ndarray)
    }


def test_the_heads_probes_are_what_the_trainer_fits_and_crossed_with_the_next_layers_same_head(
    inputs: MethodInputs, jobs_in_turn: None
) -> None:
    [probes] = fit_all_heads(inputs.heads, [TASK], jobs=1)
    [fit] = fit_probes(inputs.heads, [TASK], balance="weights", jobs=1)
    head = probes.selected
    assert head.tolist() == fit.head.tolist()
    direction, bias = probes.of(head)
    assert_allclose(direction, fit.direction)
    assert_allclose(bias, fit.bias)
    assert_allclose(probes.trajectory(), fit.trajectory, rtol=1e-5, atol=1e-5)
    [shared] = fit_all_heads(inputs.heads, [TASK], jobs=3)
    assert arrays(shared) == arrays(probes)
    crossed = splits.cross(inputs.heads, probes, TASK.test)
    geometry = inputs.heads.file.geometry
    for layer in range(geometry.num_layers - 1):
        rows = inputs.heads.file.layer(layer + 1)[inputs.heads.index[TASK.test]].reshape(
            -1, geometry.num_heads, geometry.head_dim
        )
        expected = rows[:, head[layer]] @ direction[layer] + bias[layer]
        assert_allclose(crossed[:, layer], expected, rtol=1e-5, atol=1e-5)


def test_labels_of_the_test_side_change_nothing(tmp_path: Path, inputs: MethodInputs) -> None:
    outer = outer_splits(inputs, CHOSEN)[0]
    one, other = (
        kept_split(tmp_path / name, given, outer, CHOSEN)
        for name, given in (("a", inputs), ("b", turned(inputs, outer.test)))
    )
    assert arrays(one) == arrays(other)


def test_rows_without_a_signal_have_none_out_of_fold(tmp_path: Path) -> None:
    """In-sample trajectories would separate noise: these must not."""
    inputs = level_inputs(tmp_path, strength=0.0)
    aurocs = []
    for outer in outer_splits(inputs, CHOSEN):
        split = kept_split(tmp_path / "fits", inputs, outer, CHOSEN)
        for rows, trajectory in (
            (split.test, split.test_trajectory),
            (split.train, split.train_trajectory),
        ):
            aurocs.append(auroc(inputs.label[rows], trajectory.mean(axis=1)))
    assert 0.35 < np.mean(aurocs) < 0.62


def test_both_readouts_find_a_planted_signal_and_a_kept_split_is_not_fitted_again(
    tmp_path: Path, inputs: MethodInputs
) -> None:
    split = first_split(tmp_path / "fits", inputs)
    label, mean = inputs.label[split.test], split.test_trajectory.mean(axis=1)
    assert auroc(label, mean) > 0.8
    fold = split.fold_of(inputs)
    assert auroc(label, splits.chosen_depth_mean(inputs.residual, fold, CHOSEN)) > 0.8
    assert_allclose(splits.pooled_depth_mean(inputs.heads, split, CHOSEN), mean, rtol=1e-4)
    inputs.heads.file.path.unlink()  # another fit would fail
    after = first_split(tmp_path / "fits", inputs)
    assert arrays(split) == arrays(after)
    assert after.c == 0.3


def test_an_interrupted_computation_leaves_no_file(tmp_path: Path) -> None:
    def fails() -> dict[str, np.ndarray]:
        raise KeyboardInterrupt

    path = tmp_path / "x" / "one.npz"
    with pytest.raises(KeyboardInterrupt):
        splits.kept(path, fails)
    assert not path.exists()
    assert splits.kept(path, lambda: {"score": np.arange(3.0)})["score"].tolist() == [0, 1, 2]


def tells_more(
    both: np.ndarray, second: np.ndarray, inputs: MethodInputs, split: Split, margin: float = 0.02
) -> None:
    """Together they rank the test side better than the depth mean, and than the second number."""
    label, mean = inputs.label[split.test], -split.test_trajectory.mean(axis=1)
    alone = max(risk_auroc(label, mean), risk_auroc(label, second))
    assert risk_auroc(label, both) > alone + margin


def test_the_kind_and_the_depth_mean_together_tell_more_than_each_and_no_test_label_reaches_them(
    tmp_path: Path,
) -> None:
    rng, inputs = default_rng(2), level_inputs(tmp_path)
    split = first_split(tmp_path, inputs)
    kind = np.where(rng.random(COUNT) < 0.3, 1 - inputs.label, inputs.label).astype(np.str_)
    named = replace(inputs, kind=kind)
    both = splits.with_kind(named, split)
    tells_more(both, -kind[split.test].astype(np.int64), inputs, split)
    assert splits.with_kind(turned(named, split.test), split).tobytes() == both.tobytes()
    # Kinds of three groups that tell nothing: shares that hold a row's own label would look as if
    # they told much.
    blind = replace(inputs, kind=(inputs.group % 40).astype(np.str_))
    mean = -split.test_trajectory.mean(axis=1)
    tells_more(splits.with_kind(blind, split), mean, inputs, split, -0.03)
    with pytest.raises(TrainingError, match="fewer than two kinds"):
        splits.with_kind(inputs, split)


def test_the_entropy_of_another_token_is_read_beside_the_depth_mean(tmp_path: Path) -> None:
    rng, inputs = default_rng(2), level_inputs(tmp_path)
    split = first_split(tmp_path, inputs)
    entropy = rng.standard_normal(COUNT) - 1.2 * inputs.label
    content = np.stack([rng.standard_normal(COUNT), entropy], axis=1)
    both = splits.with_entropy(content, inputs, split)
    tells_more(both, entropy[split.test], inputs, split)
    with pytest.raises(TrainingError, match="no other token"):
        splits.with_entropy(None, inputs, split)


def test_what_is_read_behind_the_answer_adds_to_the_depth_mean_and_no_test_label_reaches_it(
    tmp_path: Path,
) -> None:
    inputs, other = level_inputs(tmp_path), tmp_path / "other"
    other.mkdir()
    split = first_split(tmp_path, inputs)
    rows = noise(default_rng(5), COUNT, Site.ATTENTION_HEAD)
    for layer in range(rows.shape[1]):
        plant(rows, inputs.label, layer, 3, 0.25)
    behind = readouts(other, rows, inputs.label, Site.ATTENTION_HEAD)
    both = splits.before_and_behind(behind, inputs, split, CHOSEN)
    second = -splits.chosen_depth_mean(behind, split.fold_of(inputs), CHOSEN)
    tells_more(both, second, inputs, split, 0.01)
    blind = turned(inputs, split.test)
    again = splits.before_and_behind(replace(behind, label=blind.label), blind, split, CHOSEN)
    assert again.tobytes() == both.tobytes()


def test_running_scores_are_those_of_the_mean_s_probes_on_each_beginning_and_token(
    tmp_path: Path,
) -> None:
    inputs, rng = level_inputs(tmp_path), default_rng(6)
    split, site = first_split(tmp_path, inputs), Site.ATTENTION_HEAD
    said = rng.integers(1, 9, COUNT)
    tokens = np.stack([noise(rng, COUNT, site) for _ in range(6)])
    for token in tokens:
        for layer in range(token.shape[1]):
            plant(token, inputs.label, layer, 1, 1.0)
    tokens = tokens.astype(np.float16)
    read_tokens = np.minimum(said, 6)
    for row, count in enumerate(read_tokens):
        tokens[count:, row] = tokens[count - 1, row]  # behind the end stands the last one again
    mean = np.stack(
        [
            tokens[:count, row].astype(np.float32).mean(axis=0)
            for row, count in enumerate(read_tokens)
        ]
    )
    folder = tmp_path / "mean"
    folder.mkdir()
    read = readouts(folder, mean, inputs.label, site)
    behind = BehindAnswers(read, read, read, read, tokens.swapaxes(0, 1), said, said)
    with_answers = replace(inputs, behind=behind)
    found = splits.running(with_answers, split, CHOSEN)
    whole = -splits.chosen_depth_mean(read, split.fold_of(inputs), CHOSEN)
    assert_allclose(
        found["answer-first-16"], whole, rtol=0, atol=2e-3
    )  # float16, and no token beyond
    short = said[split.test] <= 2
    assert_allclose(found["answer-first-2"][short], whole[short], rtol=0, atol=2e-3)
    assert np.abs(found["answer-first-2"] - whole)[~short].max() > 0.01
    for count in (
        1,
        3,
    ):  # the riskiest of one token is that one; of several it is no lower than their mean
        rows = said[split.test] == count
        assert rows.any()
        assert (found["answer-max-depth-mean"][rows] >= found["answer-first-4"][rows] - 1e-9).all()
    one = said[split.test] == 1
    assert_array_equal(found["answer-max-depth-mean"][one], found["answer-first-1"][one])
    with pytest.raises(TrainingError, match="no answer's tokens"):
        splits.running(inputs, split, CHOSEN)
