"""The ablation tables: known answers from scripted logits, and the whole of them from a real fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from hallutracer_research.evaluation.methods import RESIDUAL
from hallutracer_research.evaluation.results import SetResult
from hallutracer_research.paper import ablations
from hallutracer_research.paper.tables import TableSpec, make_tables
from service.readout import Pooling, Site
from tests.research.made import LABEL, scripted_result
from tests.research.made import blind_logits as noise


def mean(cell: Any) -> float:
    return float(cell["mean"])


def row(spec: TableSpec, result: SetResult) -> Mapping[str, Any]:
    return spec.table([result]).rows[0]


def test_the_mean_is_scored_split_by_split(result: SetResult) -> None:
    by_split = [roc_auc_score(result.label[one.test], one.test_trajectory.mean(axis=1)) for one in result.splits]
    cell = row(ablations.MEAN["mean-dominance"], result)["mean"]
    assert cell == pytest.approx({"mean": np.mean(by_split), "std": np.std(by_split)})
    assert row(ablations.MEAN["location"], result)["mean"] == cell
    assert row(ablations.MEAN["logit-scale"], result)["unit_norm"] == cell
    assert row(ablations.READOUT["top-heads"], result)["top_1"] == cell
    assert row(ablations.READOUT["readout-site"], result)["head"] == pytest.approx(cell)


def test_a_level_is_in_the_mean_and_a_slope_in_the_shape() -> None:
    side = 2 * LABEL[:, None, None] - 1
    level = row(ablations.MEAN["mean-dominance"], scripted_result(noise(9) + side))
    assert mean(level["mean"]) > 0.99
    assert abs(mean(level["shape"]) - 0.5) < 0.12
    assert mean(level["mean_and_shape"]) > 0.98
    tilt = row(ablations.MEAN["mean-dominance"], scripted_result(noise(9) + side * (np.arange(9) - 4)[:, None]))
    assert abs(mean(tilt["mean"]) - 0.5) < 0.1
    assert mean(tilt["shape"]) > 0.99
    assert mean(tilt["mean_and_shape"]) > 0.99


def test_too_few_layers_for_source_features_cost_their_row_and_a_note() -> None:
    short = scripted_result(noise(4), name="short")
    first, second = make_tables(
        [ablations.MEAN["mean-dominance"], ablations.MEAN["mean-dominance-source"]],
        [short, scripted_result(noise(9), name="long")],
    )
    assert set(first.rows[0]) > {"mean", "shape"}
    assert second.rows[0] == {"set": "short"}
    assert "source" in second.rows[1]
    assert any(note.startswith("short: left out: 4 layers") for note in second.notes)
    sets = ablations.MEAN["feature-sets"].table([short])
    assert sets.rows[0]["source"] is None
    assert mean(sets.rows[0]["full"]) > 0
    assert any(note.startswith("short: 13-D is left out: 4 layers") for note in sets.notes)


def test_the_median_and_the_trimmed_mean_resist_one_wild_layer() -> None:
    logits = noise(20, seed=1) + LABEL[:, None, None]
    logits[:, 3] = 200 * noise(1, seed=2)[:, 0]
    found = row(ablations.MEAN["location"], scripted_result(logits))
    assert mean(found["median"]) > 0.95
    assert mean(found["trimmed_mean"]) > 0.95
    assert mean(found["mean"]) < 0.65
    assert abs(found["correlation"]) < 0.5


def test_under_ten_layers_the_trimmed_mean_is_the_mean_and_a_note_says_so(result: SetResult) -> None:
    table = ablations.MEAN["location"].table([result])
    assert table.rows[0]["trimmed_mean"] == table.rows[0]["mean"]
    assert any("8 layers is none" in note for note in table.notes)


def test_only_the_full_trajectory_sees_two_layers_that_cancel() -> None:
    logits = noise(9, seed=2)
    logits[:, 3] += 2 * (LABEL[:, None] - 0.5)
    logits[:, 4] -= 2 * (LABEL[:, None] - 0.5)
    found = row(ablations.MEAN["feature-sets"], scripted_result(logits))
    assert mean(found["full"]) > mean(found["trajectory"]) + 0.15


def test_standardised_logits_silence_a_layer_of_large_scale() -> None:
    logits = noise(9, seed=3) + LABEL[:, None, None]
    logits[:, 8] = 100 * noise(1, seed=4)[:, 0]
    scale = np.ones((9, 1))
    scale[8] = 100
    found = row(ablations.MEAN["logit-scale"], scripted_result(logits, scale=scale))
    assert mean(found["unit_norm"]) < 0.6
    assert mean(found["standardized"]) > 0.9
    assert mean(found["difference"]) == pytest.approx(mean(found["standardized"]) - mean(found["unit_norm"]))


def test_the_depth_curve_takes_the_best_training_layer_then_spaced_ones_then_all() -> None:
    logits = noise(12, seed=5)
    quality = np.full((12, 1), 0.6)
    quality[7] = 0.9
    result = scripted_result(logits, quality=quality, name="curve")
    sizes, means, stds = ablations.depth_curve([result])["curve"]
    assert sizes == [1, 2, 4, 12]
    for size, layers in ((1, [7]), (2, [3, 9]), (4, [3, 5, 7, 9]), (12, range(12))):
        by_fold = [
            roc_auc_score(LABEL[i::2], logits[i::2][:, list(layers), 0].astype("f4").mean(axis=1)) for i in (0, 1)
        ]
        assert means[sizes.index(size)] == pytest.approx(np.mean(by_fold), abs=1e-6)
        assert stds[sizes.index(size)] == pytest.approx(np.std(by_fold), abs=1e-6)
    table = ablations.MEAN["depth-subsampling"].table([result])
    assert [table.rows[0][ablations.depth_key(size)] for size in sizes] == [
        {"mean": a, "std": b} for a, b in zip(means, stds, strict=True)
    ]
    assert "too few for 8" in table.notes[0]


def test_heads_are_taken_by_training_auroc_and_one_without_a_probe_never_is() -> None:
    logits = np.zeros((len(LABEL), 6, 4))
    logits[:, :, 2] = 3 * (LABEL[:, None] - 0.5) + 0.01 * noise(6, seed=6)[:, :, 0]  # the best, and it is perfect
    logits[:, :, 0] = noise(6, seed=7)[:, :, 0]
    logits[:, :, 1] = -logits[:, :, 2]  # the worst: wrong throughout
    quality = np.tile([0.6, 0.4, 0.9, 0.0], (6, 1))
    table = ablations.READOUT["top-heads"].table([scripted_result(logits, quality=quality)])
    found = table.rows[0]
    assert mean(found["top_1"]) == 1.0
    assert mean(found["bottom_1"]) == 0.0
    # Heads 1 and 2 cancel: what is left of the mean of three is a third of the noise of head 0.
    third = [roc_auc_score(LABEL[i::2], logits[i::2, :, 0].astype("f4").mean(axis=1)) for i in (0, 1)]
    assert mean(found["top_5"]) == pytest.approx(np.mean(third), abs=0.01)
    assert 0.2 < mean(found["random_1"]) < 0.8
    assert found["random_1"]["std"] > 0.1  # type: ignore[index, operator]
    assert found["difference"] == pytest.approx(mean(found["random_1"]) - 1.0)
    assert any("12 of 48 probes are all zeros" in note for note in table.notes)
    assert any("has 4 heads" in note for note in table.notes)


def test_a_probe_that_is_all_zeros_counts_as_chance_among_heads() -> None:
    logits = noise(6, heads=3, seed=9)
    logits[:, :, 2] = 0.0
    table = ablations.READOUT["head-distribution"].table(
        [scripted_result(logits, quality=np.tile([0.7, 0.6, 0.0], (6, 1)))]
    )
    expected = np.std([0.7, 0.6, 0.5]) / np.mean([0.7, 0.6, 0.5])
    assert table.rows[0]["auc_cv"] == pytest.approx(expected)
    assert any("6 heads have constant scores" in note for note in table.notes)


def test_a_run_without_the_residual_stream_says_so(result: SetResult) -> None:
    without = replace(result, scores={name: scores for name, scores in result.scores.items() if name != RESIDUAL})
    table = ablations.READOUT["readout-site"].table([without])
    assert table.rows[0] == {"set": "made"}
    assert RESIDUAL in table.notes[0]


def test_the_residual_difference_is_its_auroc_less_the_heads(result: SetResult) -> None:
    found = row(ablations.READOUT["readout-site"], result)
    residual = [roc_auc_score(1 - result.label[one.test], one.score) for one in result.scores[RESIDUAL]]
    assert mean(found["residual"]) == pytest.approx(np.mean(residual))
    assert mean(found["difference"]) == pytest.approx(mean(found["residual"]) - mean(found["head"]))


def test_poolings_are_compared_with_last_1_on_the_folds_of_the_first_seed(result: SetResult) -> None:
    same = [one.test_trajectory.mean(axis=1) for one in result.folds(0)]
    pooled = {
        (Site.ATTENTION_HEAD, Pooling.LAST_4): same,
        (Site.ATTENTION_HEAD, Pooling.MEAN): [-score for score in same],
        (Site.ATTENTION_HEAD, Pooling.MAX): same[:-1],
    }
    table = ablations.READOUT["readout-position"].table([replace(result, pooled=pooled)])
    found = table.rows[0]
    last = [roc_auc_score(result.label[one.test], score) for one, score in zip(result.folds(0), same, strict=True)]
    assert found["last_1"] == pytest.approx({"mean": np.mean(last), "std": np.std(last)})
    assert found["last_4"] == pytest.approx({"mean": 0.0, "std": 0.0})
    assert mean(found["mean"]) == pytest.approx(1 - 2 * np.mean(last))
    assert "max" not in found
    assert "made: max: scores of 2 of 3 folds, left out" in table.notes
