"""A model card for people: Markdown rendered in the terminal, tables cut so that they fit, plots as files to open."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from rich.console import Console, RenderableType
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
IMAGE = re.compile(r"!\[(?P<title>[^\]]*)\]\((?P<path>[^)]*)\)")
NAMES = 30  # characters of a wide table's first column, which every part of it repeats, where it has so many
PADDING = 2
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a card may be a stranger's: nothing in it moves the cursor


def render_card(card: str, folder: Path, width: int) -> Iterator[RenderableType]:
    """The card without the hub's front matter; ``folder`` is where its plots are."""
    lines = CONTROLS.sub("", FRONT_MATTER.sub("", card)).splitlines()
    for kind, part in groupby(lines, key=_kind):
        block = list(part)
        if kind == "table":
            yield from _tables(block, width)
            yield Text()
        elif kind == "plot":
            for found in filter(None, map(IMAGE.fullmatch, block)):
                yield Text.assemble((f"{found['title']}: ", "bold"), str(folder / found["path"]))
        elif "".join(block).strip():
            yield Markdown("\n".join(block))
            yield Text()


def _kind(line: str) -> str:
    return "table" if line.startswith("|") else "plot" if IMAGE.fullmatch(line) else "text"


def print_card(card: str, folder: Path, console: Console) -> None:
    """Print it as wide as the terminal is."""
    for part in render_card(card, folder, console.width):
        console.print(part, soft_wrap=isinstance(part, Text))


def _tables(lines: list[str], width: int) -> Iterator[Table | Text]:
    """One table, or where it is too wide several, each with the first column and as many others as fit."""
    header, _, *rows = [_cells(line) for line in lines]
    widths = [
        max(len(text) for text in (*title.plain.split(), *(cell.plain for cell in column), ""))
        for title, *column in zip(header, *rows, strict=True)
    ]
    names, rest = min(widths[0], max(NAMES, width // 3)), list(range(1, len(header)))
    if len(rest) == 1:  # facts: the second column wraps
        yield _table(header, rows, [0, 1], None, widths)
        return
    while rest:
        taken, used = [rest.pop(0)], names + PADDING
        used += widths[taken[0]] + PADDING
        while rest and used + widths[rest[0]] + PADDING <= width:
            used += widths[rest[0]] + PADDING
            taken.append(rest.pop(0))
        yield _table(header, rows, [0, *taken], names, widths)
        if rest:
            yield Text()


def _table(
    header: list[Text], rows: list[list[Text]], columns: list[int], names: int | None, widths: list[int]
) -> Table:
    """Some columns of a table; ``names``: the width of the first where the others hold numbers."""
    table = Table(box=None, pad_edge=False, show_header=any(header[column].plain for column in columns))
    for place, column in enumerate(columns):
        number = place > 0 and names is not None
        table.add_column(
            header[column],
            justify="right" if number else "left",
            overflow="fold",
            max_width=names if place == 0 else None,
            width=widths[column] if number else None,
            style="" if place else "bold" if names is None else "",
        )
    for row in rows:
        table.add_row(*(row[column] for column in columns))
    return table


def _cells(line: str) -> list[Text]:
    """Cells of a row; **bold** is kept, and code loses its backticks."""
    cells = re.split(r"(?<!\\)\|", line.strip()[1:-1])
    return [_text(cell.strip().replace("\\|", "|").replace("`", "")) for cell in cells]


def _text(cell: str) -> Text:
    bold = cell.startswith("**") and cell.endswith("**") and len(cell) > 4
    return Text(cell[2:-2], "bold") if bold else Text(cell)
