"""Format version 3: the uncertainty record, its tensors, and the fields that a version has."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes_store.bundle import BundleDraft, load_bundle, render
from probes_store.errors import BadValue, BundleDamaged, MissingField, UnknownField, WrongShape
from probes_store.manifest import OPTIONAL, manifest_bytes, read_manifest
from probes_store.uncertainty import RefitInterval, Uncertainty
from tests.probes_store.factory import make_draft, write_bundle
from tests.probes_store.reseal import edit_tensors, reseal
from tests.probes_store.test_guarantee import GUARANTEE

INTERVAL = RefitInterval(level=0.95, fits=15, centre=0.5, base=0.04, by_log_odds=0.01, by_distance=0.25)
UNCERTAINTY = Uncertainty(outside_share=0.01, outside_rows=400, interval=INTERVAL, statement="What both mean.")


def draft(uncertainty: Uncertainty | None = UNCERTAINTY, **fields: Any) -> BundleDraft:
    """A draft whose reference is the unit ball around 0.5."""
    made = make_draft()
    layers = made.manifest.model.num_layers
    reference = {"reference_mean": np.full(layers, 0.5), "reference_whitening": np.eye(layers)}
    return dataclasses.replace(
        made,
        manifest=dataclasses.replace(made.manifest, uncertainty=uncertainty, **fields),
        probes=dataclasses.replace(made.probes, **(reference if uncertainty else {})),
    )


def test_it_is_written_and_read_back(tmp_path: Path) -> None:
    bundle = write_bundle(draft(), tmp_path / "tiny" / "1")
    assert (bundle.manifest.uncertainty, bundle.manifest.format_version) == (UNCERTAINTY, 3)
    assert bundle.probes.reference_mean is not None
    assert bundle.probes.reference_whitening is not None
    assert bundle.probes.reference_mean.tolist() == [0.5, 0.5, 0.5]
    assert np.array_equal(bundle.probes.reference_whitening, np.eye(3))
    assert write_bundle(make_draft(), tmp_path / "t" / "1").probes.reference_mean is None


def test_a_file_has_every_field_of_its_version_and_of_those_before() -> None:
    guaranteed = {"guarantee": GUARANTEE, "threshold": GUARANTEE.threshold}
    for made, version, null in (
        (make_draft(), 1, set()),
        (draft(None, **guaranteed), 2, set()),
        (draft(), 3, {"guarantee", "recalibration"}),
        (draft(**guaranteed), 3, {"recalibration"}),
    ):
        manifest, _ = render(made)
        document = json.loads(manifest_bytes(manifest))
        assert document["format_version"] == manifest.format_version == version
        assert document.keys() & OPTIONAL.keys() == {field for field, brought in OPTIONAL.items() if brought <= version}
        assert {field for field in OPTIONAL.keys() & document.keys() if document[field] is None} == null
        assert read_manifest(manifest_bytes(manifest)) == manifest


def test_version_and_fields_go_together() -> None:
    plain = json.loads(manifest_bytes(render(make_draft())[0]))
    full = json.loads(manifest_bytes(render(draft())[0]))
    nulls = {field: None for field, brought in OPTIONAL.items() if brought <= 3}
    with pytest.raises(UnknownField, match="uncertainty"):
        read_manifest(reseal(full | {"format_version": 2}))
    with pytest.raises(MissingField, match="uncertainty"):
        read_manifest(reseal(plain | {"format_version": 3, "guarantee": None}))
    with pytest.raises(MissingField, match="guarantee"):
        read_manifest(reseal({key: value for key, value in full.items() if key != "guarantee"}))
    with pytest.raises(BadValue, match="uncertainty"):
        read_manifest(reseal(plain | {"format_version": 3} | nulls))
    for record, where in ((Uncertainty, full["uncertainty"]), (RefitInterval, full["uncertainty"]["interval"])):
        for field in dataclasses.fields(record):
            value = where.pop(field.name)
            with pytest.raises(MissingField, match=rf"uncertainty\.(interval\.)?{field.name}"):
                read_manifest(reseal(dict(full)))
            where[field.name] = value


@pytest.mark.parametrize(
    "change",
    [
        {"outside_share": 0.0}, {"outside_share": 1.0}, {"outside_rows": 0}, {"statement": ""}, {"level": 1.0},
        {"fits": 1}, {"base": -0.1}, {"by_log_odds": -0.1}, {"by_distance": -0.1}, {"centre": math.nan},
    ],
    ids=str,
)  # fmt: skip
def test_senseless_ones_are_refused(change: dict[str, Any]) -> None:
    names = {field.name for field in dataclasses.fields(RefitInterval)}
    if change.keys() <= names:
        change = {"interval": dataclasses.replace(INTERVAL, **change)}
    with pytest.raises(BundleDamaged, match=r"uncertainty\."):
        render(draft(dataclasses.replace(UNCERTAINTY, **change)))


def test_record_and_tensors_go_together(tmp_path: Path) -> None:
    made = draft()
    with pytest.raises(MissingField, match="reference_mean"):
        render(dataclasses.replace(made, probes=make_draft().probes))
    with pytest.raises(UnknownField, match="reference_"):
        render(dataclasses.replace(made, manifest=make_draft().manifest))
    with pytest.raises(WrongShape, match="reference_whitening"):
        render(dataclasses.replace(made, probes=dataclasses.replace(made.probes, reference_whitening=np.eye(2))))
    folder = tmp_path / "tiny" / "1"
    write_bundle(made, folder)
    edit_tensors(folder, "probes.safetensors", lambda tensors: tensors.update(reference_mean=np.full(3, np.nan, "f4")))
    with pytest.raises(BundleDamaged, match="reference_mean"):
        load_bundle(folder)


def test_the_half_width() -> None:
    assert INTERVAL.half_width(0.5, 0.0) == pytest.approx(0.2)
    assert INTERVAL.half_width(2.5, 0.0) == pytest.approx(math.sqrt(0.04 + 0.04))
    assert INTERVAL.half_width(0.5, 2.0) == pytest.approx(math.sqrt(1.04))
