"""Which bundles a service starts with."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from probes_store.errors import BundleError
from probes_store.manifest import MANIFEST
from probes_store.store import SHIPPED, Store
from service.cli.loading import load_bundles, load_scorers
from service.engines.scheduler import Scheduled
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
        assert list(load_bundles(store, ["demo", "demo-fused"], leave_out=True)) == ["demo"]
    assert "demo-fused is left out" in caplog.text
    with pytest.raises(BundleError):
        load_bundles(store, ["demo", "demo-fused"])


def test_no_other_bundle_takes_the_defaults_place(store: Store) -> None:
    with pytest.raises(BundleError):
        load_bundles(store, ["demo-fused", "demo"], leave_out=True)


def test_a_bundle_of_another_model_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine()
    own = matching_bundle(engine, tmp_path, "own", 1)
    other = matching_bundle(
        ScriptedEngine(Geometry(num_layers=3, num_heads=2, head_dim=8, hidden_size=16)), tmp_path, "other", 2
    )
    with caplog.at_level(logging.ERROR):
        scorers = load_scorers(Scheduled(engine), {"own": own, "other": other}, lambda line: None, leave_out=True)
    assert list(scorers) == ["own"]
    assert "other is left out" in caplog.text
    with pytest.raises(BundleError):
        load_scorers(Scheduled(engine), {"other": other, "own": own}, lambda line: None, leave_out=True)
