"""A row with a share of right answers is fitted and ranked as that many right and wrong rows would be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from service.errors import TrainingError
from service.fitting.calibration import FitOptions, fit_classifier
from service.fitting.fit import Readouts, Task, fit_head, fit_probes, row_weights, within_class_std
from service.fitting.nested_cv import Inputs, probe_columns
from service.fitting.scores import auroc
from service.fitting.soft_labels import copies_of, soft_auroc
from service.readout import Site
from tests.fitting.test_calibration import inputs, noise

K = 4  # answers of each row


def shared(count: int = 150, seed: int = 0, d: int = 6) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows, greedy labels, shares, and the verdicts [n, K] that the shares are of; every row has both kinds."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, d)).astype(np.float32)
    right = np.clip(rng.binomial(K, 1 / (1 + np.exp(-2 * x[:, 0]))), 1, K - 1)
    verdicts = (np.arange(K) < right[:, None]).astype(np.int64)
    return x, (x[:, 0] > 0).astype(np.int64), right / K, verdicts


def test_copies_carry_the_shares() -> None:
    share = np.array([0.0, 0.25, 1.0, 0.5])
    made = copies_of(np.array([1, 1, 0, 0]), share)
    assert len(made.row) == 6  # rows without doubt stay one row
    for row, value in enumerate(share):
        mine = made.row == row
        assert made.weight[mine].sum() == 1
        assert made.weight[mine & (made.label == 1)].sum() == value
    hard = copies_of(np.array([1, 0]), None)
    assert (hard.row.tolist(), hard.label.tolist(), hard.weight.tolist()) == ([0, 1], [1, 0], [1.0, 1.0])


@pytest.mark.parametrize("site", list(Site))
def test_a_probe_is_that_of_one_row_for_each_answer(site: Site) -> None:
    x, label, share, verdicts = shared()
    train = np.arange(100)
    [soft] = fit_head(x, label, [Task(train, train, 0.3)], site, "weights", share)
    # As many rows as answers, and a loss K times as large: C is K times smaller.
    many = np.arange(100 * K)
    [hard] = fit_head(np.repeat(x, K, axis=0), verdicts.ravel(), [Task(many, many, 0.3 / K)], site, "weights")
    assert soft is not None
    assert hard is not None
    np.testing.assert_allclose(soft[0], hard[0], rtol=2e-3, atol=2e-4)
    assert soft[1] == pytest.approx(hard[1], abs=2e-3)
    [greedy] = fit_head(x, label, [Task(train, train, 0.3)], site, "weights")
    assert greedy is not None
    assert abs(greedy[0][0] - soft[0][0]) > 0.05


def test_ranking_scale_balance_and_classifier_are_those_of_one_row_for_each_answer() -> None:
    x, label, share, verdicts = shared()
    score = x[:, 0].astype(np.float64)
    many, flat = np.repeat(score, K), verdicts.ravel()
    assert soft_auroc(label, share, score) == pytest.approx(auroc(flat, many))
    assert soft_auroc(label, None, score) == auroc(label, score)
    made = copies_of(label, share)
    assert within_class_std(made.label, score[made.row], made.weight) == pytest.approx(within_class_std(flat, many))
    weight = row_weights(made.label, "weights", made.weight)
    assert weight[made.label == 1].sum() == pytest.approx(weight[made.label == 0].sum()) == pytest.approx(75)
    signals = x.astype(np.float64)
    soft, hard = fit_classifier(signals, label, share), fit_classifier(np.repeat(signals, K, axis=0), flat)
    np.testing.assert_allclose(soft.weight, hard.weight, rtol=1e-3, atol=1e-4)
    risk = soft.risk(signals)
    assert risk.mean() == pytest.approx(1 - share.mean(), abs=1e-4)


def soft(tmp_path: Path, share: np.ndarray | None = None) -> Inputs:
    rows, label = noise(240)
    rng = np.random.default_rng(1)
    rows[:, :, 3] += 2 * label[:, None] - 1
    shares = np.where(label == 1, rng.choice([0.5, 0.75, 1.0], 240), rng.choice([0.0, 0.25, 0.5], 240))
    made = inputs(tmp_path, rows, label)
    readouts = Readouts(made.readouts.file, made.readouts.index, label, shares if share is None else share)
    return Inputs(readouts, made.group, made.first_token, made.prompt_tokens, made.strata)


OPTIONS = FitOptions("weights", 3, None, (0.03, 0.3), 1)


def test_the_shares_of_a_test_side_are_not_seen(tmp_path: Path) -> None:
    given, train, test = soft(tmp_path), np.arange(180), np.arange(180, 240)
    share = given.readouts.share
    assert share is not None

    def columns(of: Inputs) -> tuple[float, list[np.ndarray]]:
        c, found = probe_columns(of.readouts, of.group, of.first_token, train, test, 0, OPTIONS)
        return c, [side for _, sides in found for side in sides]

    c, before = columns(given)
    poisoned = soft(tmp_path, np.where(np.arange(240) < 180, share, 1 - share))
    again, after = columns(poisoned)
    assert c == again
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
    turned = soft(tmp_path, np.where(np.arange(240) < 180, 1 - share, share))
    assert not np.array_equal(before[0], columns(turned)[1][0])


def test_samples_that_are_all_wrong_are_an_error(tmp_path: Path) -> None:
    given = soft(tmp_path, np.r_[np.zeros(180), np.full(60, 0.5)])
    with pytest.raises(TrainingError, match="all sampled answers of 180 training rows are wrong"):
        fit_probes(given.readouts, [Task(np.arange(180), np.arange(180, 240), 0.3)], balance="weights", jobs=1)
