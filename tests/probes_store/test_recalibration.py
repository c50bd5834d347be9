"""The recalibration record: strict, strictly increasing, and part of format version 3."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import expit, logit

from probes_store.bundle import render
from probes_store.errors import BundleDamaged, MissingField
from probes_store.manifest import manifest_bytes, read_manifest
from probes_store.recalibration import Recalibration, least_reaching
from tests.probes_store.factory import make_draft, write_bundle
from tests.probes_store.reseal import reseal

PLATT = Recalibration("platt", 0.5, 0.5, -1.0)
STEPS = Recalibration("isotonic", knots=(0.0, 0.25, 0.5, 1.0), values=(0.1, 0.2, 0.6, 0.9))


def draft(recalibration: Recalibration) -> Any:
    made = make_draft()
    return dataclasses.replace(made, manifest=dataclasses.replace(made.manifest, recalibration=recalibration))


@pytest.mark.parametrize("recalibration", [PLATT, STEPS])
def test_it_is_written_and_read_back(tmp_path: Path, recalibration: Recalibration) -> None:
    bundle = write_bundle(draft(recalibration), tmp_path / "tiny" / "1")
    assert (bundle.manifest.recalibration, bundle.manifest.format_version) == (recalibration, 3)
    document = json.loads(manifest_bytes(bundle.manifest))
    for field in dataclasses.fields(Recalibration):
        value = document["recalibration"].pop(field.name)
        with pytest.raises(MissingField, match=rf"recalibration\.{field.name}"):
            read_manifest(reseal(dict(document)))
        document["recalibration"][field.name] = value


def test_what_it_does() -> None:
    risk = np.array([[0.1, 0.5], [0.9, 0.99]])
    np.testing.assert_allclose(PLATT(risk), expit(0.5 * logit(risk) - 1.0), rtol=1e-12)
    beta = Recalibration("beta", 0.5, 2.0, 0.3)
    np.testing.assert_allclose(beta(risk), expit(0.5 * np.log(risk) - 2 * np.log1p(-risk) + 0.3), rtol=1e-12)
    assert STEPS(np.array([0.0, 0.125, 0.25, 0.75, 1.0])).tolist() == pytest.approx([0.1, 0.15, 0.2, 0.75, 0.9])


@pytest.mark.parametrize("recalibration", [PLATT, STEPS, Recalibration("beta", 0.0, 1.0, 0.0)])
def test_a_nan_stays_one_and_the_ends_stay_inside(recalibration: Recalibration) -> None:
    assert math.isnan(float(recalibration(math.nan)))
    assert 0 <= float(recalibration(0.0)) < float(recalibration(1.0)) <= 1


@pytest.mark.parametrize("recalibration", [PLATT, STEPS])
@pytest.mark.parametrize("level", [0.15, 0.5, 0.61])
def test_the_least_risk_that_reaches_a_level(recalibration: Recalibration, level: float) -> None:
    least = least_reaching(recalibration, level)
    assert recalibration(least) >= level > recalibration(math.nextafter(least, 0.0))


def test_levels_that_all_or_none_reach() -> None:
    assert least_reaching(STEPS, 0.95) == 1.0
    assert least_reaching(STEPS, 0.05) < 1e-300


@pytest.mark.parametrize(
    "recalibration",
    [
        Recalibration("beta", -0.1, 1.0, 0.0), Recalibration("beta", 1.0, -0.1, 0.0), Recalibration("beta", 0.0, 0.0),
        Recalibration("platt", math.nan, 1.0), Recalibration("isotonic"),
        dataclasses.replace(STEPS, method="platt"), dataclasses.replace(STEPS, values=(0.1, 0.2, 0.6)),
        dataclasses.replace(STEPS, values=(0.1, 0.2, 0.2, 0.9)),
        dataclasses.replace(STEPS, values=(0.0, 0.2, 0.6, 0.9)),
        dataclasses.replace(STEPS, values=(0.1, 0.2, 0.6, 1.0)), dataclasses.replace(STEPS, knots=(0.0, 0.5, 0.5, 1.0)),
        dataclasses.replace(STEPS, knots=(0.1, 0.2, 0.5, 1.0)), dataclasses.replace(STEPS, knots=(0.0, 0.2, 0.5, 0.9)),
        dataclasses.replace(PLATT, method="identity"),
    ],
    ids=str,
)  # fmt: skip
def test_senseless_ones_are_refused(recalibration: Recalibration) -> None:
    with pytest.raises(BundleDamaged, match=r"recalibration\."):
        render(draft(recalibration))
