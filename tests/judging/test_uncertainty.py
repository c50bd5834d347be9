"""A risk's interval and the distance to training, as a bundle's record has them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from probes_store.bundle import Bundle
from probes_store.records import Recalibration
from service.judging.uncertainty import distance, uncertain
from service.risk import risk
from tests.kit.bundles import INTERVAL, UNCERTAINTY, make_draft, write_bundle


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return write_bundle(make_draft(uncertainty=UNCERTAINTY), tmp_path / "tiny" / "1")


def test_the_distance_is_mahalanobis() -> None:
    rng = np.random.default_rng(0)
    root = rng.normal(size=(3, 3))
    rows, mean = rng.normal(size=(5, 3)), rng.normal(size=3)
    found = distance(rows, mean, root)
    assert found == pytest.approx(
        [np.sqrt((row - mean) @ (root.T @ root) @ (row - mean)) for row in rows]
    )
    assert distance(rows[0], mean, root) == pytest.approx(found[0])
    assert distance(mean, mean, root) == 0


def test_outside_from_a_distance_of_1(bundle: Bundle) -> None:
    signals = np.array([0.0])
    for step, outside in ((0.99, False), (1.0, True), (-1.5, True)):
        found = uncertain(bundle, np.array([0.5, 0.5 + step, 0.5]), signals)
        assert (found.distance, found.outside) == (pytest.approx(abs(step)), outside)


def test_the_interval_holds_the_risk_and_has_the_records_width(bundle: Bundle) -> None:
    classifier = bundle.manifest.classifier
    for mean, step in ((0.3, 0.0), (-2.0, 0.8), (40.0, 0.0), (1e6, 1e6)):
        signals = np.array([mean])
        found = uncertain(bundle, np.array([0.5 + step, 0.5, 0.5]), signals)
        assert found.interval is not None
        z = classifier.weight[0] * mean + classifier.intercept
        half = INTERVAL.half_width(z, step)
        low, high = (float(risk(np.array([z + side]), np.ones(1), 0.0)) for side in (half, -half))
        assert found.interval == pytest.approx((low, high))
        assert (
            0
            <= low
            <= float(risk(signals, np.array(classifier.weight), classifier.intercept))
            <= high
            <= 1
        )


def test_without_refits_there_is_a_distance_and_no_interval(tmp_path: Path) -> None:
    alone = dataclasses.replace(UNCERTAINTY, interval=None)
    found = uncertain(
        write_bundle(make_draft(uncertainty=alone), tmp_path / "a"), np.full(3, 0.5), np.zeros(1)
    )
    assert (found.distance, found.interval) == (0.0, None)


def test_the_ends_of_the_interval_are_recalibrated_as_the_risk_is(
    tmp_path: Path, bundle: Bundle
) -> None:
    recalibration = Recalibration("beta", 0.5, 2.0, -0.4)
    mapped = write_bundle(
        make_draft(uncertainty=UNCERTAINTY, recalibration=recalibration), tmp_path / "mapped"
    )
    for mean in (-1.0, 0.3):
        plain, found = (
            uncertain(one, np.full(3, 0.6), np.array([mean])) for one in (bundle, mapped)
        )
        assert plain.interval is not None
        assert found.interval == pytest.approx(
            [float(recalibration(end)) for end in plain.interval]
        )
        assert found.distance == plain.distance
