"""Guards between what is fitted and what is tested, of which each removal would flatter the figures.

Standardisation, head and C have theirs in tests/fitting/test_estimator.py, where rows of the test side are poisoned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.fitting import nested_cv
from service.fitting.estimator import FinalClassifier
from service.fitting.thresholds import ChosenThreshold, GateRule
from service.trainer import run as trainer_run
from service.trainer.publish import read_risks
from tests.fitting.planted import PlantedEngine, planted_rows, write_rows
from tests.trainer.test_run import run


def test_the_served_classifier_is_fitted_on_logits_that_its_probes_never_saw(tmp_path: Path) -> None:
    """Probes that fit noise separate their own rows well; a classifier fitted there would be sure of everything."""
    test = write_rows(tmp_path / "test.jsonl", planted_rows(600, seed=3))
    bundle, _ = run(tmp_path, PlantedEngine(strength=0.12), planted_rows(200), test=test, c=30.0, allow_no_signal=True)
    found = bundle.evaluation()["held_out"]
    share = found["hallucinated"] / found["rows"]
    assert found["signals"]["bundle"]["brier"] < share * (1 - share) + 0.01  # no worse than the share alone


def test_a_fold_s_classifier_comes_from_its_training_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted: list[tuple[np.ndarray, np.ndarray, FinalClassifier]] = []
    used: list[np.ndarray] = []
    fit, summarise = nested_cv.fit_classifier, nested_cv.summary

    def watched(signals: np.ndarray, label: np.ndarray, share: np.ndarray | None) -> FinalClassifier:
        fitted.append((signals, label, fit(signals, label, share)))
        return fitted[-1][-1]

    def summary(label: np.ndarray, risk: np.ndarray) -> Any:
        used.append(label)
        return summarise(label, risk)

    monkeypatch.setattr(nested_cv, "fit_classifier", watched)
    monkeypatch.setattr(nested_cv, "summary", summary)
    run(tmp_path)
    names = len(nested_cv.NAMES) - len(nested_cv.CONTEXT_NAMES)  # no row has a passage
    assert len(fitted) == len(used) == 2 * 3 * names  # seeds, folds, signals
    for (signals, label, classifier), test_label in zip(fitted, used, strict=True):
        assert len(label) + len(test_label) == 240
        assert label.sum() + test_label.sum() == fitted[0][1].sum() + used[0].sum()
        again = fit(signals, label, None)
        assert (classifier.weight.tolist(), classifier.intercept) == (again.weight.tolist(), again.intercept)


def test_the_threshold_is_chosen_once_on_every_seed_s_out_of_fold_risks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on the nested risks, which are there to measure it, and not on those of the refitted probes."""
    chosen: list[tuple[np.ndarray, np.ndarray]] = []
    choose = trainer_run.choose_threshold

    def watched(rule: GateRule, label: np.ndarray, risk: np.ndarray) -> ChosenThreshold:
        chosen.append((label, risk))
        return choose(rule, label, risk)

    monkeypatch.setattr(trainer_run, "choose_threshold", watched)
    bundle, _ = run(tmp_path, target="wrong<=0.2")
    [(label, risk)] = chosen
    assert risk.shape == (2, 240)
    assert not np.array_equal(risk[0], risk[1])
    recorded = read_risks(bundle.evaluation()["out_of_fold"]["risks"])
    np.testing.assert_allclose(recorded.risk, risk[0], atol=1e-6)
    np.testing.assert_array_equal(recorded.label, label)


def test_the_references_of_a_held_out_file_are_fitted_on_the_training_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted: list[int] = []
    fit = nested_cv.fit_classifier

    def watched(signals: np.ndarray, label: np.ndarray, share: np.ndarray | None) -> FinalClassifier:
        fitted.append(len(label))
        return fit(signals, label, share)

    monkeypatch.setattr(nested_cv, "fit_classifier", watched)
    test = write_rows(tmp_path / "test.jsonl", planted_rows(90, seed=3))
    bundle, _ = run(tmp_path, test=test, evaluate=False, c=0.3, seeds=(0,))
    assert fitted == [240] * (len(bundle.evaluation()["held_out"]["signals"]) - 1)  # the bundle's own came before
