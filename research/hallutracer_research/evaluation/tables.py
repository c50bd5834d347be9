"""A table as data, from which the HTML page, the Markdown file and the JSON file are written.

A table carries the paper's label where it has one, so that the published numbers can be shown beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["text", "integer", "number", "percent", "p_value"]
Cell = str | int | float | None | Mapping[str, float]  # a mapping: mean, and std or low and high


@dataclass(frozen=True)
class Column:
    """One column: the key in each row, its heading, and how its cells are written.

    number: ``digits`` decimals; percent: a share of 1 written as 12.3; p_value: two digits, "< 0.001" below.
    higher: whether a larger value is better (the best is set in bold), None where neither is.
    """

    key: str
    title: str
    kind: Kind = "number"
    digits: int = 3
    higher: bool | None = None


@dataclass(frozen=True)
class Table:
    """Rows of cells by column key; a missing cell is shown as a dash.

    name: short and unique in a run ("main"); label: the paper's ("tab:main-results"), "" where the paper has none.
    block: a column key by whose values rows are grouped (and within which the best is sought), "" for none.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Cell]]
    label: str = ""
    caption: str = ""
    notes: Sequence[str] = field(default=())
    block: str = ""

    def document(self) -> dict[str, Any]:
        """For the JSON file: the rows as they are, and what the columns mean."""
        return {
            "title": self.title,
            "label": self.label,
            "caption": self.caption,
            "notes": list(self.notes),
            "columns": {column.key: column.title for column in self.columns},
            "rows": [dict(row) for row in self.rows],
        }
