"""Options and costs; what is found on one set: the main table's numbers, DeLong's test, forms, transfer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from torch import nn

from hallutracer_research.evaluation import options, results
from hallutracer_research.evaluation.methods import METHODS, OURS
from hallutracer_research.evaluation.methods.base import MethodInputs
from hallutracer_research.evaluation.options import CLASSES, EvaluateOptions, EvaluationSource, Weights, cost
from hallutracer_research.evaluation.results import SetResult, compare, delong, form_table, measured, transfer_table
from service.errors import TrainingError
from service.fitting.nested_cv import FoldScores
from tests.research.made import method_inputs

LENGTHS: Any = {"prompt": 20.0, "answer": 8, "samples": 3, "asked": 45.0}


def test_every_method_has_a_class() -> None:
    by_class = {cls: {name for name in METHODS if METHODS[name].cost == cls} for cls in CLASSES}
    assert by_class["none"] == {"prompt-length", "text-ngrams", "kind-prior"}
    assert by_class["B"] == {"first-token-max-prob", "first-token-entropy"}
    assert by_class["C"] == {"halluguard", "perplexity", "p-true", "mind"}
    assert by_class["D"] == {"semantic-entropy", "semantic-entropy-discrete", "eigenscore"}
    assert len(by_class["A"]) == len(METHODS) - 12


def test_methods_by_name_and_by_class() -> None:
    assert options.method_names(None) == options.method_names("default") == options.DEFAULT_METHODS
    assert not set(options.DEFAULT_METHODS) & {"halluguard", "sep", "perplexity", "p-true", "mind", "eigenscore"}
    assert options.method_names("all") == tuple(METHODS)
    assert options.method_names(" eigenscore, hallutracer ,eigenscore") == ("hallutracer", "eigenscore")
    assert options.method_names("hallutracer,D,B") == (
        "hallutracer", "semantic-entropy", "semantic-entropy-discrete", "eigenscore", "first-token-max-prob",
        "first-token-entropy")  # fmt: skip
    assert set(options.method_names("A,B,C,D,none")) == set(METHODS)
    assert options.method_names("hallutracer,magic") == ("hallutracer", "magic")


def test_costs_are_multiply_adds_over_those_of_the_prefill() -> None:
    weights = Weights(blocks=1000, head=300)
    prefill, head, token = 20 * 1000, 300, 1300
    assert cost("p-ik", weights, **LENGTHS).prefills == 1.0
    assert cost("sep", weights, **LENGTHS).prefills == 1.0
    assert cost("text-ngrams", weights, **LENGTHS).prefills == 0.0
    assert cost("first-token-entropy", weights, **LENGTHS).prefills == pytest.approx((prefill + head) / prefill)
    for name in ("halluguard", "perplexity", "mind"):
        assert cost(name, weights, **LENGTHS).prefills == pytest.approx((prefill + 8 * token) / prefill)
    asked = prefill + 8 * token + 45 * 1000 + head
    assert cost("p-true", weights, **LENGTHS).prefills == pytest.approx(asked / prefill)
    for name in ("semantic-entropy", "eigenscore"):
        assert cost(name, weights, **LENGTHS).prefills == pytest.approx((prefill + 3 * 8 * token) / prefill)


def test_weights_are_those_of_the_blocks_and_of_the_head() -> None:
    blocks = [nn.Linear(4, 4), nn.Linear(4, 4, bias=False)]
    head = nn.Linear(4, 50, bias=False)
    engine = cast(Any, SimpleNamespace(torch_model=SimpleNamespace(blocks=blocks, head=head)))
    assert options.count_weights(engine) == Weights(blocks=36, head=200)
    assert options.count_weights(cast(Any, SimpleNamespace(torch_model=None))) is None


def test_without_weights_only_the_classes_that_need_them_are_unknown() -> None:
    found = {name: cost(name, None, **LENGTHS).prefills for name in ("iti", "kind-prior", "first-token-entropy")}
    assert found == {"iti": 1.0, "kind-prior": 0.0, "first-token-entropy": None}


def runs_of(label: np.ndarray, score: np.ndarray, seeds: int = 2, folds: int = 4) -> list[FoldScores]:
    found = []
    for seed in range(seeds):
        fold = np.random.default_rng(seed).permutation(len(label)) % folds
        found += [
            FoldScores(seed, place, np.flatnonzero(fold == place), score[fold == place] * (place + 1) + 10 * place)
            for place in range(folds)
        ]
    return found


def planted(separation: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    label = (np.random.default_rng(99).random(800) < 0.5).astype(np.int64)
    return label, rng.standard_normal(800) + separation * (1 - label)


def test_measures_are_means_over_the_test_sides_with_the_positive_class_named() -> None:
    label = np.array([1, 1, 1, 0, 1, 0, 0])
    right, wrong = np.array([0, 3]), np.array([1, 2, 4, 5, 6])
    risk = 1.0 - label
    found = measured(label, [FoldScores(0, 0, right, risk[right]), FoldScores(0, 1, wrong, -risk[wrong])])
    assert found["auroc"] == {"mean": 0.5, "std": 0.5}
    # On the wrong side all rows of the other class come first: precision is the class's share.
    assert found["auprc_hallucinated"]["mean"] == pytest.approx((1 + 2 / 5) / 2)
    assert found["auprc_factual"]["mean"] == pytest.approx((1 + 3 / 5) / 2)


def test_folds_of_different_scales_are_ranked_within_themselves() -> None:
    label, score = planted(1.0, 0)
    runs = [run for run in runs_of(label, score) if run.seed == 0]
    ranks = results.pooled_ranks(len(label), runs)
    assert not np.isnan(ranks).any()
    assert ranks.min() > 0
    assert ranks.max() < 1
    for run in runs:
        assert np.array_equal(np.argsort(ranks[run.test]), np.argsort(score[run.test]))


def test_a_better_method_is_told_from_the_best_baseline() -> None:
    label, ours = planted(1.6, 0)
    group = np.arange(len(label)) // 2
    scores = {OURS: ours, "iti": planted(0.6, 1)[1], "iris": planted(1.0, 2)[1], "prompt-length": planted(3.0, 3)[1]}
    runs = {name: runs_of(label, score) for name, score in scores.items()}
    aurocs = {name: measured(label, found)["auroc"]["mean"] for name, found in runs.items()}
    found = compare(label, group, runs, aurocs)
    assert found is not None
    assert found.runner_up == "iris"  # free references are no runner-up
    assert found.low < found.difference < found.high
    assert found.low > 0
    assert found.p_value < 0.01
    assert found.p_delong is not None
    assert found.p_delong < 0.01


def test_without_a_baseline_there_is_nothing_to_compare() -> None:
    label, ours = planted(1.0, 0)
    runs = {OURS: runs_of(label, ours), "prompt-length": runs_of(label, ours)}
    assert compare(label, np.arange(len(label)), runs, {OURS: 0.7, "prompt-length": 0.9}) is None


def test_rows_stand_by_cost_class_and_else_in_the_order_asked_for() -> None:
    names = ("text-ngrams", OURS, "eigenscore", "halluguard", "first-token-entropy", "iti")
    measures = {name: {"auroc": {"mean": 0.6, "std": 0.1}} for name in names}
    costs = {name: cost(name, None, prompt=9.0, answer=5) for name in names}
    rows = results.rows_of("set", measures, costs)
    expected = [OURS, "iti", "first-token-entropy", "halluguard", "eigenscore", "text-ngrams"]
    assert [row["method"] for row in rows] == [METHODS[name].title for name in expected]
    assert [row["class"] for row in rows] == ["A", "A", "B", "C", "D", "none"]
    assert [row["cost"] for row in rows] == [1.0, 1.0, None, None, None, 0.0]


Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def draw(rng: np.random.Generator, count: int = 200, gain: float = 0.0, shared: float = 0.6) -> Arrays:
    """Two risks of the same rows with correlated noise; the first separates the classes better by ``gain``."""
    label = np.repeat([0, 1], count // 2)
    common = rng.standard_normal(count) * shared
    noise = rng.standard_normal((2, count)) * np.sqrt(1 - shared**2)
    risk_a, risk_b = common + noise + np.array([[0.8 + gain], [0.8]]) * (1 - label)
    return label, risk_a, risk_b


def kernel(bad: float, good: float) -> float:
    return 1.0 if bad > good else 0.5 if bad == good else 0.0


def by_definition(label: np.ndarray, risk_a: np.ndarray, risk_b: np.ndarray) -> tuple[float, float, float]:
    """AUROCs and the variance of their difference from all pairs, as DeLong et al. (1988) write it."""
    bad, good = np.flatnonzero(label == 0), np.flatnonzero(label == 1)
    psi = np.array([[[kernel(risk[i], risk[j]) for j in good] for i in bad] for risk in (risk_a, risk_b)])
    of_bad, of_good = psi.mean(axis=2), psi.mean(axis=1)  # [2, bad], [2, good]
    covariance = np.cov(of_bad) / len(bad) + np.cov(of_good) / len(good)
    contrast = np.array([1.0, -1.0])
    return float(psi[0].mean()), float(psi[1].mean()), float(contrast @ covariance @ contrast)


@pytest.mark.parametrize("decimals", [1, 12])  # 1: many ties
def test_delong_equals_its_definition(decimals: int) -> None:
    label, risk_a, risk_b = draw(np.random.default_rng(0), 60, 0.7)
    risk_a, risk_b = np.round(risk_a, decimals), np.round(risk_b, decimals)
    auc_a, auc_b, variance = by_definition(label, risk_a, risk_b)
    found = delong(label, risk_a, risk_b)
    assert found.auc_a == pytest.approx(auc_a, abs=1e-12)
    assert found.auc_b == pytest.approx(auc_b, abs=1e-12)
    assert found.z == pytest.approx((auc_a - auc_b) / np.sqrt(variance), rel=1e-9)
    assert found.p_value is not None
    assert 0 < found.p_value < 1


def test_equal_rankings_give_one() -> None:
    label, risk, _ = draw(np.random.default_rng(5))
    for other in (risk, np.exp(risk), 3 * risk - 7):
        assert delong(label, risk, other)[2:] == (0.0, 1.0)


def test_no_variance_and_another_auroc_has_no_p_value() -> None:
    label = np.array([0, 0, 0, 1, 1, 1])
    perfect = np.array([0.9, 0.8, 0.7, 0.3, 0.2, 0.1])
    assert delong(label, perfect, np.full(6, 0.5)) == (1.0, 0.5, None, None)
    assert delong(np.array([0, 1, 1]), perfect[:3], perfect[:3])[2:] == (None, None)  # one row of a class


def test_refusals_name_what_is_wrong() -> None:
    label, risk, other = draw(np.random.default_rng(8), 20)
    with pytest.raises(TrainingError, match="risk_b is not finite at row 3"):
        delong(label, risk, np.where(np.arange(20) == 3, np.nan, other))
    with pytest.raises(TrainingError, match=r"risk_a has shape \(19,\)"):
        delong(label, risk[1:], other)
    for bad in (label + 1, np.ones(20, int)):
        with pytest.raises(TrainingError, match="both of them"):
            delong(bad, risk, other)


FORMS = ["lone", "turn"] * 20 + ["polite"] * 4
FORM_LABEL = np.array([0, 0, 1, 1] * 10 + [1] * 4)


def with_forms(forms: list[str] = FORMS) -> SetResult:
    """Of lone questions our method ranks all right, behind a turn all wrong; one head ranks them the other way."""
    sign = np.array([{"turn": -1}.get(form, 1) for form in forms])
    good = sign * (1 - 2 * FORM_LABEL)  # rises with hallucination
    strata = [{"form": form} if form else {} for form in forms]
    tests = [np.arange(0, 24), np.arange(24, 44)]
    scores = {
        method: [FoldScores(0, fold, test, values[test]) for fold, test in enumerate(tests)]
        for method, values in ((OURS, good), ("iti", -good), ("prompt-length", good))
    }
    rows = SimpleNamespace(name="made", dataset=SimpleNamespace(rows=[SimpleNamespace(strata=one) for one in strata]))
    prepared: Any = SimpleNamespace(rows=rows, index=np.arange(44), inputs=SimpleNamespace(label=FORM_LABEL))
    return SetResult(prepared, [], scores, None)


def test_each_form_has_its_ranking_and_one_of_a_single_class_none() -> None:
    table = form_table([with_forms()])
    assert table is not None
    found = {row["form"]: row for row in table.rows}
    assert list(found) == ["lone", "polite", "turn"]
    assert (found["lone"][OURS], found["lone"]["iti"], found["lone"]["wrong"]) == (1.0, 0.0, 0.5)
    assert (found["turn"][OURS], found["turn"]["iti"], found["turn"]["rows"]) == (0.0, 1.0, 20)
    assert (found["polite"]["wrong"], found["polite"].get(OURS)) == (0.0, None)
    assert [column.title for column in table.columns][4:] == ["AUROC, HalluTracer (depth mean)", "AUROC, ITI-Probe"]


def test_sets_of_one_form_or_none_have_no_table() -> None:
    assert form_table([with_forms(["lone"] * 44), with_forms([""] * 44), with_forms(["lone"] * 40 + [""] * 4)]) is None
    mixed = form_table([with_forms(["lone"] * 44), with_forms()])
    assert mixed is not None
    assert len(mixed.rows) == 3


OPTIONS = EvaluateOptions((EvaluationSource("a", Path("a")),), Path("out"), folds=3, inner_folds=2, c=0.3, jobs=1)


def mixed(folder: Path, names: tuple[str, ...] = ("a/x", "b/y", "c/z")) -> MethodInputs:
    """Groups of two rows, each group in one source."""
    inputs = method_inputs(folder, count=360, strength=1.2)
    return replace(inputs, kind=np.array([names[group % len(names)] for group in inputs.group], np.str_))


def test_each_source_and_each_rest_is_trained_on(tmp_path: Path) -> None:
    table = transfer_table({"mix": mixed(tmp_path)}, OPTIONS, tmp_path / "kept")
    assert table is not None
    depth = {row["train"]: row for row in table.rows if str(row["method"]).startswith("HalluTracer")}
    assert list(depth) == ["a", "b", "c", "all but a", "all but b", "all but c"]
    for trained_on, row in depth.items():
        tested = {key for key in row if key in ("a", "b", "c")}
        assert tested == ({trained_on[-1]} if "all but" in trained_on else {"a", "b", "c"})
        assert all(float(row[name]) > 0.7 for name in tested)  # type: ignore[arg-type]
    assert len(table.rows) == 2 * len(depth)


def test_no_group_is_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = mixed(tmp_path)
    kind = inputs.kind.copy()
    kind[0] = "b/y" if kind[1].startswith("a") else "a/x"  # its other row stays where it was
    inputs = replace(inputs, kind=kind)
    seen = []

    def watched(inputs: MethodInputs, train: np.ndarray, test: np.ndarray, *rest: Any) -> np.ndarray:
        seen.append((set(inputs.group[train].tolist()), set(inputs.group[test].tolist())))
        return np.zeros(len(test))

    monkeypatch.setattr(results, "_depth_mean", watched)
    monkeypatch.setattr(results, "text_ngrams", watched)
    assert transfer_table({"mix": inputs}, OPTIONS, tmp_path / "kept") is not None
    assert len(seen) == 2 * (3 * (1 + 3) + 3)
    assert all(not train & test for train, test in seen)


def test_a_killed_run_computes_only_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = mixed(tmp_path)
    first = transfer_table({"mix": inputs}, OPTIONS, tmp_path / "kept")
    monkeypatch.setattr(results, "_depth_mean", None)
    assert transfer_table({"mix": inputs}, OPTIONS, tmp_path / "kept") == first


def test_a_set_of_one_source_has_no_such_table(tmp_path: Path) -> None:
    assert transfer_table({"mix": mixed(tmp_path, ("a/x", "a/y"))}, OPTIONS, tmp_path / "kept") is None
    assert transfer_table({"mix": mixed(tmp_path, ("a/x", ""))}, OPTIONS, tmp_path / "kept") is None
    assert transfer_table({"mix": mixed(tmp_path, ("a", "b"))}, OPTIONS, tmp_path / "kept") is None
    assert results.sources_of(np.array(["a/b/c", "d", ""])).tolist() == ["a", "d", ""]
