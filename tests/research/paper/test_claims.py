"""Verdicts by hand-made cells on both sides of every rule, and the whole list on a real fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.random import default_rng

from hallutracer_research.evaluation.methods import OURS, RESIDUAL
from hallutracer_research.evaluation.page import Table, Verdict
from hallutracer_research.evaluation.results import SetResult, aurocs, compare, spread
from hallutracer_research.paper import claims as rules
from hallutracer_research.paper.ablations import FIVE_D, FULL, MEAN, READOUT, SHAPE, depth_key
from hallutracer_research.paper.claims import (
    ClaimFinding,
    Evidence,
    NotTestable,
    cells_by_set,
)
from hallutracer_research.paper.report import SECTIONS
from hallutracer_research.paper.tables import make_tables
from service.fitting.nested_cv import FoldScores, by_row
from service.fitting.scores import Gain
from tests.kit.tables import cells
from tests.research.made import LABEL, NOTHING, scripted_result

Cells = Mapping[str, Any]


@pytest.fixture(scope="module")
def tables(result: SetResult) -> list[Table]:
    return make_tables([spec for specs in SECTIONS.values() for spec in specs.values()], [result])


def evidence(text: str) -> dict[str, Cells]:
    """Tables from a text such as ``snr eta=1.2; kappa factual_larger=none``, a number of layers for
    its column of the depth curve; the depth mean is at 0.80 unless the text names another."""
    tables: dict[str, Cells] = {"mean-dominance": {"mean": 0.8}}
    for part in text.split("; "):
        name, *pairs = part.split()
        row = dict(tables.get(name, {}))
        for key, value in (pair.split("=") for pair in pairs):
            column = depth_key(int(key)) if key.isdigit() else key
            row[column] = None if value == "none" else float(value)
        tables[name] = row
    return tables


YES, NO, MIXED = "supported", "not supported", "mixed"
VERDICTS = {"yes": YES, "no": NO, "mixed": MIXED}
# A rule, the cells, and its verdict, on both sides of its limits.
CASES = cells(
    """
    median_no_better | location median=0.799 trimmed_mean=0.8005 | yes
    median_no_better | location median=0.799 trimmed_mean=0.802 | no
    median_is_the_mean | location correlation=0.991 | yes
    median_is_the_mean | location correlation=0.989 | no
    depth_grows | depth-subsampling 1=0.7 2=0.72 8=0.718 28=0.8 | yes
    depth_grows | depth-subsampling 1=0.7 2=0.72 8=0.71 28=0.8 | mixed
    depth_grows | depth-subsampling 1=0.8 2=0.72 28=0.79 | no
    depth_saturates | depth-subsampling 1=0.7 8=0.76 16=0.797 20=0.8 28=0.8 | yes
    depth_saturates | depth-subsampling 1=0.7 8=0.797 16=0.76 28=0.8 | no
    depth_saturates | depth-subsampling 1=0.7 8=0.7 20=0.8 28=0.8 | no
    any_head_will_do | top-heads top_1=0.8 random_1=0.796 | yes
    any_head_will_do | top-heads top_1=0.8 random_1=0.79 | no
    heads_redundant | head-distribution correlation=0.65 | yes
    heads_redundant | head-distribution correlation=0.64 | no
    near_orthogonal | geometry adjacent_cos=0.09 expected_cos=0.07 | yes
    near_orthogonal | geometry adjacent_cos=0.3 expected_cos=0.07 | no
    near_orthogonal | geometry adjacent_cos=0.09 expected_cos=0.07; isotropy adjacent_cos=.2 | mixed
    low_energy | geometry energy=0.0031 random_energy=0.0078125 | yes
    low_energy | geometry energy=0.0131 random_energy=0.0078125 | no
    shift_small | geometry energy_ratio=0.0868 | yes
    shift_small | geometry energy_ratio=0.0901 | no
    fisher_gap_small | fisher r_fisher=1.12 r_fisher_unbiased=1.03 | yes
    fisher_gap_small | fisher r_fisher=1.12 r_fisher_unbiased=1.06 | no
    fisher_gap_small | fisher r_fisher=1.02 r_fisher_unbiased=none shrinkage=0 | yes
    last_token_best | readout-position last_1=0.8 last_4=-0.001 max=-0.1 | yes
    last_token_best | readout-position last_1=0.8 last_4=0.004 max=none | mixed
    last_token_best | readout-position last_1=0.8 content_mean=0.02 | no
    factual_varies_more | kappa factual_larger=0.9 | yes
    factual_varies_more | kappa factual_larger=0.89 | no
    probe_part_of_k | k-split signal_k=0.65 null=0.51 gap_probe=.9 gap_metric=.1 gap_head=.2 | yes
    probe_part_of_k | k-split signal_k=0.65 null=0.51 gap_probe=.6 gap_metric=.7 gap_head=.2 | mixed
    probe_part_of_k | k-split signal_k=0.65 null=0.51 gap_probe=.2 gap_metric=.7 gap_head=.2 | no
    """
)


@pytest.mark.parametrize(("rule", "tables", "verdict"), CASES)
def test_a_rule_tells_its_sides_apart(rule: str, tables: str, verdict: str) -> None:
    judged = getattr(rules, rule)(Evidence(NOTHING, evidence(tables)))
    assert judged.verdict == VERDICTS[verdict]
    assert any(char.isdigit() for char in judged.text)


def test_every_rule_has_a_case_for_and_one_against() -> None:
    cases = {(rule, verdict) for rule, _, verdict in (*CASES, *SHAPED)}
    for rule in rules.RULES:
        # Of the others ``test_ahead_is_a_matter_of_the_interval`` and ``test_eta_is_a_test_...``
        if not isinstance(rule.judge, partial) and rule.judge is not rules.snr_predicted:
            name = rule.judge.__name__
            assert {(name, "yes"), (name, "no")} <= cases, rule.claim


@pytest.mark.parametrize(
    ("rule", "tables", "reason"),
    cells(
        """
        shape_falls | mean-dominance mean_and_shape=0.68 shape=0.5 | less than 19 points
        shift_small | geometry energy_ratio=none | has no energy_ratio
        depth_saturates | depth-subsampling 1=0.7 2=0.72 8=0.8 | 8 layers are too few: 1 size
        fisher_gap_small | fisher r_fisher=1.3 r_fisher_unbiased=none shrinkage=0 | too few
        fisher_gap_small | fisher r_fisher=1.01 r_fisher_unbiased=none shrinkage=0.1 | singular
        last_token_best | readout-position last_1=0.8 | no other pooling
        probe_part_of_k | k-split signal_k=0.52 null=0.51 | too little to divide
        """
    ),
)
def test_what_cannot_be_tested_says_why(rule: str, tables: str, reason: str) -> None:
    with pytest.raises(NotTestable, match=reason):
        getattr(rules, rule)(Evidence(NOTHING, evidence(tables)))


@pytest.mark.parametrize("rule", rules.RULES)
def test_without_its_tables_or_a_signal_no_rule_judges(rule: rules.ClaimRule) -> None:
    with pytest.raises(NotTestable, match="has no|did not take part"):
        rule.judge(Evidence(shaped(), {}))
    if rules.WITH_SIGNAL in rule.rule:
        chance = evidence("mean-dominance mean=0.53; readout-position last_1=0.5")
        with pytest.raises(NotTestable, match="near chance"):
            rule.judge(Evidence(with_residual(0.0), chance))


def shaped(*, level: float = 0.0, slope: float = 0.0, zigzag: float = 0.0) -> SetResult:
    """Six layers of noise, and what tells the classes: a level, a slope, a pattern that no five
    statistics see."""
    gap = level + slope * (np.arange(6) - 2.5) + zigzag * np.array([1, -1, -1, 1, 1, -1])
    noise = default_rng(0).standard_normal((len(LABEL), 6))
    return scripted_result((noise + (LABEL[:, None] - 0.5) * gap)[..., None], LABEL)


def with_residual(spread: float) -> SetResult:
    """Ours, and a residual stream that is ours with noise."""
    result = shaped(level=1.0)
    rng = default_rng(2)
    other = [
        fold._replace(score=fold.score + spread * rng.standard_normal(len(fold.score)))
        for fold in result.scores[OURS]
    ]
    return replace(result, scores={**result.scores, RESIDUAL: other})


# A rule, what tells the classes, or how far the residual stream is from ours, and the verdict.
SHAPED = cells(
    """
    mean_suffices | level=4 | yes
    mean_suffices | level=1 slope=0.2 | mixed
    mean_suffices | level=0.6 slope=1 | no
    shape_falls | level=2 | yes
    shape_falls | level=2 slope=0.3 | mixed
    shape_falls | level=2 slope=2 | no
    five_no_worse | level=4 | yes
    five_no_worse | level=1 zigzag=0.25 | mixed
    five_no_worse | level=0.6 zigzag=2 | no
    sites_equivalent | residual=0 | yes
    sites_equivalent | residual=0.1 | mixed
    sites_equivalent | residual=3 | no
    """
)


@pytest.mark.parametrize(("rule", "text", "verdict"), SHAPED)
def test_differences_are_judged_by_their_intervals(rule: str, text: str, verdict: str) -> None:
    values = {name: float(value) for name, value in (part.split("=") for part in text.split())}
    result = with_residual(values["residual"]) if "residual" in values else shaped(**values)
    specs = [MEAN["mean-dominance"], MEAN["feature-sets"], READOUT["readout-site"]]
    rows = cells_by_set(make_tables(specs, [result]))[result.title]
    judged = getattr(rules, rule)(Evidence(result, rows))
    assert judged.verdict == VERDICTS[verdict], judged.text
    assert "points [" in judged.text


def test_the_tables_have_the_aurocs_of_the_scores_that_are_judged() -> None:
    result = shaped(level=0.6, slope=1.0, zigzag=0.5)
    specs = [MEAN["mean-dominance"], MEAN["feature-sets"]]
    rows = cells_by_set(make_tables(specs, [result]))[result.title]
    for table, key, features in (
        ("mean-dominance", "mean_and_shape", FIVE_D),
        ("mean-dominance", "shape", SHAPE),
        ("feature-sets", "trajectory", FIVE_D),
        ("feature-sets", "full", FULL),
    ):
        by_fold = aurocs(result.label, Evidence(result, rows).scores(features))
        assert rows[table][key] == pytest.approx(spread(by_fold)), key


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
        rules.snr_predicted(Evidence(shaped(), evidence(f"snr eta={eta}")))
    label = np.r_[LABEL[:-8], np.ones(8, np.int64)]
    uneven = scripted_result(np.zeros((400, 6, 1)), label)
    assert rules.snr_predicted(Evidence(uneven, evidence(f"snr eta={eta}"))).verdict == verdict


def against(score: np.ndarray, *, strength: float = 1.5) -> SetResult:
    """Ours with a level of ``strength``, against a method "iti" with the given scores (rising with
    hallucination)."""
    noise = default_rng(0).standard_normal((len(LABEL), 6, 1))
    result = scripted_result(noise + strength * (LABEL[:, None, None] - 0.5), LABEL)
    other = [
        FoldScores(split.seed, split.fold, split.test, score[split.test]) for split in result.splits
    ]
    return replace(result, scores={**result.scores, "iti": other})


def ahead(result: SetResult, *names: str) -> ClaimFinding:
    return rules.ahead_of(names, Evidence(result, {}))


def test_ahead_is_a_matter_of_the_interval() -> None:
    rng = default_rng(1)
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


def test_methods_that_did_not_take_part_are_named(result: SetResult) -> None:
    with pytest.raises(NotTestable, match="fact-probe and iris did not take part"):
        ahead(result, "fact-probe", "iris")


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    cells(
        """
        supported; supported | supported
        supported; not testable | supported
        supported; not supported | mixed
        not supported; mixed | mixed
        not supported; not supported | not supported
        not testable; not testable | not testable
        """
    ),
)
def test_sets_are_put_together(verdicts: Any, expected: str) -> None:
    assert rules.together(verdicts.split("; ")) == expected
    assert rules.together([]) == "not testable"


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
