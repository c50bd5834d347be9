"""The rules of --logit-scale, from the fit to the served mean over depth."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from probes_store.errors import BadValue
from probes_store.manifest import manifest_bytes, read_manifest, version_of
from service.fitting import LogitScale
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


@pytest.mark.parametrize(("scale", "version"), [("unit_norm", 1), ("standardized", 1), ("weighted", 3)])
def test_an_older_reader_refuses_what_it_does_not_know(tmp_path: Path, scale: LogitScale, version: int) -> None:
    bundle, _ = run(tmp_path, evaluate=False, uncertainty=False, logit_scale=scale)
    manifest = bundle.manifest
    assert manifest.format_version == version == version_of(manifest)
    assert read_manifest(manifest_bytes(manifest)) == manifest
    if version > 1:
        older = dataclasses.replace(manifest, format_version=1)
        with pytest.raises(BadValue, match="version 1") as caught:
            read_manifest(manifest_bytes(older))
        assert caught.value.field == "logit_scale"


def test_the_classifier_of_weighted_layers_is_fitted_out_of_fold(tmp_path: Path) -> None:
    """Weights of 4 layers fitted on noise make their own rows look a little better; out of fold nothing is left."""
    rows = planted_rows(240, shuffled=True)
    bundle, _ = run(tmp_path, rows=rows, logit_scale="weighted", allow_no_signal=True)
    assert bundle.evaluation()["out_of_fold"]["depth_mean_auroc"] < 0.6
