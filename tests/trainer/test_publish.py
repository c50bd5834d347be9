"""Golden prompts are read back through the serving path, and a difference stops the publishing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from probes_store.store import Store
from service.engines.base import ModelIdentity
from service.errors import EngineError
from service.readout import Probes, Site
from service.trainer.options import TrainOptions
from service.trainer.publish import golden_rows, model_record
from service.trainer.run import train
from tests.fitting.planted import PlantedEngine, Quiet, planted_rows, write_rows


def test_golden_rows_spread_over_the_risks() -> None:
    risk = np.random.default_rng(0).permutation(100) / 100
    chosen = golden_rows(risk)
    assert len(chosen) == 8
    assert risk[chosen][0] == 0.0
    assert risk[chosen][-1] == 0.99
    assert np.diff(risk[chosen]).max() <= 0.15
    assert golden_rows(np.array([0.3, 0.1])).tolist() == [1, 0]


class OffByOneHead(PlantedEngine):
    """Serves another head than it extracted."""

    def score(self, prompts, probes, *, first_token=False):  # type: ignore[no-untyped-def]
        wrong = [Probes(p.site, (p.head + 1) % 3, p.direction, p.bias, p.scale) for p in probes]
        return super().score(prompts, wrong, first_token=first_token)


def test_an_engine_that_serves_other_readouts_publishes_nothing(tmp_path: Path) -> None:
    options = TrainOptions(
        data=(str(write_rows(tmp_path / "rows.jsonl", planted_rows(80))),),
        name="planted",
        run_dir=tmp_path / "run",
        folds=2,
        seeds=(0,),
        c=0.3,
        evaluate=False,
        jobs=1,
    )
    with pytest.raises(EngineError, match="serving and training read different logits"):
        train(options, OffByOneHead, Store(tmp_path / "store"), console=Quiet())
    assert list((tmp_path / "store").iterdir()) == []


def test_a_models_folder_is_recorded_by_its_name_alone(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    for given, recorded in ((str(tmp_path / "my-model"), "my-model"), ("org/model", "org/model")):
        identity: ModelIdentity = PlantedEngine(model=given).identity
        assert model_record(identity).name == recorded


def test_rows_are_read_the_same_from_disk_and_from_the_engine(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", planted_rows(80))
    options = TrainOptions(
        data=(str(data),), name="p", run_dir=tmp_path / "run", readout="residual_stream", logit_scale="standardized",
        folds=2, seeds=(0,), c=0.3, evaluate=False, jobs=1,
    )  # fmt: skip
    engine = PlantedEngine()
    bundle = train(options, lambda: engine, Store(tmp_path / "store"), console=Quiet())
    assert engine.closed
    tensors = bundle.probes
    probes = Probes(Site.RESIDUAL_STREAM, tensors.head, tensors.direction, tensors.bias, tensors.scale)
    onsets = PlantedEngine().score(bundle.golden.prompts(), [probes])
    np.testing.assert_allclose([o.trajectories[0] for o in onsets], bundle.golden.trajectory, rtol=1e-5, atol=1e-5)
