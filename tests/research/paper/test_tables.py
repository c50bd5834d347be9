"""The paper's numbers, typed a second time, and every spec's table; a set that fails costs its row only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from hallutracer_research.evaluation.results import SetResult
from hallutracer_research.evaluation.tables import Cell, Column, to_markdown
from hallutracer_research.paper.report import SECTIONS
from hallutracer_research.paper.tables import PUBLISHED, Row, TableSpec, make_tables
from service.errors import TrainingError

SHAPES = {  # rows, columns of numbers
    "tab:main-results": (25, 12),
    "tab:validation_results": (6, 9),  # and "20/20"
    "tab:ablation_combined": (3, 9),
    "tab:ablation_pooling": (5, 8),
    "tab:readout_ablation": (15, 3),
    "tab:head_distribution": (3, 5),
    "tab:topk_heads": (9, 5),
    "tab:snr_verification": (18, 5),
    "tab:fisher-gap": (3, 4),
    "tab:mean-vs-median": (9, 4),
    "tab:ablation-12d-22d": (6, 15),
    "tab:variance-decomp": (3, 6),
    "tab:kappa-calibration": (3, 8),
    "tab:isotropy-results": (4, 15),
    "tab:k-decomp-auroc": (10, 8),
    "tab:k-decomp-cov": (9, 5),
}
MODELS = {"Qwen2.5-7B", "Qwen2.5-14B", "Qwen2.5-32B", "Qwen2.5-72B", "LLaMA-2-7B", "LLaMA-3.1-8B"}
SETS = {"TruthfulQA", "True-False", "HaluEval2", "HELM", "Agentic"}

# Typed from the paper by hand, not copied from the data file: percentages as shares of 1.
MAIN = [
    ("TruthfulQA", "HalluGuard", "qwen2.5-72b_auprc", 0.1681),
    ("TruthfulQA", "Fact-Probe", "qwen2.5-32b_auroc", 0.7553), ("TruthfulQA", "IRIS", "llama-3.1-8b_auroc", 0.6504),
    ("TruthfulQA", "HalluTracer", "qwen2.5-14b_auprc", (0.4676, 0.005)),
    ("True-False", "Fact-Probe", "qwen2.5-7b_auroc", 0.8895),
    ("True-False", "ITI-Probe", "qwen2.5-72b_auroc", 0.9551),
    ("True-False", "HalluTracer", "llama-3.1-8b_auprc", (0.9726, 0.006)),
    ("HaluEval2", "ITI-Probe", "llama-2-7b_auroc", 0.7911), ("HaluEval2", "IRIS", "qwen2.5-72b_auprc", 0.8038),
    ("HaluEval2", "HalluTracer", "qwen2.5-32b_auprc", (0.7939, 0.013)),
    ("HELM", "HalluGuard", "llama-3.1-8b_auprc", 0.5672), ("HELM", "IRIS", "llama-2-7b_auroc", 0.8715),
    ("HELM", "HalluTracer", "llama-3.1-8b_auroc", (0.8873, 0.004)),
    ("Agentic", "HalluGuard", "qwen2.5-72b_auroc", 0.7562), ("Agentic", "ITI-Probe", "qwen2.5-72b_auprc", 0.8516),
    ("Agentic", "HalluTracer", "qwen2.5-72b_auroc", (0.9786, 0.008)),
]  # fmt: skip
TYPED: list[tuple[str, dict[str, str], str, Any]] = [
    *(("tab:main-results", {"dataset": one, "method": method}, column, value) for one, method, column, value in MAIN),
    ("tab:validation_results", {"model": "Qwen2.5-72B"}, "alignment", 0.377),
    ("tab:validation_results", {"model": "LLaMA-3.1-8B"}, "energy_ratio", 0.0868),
    ("tab:validation_results", {"model": "Qwen2.5-32B"}, "cq_significant", "39/40"),
    ("tab:ablation_combined", {"dataset": "True-False"}, "shape", 0.780),
    ("tab:ablation_combined", {"dataset": "HELM"}, "output", 0.868),
    ("tab:ablation_pooling", {"model": "LLaMA-3.1-8B", "method": "Shape"}, "content_max", -0.0515),
    ("tab:ablation_pooling", {"model": "Qwen2.5-7B", "method": "Traj-LR"}, "last_1", 0.8920),
    ("tab:readout_ablation", {"model": "Qwen2.5-14B", "dataset": "HELM"}, "difference", 0.023),
    ("tab:readout_ablation", {"model": "Qwen2.5-7B", "dataset": "HaluEval2"}, "residual", 0.829),
    ("tab:head_distribution", {"model": "LLaMA-2-7B"}, "rank_share", 0.178),
    ("tab:head_distribution", {"model": "LLaMA-3.1-8B"}, "switches", 1.0),
    ("tab:topk_heads", {"model": "LLaMA-2-7B", "dataset": "True-False"}, "bottom_1", 0.917),
    ("tab:topk_heads", {"model": "Qwen2.5-7B", "dataset": "HELM"}, "random_1", (0.880, 0.015)),
    ("tab:snr_verification", {"model": "Qwen2.5-32B", "dataset": "HaluEval2"}, "eta", 1.008),
    ("tab:snr_verification", {"model": "LLaMA-2-7B", "dataset": "HELM"}, "rho", 0.096),
    ("tab:fisher-gap", {"model": "LLaMA-3.1-8B"}, "chi", 0.723),
    ("tab:mean-vs-median", {"model": "Qwen2.5-7B", "dataset": "True-False"}, "correlation", 0.989),
    ("tab:ablation-12d-22d", {"model": "Qwen2.5-32B"}, "agentic_source", 0.8957),
    ("tab:ablation-12d-22d", {"model": "Average"}, "helm_full", 0.8825),
    ("tab:variance-decomp", {"model": "Qwen2.5-7B"}, "acf_1", 0.29),
    ("tab:variance-decomp", {"model": "LLaMA-2-7B"}, "acf_8", -0.04),
    ("tab:kappa-calibration", {"model": "LLaMA-2-7B"}, "kappa_p95", 3.87),
    ("tab:kappa-calibration", {"model": "LLaMA-3.1-8B"}, "degradation", 0.087),
    ("tab:isotropy-results", {"model": "Qwen2.5-7B"}, "permutation_rank_p", 0.036),
    ("tab:isotropy-results", {"model": "LLaMA-2-7B"}, "trend_slope", -0.0019),
    ("tab:isotropy-results", {"model": "Qwen2.5-14B"}, "effective_rank", (28.6, 17.0)),
    ("tab:isotropy-results", {"model": "LLaMA-3.1-8B"}, "adjacent_cos", 0.093),
    ("tab:k-decomp-auroc", {"model": "LLaMA-2-7B", "dataset": "HaluEval2"}, "gap_probe", 1.048),
    ("tab:k-decomp-auroc", {"model": "Average"}, "signal_head", 0.557),
    ("tab:k-decomp-cov", {"model": "LLaMA-3.1-8B", "dataset": "True-False"}, "var_k", 170.3),
    ("tab:k-decomp-cov", {"model": "LLaMA-2-7B", "dataset": "HaluEval2"}, "cov_metric_head", -988.8),
]


def published_cell(label: str, column: str, **where: str) -> Cell:
    (row,) = [row for row in PUBLISHED[label].rows if all(row.get(key) == value for key, value in where.items())]
    return row[column]


def is_number(cell: Cell) -> bool:
    return isinstance(cell, int | float | Mapping)


def test_every_table_has_the_printed_number_of_rows_and_numbers() -> None:
    found = {}
    for label, table in PUBLISHED.items():
        numbers = {sum(is_number(cell) for cell in row.values()) for row in table.rows}
        assert len(numbers) == 1, f"{label}: rows of different length"
        found[label] = (len(table.rows), numbers.pop())
        assert table.label == label
    assert found == SHAPES
    assert len({table.name for table in PUBLISHED.values()}) == len(SHAPES)


def test_models_and_sets_are_spelt_one_way() -> None:
    for label, table in PUBLISHED.items():
        for row in table.rows:
            assert row.get("model", "Average") in MODELS | {"Average"}, label
            assert row.get("dataset") in SETS | {None}, label
    main = PUBLISHED["tab:main-results"]
    assert {row["dataset"] for row in main.rows} == SETS
    titles = {column.title.rpartition(" ")[0] for column in main.columns[2:]}
    assert titles == MODELS


def test_cells_of_every_table_typed_again() -> None:
    for label, where, column, expected in TYPED:
        wanted = {"mean": expected[0], "std": expected[1]} if isinstance(expected, tuple) else expected
        assert published_cell(label, column, **where) == wanted, (label, where, column)
    assert {label for label, *_ in TYPED} == set(SHAPES)


SPECS = [spec for specs in SECTIONS.values() for spec in specs.values()]
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
