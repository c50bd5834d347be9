"""The picture of the solver's growth: seconds against size, both axes logarithmic."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator


def plot_growth(growth: Mapping[str, Mapping[str, list[float]]], path: Path) -> None:
    """Write an SVG, a panel for each quantity that grows; the legend has the exponent of a least-squares power law."""
    figure = Figure(figsize=(6.6, 4.0), layout="constrained")
    plain = FuncFormatter(lambda value, _: f"{value:,.10g}")
    for (name, points), axes in zip(growth.items(), figure.subplots(1, len(growth)), strict=True):
        slope = np.polyfit(np.log(points["size"]), np.log(points["seconds"]), 1)[0]
        axes.loglog(points["size"], points["seconds"], "o-", markersize=3.5, label=f"one core: slope {slope:.2f}")
        axes.set(xlabel=name, ylabel="seconds", xticks=points["size"])
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0))
        axes.xaxis.set_minor_locator(NullLocator())
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(plain)
            axis.set_minor_formatter(NullFormatter())
    figure.savefig(path, format="svg", metadata={"Date": None})
