"""Verdicts by hand-made cells on both sides of every rule, and the whole list on a real fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from hallutracer_research.evaluation.methods import OURS, RESIDUAL
from hallutracer_research.evaluation.page import Table, Verdict
from hallutracer_research.evaluation.results import SetResult, compare
from hallutracer_research.paper import claims as rules
from hallutracer_research.paper.ablations import MEAN, READOUT, depth_key
from hallutracer_research.paper.claims import (
    ClaimFinding,
    Evidence,
    Judge,
    NotTestable,
    cells_by_set,
)
from hallutracer_research.paper.report import SECTIONS
from hallutracer_research.paper.tables import make_tables
from service.fitting.nested_cv import FoldScores, by_row
from service.fitting.scores import Gain
from tests.research.made import LABEL, NOTHING, scripted_result

Cells = Mapping[str, Any]


@pytest.fixture(scope="module")
def tables(result: SetResult) -> list[Table]:
    return make_tables([spec for specs in SECTIONS.values() for spec in specs.values()], [result])


def cells(**tables: Cells) -> dict[str, Cells]:
    """Tables by their names with underscores; the depth mean is at 0.80 where nothing else is
    said."""
    found = {"mean-dominance": {"mean": {"mean": 0.8, "std": 0.01}}}
    for name, row in tables.items():
        found[name.replace("_", "-")] = found.get(name.replace("_", "-"), {}) | dict(row)
    return found  # type: ignore[return-value]


def curve(**aurocs: float) -> Cells:
    return {
        depth_key(int(size.removeprefix("n"))): {"mean": value, "std": 0.0}
        for size, value in aurocs.items()
    }


def parts(probe: float, metric: float, head: float) -> dict[str, Cells]:
    gaps = {"gap_probe": probe, "gap_metric": metric, "gap_head": head}
    return cells(k_split={"signal_k": 0.65, "null": 0.51, **gaps})


def sides(
    judge: Judge, table: str, *given: tuple[Mapping[str, Any], Verdict]
) -> list[tuple[Judge, dict[str, Cells], Verdict]]:
    """Cases of one rule, by the cells of one table."""
    return [(judge, cells(**{table: row}), verdict) for row, verdict in given]


YES, NO, MIXED = "supported", "not supported", "mixed"
CASES: list[tuple[Judge, dict[str, Cells], Verdict]] = [
    *sides(
        rules.median_no_better,
        "location",
        ({"median": 0.799, "trimmed_mean": 0.8005}, YES),
        ({"median": 0.799, "trimmed_mean": 0.802}, NO),
    ),
    *sides(
        rules.median_is_the_mean,
        "location",
        ({"correlation": 0.991}, YES),
        ({"correlation": 0.989}, NO),
    ),
    *sides(
        rules.depth_grows,
        "depth_subsampling",
        (curve(n1=0.7, n2=0.72, n8=0.718, n28=0.8), YES),
        (curve(n1=0.7, n2=0.72, n8=0.71, n28=0.8), MIXED),
        (curve(n1=0.8, n2=0.72, n28=0.79), NO),
    ),
    *sides(
        rules.depth_saturates,
        "depth_subsampling",
        (curve(n1=0.7, n8=0.76, n16=0.797, n20=0.8, n28=0.8), YES),
        (curve(n1=0.7, n8=0.797, n16=0.76, n28=0.8), NO),
        (curve(n1=0.7, n8=0.7, n20=0.8, n28=0.8), NO),
    ),
    *sides(
        rules.any_head_will_do,
        "top_heads",
        ({"top_1": {"mean": 0.8}, "random_1": {"mean": 0.796}}, YES),
        ({"top_1": {"mean": 0.8}, "random_1": {"mean": 0.79}}, NO),
    ),
    *sides(
        rules.heads_redundant,
        "head_distribution",
        ({"correlation": 0.65}, YES),
        ({"correlation": 0.64}, NO),
    ),
    *sides(
        rules.near_orthogonal,
        "geometry",
        ({"adjacent_cos": 0.09, "expected_cos": 0.071}, YES),
        ({"adjacent_cos": 0.3, "expected_cos": 0.071}, NO),
    ),
    (
        rules.near_orthogonal,
        cells(
            geometry={"adjacent_cos": 0.09, "expected_cos": 0.071}, isotropy={"adjacent_cos": 0.2}
        ),
        MIXED,
    ),
    *sides(
        rules.low_energy,
        "geometry",
        ({"energy": 0.0031, "random_energy": 1 / 128}, YES),
        ({"energy": 0.0131, "random_energy": 1 / 128}, NO),
    ),
    *sides(
        rules.shift_small,
        "geometry",
        ({"energy_ratio": 0.0868}, YES),
        ({"energy_ratio": 0.0901}, NO),
    ),
    *sides(
        rules.fisher_gap_small,
        "fisher",
        ({"r_fisher": 1.12, "r_fisher_unbiased": 1.03}, YES),
        ({"r_fisher": 1.12, "r_fisher_unbiased": 1.06}, NO),
        ({"r_fisher": 1.02, "r_fisher_unbiased": None, "shrinkage": 0.0}, YES),
    ),
    *sides(
        rules.last_token_best,
        "readout_position",
        ({"last_1": 0.8, "last_4": -0.001, "max": -0.1}, YES),
        ({"last_1": 0.8, "last_4": 0.004, "max": None}, MIXED),
        ({"last_1": 0.8, "content_mean": 0.02}, NO),
    ),
    *sides(
        rules.factual_varies_more,
        "kappa",
        ({"factual_larger": 0.9}, YES),
        ({"factual_larger": 0.89}, NO),
    ),
    (rules.probe_part_of_k, parts(0.9, 0.1, 0.2), YES),
    (rules.probe_part_of_k, parts(0.6, 0.7, 0.2), MIXED),
    (rules.probe_part_of_k, parts(0.2, 0.7, 0.2), NO),
]


@pytest.mark.parametrize(("judge", "given", "verdict"), CASES)
def test_a_rule_tells_its_sides_apart(
    judge: Judge, given: dict[str, Cells], verdict: Verdict
) -> None:
    found = judge(Evidence(NOTHING, given))
    assert found.verdict == verdict
    assert any(char.isdigit() for char in found.text)


def test_every_rule_has_a_case_for_and_one_against() -> None:
    cases = [(judge, verdict) for judge, _, verdict in (*CASES, *SHAPED)]
    for rule in rules.RULES:
        if isinstance(rule.judge, partial) or rule.judge is rules.snr_predicted:
            # of these ``test_ahead_is_a_matter_of_the_interval`` and ``test_eta_is_a_test_...``
            continue
        verdicts = {verdict for judge, verdict in cases if judge is rule.judge}
        assert {"supported", "not supported"} <= verdicts, rule.claim


UNTESTABLE: list[tuple[Judge, dict[str, Cells], str]] = [
    (rules.mean_suffices, cells(), "has no mean_and_shape"),
    (rules.mean_suffices, {}, "has no mean"),
    (
        rules.mean_suffices,
        cells(mean_dominance={"mean": 0.53, "mean_and_shape": 0.6}),
        "near chance",
    ),
    (
        rules.shape_falls,
        cells(mean_dominance={"mean_and_shape": 0.68, "shape": 0.5}),
        "less than 19 points",
    ),
    (rules.five_no_worse, cells(mean_dominance={"mean": 0.53}), "near chance"),
    (rules.five_no_worse, cells(), "has no trajectory"),
    (rules.median_is_the_mean, {}, "has no correlation"),
    (rules.heads_redundant, cells(mean_dominance={"mean": 0.53}), "near chance"),
    (rules.heads_redundant, cells(head_distribution={"correlation": None}), "has no correlation"),
    (rules.shift_small, cells(mean_dominance={"mean": 0.53}), "near chance"),
    (rules.shift_small, cells(geometry={"energy_ratio": None}), "has no energy_ratio"),
    (rules.snr_predicted, cells(), "has no eta"),
    (rules.factual_varies_more, cells(kappa={"factual_larger": None}), "has no factual_larger"),
    (rules.median_no_better, cells(mean_dominance={"mean": 0.53}), "near chance"),
    (
        rules.depth_saturates,
        cells(depth_subsampling=curve(n1=0.7, n2=0.72, n8=0.8)),
        "8 layers are too few: 1 size",
    ),
    (
        rules.fisher_gap_small,
        cells(fisher={"r_fisher": 1.3, "r_fisher_unbiased": None, "shrinkage": 0.0}),
        "too few",
    ),
    (
        rules.fisher_gap_small,
        cells(fisher={"r_fisher": 1.01, "r_fisher_unbiased": None, "shrinkage": 0.1}),
        "singular",
    ),
    (rules.last_token_best, cells(readout_position={"last_1": 0.8}), "no other pooling"),
    (rules.last_token_best, cells(readout_position={"last_1": 0.5, "max": 0.1}), "near chance"),
    (
        rules.probe_part_of_k,
        cells(k_split={"signal_k": 0.52, "null": 0.51}),
        "too little to divide",
    ),
]


@pytest.mark.parametrize(("judge", "given", "reason"), UNTESTABLE)
def test_what_cannot_be_tested_says_why(judge: Judge, given: dict[str, Cells], reason: str) -> None:
    with pytest.raises(NotTestable, match=reason):
        judge(Evidence(NOTHING, given))


def shaped(*, level: float = 0.0, slope: float = 0.0, zigzag: float = 0.0) -> SetResult:
    """Six layers of noise, and what tells the classes: a level, a slope, a pattern that no five
    statistics see."""
    gap = level + slope * (np.arange(6) - 2.5) + zigzag * np.array([1, -1, -1, 1, 1, -1])
    noise = np.random.default_rng(0).standard_normal((len(LABEL), 6))
    return scripted_result((noise + (LABEL[:, None] - 0.5) * gap)[..., None], LABEL)


def with_residual(spread: float) -> SetResult:
    """Ours, and a residual stream that is ours with noise."""
    result = shaped(level=1.0)
    rng = np.random.default_rng(2)
    other = [
        fold._replace(score=fold.score + spread * rng.standard_normal(len(fold.score)))
        for fold in result.scores[OURS]
    ]
    return replace(result, scores={**result.scores, RESIDUAL: other})


SHAPED: list[tuple[Judge, SetResult, Verdict]] = [
    (rules.mean_suffices, shaped(level=4.0), "supported"),
    (rules.mean_suffices, shaped(level=1.0, slope=0.2), "mixed"),
    (rules.mean_suffices, shaped(level=0.6, slope=1.0), "not supported"),
    (rules.shape_falls, shaped(level=2.0), "supported"),
    (rules.shape_falls, shaped(level=2.0, slope=0.3), "mixed"),
    (rules.shape_falls, shaped(level=2.0, slope=2.0), "not supported"),
    (rules.five_no_worse, shaped(level=4.0), "supported"),
    (rules.five_no_worse, shaped(level=1.0, zigzag=0.25), "mixed"),
    (rules.five_no_worse, shaped(level=0.6, zigzag=2.0), "not supported"),
    (rules.sites_equivalent, with_residual(0.0), "supported"),
    (rules.sites_equivalent, with_residual(0.1), "mixed"),
    (rules.sites_equivalent, with_residual(3.0), "not supported"),
]


@pytest.mark.parametrize(("judge", "result", "verdict"), SHAPED)
def test_differences_are_judged_by_their_intervals(
    judge: Judge, result: SetResult, verdict: Verdict
) -> None:
    rows = cells_by_set(
        make_tables(
            [MEAN["mean-dominance"], MEAN["feature-sets"], READOUT["readout-site"]], [result]
        )
    )[result.title]
    found = judge(Evidence(result, rows))
    assert found.verdict == verdict, found.text
    assert "points [" in found.text


@pytest.mark.parametrize(
    ("low", "high", "is_above", "is_within"),
    [
        (0.006, 0.02, YES, NO),
        (0.004, 0.02, MIXED, MIXED),
        (-0.02, 0.006, MIXED, MIXED),
        (-0.02, 0.004, NO, MIXED),
        (-0.02, -0.006, NO, NO),
        (-0.005, 0.005, MIXED, YES),
    ],
)
def test_verdicts_for_and_against_mirror_each_other(
    low: float, high: float, is_above: Verdict, is_within: Verdict
) -> None:
    middle = (low + high) / 2
    interval, mirrored = Gain(middle, low, high, 1.0), Gain(-middle, -high, -low, 1.0)
    assert rules.above(interval, 0.005) == is_above
    opposite = {YES: NO, NO: YES, MIXED: MIXED}
    assert rules.above(mirrored, -0.005) == opposite[is_above]
    assert rules.within(interval, 0.005) == rules.within(mirrored, 0.005) == is_within


@pytest.mark.parametrize(
    ("eta", "verdict"), [(1.009, "supported"), (0.985, "not supported"), (1.011, "not supported")]
)
def test_eta_is_a_test_where_classes_differ_in_size(eta: float, verdict: Verdict) -> None:
    with pytest.raises(NotTestable, match="classes are of one size"):
        rules.snr_predicted(Evidence(shaped(), cells(snr={"eta": eta})))
    label = np.r_[LABEL[:-8], np.ones(8, np.int64)]
    uneven = scripted_result(np.zeros((400, 6, 1)), label)
    found = rules.snr_predicted(Evidence(uneven, cells(snr={"eta": eta})))
    assert found.verdict == verdict


def against(score: np.ndarray, *, strength: float = 1.5) -> SetResult:
    """Ours with a level of ``strength``, against a method "iti" with the given scores (rising with
    hallucination)."""
    noise = np.random.default_rng(0).standard_normal((len(LABEL), 6, 1))
    result = scripted_result(noise + strength * (LABEL[:, None, None] - 0.5), LABEL)
    other = [
        FoldScores(split.seed, split.fold, split.test, score[split.test]) for split in result.splits
    ]
    return replace(result, scores={**result.scores, "iti": other})


def ahead(result: SetResult, *names: str) -> ClaimFinding:
    return rules.ahead_of(names, Evidence(result, {}))


def test_ahead_is_a_matter_of_the_interval() -> None:
    rng = np.random.default_rng(1)
    assert ahead(against(rng.standard_normal(len(LABEL))), "iti").verdict == "supported"
    perfect = ahead(against(1.0 - LABEL, strength=0.3), "iti")
    assert perfect.verdict == "not supported"
    assert "100.0 (iti)" in perfect.text
    ours = against(rng.standard_normal(len(LABEL))).scores[OURS]
    [near] = by_row(ours, len(LABEL))
    nearly = ahead(against(near + 0.1 * rng.standard_normal(len(LABEL))), "iti")
    assert nearly.verdict == "mixed"
    assert nearly.text.endswith("not distinguishable from none")


def test_the_interval_is_that_of_the_main_table(result: SetResult) -> None:
    known = compare(result.label, result.group, result.scores)
    assert known.runner_up == "iti"
    assert ahead(result, "iti").text.endswith(rules.shown(known.gain))


def test_a_method_that_did_not_take_part_cannot_be_beaten_nor_be_equivalent(
    result: SetResult,
) -> None:
    with pytest.raises(NotTestable, match="fact-probe and iris did not take part"):
        ahead(result, "fact-probe", "iris")
    with pytest.raises(NotTestable, match="did not take part"):
        rules.sites_equivalent(Evidence(shaped(level=1.0), cells()))


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([YES, YES], YES),
        ([YES, "not testable"], YES),
        ([YES, NO], MIXED),
        ([NO, MIXED], MIXED),
        ([NO, NO], NO),
        (["not testable"] * 2, "not testable"),
        ([], "not testable"),
    ],
)
def test_sets_are_put_together(verdicts: list[Verdict], expected: Verdict) -> None:
    assert rules.together(verdicts) == expected


def test_all_claims_of_a_real_fit_speak_of_its_numbers(
    result: SetResult, tables: list[Table]
) -> None:
    found = {one.claim: one for one in rules.claims([result], tables)}
    assert len(found) == 21
    for one in found.values():
        (evidence,) = one.evidence
        assert evidence.startswith("made: ")
        assert one.rule
        assert ("not testable: " in evidence) == (one.verdict == "not testable")
    assert found["The depth mean beats the best single head (ITI)."].verdict == "supported"
    assert found["The last prompt token is the best place to read."].verdict == "supported"
    others = found["The depth mean beats the other probes of internal states (Fact-Probe, IRIS)."]
    assert others.verdict == "not testable"
    assert "did not take part" in others.evidence[0]
