"""Options and costs; what is found on one set: the main table's numbers, DeLong's test, forms,
transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.random import default_rng
from torch import nn

from hallutracer_research.evaluation import options, results, tables
from hallutracer_research.evaluation.methods import ANSWER_MEAN, METHODS, OURS, WITH_ANSWER
from hallutracer_research.evaluation.methods.base import Fold, MethodInputs
from hallutracer_research.evaluation.options import (
    CLASSES,
    EvaluateOptions,
    EvaluationSource,
    Tokens,
    Weights,
    cost,
)
from hallutracer_research.evaluation.results import SetResult, compare, delong, measured
from hallutracer_research.evaluation.tables import form_table, second_look_table, transfer_table
from service.errors import TrainingError
from service.fitting.nested_cv import FoldScores
from tests.kit.tables import cells
from tests.research.made import method_inputs

LENGTHS = Tokens(prompt=20.0, answer=8, samples=3, p_true=45.0, scaffold=4.0, other_model=25.0)
WEIGHTS = Weights(blocks=1000, head=300)
# Multiply-adds of what a method takes, with these weights.
MULTIPLY_ADDS = {
    "prefill": 20 * 1000,
    "head": 300,
    "answer": 8 * 1300,
    "samples": 3 * 8 * 1300,
    "scaffold": 4 * 1000,
    "p-true": 45 * 1000,
}


def test_methods_by_name_and_by_class() -> None:
    by_class: dict[str, set[str]] = {cls: set() for cls in CLASSES}
    for name, method in METHODS.items():
        by_class[method.cost].add(name)
    assert by_class["none"] == {"prompt-length", "text-ngrams", "kind-prior"}
    assert by_class["other"] == {"other-model", "text-embedding"}
    behind = {"scaffold-max-prob", "scaffold-entropy", "scaffold-entropy-and-depth-mean"}
    assert by_class["B"] == {"first-token-max-prob", "first-token-entropy", *behind}
    of_content = {"content-max-prob", "content-entropy", "content-and-depth-mean"}
    answers = {
        "answer-last-depth-mean",
        "answer-mean-depth-mean",
        "answer-max-depth-mean",
        "asked-depth-mean",
    }
    answers |= {"depth-mean-and-asked", "depth-mean-and-answer-mean", "answer-saplma", "answer-sep"}
    answers |= {f"answer-first-{count}" for count in (1, 2, 4, 8, 16)}
    assert by_class["C"] == {
        "halluguard",
        "perplexity",
        "p-true",
        "p-true-examples",
        "mind",
        *of_content,
        *answers,
    }
    assert by_class["D"] == {"semantic-entropy", "semantic-entropy-discrete", "eigenscore"}
    assert (
        len({method.title for method in METHODS.values()})
        == len(METHODS)
        == len(by_class["A"]) + 34
    )
    named = options.method_names
    assert named(None) == named("default") == options.DEFAULT_METHODS
    assert {METHODS[name].reads for name in options.DEFAULT_METHODS} == {"prompt"}
    assert "halluguard" not in options.DEFAULT_METHODS
    assert set(named("all")) == set(METHODS) - by_class["other"] == set(named("A,B,C,D,none"))
    both = named("hallutracer", other_model="small", embedder=Path("encoder"))
    assert both == ("hallutracer", "other-model", "text-embedding")
    assert named("all", other_model="small", embedder=Path("encoder")) == tuple(METHODS)
    assert named(" eigenscore, hallutracer ,eigenscore") == ("hallutracer", "eigenscore")
    assert set(named("hallutracer,B")) == {"hallutracer", *by_class["B"]}
    assert named("hallutracer,magic") == ("hallutracer", "magic")


@pytest.mark.parametrize(
    ("name", "takes"),
    cells(
        """
        text-ngrams | nothing
        p-ik | prefill
        sep | prefill
        last-8-depth-mean | prefill
        first-token-entropy | prefill head
        halluguard | prefill answer
        perplexity | prefill answer
        mind | prefill answer
        answer-mean-depth-mean | prefill answer
        content-entropy | prefill answer
        p-true | prefill answer p-true head
        p-true-examples | prefill answer p-true head
        asked-depth-mean | prefill answer scaffold
        depth-mean-and-asked | prefill answer scaffold
        semantic-entropy | prefill samples
        eigenscore | prefill samples
        scaffold-depth-mean | prefill scaffold
        scaffold-entropy | prefill scaffold head
        """
    ),
)
def test_costs_are_multiply_adds_over_those_of_the_prefill(name: str, takes: str) -> None:
    prefills = sum(MULTIPLY_ADDS.get(part, 0) for part in takes.split()) / MULTIPLY_ADDS["prefill"]
    assert cost(name, WEIGHTS, LENGTHS).prefills == pytest.approx(prefills)
    # Of a model whose weights cannot be counted.
    assert cost(name, None, LENGTHS).prefills == (prefills if prefills in (0, 1) else None)


def test_weights_are_those_of_the_blocks_and_of_the_head() -> None:
    blocks = [nn.Linear(20, 49), nn.Linear(1, 1, bias=False)]
    model = SimpleNamespace(blocks=blocks, head=nn.Linear(4, 50, bias=False))
    assert options.count_weights(SimpleNamespace(torch_model=model)) == Weights(
        20 * 49 + 49 + 1, 200
    )
    assert options.count_weights(SimpleNamespace(torch_model=None)) is None


def test_another_model_costs_its_own_prefill() -> None:
    small = Weights(blocks=100, head=300)
    prefills = cost("other-model", WEIGHTS, LENGTHS, small).prefills
    assert prefills == pytest.approx(25 * 100 / MULTIPLY_ADDS["prefill"])
    assert cost("other-model", WEIGHTS, LENGTHS).prefills is None
    assert cost("text-embedding", WEIGHTS, LENGTHS, small).prefills is None
    for name, field in (("other-model", "other_model"), ("text-embedding", "embedder")):
        with pytest.raises(TrainingError, match="needs another model") as caught:
            EvaluateOptions(
                sources=(EvaluationSource("made", None),), out=Path("unused"), methods=(OURS, name)
            )
        assert caught.value.param == field


def runs_of(label: np.ndarray, score: np.ndarray) -> list[FoldScores]:
    found = []
    for seed in range(2):
        fold = default_rng(seed).permutation(len(label)) % 4
        found += [
            FoldScores(
                seed,
                place,
                np.flatnonzero(fold == place),
                score[fold == place] * (place + 1) + 10 * place,
            )
            for place in range(4)
        ]
    return found


def planted(separation: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    label = (default_rng(99).random(800) < 0.5).astype(np.int64)
    return label, default_rng(seed).standard_normal(800) + separation * (1 - label)


def test_measures_are_means_over_the_test_sides_with_the_positive_class_named() -> None:
    label = np.array([1, 1, 1, 0, 1, 0, 0])
    right, wrong = np.array([0, 3]), np.array([1, 2, 4, 5, 6])
    risk = 1.0 - label
    found = measured(
        label, [FoldScores(0, 0, right, risk[right]), FoldScores(0, 1, wrong, -risk[wrong])]
    )
    assert found["auroc"] == {"mean": 0.5, "std": 0.5}
    # On the wrong side all rows of the other class come first: precision is the class's share.
    assert found["auprc_hallucinated"]["mean"] == pytest.approx((1 + 2 / 5) / 2)
    assert found["auprc_factual"]["mean"] == pytest.approx((1 + 3 / 5) / 2)


def test_folds_of_different_scales_are_ranked_within_themselves() -> None:
    label, score = planted(1.0, 0)
    runs = [run for run in runs_of(label, score) if run.seed == 0]
    ranks = results.pooled_ranks(len(label), runs)
    assert 0 < ranks.min() < ranks.max() < 1
    assert all(
        np.array_equal(np.argsort(ranks[run.test]), np.argsort(score[run.test])) for run in runs
    )


def test_a_better_method_is_told_from_the_best_baseline() -> None:
    label, ours = planted(1.6, 0)
    group = np.arange(len(label)) // 2
    scores = {
        OURS: ours,
        "iti": planted(0.6, 1)[1],
        "iris": planted(1.0, 2)[1],
        "prompt-length": planted(3.0, 3)[1],
    }
    runs = {name: runs_of(label, score) for name, score in scores.items()}
    found = compare(label, group, runs)
    assert found.runner_up == "iris"  # free references are no runner-up
    assert 0 < found.gain.low < found.gain.difference < found.gain.high
    assert max(found.gain.p_value, found.p_delong) < 0.01
    assert compare(label, group, {name: runs[name] for name in (OURS, "prompt-length")}) is None


def test_rows_stand_by_cost_class_and_else_in_the_order_asked_for() -> None:
    names = ("text-ngrams", OURS, "eigenscore", "halluguard", "first-token-entropy", "iti")
    measures = {name: {"auroc": {"mean": 0.6, "std": 0.1}} for name in names}
    rows = tables.rows_of(
        "set", measures, {name: cost(name, None, Tokens(9.0, 5)) for name in names}
    )
    expected = [OURS, "iti", "first-token-entropy", "halluguard", "eigenscore", "text-ngrams"]
    assert [row["method"] for row in rows] == [METHODS[name].title for name in expected]
    assert [(row["class"], row["cost"]) for row in rows] == [
        ("A", 1.0),
        ("A", 1.0),
        ("B", None),
        ("C", None),
        ("D", None),
        ("none", 0.0),
    ]


def draw(seed: int, count: int, gain: float = 0.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Label, and two risks of the same rows with correlated noise; the first separates better by
    ``gain``."""
    rng = default_rng(seed)
    label = np.repeat([0, 1], count // 2)
    common = rng.standard_normal(count) * 0.6
    noise = rng.standard_normal((2, count)) * 0.8
    risk_a, risk_b = common + noise + np.array([[0.8 + gain], [0.8]]) * (1 - label)
    return label, risk_a, risk_b


@pytest.mark.parametrize("decimals", [1, 12])  # 1: many ties
def test_delong_equals_its_definition(decimals: int) -> None:
    """AUROCs and the variance of their difference from all pairs, as DeLong et al. (1988) write
    it."""
    label, *risks = draw(0, 60, 0.7)
    risks = [np.round(risk, decimals) for risk in risks]
    pairs = [risk[label == 0][:, None] - risk[label == 1] for risk in risks]
    psi = np.array([(pair > 0) + 0.5 * (pair == 0) for pair in pairs])
    covariance = np.cov(psi.mean(axis=2)) / 30 + np.cov(psi.mean(axis=1)) / 30
    contrast = np.array([1.0, -1.0])
    found = delong(label, *risks)
    assert (found.auc_a, found.auc_b) == pytest.approx(tuple(psi.mean(axis=(1, 2))), abs=1e-12)
    assert found.z == pytest.approx(
        (found.auc_a - found.auc_b) / np.sqrt(contrast @ covariance @ contrast), rel=1e-9
    )
    assert 0 < found.p_value < 1


def test_delong_s_equal_rankings_no_variance_and_refusals() -> None:
    label, risk, other = draw(5, 200)
    for same in (risk, np.exp(risk), 3 * risk - 7):
        assert delong(label, risk, same)[2:] == (0.0, 1.0)
    perfect = np.array([0.9, 0.8, 0.7, 0.3, 0.2, 0.1])
    assert delong(np.array([0, 0, 0, 1, 1, 1]), perfect, np.full(6, 0.5)) == (1.0, 0.5, None, None)
    # one row of a class
    assert delong(np.array([0, 1, 1]), perfect[:3], perfect[:3])[2:] == (None, None)
    for given, said in (
        (
            (label, risk, np.where(np.arange(200) == 3, np.nan, other)),
            "risk_b is not finite at row 3",
        ),
        ((label, risk[1:], other), r"risk_a has shape \(199,\)"),
        ((label + 1, risk, other), "both of them"),
        ((np.ones(200, int), risk, other), "both of them"),
    ):
        with pytest.raises(TrainingError, match=said):
            delong(*given)


FORMS = ["lone", "turn"] * 20 + ["polite"] * 4
FORM_LABEL = np.array([0, 0, 1, 1] * 10 + [1] * 4)


def result_of(
    label: np.ndarray,
    scores: dict[str, np.ndarray],
    *tests: np.ndarray,
    rows: Sequence[Any] = (),
    **inputs: Any,
) -> SetResult:
    """One seed's result: scores of all rows, and the test sides."""
    prepared: Any = SimpleNamespace(
        rows=SimpleNamespace(name="made", dataset=SimpleNamespace(rows=rows)),
        index=np.arange(len(label)),
        inputs=SimpleNamespace(label=label, **inputs),
    )
    by_fold = {
        name: [FoldScores(0, fold, test, values[test]) for fold, test in enumerate(tests)]
        for name, values in scores.items()
    }
    return SetResult(prepared, [], by_fold, None)


def with_forms(forms: list[str] = FORMS) -> SetResult:
    """Of lone questions our method ranks all right, behind a turn all wrong; one head ranks them
    the other way."""
    sign = np.array([{"turn": -1}.get(form, 1) for form in forms])
    good = sign * (1 - 2 * FORM_LABEL)  # rises with hallucination
    rows = [SimpleNamespace(strata={"form": form} if form else {}) for form in forms]
    scores = {OURS: good, "iti": -good, "prompt-length": good}
    return result_of(FORM_LABEL, scores, np.arange(24), np.arange(24, 44), rows=rows)


def test_each_form_has_its_ranking_and_one_of_a_single_class_none() -> None:
    table = form_table([with_forms(["lone"] * 44), with_forms()])
    found = {row["form"]: row for row in table.rows}
    assert list(found) == ["lone", "polite", "turn"]
    assert (found["lone"][OURS], found["lone"]["iti"], found["lone"]["wrong"]) == (1.0, 0.0, 0.5)
    assert (found["turn"][OURS], found["turn"]["iti"], found["turn"]["rows"]) == (0.0, 1.0, 20)
    assert (found["polite"]["wrong"], found["polite"].get(OURS)) == (0.0, None)
    assert [column.title for column in table.columns][4:] == [
        "AUROC, HalluTracer (depth mean)",
        "AUROC, ITI-Probe",
    ]
    assert (
        form_table(
            [with_forms(["lone"] * 44), with_forms([""] * 44), with_forms(["lone"] * 40 + [""] * 4)]
        )
        is None
    )


def test_a_second_look_shows_fewer_wrong_answers_and_costs_the_tokens_of_those_that_begin() -> None:
    # Of 20 answers 5 are right: the risk before puts them behind 5 wrong ones, both looks put them
    # first.
    label = np.repeat([0, 1, 0], [5, 5, 10])
    before, both = np.arange(20.0), np.where(label == 1, 0.0, 1.0)
    tokens = np.repeat([2, 4, 1], [5, 5, 10])
    scores = {OURS: before, ANSWER_MEAN: -before, WITH_ANSWER: both}
    behind = SimpleNamespace(answer_tokens=tokens)
    table = second_look_table([result_of(label, scores, np.arange(20), behind=behind)])
    quarter = {row["shown"]: row for row in table.rows}[0.2]
    found = {name: quarter[name]["mean"] for name in ("before", "after", "both", "staged")}
    assert found == {"before": 1.0, "after": 1.0, "both": 0.0, "staged": 0.25}
    assert (quarter["before_tokens"]["mean"], quarter["staged_tokens"]["mean"]) == (8 / 40, 22 / 40)
    alone = result_of(label, {OURS: before}, np.arange(20), behind=behind)
    assert second_look_table([alone]) is None


OPTIONS = EvaluateOptions(
    (EvaluationSource("a", Path("a")),), Path("out"), folds=3, inner_folds=2, c=0.3, jobs=1
)


def mixed(folder: Path, *names: str) -> MethodInputs:
    """Groups of two rows, each group in one source."""
    inputs = method_inputs(folder, count=360, strength=1.2)
    return replace(
        inputs, kind=np.array([names[group % len(names)] for group in inputs.group], np.str_)
    )


def test_each_source_and_each_rest_is_trained_on_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = mixed(tmp_path, "a/x", "b/y", "c/z")
    table = transfer_table({"mix": inputs}, OPTIONS, tmp_path / "kept")
    depth = {
        row["train"]: row for row in table.rows if str(row["method"]).startswith("HalluTracer")
    }
    assert list(depth) == ["a", "b", "c", "all but a", "all but b", "all but c"]
    for trained_on, row in depth.items():
        tested = {key for key in row if key in ("a", "b", "c")}
        assert tested == ({trained_on[-1]} if "all but" in trained_on else {"a", "b", "c"})
        assert all(float(row[name]) > 0.7 for name in tested)  # type: ignore[arg-type]
    assert len(table.rows) == 2 * len(depth)
    monkeypatch.setattr(tables, "chosen_depth_mean", None)  # a killed run computes only the rest
    assert transfer_table({"mix": inputs}, OPTIONS, tmp_path / "kept") == table


def test_no_group_is_on_both_sides_of_a_transfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = mixed(tmp_path, "a/x", "b/y", "c/z")
    kind = inputs.kind.copy()
    kind[0] = "b/y" if kind[1].startswith("a") else "a/x"  # its other row stays where it was
    seen = []

    def watched(fold: Fold) -> np.ndarray:
        seen.append([set(inputs.group[side].tolist()) for side in (fold.train, fold.test)])
        return np.zeros(len(fold.test))

    monkeypatch.setattr(tables, "chosen_depth_mean", lambda _, fold, options: watched(fold))
    monkeypatch.setattr(tables, "text_ngrams", watched)
    assert (
        transfer_table({"mix": replace(inputs, kind=kind)}, OPTIONS, tmp_path / "kept") is not None
    )
    assert len(seen) == 2 * (3 * (1 + 3) + 3)
    assert all(not train & test for train, test in seen)


@pytest.mark.parametrize("names", [("a/x", "a/y"), ("a/x", ""), ("a", "b")])
def test_a_set_of_one_source_has_no_such_table(tmp_path: Path, names: tuple[str, str]) -> None:
    assert transfer_table({"mix": mixed(tmp_path, *names)}, OPTIONS, tmp_path / "kept") is None
    assert tables.sources_of(np.array(["a/b/c", "d", ""])).tolist() == ["a", "d", ""]
