"""The table of ``hallutracer try``: questions sorted by risk, the line of the gate, tenths as bars, and a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from service.judging.coverage import Tenth

MARKS = {"right": ("\u2713", "green"), "wrong": ("\u2717", "red"), "abstained": ("-", "dim")}
BAR = 40  # characters of a bar of 100 %


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
    """All that is shown."""

    bundle: str
    model: str
    threshold: float
    seen: tuple[Seen, ...]  # lowest risks first
    tenths: tuple[Tenth, ...]  # of the training rows, by folds that never saw the row

    def document(self) -> dict[str, Any]:
        """For --json."""
        lower, upper = self.halves
        return asdict(self) | {"lower_half": lower, "upper_half": upper}

    @property
    def halves(self) -> tuple[dict[str, int], dict[str, int]]:
        """Questions and right answers by half of the risks; the middle one of an odd number is in the lower."""
        middle = (len(self.seen) + 1) // 2
        return _counted(self.seen[:middle]), _counted(self.seen[middle:])


def _counted(half: Sequence[Seen]) -> dict[str, int]:
    return {"questions": len(half), "right": sum(one.verdict == "right" for one in half)}


def draw_sorted(tried: Tried, console: Console | None = None) -> None:
    """Print all of it to standard output."""
    from rich.console import Console

    console = console or Console(highlight=False)
    console.print(_table(tried, console.width))
    if tried.tenths:
        console.print()
        for line in tenth_lines(tried.tenths):
            console.print(line)
    console.print()
    console.print(sentence(tried), soft_wrap=True)


def _table(tried: Tried, width: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, width=min(width, 120), header_style="bold")
    table.add_column("risk", justify="right", no_wrap=True)
    table.add_column("question", ratio=5, no_wrap=True, overflow="ellipsis")
    table.add_column("answer", ratio=4, no_wrap=True, overflow="ellipsis")
    table.add_column("right?", ratio=2, no_wrap=True, overflow="ellipsis")
    above = False
    for one in tried.seen:
        if one.flagged and not above:
            above = True
            gate = f"a gate withholds {tried.threshold:.2f} and more:"
            table.add_row("", Text(gate, style="bold"), "", "")
        mark, style = MARKS[one.verdict]
        right = mark if one.verdict == "right" else f"{mark} {one.accepted[0]}"
        cells = Text(_one_line(one.prompt)), Text(_one_line(one.answer)), Text(right, style=style)
        table.add_row(f"{one.risk:.2f}", *cells)
    return table


def _one_line(text: str) -> str:
    return " ".join(text.split())


def tenth_lines(tenths: Sequence[Tenth]) -> list[Text]:
    """A bar for each tenth: the share of right answers."""
    from rich.text import Text

    lines = [Text("right answers among the training questions, in tenths by risk (risks by folds that never saw them)")]
    for tenth in tenths:
        bar = "\u2588" * round(BAR * tenth.right)
        lines.append(Text.assemble(f"{tenth.low:.2f} to {tenth.high:.2f}  ", (bar, "green"), f" {tenth.right:.0%}"))
    return lines


def sentence(tried: Tried) -> str:
    """The two numbers that matter."""
    lower, upper = tried.halves
    return (
        f"{tried.model}, asked {len(tried.seen)} questions that {tried.bundle} was not fitted on: right in "
        f"{lower['right']} of the {lower['questions']} with the lower risks, in {upper['right']} of the "
        f"{upper['questions']} with the higher."
    )
