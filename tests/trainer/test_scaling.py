"""The rules of --logit-scale, from the fit to the served mean over depth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from service.fitting.layer_weights import FLOOR
from service.readout import Site
from service.scoring import Scorer
from tests.fitting.planted import PlantedEngine, planted_rows, write_rows
from tests.trainer.test_run import run


class OneLayer(PlantedEngine):
    """Only layer 1 knows; the layers above it are louder."""

    def activations(self, prompt: list[int], site: Site) -> np.ndarray:  # type: ignore[override]
        rows = super().activations(prompt, site)
        self.strength, kept = 0.0, self.strength
        silent = super().activations(prompt, site)
        self.strength = kept
        silent[1] = rows[1]
        return silent


def test_weights_are_fitted_recorded_and_served(tmp_path: Path) -> None:
    test = write_rows(tmp_path / "test.jsonl", planted_rows(200, seed=3))
    plain, console = run(tmp_path, OneLayer(1.0), test=test)
    [line] = [line for line in console.lines if line.startswith("--logit-scale weighted --signals depth_mean gains")]
    bundle, _ = run(tmp_path, OneLayer(1.0), test=test, logit_scale="weighted", name="weighted")
    weight = np.array(bundle.evaluation()["layer_weights"]["weight"])
    np.testing.assert_allclose(1 / bundle.probes.scale, weight, rtol=1e-4)
    assert weight.mean() == pytest.approx(1, abs=1e-5)
    assert weight.argmax() == 1
    assert weight.min() >= 0.9 * FLOOR
    assert bundle.evaluation()["signal_of_the_bundle"] == "depth_mean_weighted"
    assert "each layer has a weight" in bundle.card()
    held = [one.evaluation()["held_out"]["signals"]["bundle"]["auroc"] for one in (plain, bundle)]
    assert held[1] > held[0] + 0.02
    scorer = Scorer(OneLayer(1.0), bundle)  # replays the golden prompts
    (report,) = scorer.score([scorer.render(planted_rows(1, seed=5)[0]["prompt"])])
    assert report.depth_mean == pytest.approx(report.trajectory.mean())


def test_the_classifier_of_weighted_layers_is_fitted_out_of_fold(tmp_path: Path) -> None:
    """Weights of 4 layers fitted on noise make their own rows look a little better; out of fold nothing is left."""
    rows = planted_rows(240, shuffled=True)
    bundle, _ = run(tmp_path, rows=rows, logit_scale="weighted", allow_no_signal=True)
    assert bundle.evaluation()["out_of_fold"]["depth_mean_auroc"] < 0.6
