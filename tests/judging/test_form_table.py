"""The table by form of conversation that a served bundle tells of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes_store.bundle import load_bundle
from probes_store.records import Recalibration
from probes_store.store import SHIPPED
from service.data.forms import registry
from service.judging.evaluation import FormTable, form_table
from service.trainer.publish import by_form
from tests.judging.test_coverage import bundle_with
from tests.probes_store.factory import GUARANTEE

FORMS = [{"form": "lone"}] * 6 + [{"form": "turn_own"}] * 4
LABEL = np.array([1, 0, 0, 0, 0, 1, 0, 0, 0, 0])
RISK = np.array([[0.1, 0.9, 0.8, 0.7, 0.3, 0.6, 0.9, 0.8, 0.8, 0.9]])
MADE = by_form(LABEL, RISK, FORMS, 0.5)
KEPT = {"cross_validation": {"by_form": MADE}}


def table(folder: Path, evaluation: dict[str, Any], **changes: Any) -> FormTable | None:
    return form_table(bundle_with(folder, evaluation, **changes))


def test_what_the_trainer_keeps_is_told(tmp_path: Path) -> None:
    found = table(tmp_path, KEPT)
    assert found is not None
    assert found.source == "out_of_fold"
    lone, turn = found.data
    assert (lone.form, lone.rows, lone.wrong, lone.answered) == ("lone", 6, pytest.approx(4 / 6), pytest.approx(2 / 6))
    assert lone.wrong_among_answered == pytest.approx(0.5)
    assert (turn.form, turn.auroc, turn.answered, turn.wrong_among_answered) == ("turn_own", None, 0.0, None)
    assert turn.mean_risk == pytest.approx(0.85)


def test_held_out_rows_go_first(tmp_path: Path) -> None:
    found = table(tmp_path, KEPT | {"held_out": {"by_form": by_form(LABEL[:6], RISK[:, :6], FORMS[:6], 0.5)}})
    assert found is not None
    assert (found.source, [one.form for one in found.data]) == ("held_out", ["lone"])


@pytest.mark.parametrize(
    "kept",
    [
        {},
        {"cross_validation": None},
        {"cross_validation": {"by_form": {}}},
        {"cross_validation": {"by_form": [1]}},
        {"cross_validation": {"by_form": "lone"}},
        {"cross_validation": {"by_form": {"lone": None}}},
        {"cross_validation": {"by_form": {"lone": MADE["lone"] | {"rows": 0}}}},
        {"cross_validation": {"by_form": {"lone": MADE["lone"] | {"rows": "6"}}}},
        {"cross_validation": {"by_form": {"lone": MADE["lone"] | {"wrong": 1.5}}}},
        {"cross_validation": {"by_form": {"lone": MADE["lone"] | {"auroc": "high"}}}},
        {"cross_validation": {"by_form": {"lone": {key: MADE["lone"][key] for key in ("rows", "wrong")}}}},
        {"cross_validation": [KEPT]},
    ],
)
def test_nothing_is_told_where_nothing_can_be_read(tmp_path: Path, kept: dict[str, Any]) -> None:
    assert table(tmp_path, kept) is None


def test_a_recalibrated_bundle_serves_other_risks(tmp_path: Path) -> None:
    assert table(tmp_path, KEPT, recalibration=Recalibration("intercept", c=-1.0)) is None


def test_a_calibrated_bundle_has_another_threshold(tmp_path: Path) -> None:
    found = table(tmp_path, KEPT, guarantee=GUARANTEE, threshold=GUARANTEE.threshold)
    assert found is not None
    assert {(one.answered, one.wrong_among_answered) for one in found.data} == {(None, None)}
    assert found.data[0].mean_risk == pytest.approx(MADE["lone"]["mean_risk"])


def test_the_shipped_smollm2_has_one() -> None:
    found = form_table(load_bundle(SHIPPED / "smollm2" / "1"))
    assert found is not None
    assert {row.form for row in found.data} == set(registry.FORMS)
