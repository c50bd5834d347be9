"""A GitHub Markdown table from texts that are already escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    """Lines joined by newlines, none at the end; ``numbers``: positions of the columns aligned to the right."""
    right = set(numbers)
    rule = [" ---: " if place in right else " --- " for place in range(len(header))]
    return "\n".join([f"| {' | '.join(header)} |", f"|{'|'.join(rule)}|", *(f"| {' | '.join(row)} |" for row in rows)])
