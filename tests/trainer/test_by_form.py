"""The table by form of conversation: what it counts, and where it stands."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from service.trainer.publish import by_form
from tests.fitting.planted import planted_rows
from tests.trainer.test_run import run

LABEL = np.array([0, 0, 1, 1, 0, 0])
RISK = np.array([[0.9, 0.4, 0.3, 0.6, 0.2, 0.8], [0.7, 0.2, 0.1, 0.4, 0.2, 0.6]])
FORMS = [{"form": name} for name in ("lone", "lone", "lone", "lone", "turns", "turns")]


def test_each_form_has_its_own_row() -> None:
    found = by_form(LABEL, RISK, FORMS, 0.5)
    lone, turns = found["lone"], found["turns"]
    assert list(found) == ["lone", "turns"]
    assert (lone["rows"], lone["wrong"], lone["mean_risk"]) == (4, 0.5, pytest.approx(0.45))
    assert lone["auroc"] == pytest.approx(0.75)  # in each seed: 3 of the 4 pairs in their order
    assert lone["answered"] == pytest.approx(5 / 8)
    assert lone["wrong_among_answered"] == pytest.approx(2 / 5)  # .4 and .2 of .4 .3 .2 .1 .4
    assert lone["mean_risk_among_answered"] == pytest.approx(0.28)
    assert (turns["auroc"], turns["wrong"], turns["answered"]) == (None, 1.0, 0.5)


def test_nothing_is_told_of_answers_that_no_gate_gives() -> None:
    found = by_form(LABEL, RISK, FORMS, 0.05)
    assert found["lone"]["answered"] == 0
    assert found["lone"]["wrong_among_answered"] is None


def test_rows_that_name_no_form_have_no_table() -> None:
    assert by_form(LABEL, RISK, [*FORMS[:-1], {}], 0.5) == {}


def test_evaluation_and_card_have_it(tmp_path: Path) -> None:
    rows = [row | {"form": ("lone", "chat")[place % 2]} for place, row in enumerate(planted_rows(240))]
    bundle, _ = run(tmp_path, rows=rows)
    crossed = bundle.evaluation()["cross_validation"]
    found = crossed["by_form"]
    assert {name: row["rows"] for name, row in found.items()} == {"chat": 120, "lone": 120}
    assert np.mean([row["wrong"] for row in found.values()]) == pytest.approx(
        bundle.evaluation()["data"]["hallucinated"] / 240
    )
    assert crossed["signals"]["depth_mean_unit_norm"]["auroc_within_form"]["mean"] > 0.7
    card = bundle.card()
    assert "## By form of conversation" in card
    assert f"| `lone` | 120 | {found['lone']['wrong']:.3f} | {found['lone']['mean_risk']:.3f} |" in card
    assert "within form" in card
