"""A report as data (facts, claims, sections, tables, figures), and as one self-contained HTML page.

The page needs no network and no script; published numbers are folded under the table with their label.  Everything
that is not this file's own markup is escaped; a drawing with scripts, handlers or external links is refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from hallutracer_research.evaluation.tables import Table, best_rows, blocks, cell_text, header_text

Verdict = Literal["supported", "not supported", "mixed", "not testable"]
Fact = str | int | float | bool | None


@dataclass(frozen=True)
class Figure:
    """A drawing: ``svg`` is a whole SVG document, ``caption`` stands under it, ``alt`` is its alternative text.

    Two figures of one report may share a name.
    """

    name: str
    caption: str
    alt: str
    svg: bytes


@dataclass(frozen=True)
class Claim:
    """One claim of the paper, this run's evidence, a line for each set, the verdict, and the rule behind it."""

    claim: str
    evidence: Sequence[str]
    verdict: Verdict
    rule: str


@dataclass(frozen=True)
class Section:
    """Text (paragraphs between blank lines, `code` between backticks), then tables, then figures."""

    title: str
    text: str = ""
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()


@dataclass(frozen=True)
class ReportData:
    """A whole report.

    introduction: paragraphs for someone who sees such a report for the first time.
    facts: the run's provenance: model identity, versions, settings, "command" (shown as code); a mapping among the
    values is a group of facts under its key.
    published: the paper's tables by label, folded under the first table of that label.
    """

    title: str
    facts: Mapping[str, Fact | Mapping[str, Fact]]
    claims: Sequence[Claim]
    sections: Sequence[Section]
    published: Mapping[str, Table] = field(default_factory=dict)
    introduction: str = ""


_MARKS: Mapping[Verdict, str] = {"supported": "✓", "not supported": "✗", "mixed": "≈", "not testable": "○"}
_PIXELS = 4 / 3  # of a point
_FOLDER = Path(__file__).parent


def to_html(report: ReportData) -> str:
    """Return the whole page, by ``page.html.jinja``.

    Raises ValueError for two tables of one name, an unknown verdict, an invalid cell or drawing.
    """
    count = Counter(_anchor(table) for section in report.sections for table in section.tables)
    if twice := sorted(anchor for anchor, times in count.items() if times > 1):
        raise ValueError(f"table names must differ within a report, these come twice: {twice}")
    verdicts = Counter(claim.verdict for claim in report.claims)
    if unknown := verdicts.keys() - _MARKS.keys():
        raise ValueError(f"verdicts {sorted(unknown)} are none of {list(_MARKS)}")
    environment = Environment(
        loader=FileSystemLoader(_FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    return environment.get_template("page.html.jinja").render(
        report=report, css=Markup((_FOLDER / "report.css").read_text(encoding="utf-8")), marks=_MARKS, folded=[],
        counted=", ".join(f"{verdicts[verdict]} {verdict}" for verdict in _MARKS if verdicts[verdict]),
        anchor_of=_anchor, inline=_inline, prose=_prose, drawing=_drawing, header_text=header_text, blocks=blocks,
        best_rows=best_rows, cell_text=cell_text,
        number=lambda column: "" if column.kind == "text" else Markup(' class="number"'),
    )  # fmt: skip


def _drawing(figure: Figure, prefix: str) -> Markup:
    """Return the drawing as an element of the page; names inside it get a prefix, since a page has one set of names."""
    try:
        root = ElementTree.fromstring(figure.svg)
    except ElementTree.ParseError as error:
        raise ValueError(f"figure {figure.name!r} is not well-formed SVG: {error}") from error
    for element in root.iter():
        tag = element.tag.rpartition("}")[2].lower()
        names = {name.rpartition("}")[2].lower(): value for name, value in element.attrib.items()}
        link = names.get("href", "#")
        handlers = [name for name in names if name.startswith("on")]
        if tag in ("script", "foreignobject") or handlers or not link.startswith(("#", "data:image/")):
            raise ValueError(f"figure {figure.name!r} does more than draw: <{tag}> {handlers or link}")
    box = root.get("viewBox", "").split()
    if not root.tag.endswith("}svg") or len(box) != 4:
        raise ValueError(f"figure {figure.name!r} is not an SVG document with a viewBox")
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", figure.svg.decode("utf-8"), flags=re.DOTALL)
    text = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{prefix}", text[text.index("<svg") :])
    size = f'width="{float(box[2]) * _PIXELS:.0f}" viewBox="{" ".join(box)}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {size}'
    inside = text[text.index(">") + 1 :].strip()
    return Markup(f'{opening} role="img" aria-label="{escape(figure.alt)}">{inside}')


def _prose(text: str) -> Markup:
    return Markup("\n").join(
        Markup("<p>{}</p>").format(_inline(part)) for part in re.split(r"\n\s*\n", text.strip()) if part
    )


def _inline(text: str) -> Markup:
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text)))


def _anchor(table: Table) -> str:
    return "table-" + re.sub(r"[^a-z0-9]+", "-", table.name.lower()).strip("-")
