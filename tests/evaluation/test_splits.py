"""One split: nothing of the test side reaches the fits, and what was kept is what is found again."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from service.data.run_folder import RowsFile
from service.evaluation.head_probes import fit_all_heads
from service.evaluation.methods.base import MethodInputs
from service.evaluation.options import EvaluateOptions, Source
from service.evaluation.splits import cross, kept, kept_split, outer_splits, pooled_depth_mean, residual_split
from service.fitting.fit import Readouts, Task, fit_probes, require
from service.fitting.scores import auroc
from service.readout import Geometry, Site

GEOMETRY = Geometry(num_layers=4, num_heads=3, head_dim=6, hidden_size=12)
N = 240


def material(tmp_path: Path, *, signal: float = 1.2, seed: int = 0) -> MethodInputs:
    rng = np.random.default_rng(seed)
    label = (rng.random(N) < 0.5).astype(np.int64)
    found = {}
    for site in Site:
        rows = rng.standard_normal((4, N, GEOMETRY.width(site)))
        rows[:, :, 7:9] += signal * (label - 0.5)[None, :, None]
        path = tmp_path / f"{site}.f32"
        rows.astype("<f4").tofile(path)
        found[site] = Readouts(RowsFile(path, GEOMETRY, site, N), np.arange(N), label)
    return MethodInputs(
        label=label,
        group=np.arange(N) // 2,
        heads=found[Site.ATTENTION_HEAD],
        residual=found[Site.RESIDUAL_STREAM],
        first_token=rng.standard_normal((N, 2)),
        prompt_tokens=rng.integers(5, 20, N),
    )


def options(tmp_path: Path) -> EvaluateOptions:
    return EvaluateOptions((Source("made", tmp_path),), tmp_path, seeds=1, folds=3, inner_folds=2, c=0.3, jobs=1)


def test_every_head_is_what_the_trainer_fits(tmp_path: Path) -> None:
    made = material(tmp_path)
    task = Task(np.arange(0, 160), np.arange(160, N), 0.3)
    [every] = fit_all_heads(made.heads, [task], jobs=1)
    [fit] = require(fit_probes(made.heads, [task], balance="weights", jobs=1))
    assert every.selected.tolist() == fit.head.tolist()
    direction, bias = every.of(every.selected)
    np.testing.assert_allclose(direction, fit.direction)
    np.testing.assert_allclose(bias, fit.bias)
    np.testing.assert_allclose(every.trajectory(), fit.trajectory, rtol=1e-5, atol=1e-5)
    [shared] = fit_all_heads(made.heads, [task], jobs=3)
    assert shared.logits.tobytes() == every.logits.tobytes()


def test_the_crossed_readout_is_the_next_layers_same_head(tmp_path: Path) -> None:
    made = material(tmp_path)
    task = Task(np.arange(0, 160), np.arange(160, N), 0.3)
    [every] = fit_all_heads(made.heads, [task], jobs=1)
    head = every.selected
    found = cross(made.heads, every, task.test)
    for layer in range(3):
        rows = made.heads.file.layer(layer + 1)[task.test].reshape(-1, 3, 6)[:, head[layer]]
        direction, bias = every.of(head)
        np.testing.assert_allclose(found[:, layer], rows @ direction[layer] + bias[layer], rtol=1e-5, atol=1e-5)


def test_labels_of_the_test_side_change_nothing(tmp_path: Path) -> None:
    made = material(tmp_path)
    chosen = options(tmp_path)
    _, _, train, test = outer_splits(made, chosen)[0]
    other = made.label.copy()
    other[test] = 1 - other[test]
    changed = MethodInputs(
        label=other, group=made.group, heads=Readouts(made.heads.file, made.heads.index, other), residual=None,
        first_token=made.first_token, prompt_tokens=made.prompt_tokens,
    )  # fmt: skip
    one = kept_split(tmp_path / "a", made, 0, 0, train, test, chosen)
    two = kept_split(tmp_path / "b", changed, 0, 0, train, test, chosen)
    assert one.every.logits.tobytes() == two.every.logits.tobytes()
    assert one.train_trajectory.tobytes() == two.train_trajectory.tobytes()
    assert one.test_crossed.tobytes() == two.test_crossed.tobytes()


def test_rows_without_a_signal_have_none_out_of_fold(tmp_path: Path) -> None:
    """In-sample trajectories would separate noise: these must not."""
    made = material(tmp_path, signal=0.0)
    chosen = options(tmp_path)
    found = []
    for seed, fold, train, test in outer_splits(made, chosen):
        split = kept_split(tmp_path / "fits", made, seed, fold, train, test, chosen)
        found += [auroc(made.label[test], split.test_trajectory.mean(axis=1)),
                  auroc(made.label[train], split.train_trajectory.mean(axis=1))]  # fmt: skip
    assert 0.35 < np.mean(found) < 0.62


def test_both_readouts_find_a_planted_signal(tmp_path: Path) -> None:
    made = material(tmp_path)
    chosen = options(tmp_path)
    seed, fold, train, test = outer_splits(made, chosen)[0]
    split = kept_split(tmp_path / "fits", made, seed, fold, train, test, chosen)
    assert auroc(made.label[test], split.test_trajectory.mean(axis=1)) > 0.8
    residual, inner = residual_split(made, split, chosen)
    assert auroc(made.label[test], residual) > 0.8
    assert inner.shape == train.shape
    np.testing.assert_allclose(
        pooled_depth_mean(made.heads, split, chosen), split.test_trajectory.mean(axis=1), rtol=1e-4
    )


def test_what_was_kept_is_found_again_and_not_made_again(tmp_path: Path) -> None:
    made = material(tmp_path)
    chosen = options(tmp_path)
    seed, fold, train, test = outer_splits(made, chosen)[0]
    one = kept_split(tmp_path / "fits", made, seed, fold, train, test, chosen)
    made.heads.file.path.unlink()  # another fit would fail
    two = kept_split(tmp_path / "fits", made, seed, fold, train, test, chosen)
    for field in fields(one):
        before, after = getattr(one, field.name), getattr(two, field.name)
        if isinstance(before, np.ndarray):
            assert before.tobytes() == after.tobytes(), field.name
    assert one.every.logits.tobytes() == two.every.logits.tobytes()
    assert two.c == 0.3


def test_a_half_written_file_is_no_result(tmp_path: Path) -> None:
    def fails() -> dict[str, np.ndarray]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kept(tmp_path / "x" / "one.npz", fails)
    assert not (tmp_path / "x" / "one.npz").exists()
    assert kept(tmp_path / "x" / "one.npz", lambda: {"score": np.arange(3.0)})["score"].tolist() == [0, 1, 2]
