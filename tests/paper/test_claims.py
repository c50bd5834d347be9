"""Verdicts by hand-made cells on both sides of every rule, and the whole list on a real fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from service.evaluation.main_table import Comparison, compare, measured
from service.evaluation.page.report_data import Verdict
from service.evaluation.set_result import SetResult
from service.evaluation.tables import Table
from service.fitting.nested_cv import FoldScores
from service.paper import claim_table_rules as rules
from service.paper.ablations import depth_key
from service.paper.claim_rules import Finding, NotTestable, ahead_of
from service.paper.claims import cells_by_set, claims, together
from service.paper.report import SECTIONS
from service.paper.table_spec import make_tables
from tests.evaluation.made_result import scripted_result

LABEL = np.arange(400) // 2 % 2
NOTHING: Any = None
Cells = Mapping[str, Any]


@pytest.fixture(scope="module")
def tables(result: SetResult) -> list[Table]:
    return make_tables([spec for specs in SECTIONS.values() for spec in specs], [result])


def cells(**tables: Cells) -> dict[str, Cells]:
    """Tables by their names with underscores; the depth mean is at 0.80 where nothing else is said."""
    found = {"mean-dominance": {"mean": {"mean": 0.8, "std": 0.01}}}
    for name, row in tables.items():
        found[name.replace("_", "-")] = found.get(name.replace("_", "-"), {}) | dict(row)
    return found  # type: ignore[return-value]


def curve(**aurocs: float) -> Cells:
    return {depth_key(int(size.removeprefix("n"))): {"mean": value, "std": 0.0} for size, value in aurocs.items()}


def parts(probe: float, metric: float, head: float) -> dict[str, Cells]:
    gaps = {"gap_probe": probe, "gap_metric": metric, "gap_head": head}
    return cells(k_split={"signal_k": 0.65, "null": 0.51, **gaps})


CASES: list[tuple[Callable[[SetResult, Any], Finding], Cells, Verdict]] = [
    (rules.mean_suffices, cells(mean_dominance={"mean_and_shape": 0.803, "shape": 0.6}), "supported"),
    (rules.mean_suffices, cells(mean_dominance={"mean_and_shape": 0.76, "shape": 0.6}), "supported"),
    (rules.mean_suffices, cells(mean_dominance={"mean_and_shape": 0.807, "shape": 0.6}), "mixed"),
    (rules.mean_suffices, cells(mean_dominance={"mean_and_shape": 0.807, "shape": 0.75}), "not supported"),
    (rules.median_no_better, cells(location={"median": 0.799, "trimmed_mean": 0.8005}), "supported"),
    (rules.median_no_better, cells(location={"median": 0.799, "trimmed_mean": 0.802}), "not supported"),
    (rules.depth_grows, cells(depth_subsampling=curve(n1=0.7, n2=0.72, n8=0.718, n28=0.8)), "supported"),
    (rules.depth_grows, cells(depth_subsampling=curve(n1=0.7, n2=0.72, n8=0.71, n28=0.8)), "mixed"),
    (rules.depth_grows, cells(depth_subsampling=curve(n1=0.8, n2=0.72, n28=0.79)), "not supported"),
    (rules.depth_saturates, cells(depth_subsampling=curve(n1=0.7, n8=0.76, n16=0.797, n20=0.8, n28=0.8)), "supported"),
    (rules.depth_saturates, cells(depth_subsampling=curve(n1=0.7, n8=0.797, n16=0.76, n28=0.8)), "not supported"),
    (rules.depth_saturates, cells(depth_subsampling=curve(n1=0.7, n8=0.7, n20=0.8, n28=0.8)), "not supported"),
    (rules.any_head_will_do, cells(top_heads={"top_1": {"mean": 0.8}, "random_1": {"mean": 0.796}}), "supported"),
    (rules.any_head_will_do, cells(top_heads={"top_1": {"mean": 0.8}, "random_1": {"mean": 0.79}}), "not supported"),
    (rules.near_orthogonal, cells(geometry={"adjacent_cos": 0.09, "expected_cos": 0.071}), "supported"),
    (
        rules.near_orthogonal,
        cells(geometry={"adjacent_cos": 0.09, "expected_cos": 0.071}, isotropy={"adjacent_cos": 0.2}),
        "mixed",
    ),
    (rules.near_orthogonal, cells(geometry={"adjacent_cos": 0.3, "expected_cos": 0.071}), "not supported"),
    (rules.low_energy, cells(geometry={"energy": 0.0031, "random_energy": 1 / 128}), "supported"),
    (rules.low_energy, cells(geometry={"energy": 0.0131, "random_energy": 1 / 128}), "not supported"),
    (rules.fisher_gap_small, cells(fisher={"r_fisher": 1.12, "r_fisher_unbiased": 1.03}), "supported"),
    (rules.fisher_gap_small, cells(fisher={"r_fisher": 1.12, "r_fisher_unbiased": 1.06}), "not supported"),
    (
        rules.fisher_gap_small,
        cells(fisher={"r_fisher": 1.02, "r_fisher_unbiased": None, "shrinkage": 0.0}),
        "supported",
    ),
    (rules.last_token_best, cells(readout_position={"last_1": 0.8, "last_4": -0.001, "max": -0.1}), "supported"),
    (rules.last_token_best, cells(readout_position={"last_1": 0.8, "last_4": 0.004, "max": None}), "mixed"),
    (rules.last_token_best, cells(readout_position={"last_1": 0.8, "content_mean": 0.02}), "not supported"),
    (rules.sites_equivalent, cells(readout_site={"head": 0.8, "residual": 0.804}), "supported"),
    (rules.sites_equivalent, cells(readout_site={"head": 0.8, "residual": 0.78}), "not supported"),
    (rules.probe_part_of_k, parts(0.9, 0.1, 0.2), "supported"),
    (rules.probe_part_of_k, parts(0.6, 0.7, 0.2), "mixed"),
    (rules.probe_part_of_k, parts(0.2, 0.7, 0.2), "not supported"),
]


@pytest.mark.parametrize(("judge", "given", "verdict"), CASES)
def test_a_rule_tells_its_sides_apart(
    judge: Callable[[SetResult, Any], Finding], given: Cells, verdict: Verdict
) -> None:
    found = judge(NOTHING, given)
    assert found.verdict == verdict
    assert any(char.isdigit() for char in found.text)


def test_every_table_rule_has_a_case_for_and_one_against() -> None:
    for rule in rules.TABLE_RULES:
        verdicts = {verdict for judge, _, verdict in CASES if judge is rule.judge}
        assert {"supported", "not supported"} <= verdicts, rule.claim


UNTESTABLE: list[tuple[Callable[[SetResult, Any], Finding], Cells, str]] = [
    (rules.mean_suffices, cells(), "has no mean_and_shape"),
    (rules.mean_suffices, {}, "has no mean"),
    (rules.median_no_better, cells(mean_dominance={"mean": 0.53}), "near chance"),
    (rules.depth_saturates, cells(depth_subsampling=curve(n1=0.7, n2=0.72, n8=0.8)), "8 layers are too few: 1 size"),
    (rules.fisher_gap_small, cells(fisher={"r_fisher": 1.3, "r_fisher_unbiased": None, "shrinkage": 0.0}), "too few"),
    (rules.fisher_gap_small, cells(fisher={"r_fisher": 1.01, "r_fisher_unbiased": None, "shrinkage": 0.1}), "singular"),
    (rules.last_token_best, cells(readout_position={"last_1": 0.8}), "no other pooling"),
    (rules.last_token_best, cells(readout_position={"last_1": 0.5, "max": 0.1}), "near chance"),
    (rules.probe_part_of_k, cells(k_split={"signal_k": 0.52, "null": 0.51}), "too little to divide"),
]


@pytest.mark.parametrize(("judge", "given", "reason"), UNTESTABLE)
def test_what_cannot_be_tested_says_why(judge: Callable[[SetResult, Any], Finding], given: Cells, reason: str) -> None:
    with pytest.raises(NotTestable, match=reason):
        judge(NOTHING, given)


def against(score: np.ndarray, *, strength: float = 1.5) -> SetResult:
    """Ours with a level of ``strength``, against a method "iti" with the given scores (rising with hallucination)."""
    noise = np.random.default_rng(0).standard_normal((len(LABEL), 6, 1))
    result = scripted_result(noise + strength * (LABEL[:, None, None] - 0.5), LABEL)
    other = [FoldScores(split.seed, split.fold, split.test, score[split.test]) for split in result.splits]
    return replace(result, scores={**result.scores, "iti": other})


def test_ahead_is_a_matter_of_the_interval() -> None:
    rng = np.random.default_rng(1)
    assert ahead_of(["iti"], against(rng.standard_normal(len(LABEL))), {}).verdict == "supported"
    perfect = ahead_of(["iti"], against(1.0 - LABEL, strength=0.3), {})
    assert perfect.verdict == "not supported"
    assert "100.0 (iti)" in perfect.text
    within = Comparison("iti", 0.01, -0.01, 0.03, 0.3, 0.3)
    nearly = ahead_of(["iti"], replace(against(rng.standard_normal(len(LABEL))), comparison=within), {})
    assert nearly.verdict == "mixed"
    assert nearly.text.endswith("+1.0 points on pooled ranks [−1.0, +3.0], not distinguishable from none")


def test_the_interval_is_that_of_the_main_table(result: SetResult) -> None:
    aurocs = {name: measured(result.label, found)["auroc"]["mean"] for name, found in result.scores.items()}
    known = compare(result.label, result.group, result.scores, aurocs)
    assert known is not None
    assert known.runner_up == "iti"
    assert ahead_of(["iti"], replace(result, comparison=known), {}) == ahead_of(["iti"], result, {})
    other = Comparison("iti", 0.5, 0.4, 0.6, 0.001, 0.001)
    assert (
        "+50.0 points on pooled ranks [+40.0, +60.0]" in ahead_of(["iti"], replace(result, comparison=other), {}).text
    )
    elsewhere = replace(other, runner_up="iris")
    assert ahead_of(["iti"], replace(result, comparison=elsewhere), {}) == ahead_of(["iti"], result, {})


def test_a_method_that_did_not_take_part_cannot_be_beaten(result: SetResult) -> None:
    with pytest.raises(NotTestable, match="fact-probe and iris did not take part"):
        ahead_of(["fact-probe", "iris"], result, {})


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["supported", "supported"], "supported"),
        (["supported", "not testable"], "supported"),
        (["supported", "not supported"], "mixed"),
        (["not supported", "mixed"], "mixed"),
        (["not supported", "not supported"], "not supported"),
        (["not testable", "not testable"], "not testable"),
        ([], "not testable"),
    ],
)
def test_sets_are_put_together(verdicts: list[Verdict], expected: Verdict) -> None:
    assert together(verdicts) == expected


def test_all_claims_of_a_real_fit_speak_of_its_numbers(result: SetResult, tables: list[Table]) -> None:
    found = {one.claim: one for one in claims([result], tables)}
    assert len(found) == 14
    for one in found.values():
        assert one.evidence.startswith("made: ")
        assert "Rule: " in one.evidence
        assert ("not testable: " in one.evidence) == (one.verdict == "not testable")
    assert found["The depth mean beats the best single head (ITI)."].verdict == "supported"
    assert found["The last prompt token is the best place to read."].verdict == "supported"
    others = found["The depth mean beats the other probes of internal states (Fact-Probe, IRIS)."]
    assert others.verdict == "not testable"
    assert "did not take part" in others.evidence


def test_each_set_is_judged_by_its_own_row(result: SetResult, tables: list[Table]) -> None:
    rows = cells_by_set(tables)
    assert list(rows) == ["made"]
    assert set(rows["made"]) == {table.name for table in tables}
    assert rows["made"]["top-heads"]["top_1"] == rows["made"]["mean-dominance"]["mean"]
