"""Draws the common parts of cards and reports: tables, and colours, bands, ticks and curves of
figures.

Colours are Okabe and Ito's, which colour-blind readers can tell apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE = "#0072B2"
ORANGE = "#D55E00"
GREEN = "#009E73"
PURPLE = "#CC79A7"
GREY = "#777777"
STYLE: Any = {
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
}
Floats = NDArray[np.floating]


def markdown_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()
) -> str:
    """Return a GitHub table of escaped texts, without a final newline; columns ``numbers`` are
    aligned to the right."""
    right = set(numbers)
    rule = [" ---: " if column in right else " --- " for column in range(len(header))]
    return "\n".join(
        [
            f"| {' | '.join(header)} |",
            f"|{'|'.join(rule)}|",
            *(f"| {' | '.join(row)} |" for row in rows),
        ]
    )


def aligned_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table for a terminal: padded columns, the first aligned to the left, the others to
    the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *more = zip(cells, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in more)]
        return f"| {' | '.join(padded)} |"

    rule = [
        f"{'-' * (width + 1)}:" if number else "-" * (width + 2)
        for number, width in enumerate(widths)
    ]
    return "\n".join([line(header), f"|{'|'.join(rule)}|", *map(line, rows)])


def class_bands(axes: Axes, classes: Iterable[tuple[str, Floats, Floats]]) -> None:
    """Draw the mean truth logit by layer and a band of one deviation: (legend, mean [m], std [m]),
    factual first."""
    for (text, mean, std), (colour, line) in zip(
        classes, ((BLUE, "-"), (ORANGE, "--")), strict=True
    ):
        layers = np.arange(len(mean))
        axes.fill_between(layers, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)
        axes.plot(layers, mean, line, color=colour, label=text, linewidth=1.8)
    axes.axhline(0, color=GREY, linewidth=0.8)


def layer_ticks(axes: Axes, layers: int, limit: int) -> None:
    """Set at most ``limit`` ticks, evenly spaced from layer 0."""
    axes.set_xticks(range(0, layers, max(1, -(-layers // limit))))
    axes.set_xlim(-0.5, layers - 0.5)


def legend_below(axes: Axes, columns: int = 1) -> None:
    """Put the legend under the axes, where it hides no curve; the figure's layout makes room for
    it."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(columns, max(len(labels), 1))
    )


def thinned(length: int, limit: int) -> NDArray[np.int64]:
    """Return at most ``limit`` positions of a curve, including both ends."""
    return np.unique(np.linspace(0, length - 1, min(length, limit)).round().astype(np.int64))
