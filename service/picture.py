"""Trajectories of scored prompts as a picture: what the terminal's plot shows, for several prompts at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from probes_store.bundle import Bundle
from service.risk import running_means
from service.scoring import RiskReport

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, which colour-blind readers can tell apart.  As many as ``score --plot`` takes prompts."""


def draw_trajectories(bundle: Bundle, prompts: Sequence[str], reports: Sequence[RiskReport], path: Path) -> None:
    """Write a PNG: truth logit over layers, its running mean, and where the bundle's training rows lie.

    ``prompts`` are the reports' titles, at most ``len(COLOURS)``.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    layers = np.arange(bundle.manifest.model.num_layers)
    probes = bundle.probes
    figure, axes = plt.subplots(figsize=(8, 4.6), dpi=110, layout="constrained")
    for value, name, colour in ((1, "factual rows", "#0072b2"), (0, "hallucinated rows", "#d55e00")):
        mean, std = probes.trajectory_mean[value], probes.trajectory_std[value]
        axes.fill_between(layers, mean - std, mean + std, color=colour, alpha=0.12, linewidth=0)
        axes.plot(layers, mean, color=colour, linewidth=1, linestyle=":", label=f"{name}: mean ± 1 std")
    for text, report, colour in zip(prompts, reports, COLOURS, strict=False):
        answer = report.completion.text.strip() if report.completion else ""
        title = "  ".join(filter(None, (_short(text), _short(answer), f"risk {report.risk:.2f}")))
        axes.plot(layers, report.trajectory, color=colour, marker="o", markersize=4, label=title)
        axes.plot(layers, running_means(report.trajectory), color=colour, linewidth=1, linestyle="--")
    axes.set_xlabel("layer (dashed: running depth mean)")
    axes.set_ylabel("truth logit")
    axes.set_title("Read at the last prompt token, before the first answer token", fontsize=11)
    axes.set_xticks(layers[:: -(-len(layers) // 16)])
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", metadata={"Software": None})
    plt.close(figure)


def _short(text: str, limit: int = 60) -> str:
    """One line without ``$``, which matplotlib would read as mathematics."""
    line = " ".join(text.split()).replace("$", r"\$")
    return line if len(line) <= limit else line[: limit - 1] + "…"
