"""A report as data: facts, claims, sections, tables, figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hallutracer_research.evaluation.tables import Table

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
