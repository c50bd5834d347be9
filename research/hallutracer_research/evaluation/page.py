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
from importlib.resources import files
from typing import Literal, get_args
from xml.etree import ElementTree

from hallutracer_research.evaluation.tables import DASH, Cell, Column, Table, best_rows, blocks, cell_text, header_text

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
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_PIXELS = 4 / 3  # of a point


def to_html(report: ReportData) -> str:
    """The whole page.  ValueError for two tables of one name, an unknown verdict, an invalid cell or drawing."""
    _require_unique([_anchor(table) for section in report.sections for table in section.tables])
    css = files("hallutracer_research.evaluation").joinpath("report.css").read_text(encoding="utf-8")
    folded: set[str] = set()
    sections = [
        _section(section, number, report.published, folded) for number, section in enumerate(report.sections, start=1)
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            f"<title>{escape(report.title)}</title>", f"<style>\n{css}</style>", "</head>", "<body>",
            f"<header><h1>{escape(report.title)}</h1></header>", "<main>",
            f'<section id="introduction">{_prose(report.introduction)}</section>' if report.introduction else "",
            _claims(report.claims), _contents(report), *sections, "</main>",
            f'<footer id="provenance"><h2>How this report came to be</h2>{_facts(report.facts)}</footer>', "</body>",
            "</html>", "",
        ]
    )  # fmt: skip


def _claims(claims: Sequence[Claim]) -> str:
    unknown = {claim.verdict for claim in claims} - set(get_args(Verdict))
    if unknown:
        raise ValueError(f"verdicts {sorted(unknown)} are none of {list(get_args(Verdict))}")
    if not claims:
        return ""
    count = Counter(claim.verdict for claim in claims)
    counted = ", ".join(f"{count[verdict]} {verdict}" for verdict in _MARKS if count[verdict])
    items = "\n".join(
        f'<li><div><p class="claim">{_inline_text(claim.claim)}</p><p class="rule">Rule: {_inline_text(claim.rule)}</p>'
        f'</div><p class="verdict {claim.verdict.replace(" ", "-")}">{_MARKS[claim.verdict]} {claim.verdict}</p>'
        f"<ul>{''.join(f'<li>{_inline_text(line)}</li>' for line in claim.evidence)}</ul></li>"
        for claim in claims
    )
    return (
        '<section id="claims"><h2>What this run supports of the paper’s claims</h2>'
        f"<p>Of {len(claims)} claims: {counted}.</p>\n"
        f'<ol class="claims">\n{items}\n</ol></section>'
    )


def _contents(report: ReportData) -> str:
    items = []
    for number, section in enumerate(report.sections, start=1):
        inner = "".join(f'<li><a href="#{_anchor(table)}">{escape(table.title)}</a></li>' for table in section.tables)
        inner = f"<ul>{inner}</ul>" if inner else ""
        items.append(f'<li><a href="#section-{number}">{escape(section.title)}</a>{inner}</li>')
    items.append('<li><a href="#provenance">How this report came to be</a></li>')
    return f'<nav aria-labelledby="contents"><h2 id="contents">Contents</h2><ol>{"".join(items)}</ol></nav>'


def _section(section: Section, number: int, published: Mapping[str, Table], folded: set[str]) -> str:
    parts = [f'<section id="section-{number}"><h2>{escape(section.title)}</h2>', _prose(section.text)]
    for table in section.tables:
        parts += [_table(table), _published(published.get(table.label), folded)]
    for index, figure in enumerate(section.figures, start=1):
        drawing, caption = _drawing(figure, f"f{number}-{index}-"), _inline_text(figure.caption)
        name = f'tabindex="0" role="region" aria-label="Drawing {number}.{index}: {escape(figure.name)}"'
        parts.append(f'<figure><div class="wide" {name}>{drawing}</div><figcaption>{caption}</figcaption></figure>')
    return "\n".join(part for part in [*parts, "</section>"] if part)


def _published(published: Table | None, folded: set[str]) -> str:
    """The paper's table, folded, at the first table with its label; a link to it at later ones."""
    if published is None:
        return ""
    if published.name in folded:
        return f'<p class="notes"><a href="#fold-{published.name}">The paper’s published numbers</a> stand above.</p>'
    folded.add(published.name)
    summary = f"<summary>The paper’s published numbers: {escape(published.title)}</summary>"
    return f'<details id="fold-{published.name}">{summary}\n{_table(published)}\n</details>'


def _table(table: Table) -> str:
    anchor = _anchor(table)
    label = f' <span class="label">{escape(table.label)}</span>' if table.label else ""
    head = "".join(f'<th scope="col"{_class(column)}>{escape(header_text(column))}</th>' for column in table.columns)
    bodies = "\n".join(_body(table, rows) for rows in blocks(table))
    notes = "".join(f"<li>{_inline_text(note)}</li>" for note in table.notes)
    return "\n".join(
        part
        for part in (
            f'<h3 id="{anchor}">{escape(table.title)}{label}</h3>',
            f'<p class="caption">{_inline_text(table.caption)}</p>' if table.caption else "",
            f'<div class="wide" tabindex="0" role="region" aria-labelledby="{anchor}">'
            f'<table aria-labelledby="{anchor}"><thead><tr>{head}</tr></thead>\n{bodies}\n</table></div>',
            f'<ul class="notes">{notes}</ul>' if notes else "",
        )
        if part
    )


def _body(table: Table, rows: Sequence[Mapping[str, Cell]]) -> str:
    """One block: the value that its rows share stands once, beside them all."""
    best = {column.key: best_rows(column, rows) for column in table.columns}
    heading = next((c.key for c in table.columns if c.kind == "text" and c.key != table.block), None)
    lines = []
    for index, row in enumerate(rows):
        cells = []
        for column in table.columns:
            text = escape(cell_text(column, row.get(column.key)))
            if column.key == table.block:
                if index == 0:
                    cells.append(f'<th scope="rowgroup" rowspan="{len(rows)}">{text}</th>')
                continue
            text = f"<strong>{text}</strong>" if index in best[column.key] else text
            heads = column.key == heading
            cells.append(f'<th scope="row">{text}</th>' if heads else f"<td{_class(column)}>{text}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "<tbody>\n" + "\n".join(lines) + "\n</tbody>"


def _class(column: Column) -> str:
    return "" if column.kind == "text" else ' class="number"'


def _drawing(figure: Figure, prefix: str) -> str:
    """The drawing as an element of the page; names inside it get a prefix, since a page has one set of names."""
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
    return f'{opening} role="img" aria-label="{escape(figure.alt)}">{inside}'


def _facts(facts: Mapping[str, Fact | Mapping[str, Fact]]) -> str:
    rows = []
    for key, value in facts.items():
        if isinstance(value, Mapping):
            text = _facts(value)
        else:
            text = DASH if value is None else escape(str(value))
            text = f"<code>{text}</code>" if key == "command" else text
        rows.append(f"<dt>{escape(key)}</dt><dd>{text}</dd>")
    return f"<dl>{''.join(rows)}</dl>"


def _prose(text: str) -> str:
    paragraphs = [part for part in re.split(r"\n\s*\n", text.strip()) if part]
    return "\n".join(f"<p>{_inline_text(paragraph)}</p>" for paragraph in paragraphs)


def _inline_text(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _anchor(table: Table) -> str:
    return "table-" + re.sub(r"[^a-z0-9]+", "-", table.name.lower()).strip("-")


def _require_unique(anchors: Sequence[str]) -> None:
    twice = sorted(anchor for anchor, count in Counter(anchors).items() if count > 1)
    if twice:
        raise ValueError(f"table names must differ within a report, these come twice: {twice}")
