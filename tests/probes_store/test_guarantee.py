"""Format version 2: the guarantee is strict, sealed and only there where the version says so."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from probes_store.bundle import BundleDraft, render
from probes_store.errors import BadValue, MissingField, UnknownField
from probes_store.guarantee import Guarantee
from probes_store.manifest import manifest_bytes, read_manifest
from tests.probes_store.factory import VERSION_1, make_draft, write_bundle
from tests.probes_store.reseal import reseal

GUARANTEE = Guarantee(
    alpha=0.1,
    delta=0.05,
    threshold=0.25,
    groups=100,
    hallucinated=3,
    p_value=0.0078,
    answered=0.5,
    risk_control_threshold=None,
    rows=400,
    all_groups=200,
    data_digest="sha256:" + "5" * 64,
    labels="given",
    judge=None,
    dtype="float32",
    seed=0,
    statement="It holds.",
)


def draft(**changes: Any) -> BundleDraft:
    given = dataclasses.replace(GUARANTEE, **changes)
    made = make_draft(threshold=given.threshold)
    return dataclasses.replace(made, manifest=dataclasses.replace(made.manifest, guarantee=given))


def test_it_is_written_and_read_back(tmp_path: Path) -> None:
    bundle = write_bundle(draft(), tmp_path / "tiny" / "1")
    assert bundle.manifest.guarantee == GUARANTEE
    assert bundle.manifest.format_version == 2
    assert bundle.manifest.digest != write_bundle(make_draft(threshold=0.25), tmp_path / "t" / "1").manifest.digest


def test_a_closed_gate_has_threshold_0(tmp_path: Path) -> None:
    closed = draft(threshold=0.0, groups=0, hallucinated=0, p_value=1.0, answered=0.0)
    bundle = write_bundle(closed, tmp_path / "tiny" / "1")
    assert bundle.manifest.guarantee is not None
    assert bundle.manifest.guarantee.closed


def test_version_1_keeps_its_bytes() -> None:
    paths = list(VERSION_1.glob("*/*/bundle.json"))
    assert paths
    for path in paths:
        data = path.read_bytes()
        assert b"guarantee" not in data
        assert manifest_bytes(read_manifest(data)) == data


def test_version_and_guarantee_go_together() -> None:
    plain = json.loads(manifest_bytes(render(make_draft())[0]))
    full = json.loads(manifest_bytes(render(draft())[0]))
    with pytest.raises(UnknownField, match="guarantee"):
        read_manifest(reseal(full | {"format_version": 1}))
    with pytest.raises(UnknownField, match="guarantee"):
        read_manifest(reseal(plain | {"guarantee": None}))
    with pytest.raises(MissingField, match="guarantee"):
        read_manifest(reseal(plain | {"format_version": 2}))
    with pytest.raises(BadValue, match="guarantee"):
        read_manifest(reseal(plain | {"format_version": 2, "guarantee": None}))
    for field in dataclasses.fields(Guarantee):
        shorter = {key: value for key, value in full["guarantee"].items() if key != field.name}
        with pytest.raises(MissingField, match=f"guarantee.{field.name}"):
            read_manifest(reseal(full | {"guarantee": shorter}))


@pytest.mark.parametrize(
    "change",
    [
        {"alpha": 0.0}, {"delta": 1.0}, {"p_value": 0.06}, {"answered": 1.5}, {"risk_control_threshold": -0.5},
        {"hallucinated": 101}, {"groups": 201}, {"all_groups": 500}, {"data_digest": ""}, {"statement": ""},
        {"seed": -1}, {"dtype": "float64"}, {"labels": "guessed"}, {"threshold": 0.0}, {"threshold": 1.5},
    ],
    ids=str,
)  # fmt: skip
def test_senseless_ones_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BadValue):
        render(draft(**change))


def test_the_threshold_is_the_manifests() -> None:
    made = draft()
    with pytest.raises(BadValue, match=r"guarantee\.threshold"):
        render(dataclasses.replace(made, manifest=dataclasses.replace(made.manifest, threshold=0.3)))


def with_shapes(shapes: tuple[str, ...], made: BundleDraft) -> BundleDraft:
    return dataclasses.replace(made, manifest=dataclasses.replace(made.manifest, guarantee_shapes=shapes))


def test_the_shapes_of_its_calibration_are_of_version_4(tmp_path: Path) -> None:
    bundle = write_bundle(with_shapes(("alone", "a chat"), draft()), tmp_path / "tiny" / "1")
    assert (bundle.manifest.guarantee_shapes, bundle.manifest.format_version) == (("alone", "a chat"), 4)


@pytest.mark.parametrize("shapes", [(), ("alone", "alone"), ("alone", "")], ids=str)
def test_senseless_shapes_are_refused(shapes: tuple[str, ...]) -> None:
    with pytest.raises(BadValue, match="guarantee_shapes"):
        render(with_shapes(shapes, draft()))


def test_shapes_without_a_guarantee_are_refused() -> None:
    with pytest.raises(BadValue, match="guarantee_shapes"):
        render(with_shapes(("alone",), make_draft()))
