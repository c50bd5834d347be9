"""The trajectory drawn in characters."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from service.cli.output import draw_report, plot_lines
from service.engines.scheduler import Scheduled
from service.library.results import risk_of
from service.scoring import Scorer
from tests.matching import contextual_bundle, matching_bundle
from tests.scripted_engine import ScriptedEngine


@pytest.mark.parametrize("layers", [1, 8, 28, 80, 126])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_plot_fits_and_marks_every_shown_layer(layers: int, width: int) -> None:
    rng = np.random.default_rng(layers)
    lines = [line.plain for line in plot_lines(rng.normal(size=layers), rng.normal(size=(2, layers)), width)]
    body = [line for line in lines if "│" in line]
    assert all(len(line) <= width for line in body)
    marks = sum(line.count("●") for line in body)
    assert marks == min(layers, marks)
    assert marks >= min(layers, (width - 10) // 5)


def test_the_highest_logit_is_on_top_and_the_lowest_at_the_bottom() -> None:
    trajectory = np.array([0.0, 3.0, -3.0])
    body = [line.plain for line in plot_lines(trajectory, np.zeros((2, 3)), 80) if "│" in line.plain]
    assert "3.00" in body[0]
    assert "●" in body[0]
    assert "●" in body[-1]


def test_a_flat_trajectory_draws() -> None:
    assert plot_lines(np.zeros(4), np.zeros((2, 4)), 80)


@pytest.mark.parametrize(("applies_from", "applies"), [(0.999999, False), (1e-6, True), (None, None)])
def test_a_prompt_that_asks_for_no_fact_is_told(
    tmp_path: Path, applies_from: float | None, applies: bool | None
) -> None:
    script = ScriptedEngine()
    bundle = (
        matching_bundle(script, tmp_path)
        if applies_from is None
        else contextual_bundle(script, tmp_path, applies_from=applies_from)
    )
    [report] = Scorer(Scheduled(script), bundle).score([[256, 65]])
    console = Console(file=StringIO(), width=100)
    draw_report(bundle, report, console)
    assert isinstance(console.file, StringIO)
    said = f"asks for no fact (P(asks) {report.context.asks or 0.0:.2f}): the risk does not apply"
    assert (said in console.file.getvalue()) is (applies is False)
    assert risk_of("A", report).applies is applies
