"""What a researcher sees first: a cheaper signal that is better is said, and few rows give no figure."""

from __future__ import annotations

from itertools import islice
from typing import Any

from service.trainer.cards import cell, cheaper_and_better, closing_lines


def signals(own: float, **others: float) -> dict[str, Any]:
    def row(auroc: float) -> dict[str, Any]:
        plain = {"mean": auroc, "std": 0.1}
        return {"auroc": plain, "ece": plain, "calibration_debiased": plain}

    return {"depth_mean_unit_norm": row(own)} | {name: row(value) for name, value in others.items()}


def test_a_signal_without_probes_that_ranks_better_is_said_above_the_table() -> None:
    rows = signals(0.844, first_token_entropy=0.904, prompt_length=0.85, best_head=0.95)
    said = cheaper_and_better(rows, "depth_mean_unit_norm")
    assert said is not None
    assert "first-token entropy" in said
    assert "0.904 against 0.844" in said
    evaluation = {"cross_validation": {"signals": rows}, "signal_of_the_bundle": "depth_mean_unit_norm"}
    lines = list(islice(closing_lines(evaluation), 3))
    assert lines[0] == said
    assert "0.904 +/- 0.100" in lines[2]  # without intervals the table is drawn, too


def test_nothing_is_said_where_the_probes_are_better() -> None:
    assert cheaper_and_better(signals(0.844, first_token_entropy=0.84), "depth_mean_unit_norm") is None


def test_a_cell_names_its_spread() -> None:
    assert cell({"mean": 0.5, "std": 0.1}) == "0.500 +/- 0.100"
    assert cell({"mean": 0.5, "std": 0.1, "low": 0.4, "high": 0.6}) == "0.500 [0.400, 0.600]"
