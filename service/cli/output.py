"""What commands print: results on standard output, for people or as JSON; progress is
``service.progress``'s."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text
    from tqdm import tqdm

    from probes_store.bundle import Bundle
    from service.judging.evaluation import Tenth
    from service.scoring import RiskReport

ROWS = 11  # of a trajectory's plot
COLUMN = 5  # characters a layer takes, where the terminal is wide enough
MARKS = {"right": ("\u2713", "green"), "wrong": ("\u2717", "red"), "abstained": ("-", "dim")}
BAR = 40  # characters of a bar of 100 %
FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
BOLD = re.compile(r"\*\*(.+)\*\*")
IMAGE = re.compile(r"!\[(?P<title>[^\]]*)\]\((?P<path>[^)]*)\)")
# characters of a wide table's first column, which every part of it repeats, where it has so many
NAMES = 30
PADDING = 2
UNBOUNDED = 1 << 16  # characters of a line that is for no terminal
CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)  # a card may be a stranger's: nothing in it moves the cursor


def print_line(text: str) -> None:
    """Print a line on standard output, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_json(document: Any) -> None:
    """Print a document on standard output."""
    print_line(json.dumps(document, indent=2, ensure_ascii=False))


def output_console() -> Console:
    """Return a console as wide as the terminal; elsewhere, as in a pipe or a file, so wide that
    nothing is cut."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=UNBOUNDED)


def print_table(
    rows: Sequence[dict[str, Any]], columns: Sequence[str], console: Console | None = None
) -> None:
    """Print columns of rows: lists in words, nothing for None.

    No cell is broken: where a terminal is too narrow there are several tables, each with the first
    column."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or output_console()
    cells: dict[str, list[str]] = {}
    for name in columns:
        values = [row[name] for row in rows]
        cells[name] = [
            ", ".join(value) if isinstance(value, list) else str(value or "") for value in values
        ]
    widths = {name: max(map(cell_len, (name, *texts))) for name, texts in cells.items()}
    first, *remaining = columns
    whole = Console(file=console.file, highlight=False, width=UNBOUNDED, no_color=console.no_color)
    while remaining:
        taken = [first, remaining.pop(0)]
        while (
            remaining
            and sum(widths[name] + PADDING for name in (*taken, remaining[0])) - PADDING
            <= console.width
        ):
            taken.append(remaining.pop(0))
        table = Table(box=None, pad_edge=False)
        for name in taken:
            table.add_column(name, no_wrap=True)
        for number in range(len(rows)):
            table.add_row(*(Text(cells[name][number]) for name in taken))
        whole.print(table)
        if remaining:
            whole.print()


def progress_bar(total: int, doing: str | None, unit: str) -> tqdm[Any]:
    """Return a bar on standard error, where that is a terminal."""
    from tqdm import tqdm

    return tqdm(
        total=total, desc=doing, unit=unit, file=sys.stderr, disable=not sys.stderr.isatty()
    )


# a risk report


def draw_report(bundle: Bundle, report: RiskReport, console: Console | None = None) -> None:
    """Print risk, decision, the answer where there is one, and the trajectory between the class
    means."""
    import numpy as np
    from rich.console import Console
    from rich.text import Text

    console = console or Console(highlight=False)
    risk = Text(
        f"{report.risk:.3f}", "bold green" if report.decision.value == "continue" else "bold red"
    )
    threshold = f"  decision {report.decision.value} (threshold {report.verdict.threshold:.3f})"
    mean = f"  depth mean {report.depth_mean:+.3f}  {bundle.reference}"
    console.print(Text.assemble(("risk ", "bold"), risk, threshold, mean))
    if (known := report.uncertain) is not None:
        refits = known.interval and "other training rows would give {:.3f} to {:.3f}  ".format(
            *known.interval
        )
        side = "outside" if known.outside else "inside"
        console.print(f"{refits or ''}{side} training (distance {known.distance:.2f})")
        if known.unlike is not None:
            console.print(known.unlike)
    if not report.context.applies:
        console.print(
            f"asks for no fact (P(asks) {report.context.asks:.2f}): the risk does not apply"
        )
    if report.outcome.shows:
        console.print(Text.assemble(("answer ", "bold"), report.shown.text.strip()))
    if report.answer is not None:
        side = "flagged" if report.answer.flagged else "not flagged"
        console.print(f"risk of this answer, by its own tokens: {report.answer.risk:.3f} ({side})")
    means = np.asarray(bundle.probes.trajectory_mean, np.float64)
    console.print(*plot_lines(report.trajectory, means, width=console.width), sep="\n")


def plot_lines(
    trajectory: NDArray[np.float64], class_means: NDArray[np.float64], width: int = 80
) -> list[Text]:
    """Draw truth logits over depth: trajectory [m], class_means [2, m] (0 hallucinated, 1
    factual)."""
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
        (hallucinated, "-", "red"),
        (factual, "+", "green"),
        (running_means(trajectory), "○", "cyan"),
        (trajectory, "●", "bold"),
    ]
    low = min(float(values.min()) for values, _, _ in series)
    high = max(float(values.max()) for values, _, _ in series)
    step = (high - low) / (ROWS - 1) or 1.0
    grid = [[(" ", "")] * (len(shown) * column) for _ in range(ROWS)]
    for values, mark, style in series:
        for number, layer in enumerate(shown):
            grid[round((high - float(values[layer])) / step)][number * column + column // 2] = (
                mark,
                style,
            )
    lines = [Text("truth logit")]
    for row, cells in enumerate(grid):
        label = f"{high - row * step:8.2f} " if row in (0, ROWS // 2, ROWS - 1) else " " * 9
        lines.append(Text.assemble(label, "│", *cells))
    axis = (
        "".join(str(layer).center(column) for layer in shown)
        if column >= 3
        else f"0 .. {layers - 1}"
    )
    lines += [Text(" " * 9 + "└" + "─" * (len(shown) * column)), Text(f"{'layer':>9} {axis}")]
    legend = ("this prompt  ", "its running mean  ", "factual mean  ", "hallucinated mean")
    parts = [
        ((mark, style), f" {text}")
        for (_, mark, style), text in zip(reversed(series), legend, strict=True)
    ]
    return [*lines, Text.assemble(" " * 10, *(part for pair in parts for part in pair))]


# held-out questions sorted by risk


@dataclass(frozen=True, slots=True)
class QuestionResult:
    """One question, its risk, and what came of it."""

    prompt: str
    answer: str | None  # None: the policy of the service that was asked withholds it
    accepted: tuple[str, ...]
    risk: float
    flagged: bool  # a gate withholds it
    verdict: (
        str | None
    )  # "right" | "wrong" | "abstained"; None where the policy withholds the answer, or ends it


@dataclass(frozen=True, slots=True)
class TryReport:
    """All that ``hallutracer try`` shows."""

    bundle: str
    model: str
    threshold: float
    seen: tuple[QuestionResult, ...]  # lowest risks first
    tenths: tuple[Tenth, ...]  # of the training rows, by folds that never saw the row
    recommendation: str | None = None  # whether the bundle pays for its model, as its training said
    file: str | None = None  # of the user's own questions; None where the bundle carries them

    @property
    def halves(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return questions and right answers by half of the risks; the middle one of an odd number
        is in the lower."""
        middle = (len(self.seen) + 1) // 2
        return _counts(self.seen[:middle]), _counts(self.seen[middle:])

    @property
    def helps(self) -> str:
        """Return a sentence: wrong answers without a gate, and with one."""
        right = [result.flagged for result in self.seen if result.verdict == "right"]
        wrong = [result.flagged for result in self.seen if result.verdict == "wrong"]
        given = right.count(False) + wrong.count(False)
        return (
            f"Without a gate {_none(len(wrong))} of {len(right) + len(wrong)} answers are wrong."
            f"  A gate at {self.threshold:.2f} gives {_none(given)}, {_none(wrong.count(False))} of"
            f" them wrong, and withholds {_none(right.count(True))} of the {len(right)} right ones."
        )

    def document(self) -> dict[str, Any]:
        """Return it for --json."""
        lower, upper = self.halves
        return asdict(self) | {"lower_half": lower, "upper_half": upper}


def _counts(results: Sequence[QuestionResult]) -> dict[str, int]:
    return {
        "questions": len(results),
        "right": sum(result.verdict == "right" for result in results),
    }


def draw_sorted(tried: TryReport, console: Console | None = None) -> None:
    """Print the table of questions, the tenths as bars, and the two numbers that matter."""
    from rich.text import Text

    console = console or output_console()
    if tried.recommendation is not None:
        sentence = Text(CONTROLS.sub("", tried.recommendation), "bold")
        console.print(sentence, "", sep="\n", soft_wrap=True)
    console.print(_table(tried, console.width))
    if tried.tenths:
        lines = [
            Text(
                "right answers among the training questions, in tenths by risk (risks by folds that"
                " never saw them)"
            )
        ]
        for tenth in tried.tenths:
            bar = ("\u2588" * round(BAR * tenth.right), "green")
            lines.append(
                Text.assemble(f"{tenth.low:.2f} to {tenth.high:.2f}  ", bar, f" {tenth.right:.0%}")
            )
        console.print("", *lines, sep="\n")
    lower, upper = tried.halves
    judged = [question.verdict for question in tried.seen if question.verdict is not None]
    right = (
        f"{_none(lower['right'])} of the {lower['questions']} with the lower risks, in"
        f" {_none(upper['right'])} of the {upper['questions']} with the higher."
    )
    if len(judged) < len(tried.seen):  # what is withheld says nothing of a half
        right = (
            f"{_none(judged.count('right'))} of the {len(judged)} that were"
            f" answered.{_not_judged(tried)}"
        )
    result = f"right in {right}" if judged else f"no answer was given.{_not_judged(tried)}"
    whose = f"that {tried.bundle} was not fitted on" if tried.file is None else f"of {tried.file}"
    questions = f"asked {len(tried.seen)} questions {whose}"
    console.print(f"\n{tried.model}, {questions}: {result}", soft_wrap=True, markup=False)
    if tried.file is not None:
        console.print(tried.helps, soft_wrap=True, markup=False)


def _none(number: int) -> str:
    return str(number) if number else "none"


def _not_judged(tried: TryReport) -> str:
    count = sum(question.verdict is None for question in tried.seen)
    withheld = (
        f"  The service's policy withholds {count} of the answers: whether they would be right is"
        " not known."
    )
    return withheld if count else ""


def _table(tried: TryReport, width: int) -> Table:
    """Return the questions, cut to fit a terminal; whole where there is none."""
    from rich.table import Table
    from rich.text import Text

    whole = width == UNBOUNDED
    table = Table(
        box=None, pad_edge=False, width=None if whole else min(width, 120), header_style="bold"
    )
    table.add_column("risk", justify="right", no_wrap=True)
    for title, ratio in (("question", 5), ("answer", 4), ("right?", 2)):
        table.add_column(title, ratio=None if whole else ratio, no_wrap=True, overflow="ellipsis")
    above = False
    for question in tried.seen:
        if question.flagged and not above:
            above = True
            table.add_row(
                "", Text(f"a gate withholds {tried.threshold:.2f} and more:", style="bold"), "", ""
            )
        mark, style = MARKS.get(question.verdict or "", ("", "dim"))
        right = Text(
            mark if question.verdict == "right" else f"{mark} {question.accepted[0]}".strip(),
            style=style,
        )
        shown = (question.prompt, "(withheld)" if question.answer is None else question.answer)
        table.add_row(
            f"{question.risk:.2f}", *(Text(" ".join(text.split())) for text in shown), right
        )
    return table


# a model card


def print_card(card: str, folder: Path, console: Console) -> None:
    """Print a model card as wide as the terminal is: tables cut so that they fit, plots as files in
    ``folder``."""
    from rich.text import Text

    for part in _rendered(card, folder, console.width):
        console.print(part, soft_wrap=isinstance(part, Text))


def _rendered(card: str, folder: Path, width: int) -> Iterator[RenderableType]:
    from rich.markdown import Markdown
    from rich.text import Text

    def kind_of(line: str) -> str:
        return "table" if line.startswith("|") else "plot" if IMAGE.fullmatch(line) else "text"

    lines = CONTROLS.sub("", FRONT_MATTER.sub("", card)).splitlines()
    for kind, part in groupby(lines, key=kind_of):
        block = list(part)
        if kind == "table":
            yield from _tables(block, width)
            yield Text()
        elif kind == "plot":
            for image in filter(None, map(IMAGE.fullmatch, block)):
                yield Text.assemble((f"{image['title']}: ", "bold"), str(folder / image["path"]))
        elif "".join(block).strip():
            yield Markdown("\n".join(block))
            yield Text()


def _tables(lines: list[str], width: int) -> Iterator[Table | Text]:
    """Yield one table, or where it is too wide several, each with the first column and as many
    others as fit."""
    from rich.table import Table
    from rich.text import Text

    header, _, *rows = [_cells(line) for line in lines]
    widths = []
    for title, *below in zip(header, *rows, strict=True):
        texts = [*title.plain.split(), *(cell.plain for cell in below)]
        widths.append(max(map(len, texts), default=0))
    names, remaining = min(widths[0], max(NAMES, width // 3)), list(range(1, len(header)))
    facts = len(remaining) == 1  # the second column wraps
    while remaining:
        taken, used = [remaining.pop(0)], names + PADDING
        used += widths[taken[0]] + PADDING
        while remaining and used + widths[remaining[0]] + PADDING <= width:
            used += widths[remaining[0]] + PADDING
            taken.append(remaining.pop(0))
        table = Table(
            box=None,
            pad_edge=False,
            show_header=any(header[column].plain for column in (0, *taken)),
        )
        table.add_column(
            header[0],
            overflow="fold",
            max_width=None if facts else names,
            style="bold" if facts else "",
        )
        for column in taken:
            table.add_column(
                header[column],
                justify="left" if facts else "right",
                overflow="fold",
                width=None if facts else widths[column],
            )
        for row in rows:
            table.add_row(*(row[column] for column in (0, *taken)))
        yield table
        if remaining:
            yield Text()


def _cells(line: str) -> list[Text]:
    """Return the cells of a row; **bold** is kept, and code loses its backticks."""
    from rich.text import Text

    cells = []
    for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1]):
        text = cell.strip().replace("\\|", "|").replace("`", "")
        bold = BOLD.fullmatch(text)
        cells.append(Text(bold[1], "bold") if bold else Text(text))
    return cells
