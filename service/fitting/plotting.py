"""What the model card's figures and the report's have in common: colours, class bands, layer ticks, thinned curves.

Colours are Okabe and Ito's, which colour-blind readers can tell apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#777777"
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
_CLASS_LOOKS = ((BLUE, "-"), (ORANGE, "--"))
Floats = NDArray[np.floating]


def class_bands(axes: Axes, classes: Iterable[tuple[str, Floats, Floats]]) -> None:
    """Mean truth logit by layer, with a band of one standard deviation: (legend, mean [m], std [m]), factual first."""
    for (text, mean, std), (colour, line) in zip(classes, _CLASS_LOOKS, strict=True):
        layers = np.arange(len(mean))
        axes.fill_between(layers, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)
        axes.plot(layers, mean, line, color=colour, label=text, linewidth=1.8)
    axes.axhline(0, color=GREY, linewidth=0.8)


def layer_ticks(axes: Axes, layers: int, limit: int) -> None:
    """At most ``limit`` ticks, evenly spaced from layer 0."""
    axes.set_xticks(range(0, layers, max(1, -(-layers // limit))))
    axes.set_xlim(-0.5, layers - 0.5)


def legend_below(axes: Axes, columns: int = 1) -> None:
    """Under the axes, where it hides no curve; the figure's layout makes room for it."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, max(len(labels), 1)))


def thinned(length: int, limit: int) -> NDArray[np.int64]:
    """At most ``limit`` positions of a curve, both ends among them."""
    return np.unique(np.linspace(0, length - 1, min(length, limit)).round().astype(np.int64))
