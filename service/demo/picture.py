"""The README's picture: the trajectories of a question the demo model can answer and of one it cannot."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from probes_store.bundle import Bundle
from service.engines.base import Engine, Sampling
from service.guard import GATE
from service.risk import running_means
from service.scoring import Scorer

KNOWN = "What is the capital of Italy?"
UNKNOWN = "What is the capital of the Solomon Islands?"


def draw_pair(engine: Engine, bundle: Bundle, path: Path) -> None:
    """Write a PNG with both trajectories between the class means of the bundle's training rows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    scorer = Scorer(engine, bundle)
    ids = [scorer.render(prompt=text) for text in (KNOWN, UNKNOWN)]
    reports = scorer.score_or_continue(ids, Sampling(max_tokens=24), GATE.at(1.0))
    layers = np.arange(bundle.manifest.model.num_layers)
    probes = bundle.probes
    figure, axes = plt.subplots(figsize=(8, 4.6), dpi=110, layout="constrained")
    for value, name, colour in ((1, "factual rows", "#0072b2"), (0, "hallucinated rows", "#d55e00")):
        mean, std = probes.trajectory_mean[value], probes.trajectory_std[value]
        axes.fill_between(layers, mean - std, mean + std, color=colour, alpha=0.12, linewidth=0)
        axes.plot(layers, mean, color=colour, linewidth=1, linestyle=":", label=f"{name}: mean ± 1 std")
    for text, report, colour in zip((KNOWN, UNKNOWN), reports, ("#0072b2", "#d55e00"), strict=True):
        answer = report.completion.text.strip() if report.completion else ""
        axes.plot(
            layers, report.trajectory, color=colour, marker="o", label=f"{text}  {answer}  risk {report.risk:.2f}"
        )
        axes.plot(layers, running_means(report.trajectory), color=colour, linewidth=1, linestyle="--")
    axes.set_xlabel("layer (dashed: running depth mean)")
    axes.set_ylabel("truth logit")
    axes.set_title("Read at the last prompt token, before the first answer token", fontsize=11)
    axes.set_xticks(layers)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)
