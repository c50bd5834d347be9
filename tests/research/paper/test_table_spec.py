"""Every spec makes a whole table that is named as the paper's, and a set that fails costs its row only."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hallutracer_research.evaluation.page.markdown import to_markdown
from hallutracer_research.evaluation.set_result import SetResult
from hallutracer_research.evaluation.tables import Column
from hallutracer_research.paper.published import PUBLISHED
from hallutracer_research.paper.report import SECTIONS
from hallutracer_research.paper.table_spec import Row, TableSpec, make_tables
from service.errors import TrainingError

SPECS = [spec for specs in SECTIONS.values() for spec in specs]
# Columns of our own, and those of the published tables that no run can fill.
OURS = {"gamma_plugin", "r_fisher_direct", "r_fisher_unbiased", "cauchy_schwarz", "shrinkage", "acf_floor",
        "icc_unbiased", "random_energy", "expected_cos", "cos_p", "head", "null"}  # fmt: skip
NOT_OURS = {"model", "dataset", "method", "auc_head", "block"}


def test_every_spec_makes_a_whole_table_of_a_real_fit(result: SetResult) -> None:
    tables = make_tables(SPECS, [result])
    assert len({table.name for table in tables}) == len(tables) == 18
    for spec, table in zip(SPECS, tables, strict=True):
        keys = [column.key for column in table.columns]
        assert len(set(keys)) == len(keys)
        assert set(table.rows[0]) == set(keys), table.name
        assert table.notes[: len(spec.notes)] == list(spec.notes)
        if table.label and table.label != "tab:ablation-12d-22d":  # that one has a column for each data set
            published = {column.key: column for column in PUBLISHED[table.label].columns}
            assert all(published[column.key] == column for column in table.columns[1:] if column.key not in OURS)
    assert to_markdown(tables, "")  # refuses a number that is none


def test_together_they_are_all_tables_of_the_paper_but_the_main_one() -> None:
    assert {spec.label for spec in SPECS} - {""} == set(PUBLISHED) - {"tab:main-results"}
    for label in {spec.label for spec in SPECS} - {"", "tab:ablation-12d-22d"}:
        columns = [column for spec in SPECS if spec.label == label for column in spec.columns]  # type: ignore[union-attr]
        assert (
            set(filter(lambda column: isinstance(column, str), columns))
            == {column.key for column in PUBLISHED[label].columns} - NOT_OURS
        ), label


def test_a_row_function_of_two_tables_runs_once_and_a_failing_set_costs_its_row(result: SetResult) -> None:
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
    assert tables[0].notes == ["common", "made: twice", "made: left out: too few rows", "made: twice"]
    assert tables[1].notes == ["own"]


def test_a_column_that_the_paper_does_not_have_is_refused(result: SetResult) -> None:
    with pytest.raises(KeyError, match="phi"):
        TableSpec("t", "T", "tab:fisher-gap", ["phi"], "", lambda *_: {}).table([result])
