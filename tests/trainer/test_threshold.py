"""The rule of a threshold through a whole run: manifest, evaluation.json, card, plot and console say the same."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from probes_store.bundle import Bundle
from service.errors import TrainingError
from service.fitting.scores import at_threshold
from service.fitting.thresholds import Target, WrongCosts
from service.judging.evaluation import coverage
from service.trainer.cards import rule_in_words, write_card
from service.trainer.options import TrainOptions
from service.trainer.plots import PlotData, _coverage
from tests.fitting.planted import Quiet, planted_rows, write_rows
from tests.trainer.test_plots import data
from tests.trainer.test_run import run

QUICK: dict[str, Any] = {"seeds": (0, 1), "c": 0.3}


def section(bundle: Bundle) -> str:
    _, _, rest = bundle.card().partition("## Threshold\n")
    return " ".join(rest.partition("\n## ")[0].split())


@pytest.fixture(scope="module")
def by_cost(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Quiet]:
    folder = tmp_path_factory.mktemp("cost")
    test = write_rows(folder / "test.jsonl", planted_rows(90, seed=3))
    return run(folder, test=test, **QUICK)


@pytest.fixture(scope="module")
def missed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Quiet]:
    """Every fifth label is turned, so that some of the surest answers are wrong."""
    rows = [row | {"label": 1 - row["label"]} if place % 5 == 0 else row for place, row in enumerate(planted_rows(240))]
    return run(tmp_path_factory.mktemp("missed"), rows=rows, target="wrong<=0.01", **QUICK)


def test_by_default_what_is_more_likely_right_than_wrong_is_answered(by_cost: tuple[Bundle, Quiet]) -> None:
    bundle, console = by_cost
    evaluation = bundle.evaluation()
    found = evaluation["threshold"]
    assert bundle.manifest.threshold == 0.5
    assert {key: found[key] for key in ("rule", "wrong_costs", "threshold")} == {
        "rule": "wrong_costs", "wrong_costs": 1.0, "threshold": 0.5,
    }  # fmt: skip
    for said in (section(bundle), " ".join(console.lines)):
        assert "hreshold 0.5000 = 1 / (1 + K) with K = 1" in said
        assert "answer what is more likely right than wrong" in said


def test_another_cost_moves_the_threshold_and_every_figure_at_it(tmp_path: Path, by_cost: tuple[Bundle, Quiet]) -> None:
    test = write_rows(tmp_path / "test.jsonl", planted_rows(90, seed=3))
    bundle, _ = run(tmp_path, test=test, wrong_costs=4.0, **QUICK)
    assert bundle.manifest.threshold == 0.2
    careful, plain = bundle.evaluation(), by_cost[0].evaluation()
    assert "with K = 4" in section(bundle)
    assert "more likely right than wrong" not in section(bundle)
    for part in ("cross_validation", "held_out"):
        assert careful[part]["at_threshold"]["answered"] < plain[part]["at_threshold"]["answered"]
    for evaluation, k in ((careful, 4), (plain, 1)):  # the nested figures are those of the chosen threshold
        crossed = evaluation["cross_validation"]
        [row] = (row for row in crossed["by_wrong_costs"] if row["wrong_costs"] == k)
        assert row == {"wrong_costs": k, "threshold": 1 / (1 + k)} | crossed["at_threshold"]
    own = coverage(bundle).own
    assert own is not None
    assert own.threshold == 0.2
    assert own.answered == careful["cross_validation"]["at_threshold"]["answered"]


def test_the_card_has_a_table_of_costs(by_cost: tuple[Bundle, Quiet]) -> None:
    card, crossed = by_cost[0].card(), by_cost[0].evaluation()["cross_validation"]
    rows = re.findall(r"^\| (0\.25|0\.5|1|2|4) \| (0\.\d{3}) \| (.+?) \| (.+?) \| (.+?) \|$", card, re.MULTILINE)
    assert [(k, at) for k, at, *_ in rows] == [
        ("0.25", "0.800"), ("0.5", "0.667"), ("1", "0.500"), ("2", "0.333"), ("4", "0.200")
    ]  # fmt: skip
    for (*_, answered, wrong, withheld), row in zip(rows, crossed["by_wrong_costs"], strict=True):
        assert answered == f"{row['answered']:.1%}"
        assert wrong == f"{row['wrong_among_answered']:.1%}"
        assert withheld == f"{row['right_withheld']:.1%}"
    assert "coverage.png" in card


@pytest.mark.parametrize("target", ["wrong<=0.2", "answered>=0.5"])
def test_a_target_that_is_reached(tmp_path: Path, target: str) -> None:
    bundle, console = run(tmp_path, target=target, **QUICK)
    found = bundle.evaluation()["threshold"]
    assert (found["rule"], found["target"], found["reached"]) == ("target", target, True)
    assert found["threshold"] == bundle.manifest.threshold != 0.5
    gate = found["out_of_fold"]
    assert 0.1 < gate["wrong_among_answered"] <= 0.2 if target == "wrong<=0.2" else 0.5 <= gate["answered"] < 0.51
    for said in (section(bundle), " ".join(console.lines)):
        assert f"for the target {target}: it answers {gate['answered']:.1%}" in said
        assert "out of reach" not in said
    assert "it is no promise" in section(bundle)


def test_a_target_out_of_reach_is_said_so_and_does_not_open_the_gate(missed: tuple[Bundle, Quiet]) -> None:
    bundle, console = missed
    found = bundle.evaluation()["threshold"]
    gate = found["out_of_fold"]
    assert found["reached"] is False
    assert found["threshold"] == bundle.manifest.threshold
    assert gate["wrong_among_answered"] > 0.01
    assert gate["answered"] < 0.5
    for row in bundle.evaluation()["cross_validation"]["by_wrong_costs"][:3]:
        assert gate["wrong_among_answered"] < row["wrong_among_answered"]
    words = (
        "he target wrong<=0.01 is out of reach. What is reachable is the lowest share of wrong with at least 20 "
        f"answered rows: threshold {found['threshold']:.4f}, which was published, answers {gate['answered']:.1%} of "
        f"the training rows by out-of-fold risks, and {gate['wrong_among_answered']:.1%} of these answers are wrong"
    )
    assert f"t{words}" in console.lines
    assert f"**T{words}.**" in section(bundle)


def test_too_few_rows_for_a_target_publish_nothing(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="needs 20 answered rows, and there are 18") as caught:
        run(tmp_path, rows=planted_rows(18), target="wrong<=0.2", folds=2, seeds=(0,), c=0.3, evaluate=False)
    assert caught.value.param == "target"
    assert not (tmp_path / "store" / "planted").exists()


def test_without_an_evaluation_the_rule_is_recorded_all_the_same(tmp_path: Path) -> None:
    bundle, console = run(tmp_path, evaluate=False, wrong_costs=2.0, **QUICK)
    assert bundle.manifest.threshold == 1 / 3
    assert bundle.evaluation()["threshold"]["wrong_costs"] == 2
    assert "K = 2" in section(bundle)
    assert any("K = 2" in line for line in console.lines)
    assert "| K |" not in bundle.card()


def test_a_gate_that_answers_nothing_says_so(missed: tuple[Bundle, Quiet]) -> None:
    evaluation = missed[0].evaluation()
    crossed = evaluation["cross_validation"]
    nothing = {"answered": 0.0, "wrong_among_answered": 0.0, "right_withheld": 1.0}
    crossed["at_threshold"] = nothing
    crossed["by_wrong_costs"][-1] |= nothing
    manifest, std = missed[0].manifest, [1.0] * len(missed[0].manifest.signals)
    said = write_card(manifest, evaluation, signal_std=std, left_out={}, plots=[])
    assert "**no prompt is answered**" in said
    assert "| 4 | 0.200 | 0.0% | - | 100.0% |" in said


def test_an_unreachable_share_of_answers_has_words_too() -> None:
    gate = {"answered": 0.9, "wrong_among_answered": 0.3, "right_withheld": 0.0}
    said = rule_in_words(
        {"rule": "target", "target": "answered>=1", "reached": False, "threshold": 1.0, "out_of_fold": gate}
    )
    assert "answered>=1 is out of reach. What is reachable is the largest share answered" in said


def points(given: PlotData) -> tuple[list[tuple[float, float]], list[str]]:
    axes = Figure().add_subplot()
    _coverage(axes, given)
    marked = [line for line in axes.lines if line.get_marker() == "o"]
    labels = [str(line.get_label()) for line in axes.lines]
    return [tuple(np.asarray(line.get_xydata())[0].tolist()) for line in marked], labels


def test_the_curve_shows_the_chosen_point() -> None:
    given = data()
    for threshold in (0.3, 0.5, 0.7):
        gate = at_threshold(given.label, given.risk["depth mean"], threshold)
        found, labels = points(dataclasses.replace(given, threshold=threshold))
        assert found == [(gate["answered"], gate["wrong_among_answered"])]
        assert f"the bundle's threshold, {threshold:.3f}" in labels
    found, labels = points(dataclasses.replace(given, threshold=1e-9))
    assert found == []
    assert "the bundle's threshold, 0.000, answers nothing" in labels


def test_the_options_have_one_rule(tmp_path: Path) -> None:
    def options(**given: Any) -> TrainOptions:
        return TrainOptions(name="x", **given)

    assert options().rule == WrongCosts(1.0)
    assert options(wrong_costs=0.5).rule == WrongCosts(0.5)
    assert options(target="answered>=0.5").rule == Target("answered", 0.5)
    for given, field in (
        ({"target": "wrong<=0.2", "wrong_costs": 1.0}, "target"),
        ({"target": "wrong"}, "target"),
        ({"target": ""}, "target"),
        ({"wrong_costs": 0.0}, "wrong_costs"),
    ):
        with pytest.raises(TrainingError, match=field) as caught:
            options(**given).check()
        assert caught.value.param == field
