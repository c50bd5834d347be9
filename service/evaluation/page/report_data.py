"""What a report holds before anyone writes it down: facts, claims, sections, tables, figures.  Data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from service.evaluation.tables import Table

Verdict = Literal["supported", "not supported", "mixed", "not testable"]
Fact = str | int | float | bool | None


@dataclass(frozen=True)
class Figure:
    """A drawing: ``svg`` is a whole SVG document, ``caption`` stands under it, ``alt`` in its place where it is unseen.

    Two figures of one report may share a name.
    """

    name: str
    caption: str
    alt: str
    svg: bytes


@dataclass(frozen=True)
class Claim:
    """One claim of the paper, what this run has to say about it, and the verdict."""

    claim: str
    evidence: str
    verdict: Verdict


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

    facts: how the run came to be: model identity, versions, settings, "command" (shown as code); a mapping among the
    values is a group of facts under its key.
    """

    title: str
    facts: Mapping[str, Fact | Mapping[str, Fact]]
    claims: Sequence[Claim]
    sections: Sequence[Section]
