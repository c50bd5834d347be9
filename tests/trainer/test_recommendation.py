"""The sentence that says whether a bundle pays for its model, and the rule that chooses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.fitting.folds import outer_folds
from service.fitting.nested_cv import Evaluation
from service.judging.evaluation import recommendation_of
from service.trainer.cards import recommendation_page
from service.trainer.recommendation import (
    SHOWN_COSTS,
    TEXT,
    _against,
    recommend,
    text_risks,
)
from tests.fitting.made import labelled_inputs
from tests.fitting.planted import planted_rows
from tests.kit.rows import Document
from tests.trainer.made import run, section

ROWS, FOLDS = 600, 2
OWN = "depth_mean_unit_norm"


def made(
    own: dict[str, float], rival: float, *, least: float = 0.0, kinds: tuple[str, ...] = ("a", "b")
) -> tuple[Document, np.ndarray]:
    """A recommendation on rows whose own signal has so much of the truth in each kind, and the
    entropy so much of it; the texts tell nothing.  No risk is below ``least``."""
    draw = np.random.default_rng(0)
    label = (draw.random(ROWS) < 0.5).astype(np.int64)
    names = [kinds[number % len(kinds)] for number in range(ROWS)]
    strength = np.array([own.get(name, 0.0) for name in names])
    wrong = 1.0 - label

    def risks(truth: Any) -> np.ndarray:
        odds = 3 * truth * (wrong - 0.5) + draw.normal(size=ROWS)
        return np.asarray(least + (1 - least) / (1 + np.exp(-odds)))

    sides = [fold.test for fold in outer_folds(label, np.arange(ROWS), folds=FOLDS, seeds=(0,))]
    risk = {OWN: risks(strength), "first_token_entropy": risks(rival)}
    tests: Document = {}
    for name, values in risk.items():
        tests[name] = [(side, values[side]) for side in sides]
    nested = Evaluation({}, {name: values[None] for name, values in risk.items()}, tests)
    texts = ["the same words"] * ROWS
    inputs = labelled_inputs(label, np.arange(ROWS), names)
    return recommend(inputs, texts, nested, OWN, folds=FOLDS, seed=0), label


def test_a_risk_that_beats_all_that_is_cheaper_is_recommended() -> None:
    record, label = made({"a": 1.0, "b": 1.0}, rival=0.3)
    assert (record["use"], record["rival"]) == ("yes", "first_token_entropy")
    assert record["gain"]["low"] > 0
    assert record["sentence"].startswith("Use it: ")
    assert "first-token entropy" in record["sentence"]
    assert f"AUROC {record['auroc']:.3f} against {record['rival_auroc']:.3f}" in record["sentence"]
    assert record["right"] == pytest.approx(label.mean(), abs=1e-6)
    assert [gate["wrong_costs"] for gate in record["gates"]] == list(SHOWN_COSTS)
    assert any(gate["pays"] for gate in record["gates"])


def test_a_risk_that_is_better_in_some_kinds_is_recommended_for_these() -> None:
    kinds = ("a", "b", "c", "d")
    own = {"a": 1.2, "b": 0.1, "c": 0.1, "d": 0.1}
    record, _ = made(own, rival=0.5, kinds=kinds)
    assert (record["use"], record["kinds"]) == ("kinds", ["a"])
    assert record["sentence"].startswith("Use it for these kinds: a. ")
    assert [row["use"] for row in record["by_kind"].values()].count(True) == 1


@pytest.mark.parametrize("more", range(3))
def test_chance_alone_names_no_kind(more: int) -> None:
    kinds = ("a", "b", "c", "d", "e")[: 3 + more]
    record, _ = made(dict.fromkeys(kinds, 0.5), rival=0.5, kinds=kinds)
    assert (record["use"], record["kinds"]) == ("no", [])
    assert record["sentence"].startswith("Do not use it: it is not shown to be better than ")


def test_a_better_ranking_is_not_enough_where_no_gate_saves_anything() -> None:
    """All risks lie above all thresholds: each gate withholds everything."""
    record, _ = made({"a": 1.0, "b": 1.0}, rival=0.3, least=0.81)
    assert record["gain"]["low"] > 0
    assert record["use"] == "no"
    assert record["sentence"].startswith("Do not use it: no gate at a cost of 0.25, 1, 4 saves")
    assert [gate["answered"] for gate in record["gates"]] == [0, 0, 0]
    assert "| 1 | 0.50 | 0% | - | 100% | no |" in recommendation_page({"recommendation": record})


def test_small_kinds_are_not_judged_by_themselves() -> None:
    record, _ = made({"a": 1.0}, rival=0.6, kinds=tuple("abcdefgh"))
    assert all("gain" not in row for row in record["by_kind"].values())
    assert "too few rows" in recommendation_page({"recommendation": record})


def test_a_kind_whose_classes_stand_in_different_folds_is_not_judged() -> None:
    label = np.repeat([0, 1], 60)
    sides = [(np.arange(60), np.zeros(60)), (np.arange(60, 120), np.ones(60))]
    group, every = np.arange(120), np.ones(120, np.bool_)
    assert _against(label, group, sides, {TEXT: sides}, every) is None


def test_the_rival_that_reads_words_alone_sees_no_model() -> None:
    label = np.arange(200) % 2
    texts = [f"{'old' if known else 'new'} town {number}" for number, known in enumerate(label)]
    group = np.arange(200)
    tests = text_risks(texts, label, group, folds=2, seed=0)
    assert sorted(np.concatenate([rows for rows, _ in tests]).tolist()) == list(range(200))
    assert all((risk[label[rows] == 0] > 0.5).all() for rows, risk in tests)
    wordless = text_risks(["?"] * 200, label, group, folds=2, seed=0)
    assert all((risk == 0).all() for _, risk in wordless)


def test_a_run_ends_with_the_page_and_the_card_begins_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.trainer.run.better_options", lambda *_: ["--other gains"])
    bundle, console = run(tmp_path, rows=planted_rows(240), seeds=(0,), folds=2)
    record = bundle.evaluation()["recommendation"]
    assert record["rival"] == TEXT, "the words of planted prompts give the label away"
    assert (record["use"], recommendation_of(bundle)) == ("no", record["sentence"])
    page = recommendation_page(bundle.evaluation())
    lines = page.splitlines()
    start = console.lines.index("## Does it pay for this model?")
    assert console.lines[start : start + len(lines)] == lines
    assert console.lines[start - 1] == "--other gains"
    assert f"**{record['sentence']}**" in lines
    assert {"capital", "river", "element"} == set(record["by_kind"])
    assert section(bundle, "Does it pay for this model?").startswith(f"**{record['sentence']}**")
    card = bundle.card()
    assert card.index("## Does it pay") < card.index("## Training data")
