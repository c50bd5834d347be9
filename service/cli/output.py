"""What commands print: results on standard output, for people or as JSON; progress is ``service.progress``'s."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from probes_store.bundle import Bundle
    from service.judging.evaluation import Tenth
    from service.scoring import RiskReport

ROWS = 11  # of a trajectory's plot
COLUMN = 5  # characters a layer takes, where the terminal is wide enough
MARKS = {"right": ("\u2713", "green"), "wrong": ("\u2717", "red"), "abstained": ("-", "dim")}
BAR = 40  # characters of a bar of 100 %


def print_line(text: str) -> None:
    """Print a line on standard output, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_json(document: Any) -> None:
    """Print a document on standard output."""
    print_line(json.dumps(document, indent=2, ensure_ascii=False))


# a risk report


def draw_report(bundle: Bundle, report: RiskReport, console: Console | None = None) -> None:
    """Print risk, decision, the answer where there is one, and the trajectory between the class means."""
    import numpy as np
    from rich.console import Console
    from rich.text import Text

    console = console or Console(highlight=False)
    risk = Text(f"{report.risk:.3f}", "bold green" if report.decision.value == "continue" else "bold red")
    threshold = f"  decision {report.decision.value} (threshold {report.verdict.threshold:.3f})"
    mean = f"  depth mean {report.depth_mean:+.3f}  {bundle.reference}"
    console.print(Text.assemble(("risk ", "bold"), risk, threshold, mean))
    if (known := report.uncertain) is not None:
        side = f"{'outside' if known.outside else 'inside'} what training saw (distance {known.distance:.2f})"
        if known.interval is not None:
            side = f"other training rows would give {known.interval[0]:.3f} to {known.interval[1]:.3f}  {side}"
        console.print(side)
    if not report.context.applies:
        console.print(f"asks for no fact (P(asks) {report.context.asks:.2f}): the risk does not apply")
    if report.completion is not None:
        console.print(Text.assemble(("answer ", "bold"), report.completion.text.strip()))
    means = np.asarray(bundle.probes.trajectory_mean, np.float64)
    console.print(*plot_lines(report.trajectory, means, width=console.width), sep="\n")


def plot_lines(trajectory: NDArray[np.float64], class_means: NDArray[np.float64], width: int = 80) -> list[Text]:
    """Draw truth logits over depth: trajectory [m], class_means [2, m] (0 hallucinated, 1 factual)."""
    import numpy as np
    from rich.text import Text

    from service.risk import running_means

    layers = len(trajectory)
    column = max(1, min(COLUMN, (width - 10) // layers))
    shown = np.arange(layers)
    if layers * column > width - 10:  # deeper than the terminal is wide: every k-th layer
        shown = np.unique(np.linspace(0, layers - 1, max(2, (width - 10) // column)).astype(int))
    hallucinated, factual = class_means
    series = [
        (hallucinated, "-", "red"), (factual, "+", "green"), (running_means(trajectory), "○", "cyan"),
        (trajectory, "●", "bold"),
    ]  # fmt: skip
    low = min(float(values.min()) for values, _, _ in series)
    high = max(float(values.max()) for values, _, _ in series)
    step = (high - low) / (ROWS - 1) or 1.0
    grid = [[(" ", "")] * (len(shown) * column) for _ in range(ROWS)]
    for values, mark, style in series:
        for place, layer in enumerate(shown):
            grid[round((high - float(values[layer])) / step)][place * column + column // 2] = (mark, style)
    lines = [Text("truth logit")]
    for row, cells in enumerate(grid):
        label = f"{high - row * step:8.2f} " if row in (0, ROWS // 2, ROWS - 1) else " " * 9
        lines.append(Text.assemble(label, "│", *cells))
    axis = "".join(str(layer).center(column) for layer in shown) if column >= 3 else f"0 .. {layers - 1}"
    lines += [Text(" " * 9 + "└" + "─" * (len(shown) * column)), Text(f"{'layer':>9} {axis}")]
    legend = ("this prompt  ", "its running mean  ", "factual mean  ", "hallucinated mean")
    parts = [((mark, style), f" {text}") for (_, mark, style), text in zip(reversed(series), legend, strict=True)]
    return [*lines, Text.assemble(" " * 10, *(part for pair in parts for part in pair))]


# held-out questions sorted by risk


@dataclass(frozen=True, slots=True)
class Seen:
    """One question, its risk, and what came of it."""

    prompt: str
    answer: str
    accepted: tuple[str, ...]
    risk: float
    flagged: bool  # a gate withholds it
    verdict: str  # "right" | "wrong" | "abstained"


@dataclass(frozen=True, slots=True)
class Tried:
    """All that ``hallutracer try`` shows."""

    bundle: str
    model: str
    threshold: float
    seen: tuple[Seen, ...]  # lowest risks first
    tenths: tuple[Tenth, ...]  # of the training rows, by folds that never saw the row

    @property
    def halves(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return questions and right answers by half of the risks; the middle one of an odd number is in the lower."""
        middle = (len(self.seen) + 1) // 2
        halves = (self.seen[:middle], self.seen[middle:])
        lower, upper = ({"questions": len(h), "right": sum(s.verdict == "right" for s in h)} for h in halves)
        return lower, upper

    def document(self) -> dict[str, Any]:
        """Return it for --json."""
        lower, upper = self.halves
        return asdict(self) | {"lower_half": lower, "upper_half": upper}


def draw_sorted(tried: Tried, console: Console | None = None) -> None:
    """Print the table of questions, the tenths as bars, and the two numbers that matter."""
    from rich.console import Console

    console = console or Console(highlight=False)
    console.print(_table(tried, console.width))
    if tried.tenths:
        console.print("", *tenth_lines(tried.tenths), sep="\n")
    lower, upper = tried.halves
    console.print(
        f"\n{tried.model}, asked {len(tried.seen)} questions that {tried.bundle} was not fitted on: right in "
        f"{lower['right']} of the {lower['questions']} with the lower risks, in {upper['right']} of the "
        f"{upper['questions']} with the higher.",
        soft_wrap=True, markup=False,
    )  # fmt: skip


def _table(tried: Tried, width: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, width=min(width, 120), header_style="bold")
    table.add_column("risk", justify="right", no_wrap=True)
    for title, ratio in (("question", 5), ("answer", 4), ("right?", 2)):
        table.add_column(title, ratio=ratio, no_wrap=True, overflow="ellipsis")
    above = False
    for one in tried.seen:
        if one.flagged and not above:
            above = True
            table.add_row("", Text(f"a gate withholds {tried.threshold:.2f} and more:", style="bold"), "", "")
        mark, style = MARKS[one.verdict]
        right = Text(mark if one.verdict == "right" else f"{mark} {one.accepted[0]}", style=style)
        table.add_row(f"{one.risk:.2f}", *(Text(" ".join(text.split())) for text in (one.prompt, one.answer)), right)
    return table


def tenth_lines(tenths: Sequence[Tenth]) -> list[Text]:
    """Draw a bar for each tenth: the share of right answers."""
    from rich.text import Text

    title = "right answers among the training questions, in tenths by risk (risks by folds that never saw them)"
    lines = [Text(title)]
    for one in tenths:
        bar = ("\u2588" * round(BAR * one.right), "green")
        lines.append(Text.assemble(f"{one.low:.2f} to {one.high:.2f}  ", bar, f" {one.right:.0%}"))
    return lines
