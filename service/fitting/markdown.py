"""A GitHub Markdown table from texts that are already escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    """Lines joined by newlines, none at the end; ``numbers``: positions of the columns aligned to the right."""
    right = set(numbers)
    rule = [" ---: " if place in right else " --- " for place in range(len(header))]
    return "\n".join([f"| {' | '.join(header)} |", f"|{'|'.join(rule)}|", *(f"| {' | '.join(row)} |" for row in rows)])


def aligned_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same with columns of one width, for a terminal: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return f"| {' | '.join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)])} |"

    rule = [f"{'-' * (width + 1)}:" if place else "-" * (width + 2) for place, width in enumerate(widths)]
    return "\n".join([line(header), f"|{'|'.join(rule)}|", *map(line, rows)])
