"""A run publishes an interval for each risk and a reference of its trajectories, from fits that it makes anyway."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from probes_store.bundle import Bundle
from service.scoring import Scorer
from tests.fitting.planted import PlantedEngine, planted_rows
from tests.trainer.test_run import run

ROWS = 240


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return run(tmp_path_factory.mktemp("trained"))[0]


def test_the_record_and_its_words(trained: Bundle) -> None:
    manifest, record = trained.manifest, trained.manifest.uncertainty
    assert record is not None
    assert record.interval is not None
    assert (manifest.format_version, record.outside_rows, record.outside_share) == (1, ROWS, 0.01)
    assert (record.interval.level, record.interval.fits) == (0.95, 2 * 3)  # seeds, folds
    assert record.interval.half_width(0.0, 0.5) > 0
    section = trained.card().partition("## Uncertainty\n")[2].partition("\n## ")[0]
    assert record.statement in section
    low, high = section.partition("| 0.5 | ")[2].partition(" |")[0].split(" to ")
    assert 0 < float(low) < 0.5 < float(high) < 1


def test_what_it_says_when_served(trained: Bundle) -> None:
    engine = PlantedEngine()
    scorer = Scorer(engine, trained)
    reports = scorer.score([scorer.render(prompt=row["prompt"]) for row in planted_rows(600, seed=3)])
    known = [report.uncertain for report in reports]
    assert np.mean([one is not None and one.outside for one in known]) < 0.04
    for report in reports:
        assert report.uncertain is not None
        assert report.uncertain.interval is not None
        low, high = report.uncertain.interval
        assert low < report.risk < high
    engine.strength = 6.0  # the same prompts on an engine that reads other numbers
    strange = scorer.score([scorer.render(prompt=row["prompt"]) for row in planted_rows(50, seed=4)])
    assert all(report.uncertain is not None and report.uncertain.outside for report in strange)


def test_without_nested_refits_there_is_a_reference_and_no_interval(tmp_path: Path, trained: Bundle) -> None:
    for name, changes in (("one-seed", {"seeds": (0,)}), ("not-evaluated", {"evaluate": False})):
        record = run(tmp_path / name, c=0.3, **changes)[0].manifest.uncertainty
        assert record is not None
        assert record.interval is None
        assert "no intervals" in record.statement
