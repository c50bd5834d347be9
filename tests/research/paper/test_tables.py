"""The paper's numbers, typed a second time, and every spec's table; a set that fails costs its row
only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hallutracer_research.evaluation.page import Cell, Column, to_markdown
from hallutracer_research.evaluation.results import SetResult
from hallutracer_research.paper.report import SECTIONS
from hallutracer_research.paper.tables import PUBLISHED, Row, TableSpec, make_tables
from service.errors import TrainingError
from tests.kit.tables import cells

# Label, rows, columns of numbers; of validation_results one more is "20/20".
SHAPES = {
    label: (int(rows), int(columns))
    for label, rows, columns in cells(
        """
        tab:main-results | 25 | 12
        tab:validation_results | 6 | 9
        tab:ablation_combined | 3 | 9
        tab:ablation_pooling | 5 | 8
        tab:readout_ablation | 15 | 3
        tab:head_distribution | 3 | 5
        tab:topk_heads | 9 | 5
        tab:snr_verification | 18 | 5
        tab:fisher-gap | 3 | 4
        tab:mean-vs-median | 9 | 4
        tab:ablation-12d-22d | 6 | 15
        tab:variance-decomp | 3 | 6
        tab:kappa-calibration | 3 | 8
        tab:isotropy-results | 4 | 15
        tab:k-decomp-auroc | 10 | 8
        tab:k-decomp-cov | 9 | 5
        """
    )
}


def is_number(cell: Cell) -> bool:
    return isinstance(cell, int | float | Mapping)


def test_every_table_has_the_printed_number_of_rows_and_numbers() -> None:
    found = {}
    for label, table in PUBLISHED.items():
        numbers = {sum(map(is_number, row.values())) for row in table.rows}
        assert len(numbers) == 1, f"{label}: rows of different length"
        found[label] = (len(table.rows), numbers.pop())
        assert table.label == label
    assert found == SHAPES
    assert len({table.name for table in PUBLISHED.values()}) == len(SHAPES)


def test_cells_of_every_table_typed_again() -> None:
    typed = [
        line.split("\t")
        for line in Path(__file__).with_name("typed.tsv").read_text().splitlines()[2:]
    ]
    for label, where, column, text in typed:
        wanted = dict(one.split("=") for one in where.split(" "))
        (row,) = (row for row in PUBLISHED[label].rows if wanted.items() <= row.items())
        value, *std = (
            float(one) if one[-1].isdigit() and "/" not in one else one for one in text.split()
        )
        assert row[column] == ({"mean": value, "std": std[0]} if std else value), (
            label,
            where,
            column,
        )
    assert {label for label, *_ in typed} == set(SHAPES)


SPECS = [spec for specs in SECTIONS.values() for spec in specs.values()]
# Columns of our own, and those of the published tables that no run can fill.
OURS = {
    "gamma_plugin",
    "r_fisher_direct",
    "r_fisher_unbiased",
    "cauchy_schwarz",
    "shrinkage",
    "acf_floor",
    "icc_unbiased",
    "random_energy",
    "expected_cos",
    "cos_p",
    "head",
    "null",
}
NOT_OURS = {"model", "dataset", "method", "auc_head", "block"}


def test_every_spec_makes_a_whole_table_of_a_real_fit(result: SetResult) -> None:
    tables = make_tables(SPECS, [result])
    assert len({table.name for table in tables}) == len(tables) == 18
    for spec, table in zip(SPECS, tables, strict=True):
        keys = [column.key for column in table.columns]
        assert len(set(keys)) == len(keys)
        assert set(table.rows[0]) == set(keys), table.name
        assert table.notes[: len(spec.notes)] == list(spec.notes)
        if (
            table.label and table.label != "tab:ablation-12d-22d"
        ):  # that one has a column for each data set
            published = {column.key: column for column in PUBLISHED[table.label].columns}
            assert all(
                published[column.key] == column
                for column in table.columns[1:]
                if column.key not in OURS
            )
    assert to_markdown(tables, "")  # refuses a number that is none


def test_together_they_are_all_tables_of_the_paper_but_the_main_one() -> None:
    assert {spec.label for spec in SPECS} - {""} == set(PUBLISHED) - {"tab:main-results"}
    for label in {spec.label for spec in SPECS} - {"", "tab:ablation-12d-22d"}:
        columns: set[Any] = set()
        for spec in SPECS:
            if spec.label == label:
                columns |= {column for column in spec.columns if isinstance(column, str)}
        assert columns == {column.key for column in PUBLISHED[label].columns} - NOT_OURS, label


def test_a_row_function_of_two_tables_runs_once_and_a_failing_set_costs_its_row(
    result: SetResult,
) -> None:
    calls: list[str] = []

    def make(one: SetResult, notes: list[str]) -> Row:
        calls.append(one.title)
        notes += ["twice", "twice"]
        if len(calls) == 1:
            raise TrainingError("too few rows")
        return {"a": 1.0, "b": 2.0}

    def columns(results: Sequence[SetResult]) -> list[Column]:
        return [Column("b", "B")] * (len(results) - 1)

    first = TableSpec("first", "First", "", [Column("a", "A")], "", make, ("common",))
    second = TableSpec("second", "Second", "", columns, "", make, ("own",))
    tables = make_tables([first, second], [result, result])
    assert calls == ["made", "made"]
    assert [table.rows for table in tables] == [
        [{"set": "made"}, {"set": "made", "a": 1.0}],
        [{"set": "made"}, {"set": "made", "b": 2.0}],
    ]
    assert tables[0].notes == [
        "common",
        "made: twice",
        "made: left out: too few rows",
        "made: twice",
    ]
    assert tables[1].notes == ["own"]
