"""A risk report for people: one line of verdict and the trajectory drawn in characters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from service.policies.guard import Decision
from service.risk import running_means

if TYPE_CHECKING:
    from probes_store.bundle import Bundle
    from service.judging.uncertainty import Uncertain
    from service.scoring import RiskReport

ROWS = 11
COLUMN = 5  # characters a layer takes, where the terminal is wide enough


def draw_report(bundle: Bundle, report: RiskReport, console: Console | None = None) -> None:
    """Print risk, decision, the answer where there is one, and the trajectory between the class means."""
    console = console or Console(highlight=False)
    gated = report.decision is not Decision.CONTINUE
    verdict = Text.assemble(
        ("risk ", "bold"),
        (f"{report.risk:.3f}", "bold red" if gated else "bold green"),
        f"  decision {report.decision.value} (threshold {report.verdict.threshold:.3f})",
        f"  depth mean {report.depth_mean:+.3f}  {bundle.reference}",
    )
    console.print(verdict)
    if report.uncertain is not None:
        console.print(_uncertainty(report.uncertain))
    if not report.context.applies:
        console.print(f"asks for no fact (P(asks) {report.context.asks:.2f}): the risk does not apply")
    if report.completion is not None:
        console.print(Text.assemble(("answer ", "bold"), report.completion.text.strip()))
    means = np.asarray(bundle.probes.trajectory_mean, np.float64)
    for line in plot_lines(report.trajectory, means, width=console.width):
        console.print(line)


def _uncertainty(known: Uncertain) -> str:
    parts = [f"{'outside' if known.outside else 'inside'} what training saw (distance {known.distance:.2f})"]
    if known.interval is not None:
        low, high = known.interval
        parts.insert(0, f"other training rows would give {low:.3f} to {high:.3f}")
    return "  ".join(parts)


def plot_lines(trajectory: NDArray[np.float64], class_means: NDArray[np.float64], width: int = 80) -> list[Text]:
    """Draw truth logits over depth: trajectory [m], class_means [2, m] (0 hallucinated, 1 factual)."""
    layers = len(trajectory)
    column = max(1, min(COLUMN, (width - 10) // layers))
    shown = np.arange(layers)
    if layers * column > width - 10:  # deeper than the terminal is wide: every k-th layer
        shown = np.unique(np.linspace(0, layers - 1, max(2, (width - 10) // column)).astype(int))
    mean = running_means(trajectory)
    series = [
        (class_means[0], "-", "red"),
        (class_means[1], "+", "green"),
        (mean, "○", "cyan"),
        (trajectory, "●", "bold"),
    ]
    low = min(float(values.min()) for values, _, _ in series)
    high = max(float(values.max()) for values, _, _ in series)
    step = (high - low) / (ROWS - 1) or 1.0
    grid = [[(" ", "")] * (len(shown) * column) for _ in range(ROWS)]
    for values, mark, style in series:
        for place, layer in enumerate(shown):
            row = round((high - float(values[layer])) / step)
            grid[row][place * column + column // 2] = (mark, style)
    lines = [Text("truth logit")]
    for row, cells in enumerate(grid):
        label = f"{high - row * step:8.2f} " if row in (0, ROWS // 2, ROWS - 1) else " " * 9
        lines.append(Text.assemble(label, "│", *cells))
    axis = "".join(str(layer).center(column) for layer in shown) if column >= 3 else f"0 .. {layers - 1}"
    lines.append(Text(" " * 9 + "└" + "─" * (len(shown) * column)))
    lines.append(Text(f"{'layer':>9} {axis}"))
    lines.append(
        Text.assemble(
            " " * 10, ("●", "bold"), " this prompt  ", ("○", "cyan"), " its running mean  ",
            ("+", "green"), " factual mean  ", ("-", "red"), " hallucinated mean",
        )
    )  # fmt: skip
    return lines
