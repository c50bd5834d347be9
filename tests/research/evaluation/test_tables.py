"""Tables as Markdown: how cells are written, which are best, and that text cannot break a table."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hallutracer_research.evaluation.tables import (
    Cell,
    Column,
    Table,
    best_rows,
    blocks,
    cell_text,
    header_text,
    table_markdown,
    to_markdown,
)

METHODS = [Column("set", "Set", "text"), Column("method", "Method", "text"), Column("auroc", "AUROC", higher=True),
           Column("ece", "ECE", higher=False)]  # fmt: skip
ROWS = [
    {"set": "A", "method": "ours", "auroc": {"mean": 0.9, "std": 0.012}, "ece": 0.04},
    {"set": "B", "method": "ours", "auroc": 0.7, "ece": None},
    {"set": "A", "method": "theirs", "auroc": 0.8, "ece": 0.03},
    {"set": "B", "method": "theirs", "auroc": 0.75, "ece": 0.01},
]
TABLE = Table("main", "Main", METHODS, ROWS, "tab:main-results", "By set.", ["Seeds: 3."], "set")


@pytest.mark.parametrize(
    ("column", "cell", "text"),
    [
        (Column("x", "X"), 0.68711, "0.687"),
        (Column("x", "X", digits=1), -1234.56, "−1,234.6"),
        (Column("x", "X"), -0.0001, "0.000"),
        (Column("x", "X"), {"mean": 0.5, "std": 0.0123}, "0.500 ± 0.012"),
        (Column("x", "X"), {"mean": 0.5}, "0.500"),
        (Column("x", "X"), None, "–"),
        (Column("x", "X", "percent"), 0.6871, "68.7"),
        (Column("x", "X", "percent", 4), {"mean": 0.6871, "std": 0.003}, "68.71 ± 0.30"),
        (Column("x", "X", "percent"), {"mean": 0.687, "std": 0.1, "low": 0.679, "high": 0.694}, "68.7 [67.9, 69.4]"),
        (Column("x", "X", "percent", 2), 1, "100"),
        (Column("x", "X", "integer"), 3793, "3,793"),
        (Column("x", "X", "p_value"), 0.00099, "< 0.001"),
        (Column("x", "X", "p_value"), 0.05, "0.050"),
        (Column("x", "X", "p_value"), 1.0, "1.0"),
        (Column("x", "X", "text"), "a|b", "a|b"),
        (Column("x", "X", "text"), 7, "7"),
    ],
)
def test_a_cell_is_written_by_its_column(column: Column, cell: Cell, text: str) -> None:
    assert cell_text(column, cell) == text


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), {"mean": 0.5, "std": float("nan")}])
def test_a_number_that_is_none_is_refused(bad: Cell) -> None:
    with pytest.raises(ValueError, match="'auroc'.*give None"):
        cell_text(METHODS[2], bad)


def test_text_in_a_column_of_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="'auroc'.*'high'"):
        cell_text(METHODS[2], "high")


def test_rows_of_a_block_stand_together_in_order_of_appearance() -> None:
    assert [[row["method"] for row in rows] for rows in blocks(TABLE)] == [["ours", "theirs"], ["ours", "theirs"]]
    assert [rows[0]["set"] for rows in blocks(TABLE)] == ["A", "B"]


def test_the_best_is_sought_in_the_columns_direction_and_as_shown() -> None:
    a, b = blocks(TABLE)
    assert best_rows(METHODS[2], a) == {0}
    assert best_rows(METHODS[3], a) == {1}
    assert best_rows(METHODS[2], b) == {1}
    assert best_rows(METHODS[3], b) == set(), "one number has nothing to be better than"
    assert best_rows(METHODS[1], a) == set()
    ties: list[dict[str, Cell]] = [{"auroc": 0.90001}, {"auroc": 0.90002}, {"auroc": 0.8}]
    assert best_rows(METHODS[2], ties) == {0, 1}, "a difference that is not shown is none"


def test_a_table_in_full() -> None:
    assert to_markdown([TABLE], "# Report\n") == (
        "# Report\n\n"
        "## Main (paper: `tab:main-results`)\n\n"
        "By set.\n\n"
        "| Set | Method | AUROC | ECE |\n"
        "| --- | --- | ---: | ---: |\n"
        "| A | ours | **0.900 ± 0.012** | 0.040 |\n"
        "| A | theirs | 0.800 | **0.030** |\n"
        "| B | ours | 0.700 | – |\n"
        "| B | theirs | **0.750** | 0.010 |\n\n"
        "- Seeds: 3.\n"
    )


def test_a_percentage_says_so_above() -> None:
    assert header_text(Column("x", "AUROC", "percent")) == "AUROC, %"
    assert header_text(Column("x", "in %", "percent")) == "in %"
    assert header_text(Column("x", "AUROC")) == "AUROC"


def unescaped(text: str) -> str:
    text = re.sub(r"\\(.)", r"\1", text)
    return text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")


@settings(deadline=None)
@given(st.text(st.sampled_from("ab_*|`<>&$~[]\\ \n#"), min_size=1).filter(lambda text: text.strip() != ""))
def test_any_name_is_shown_as_it_is_and_stays_in_its_cell(name: str) -> None:
    table = Table("t", "T", [Column("a", "A", "text"), Column("b", "B", "text")], [{"a": name, "b": "end"}])
    *_, row = table_markdown(table).splitlines()
    cells = re.split(r"(?<!\\)(?:\\\\)*\|", row)
    assert len(cells) == 4, row
    assert cells[2] == " end "
    assert unescaped(row) == f"| {' '.join(name.split())} | end |"
    assert not re.search(r"(?<!\\)(?:\\\\)*[*`$]|<", row), "nothing is left that would be markup"


def test_notes_keep_their_code_and_nothing_else() -> None:
    table = Table("t", "T", [Column("a", "A")], [{"a": 1.0}], notes=["`a_b|c` is <b>not</b> a *word*, `d`."])
    assert table_markdown(table).endswith(r"- `a_b|c` is &lt;b&gt;not&lt;/b&gt; a \*word\*, `d`.")
