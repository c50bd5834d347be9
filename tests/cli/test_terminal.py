"""The trajectory drawn in characters."""

from __future__ import annotations

import numpy as np
import pytest

from service.cli.terminal import plot_lines


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
