"""The report's table by form of conversation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from hallutracer_research.evaluation.by_form import form_table
from hallutracer_research.evaluation.options import OURS
from hallutracer_research.evaluation.set_result import SetResult
from service.fitting.nested_cv import FoldScores

TITLES = {OURS: "Ours", "iti": "One head", "prompt-length": "Length"}
FORMS = ["lone", "turn"] * 20 + ["polite"] * 4
LABEL = np.array([0, 0, 1, 1] * 10 + [1] * 4)


def made(forms: list[str] = FORMS) -> SetResult:
    """Of lone questions our method ranks all right, behind a turn all wrong; one head ranks them the other way."""
    sign = np.array([{"turn": -1}.get(form, 1) for form in forms])
    good = sign * (1 - 2 * LABEL)  # rises with hallucination
    strata = [{"form": form} if form else {} for form in forms]
    tests = [np.arange(0, 24), np.arange(24, 44)]
    scores = {
        method: [FoldScores(0, fold, test, values[test]) for fold, test in enumerate(tests)]
        for method, values in ((OURS, good), ("iti", -good), ("prompt-length", good))
    }
    rows = SimpleNamespace(name="made", dataset=SimpleNamespace(rows=[SimpleNamespace(strata=one) for one in strata]))
    prepared: Any = SimpleNamespace(rows=rows, index=np.arange(44), inputs=SimpleNamespace(label=LABEL))
    return SetResult(prepared, [], scores, None)


def test_each_form_has_its_ranking_and_one_of_a_single_class_none() -> None:
    table = form_table([made()], TITLES)
    assert table is not None
    found = {row["form"]: row for row in table.rows}
    assert list(found) == ["lone", "polite", "turn"]
    assert (found["lone"][OURS], found["lone"]["iti"], found["lone"]["wrong"]) == (1.0, 0.0, 0.5)
    assert (found["turn"][OURS], found["turn"]["iti"], found["turn"]["rows"]) == (0.0, 1.0, 20)
    assert (found["polite"]["wrong"], found["polite"].get(OURS)) == (0.0, None)
    assert [column.title for column in table.columns][4:] == ["AUROC, Ours", "AUROC, One head"]


def test_sets_of_one_form_or_none_have_no_table() -> None:
    assert form_table([made(["lone"] * 44), made([""] * 44), made(["lone"] * 40 + [""] * 4)], TITLES) is None
    mixed = form_table([made(["lone"] * 44), made()], TITLES)
    assert mixed is not None
    assert len(mixed.rows) == 3
