"""Trajectories of scored prompts as a picture: what the terminal's plot shows, for several prompts at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from probes_store.bundle import Bundle
from service.risk import running_means
from service.scoring import RiskReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, which colour-blind readers can tell apart.  As many as ``score --plot`` takes prompts."""
LEGEND: dict[str, Any] = {"ncols": 1, "fontsize": 8, "frameon": False}
"""One column: a title with its answer is nearly as wide as the figure."""


def draw_trajectories(bundle: Bundle, prompts: Sequence[str], reports: Sequence[RiskReport], path: Path) -> None:
    """Write a PNG of ``draw_curves``.  ``prompts`` are the reports' titles, at most ``len(COLOURS)``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.4 + 0.16 * len(prompts)), dpi=110, layout="constrained")
    curves = [
        (title_of(text, report.completion.text.strip() if report.completion else None, report.risk), report.trajectory)
        for text, report in zip(prompts, reports, strict=True)
    ]
    draw_curves(figure.subplots(), bundle, curves)
    figure.legend(loc="outside lower center", **LEGEND)
    figure.savefig(path, format="png", metadata={"Software": None})


def draw_curves(axes: Axes, bundle: Bundle, curves: Sequence[tuple[str, NDArray[np.float64]]]) -> None:
    """Draw trajectories [m] with their titles, their running means, and where the bundle's training rows lie."""
    layers = np.arange(bundle.manifest.model.num_layers)
    probes = bundle.probes
    for value, name, colour in ((1, "factual rows", "#0072b2"), (0, "hallucinated rows", "#d55e00")):
        mean, std = probes.trajectory_mean[value], probes.trajectory_std[value]
        axes.fill_between(layers, mean - std, mean + std, color=colour, alpha=0.12, linewidth=0)
        axes.plot(layers, mean, color=colour, linewidth=1, linestyle=":", label=f"{name}: mean ± 1 std")
    for (title, trajectory), colour in zip(curves, COLOURS, strict=False):
        axes.plot(layers, trajectory, color=colour, marker="o", markersize=4, label=title)
        axes.plot(layers, running_means(trajectory), color=colour, linewidth=1, linestyle="--")
    axes.set_xlabel("layer (dashed: running depth mean)")
    axes.set_ylabel("truth logit")
    axes.set_title("Read at the last prompt token, before the first answer token", fontsize=11)
    axes.set_xticks(layers[:: -(-len(layers) // 16)])
    axes.spines[["top", "right"]].set_visible(False)


def title_of(prompt: str, answer: str | None, risk: float) -> str:
    """A curve's title: the prompt, its answer and its risk, each in one line."""
    return "  ".join(filter(None, (_short(prompt), _short(answer or ""), f"risk {risk:.2f}")))


def _short(text: str, limit: int = 48) -> str:
    """One line without ``$``, which matplotlib would read as mathematics."""
    line = " ".join(text.split()).replace("$", r"\$")
    return line if len(line) <= limit else line[: limit - 1] + "…"
