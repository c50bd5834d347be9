"""A report as data: tables, also as GitHub Markdown; claims, figures and sections; all as one
self-contained HTML page. The page needs no network and no script.  All text is escaped, but for
code between backticks in captions and notes; a drawing with scripts, handlers or external links is
refused."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from hallutracer_research.documents import table_beside
from service.trainer.presentation import markdown_table

Kind = Literal["text", "integer", "number", "percent", "p_value"]
Cell = str | int | float | None | Mapping[str, float]  # a mapping: mean, and std or low and high
Rows = list[Mapping[str, Cell]]


@dataclass(frozen=True)
class Column:
    """One column: the key in each row, its heading, and how its cells are written."""

    key: str
    title: str
    # percent: a share of 1 written as 12.3; p_value: two digits, "< 0.001" below
    kind: Kind = "number"
    digits: int = 3
    # whether a larger value is better (the best is set in bold); None where neither is
    higher: bool | None = None


SET = Column("set", "Set", "text")


@dataclass(frozen=True)
class Table:
    """Rows of cells by column key; a missing cell is shown as a dash."""

    name: str  # short and unique in a run: "main"
    title: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Cell]]
    label: str = ""  # the paper's, "tab:main-results"; "" where it has none
    caption: str = ""
    notes: Sequence[str] = ()
    # column key by whose values rows are grouped, and within which the best is sought; "" for none
    block: str = ""

    def document(self) -> dict[str, Any]:
        """Return, for the JSON file, the rows as they are, and what the columns mean."""
        return {
            "title": self.title,
            "label": self.label,
            "caption": self.caption,
            "notes": list(self.notes),
            "columns": {column.key: column.title for column in self.columns},
            "rows": [dict(row) for row in self.rows],
        }


_FOLDER = Path(__file__).parent
TEXTS = table_beside(__file__, "tables.toml")


def described(
    name: str,
    rows: Sequence[Mapping[str, Cell]],
    *,
    columns: Sequence[Column] = (),
    notes: Sequence[str] = (),
    **words: object,
) -> Table:
    """Return the table of ``tables.toml`` by its name with these rows; ``columns`` come after its
    own, ``words`` stand in its texts."""
    entry = TEXTS[name]
    own_columns = [
        Column(key, title.format_map(words), *more) for key, title, *more in entry["columns"]
    ]
    return Table(
        name,
        entry["title"],
        [*own_columns, *columns],
        rows,
        label=entry.get("label", ""),
        caption=entry["caption"].format_map(words),
        notes=notes,
        block=entry.get("block", ""),
    )


DASH, MINUS = "–", "−"
SMALLEST_P = 0.001


def to_markdown(tables: Sequence[Table], intro: str) -> str:
    """Return ``intro`` (Markdown, as it is), then every table under its title; the best cell of a
    block is in bold."""
    parts = [intro.strip(), *map(table_markdown, tables)]
    return "\n\n".join(filter(None, parts)) + "\n"


def table_markdown(table: Table) -> str:
    """Return heading, caption, rows and notes.  Raises ValueError for what ``cell_text`` cannot
    write."""
    lines = []
    for rows in blocks(table):
        best = {column.key: best_rows(column, rows) for column in table.columns}
        for index, row in enumerate(rows):
            texts = {
                column.key: _escape(cell_text(column, row.get(column.key)))
                for column in table.columns
            }
            lines.append(
                [f"**{text}**" if index in best[key] else text for key, text in texts.items()]
            )
    header = [_escape(header_text(column)) for column in table.columns]
    numbers = [number for number, column in enumerate(table.columns) if column.kind != "text"]
    heading = f"## {_escape(table.title)}" + (f" (paper: `{table.label}`)" if table.label else "")
    notes = "\n".join(f"- {_markdown_prose(note)}" for note in table.notes)
    parts = [heading, _markdown_prose(table.caption), markdown_table(header, lines, numbers), notes]
    return "\n\n".join(part for part in parts if part)


def blocks(table: Table) -> list[Rows]:
    """Return rows grouped by the table's block column, in order of first appearance; one group
    without one."""
    if not table.block:
        return [list(table.rows)]
    groups: dict[str, Rows] = {}
    for row in table.rows:
        groups.setdefault(str(row.get(table.block)), []).append(row)
    return list(groups.values())


def best_rows(column: Column, rows: Rows) -> set[int]:
    """Return which of ``rows`` hold the best value as it is written (values that are written alike
    are a tie).  Empty where the column has no better direction, or where fewer than two rows have a
    number to compare."""
    if column.higher is None:
        return set()
    means = [mean(row.get(column.key)) for row in rows]
    shown = {index: _shown(column, value) for index, value in enumerate(means) if value is not None}
    if len(shown) < 2:
        return set()
    best = max(shown.values()) if column.higher else min(shown.values())
    return {index for index, value in shown.items() if value == best}


def mean(cell: Cell) -> float | None:
    """Return the number of a cell: itself, or the mean that comes with a spread; None for text and
    missing cells."""
    if isinstance(cell, Mapping):
        return cell.get("mean")
    return cell if isinstance(cell, int | float) else None


def header_text(column: Column) -> str:
    """Return a column's heading; a column of percentages names the unit unless its title does."""
    named = "%" in column.title or column.title.endswith("points")
    return f"{column.title}, %" if column.kind == "percent" and not named else column.title


def cell_text(column: Column, cell: Cell) -> str:
    """Return a cell as it is written: "0.687", "68.7 ± 0.3", "68.7 [67.9, 69.4]", "< 0.001",
    "3,793", "–" for none.  A percentage has two decimals fewer than the share it stands for:
    ``digits`` 3 writes 0.6871 as 68.7. ValueError names the column where a number is not finite or
    a text stands in a column of numbers."""
    if cell is None:
        return DASH
    if isinstance(cell, str):
        if column.kind != "text":
            raise ValueError(
                f"column {column.key!r} holds {column.kind}s, but a cell is the text {cell!r}"
            )
        return cell
    if column.kind == "text" and not isinstance(cell, Mapping):
        return str(cell)
    value = mean(cell)
    if value is None:
        return DASH
    text, more = _number(column, value), cell if isinstance(cell, Mapping) else {}
    if "low" in more:
        return f"{text} [{_number(column, more['low'])}, {_number(column, more['high'])}]"
    return f"{text} ± {_number(column, more['std'])}" if "std" in more else text


def _number(column: Column, value: float) -> str:
    if not math.isfinite(value):
        raise ValueError(
            f"column {column.key!r}: {value} is not a number to show; give None, and a note with"
            " the reason"
        )
    if column.kind == "p_value":
        return f"< {SMALLEST_P}" if value < SMALLEST_P else f"{value:#.2g}"
    return f"{_shown(column, value):,.{_decimals(column)}f}".replace("-", MINUS)


def _decimals(column: Column) -> int:
    return {"integer": 0, "percent": max(column.digits - 2, 0)}.get(column.kind, column.digits)


def _shown(column: Column, value: float) -> float:
    """Return it as far as its digits go; never a negative zero.  A p-value is compared as it is."""
    if column.kind == "p_value":
        return value
    return round(100 * value if column.kind == "percent" else value, _decimals(column)) + 0.0


def _escape(text: str) -> str:
    """Return plain text that Markdown, HTML inside it and GitHub's formulas leave alone, on one
    line."""
    text = re.sub(r"([\\`*\[\]|$~])", r"\\\1", " ".join(text.split()))
    # An underscore inside a word means nothing.
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", escape(text, quote=False))


def _markdown_prose(text: str) -> str:
    parts = re.split(r"(`[^`]+`)", " ".join(text.split()))
    for index, text in enumerate(parts[::2]):
        inner = _escape(text)
        parts[2 * index] = (
            " " * text.startswith(" ") + inner + " " * bool(inner and text.endswith(" "))
        )
    return "".join(parts)


Verdict = Literal["supported", "not supported", "mixed", "not testable"]
Fact = str | int | float | bool | None


@dataclass(frozen=True)
class Figure:
    """A drawing: ``svg`` is a whole SVG document, ``caption`` stands under it, ``alt`` is its
    alternative text.  Two figures of one report may share a name."""

    name: str
    caption: str
    alt: str
    svg: bytes


@dataclass(frozen=True)
class Claim:
    """One claim of the paper, this run's evidence, a line for each set, the verdict, and the rule
    behind it."""

    claim: str
    evidence: Sequence[str]
    verdict: Verdict
    rule: str


@dataclass(frozen=True)
class Section:
    """Text (paragraphs between blank lines, `code` between backticks), then tables, then
    figures."""

    title: str
    text: str = ""
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()


@dataclass(frozen=True)
class ReportData:
    """A whole report."""

    title: str
    # provenance, "command" shown as code; a mapping is a group of facts
    facts: Mapping[str, Fact | Mapping[str, Fact]]
    claims: Sequence[Claim]
    sections: Sequence[Section]
    # by label, folded under the first table of that label
    published: Mapping[str, Table] = field(default_factory=dict)
    introduction: str = ""  # paragraphs for someone who sees such a report for the first time


_MARKS: Mapping[Verdict, str] = {
    "supported": "✓",
    "not supported": "✗",
    "mixed": "≈",
    "not testable": "○",
}
_PIXELS = 4 / 3  # of a point


def to_html(report: ReportData) -> str:
    """Return the whole page, by ``page.html.jinja``.  Raises ValueError for two tables of one name,
    an unknown verdict, an invalid cell or drawing."""
    count = Counter(_anchor(table) for section in report.sections for table in section.tables)
    if twice := sorted(anchor for anchor, times in count.items() if times > 1):
        raise ValueError(f"table names must differ within a report, these come twice: {twice}")
    verdicts = Counter(claim.verdict for claim in report.claims)
    if unknown := verdicts.keys() - _MARKS.keys():
        raise ValueError(f"verdicts {sorted(unknown)} are none of {list(_MARKS)}")
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("page.html.jinja").render(
        report=report,
        css=Markup((_FOLDER / "report.css").read_text(encoding="utf-8")),
        marks=_MARKS,
        folded=[],
        counted=", ".join(
            f"{verdicts[verdict]} {verdict}" for verdict in _MARKS if verdicts[verdict]
        ),
        anchor_of=_anchor,
        inline=_inline,
        prose=_prose,
        drawing=_drawing,
        header_text=header_text,
        blocks=blocks,
        best_rows=best_rows,
        cell_text=cell_text,
        number=lambda column: "" if column.kind == "text" else Markup(' class="number"'),
    )


def _drawing(figure: Figure, prefix: str) -> Markup:
    """Return the drawing as an element of the page; names inside it get a prefix, since a page has
    one set of names."""
    try:
        root = ElementTree.fromstring(figure.svg)
    except ElementTree.ParseError as error:
        raise ValueError(f"figure {figure.name!r} is not well-formed SVG: {error}") from error
    for element in root.iter():
        tag = element.tag.rpartition("}")[2].lower()
        names = {name.rpartition("}")[2].lower(): value for name, value in element.attrib.items()}
        link = names.get("href", "#")
        handlers = [name for name in names if name.startswith("on")]
        if (
            tag in ("script", "foreignobject")
            or handlers
            or not link.startswith(("#", "data:image/"))
        ):
            raise ValueError(
                f"figure {figure.name!r} does more than draw: <{tag}> {handlers or link}"
            )
    box = root.get("viewBox", "").split()
    if not root.tag.endswith("}svg") or len(box) != 4:
        raise ValueError(f"figure {figure.name!r} is not an SVG document with a viewBox")
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", figure.svg.decode("utf-8"), flags=re.DOTALL)
    text = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{prefix}", text[text.index("<svg") :])
    size = f'width="{float(box[2]) * _PIXELS:.0f}" viewBox="{" ".join(box)}"'
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {size}'
    )
    inside = text[text.index(">") + 1 :].strip()
    return Markup(f'{opening} role="img" aria-label="{escape(figure.alt)}">{inside}')


def _prose(text: str) -> Markup:
    return Markup("\n").join(
        Markup("<p>{}</p>").format(_inline(part))
        for part in re.split(r"\n\s*\n", text.strip())
        if part
    )


def _inline(text: str) -> Markup:
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text)))


def _anchor(table: Table) -> str:
    return "table-" + re.sub(r"[^a-z0-9]+", "-", table.name.lower()).strip("-")
