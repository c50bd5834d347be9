"""A request without HTTP, on the scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes_store.errors import GoldenMismatch, WrongModel
from probes_store.manifest import Classifier
from probes_store.records import ContextName, Recalibration
from probes_store.tensors import Golden
from service.engines.base import EngineGate, Sampling
from service.engines.scheduler import Scheduled
from service.errors import EmptyPrompt, EngineError, NonFiniteReadout, RequestError
from service.judging.asking import Asks
from service.judging.guarantee import (
    OTHER_RENDERING,
    SURE,
    SURE_REWORDED,
    UNKNOWN,
    Shape,
    Standing,
    shape_of,
    unlike_training,
)
from service.judging.uncertainty import FAR_READINGS
from service.policies.guard import BLOCK, GATE, OBSERVE, Action, Decision, Policy, judge
from service.readout import Probes, Site
from service.risk import depth_mean, risk, truth_logits
from service.scoring import RiskReport, Scorer
from tests.engine_kinds import KINDS, engine_of
from tests.kit.bundles import write_bundle
from tests.matching import (
    GOLDEN,
    INTERCEPT,
    SMALL_TALK,
    WEIGHT,
    contextual_bundle,
    matching_bundle,
    matching_draft,
)
from tests.scripted_engine import ScriptedEngine

Patch = pytest.MonkeyPatch


@pytest.fixture
def script() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(params=KINDS)
def scorer(
    tmp_path: Path, script: ScriptedEngine, request: pytest.FixtureRequest
) -> Iterator[Scorer]:
    engine = engine_of(script, request.param)
    yield Scorer(engine, matching_bundle(script, tmp_path))
    engine.close()
    assert script.counters.open_continuations == 0


def asked(scorer: Scorer, count: int = 60) -> list[list[int]]:
    return [scorer.render(prompt=f"prompt {n}") for n in range(count)]


def check_gated(scorer: Scorer, count: int = 20) -> list[RiskReport]:
    """Half of the prompts are answered, by the risks that they have alone; return these."""
    alone = scorer.score(ids := asked(scorer, count))
    middle = sorted(report.risk for report in alone)[count // 2]
    reports = scorer.score_or_continue(ids, Sampling(), GATE.at(middle))
    assert [report.risk for report in reports] == [report.risk for report in alone]
    assert [report.completion is None for report in reports] == [
        report.risk >= middle for report in alone
    ]
    assert {report.completion.text for report in reports if report.completion} == {"It is so."}
    return alone


def test_risk_is_the_papers_rule_on_the_engines_rows(
    scorer: Scorer, script: ScriptedEngine
) -> None:
    ids = scorer.render(prompt="What is the capital of France?")
    (report,) = scorer.score([ids])
    probes, shape = scorer.bundle.probes, script.identity.geometry
    readout = shape.select(
        script.activations(ids, Site.ATTENTION_HEAD), probes.head, Site.ATTENTION_HEAD
    )
    expected = truth_logits(readout, probes.direction, probes.bias)
    np.testing.assert_allclose(report.trajectory, expected, atol=1e-6)
    assert report.depth_mean == pytest.approx(float(depth_mean(expected)))
    assert report.risk == pytest.approx(
        float(risk(depth_mean(expected)[None], np.array([WEIGHT]), INTERCEPT))
    )
    assert report.prompt_tokens == len(ids)


@pytest.mark.parametrize("honoured", [True, False])
def test_gate_and_continue(scorer: Scorer, honoured: bool, monkeypatch: Patch) -> None:
    if not honoured:
        monkeypatch.setattr(EngineGate, "closes", lambda *_: False)
    check_gated(scorer)


def test_what_is_gated_impossible_or_nothing_costs_no_work(
    scorer: Scorer, script: ScriptedEngine
) -> None:
    gated = scorer.score_or_continue(asked(scorer, 3), Sampling(), GATE.at(0.0))
    assert all(
        report.decision is Decision.ABSTAIN and report.completion is None for report in gated
    )
    assert script.counters.decode_steps == 0
    before = scorer.engine.counters.prefills
    assert scorer.score_or_continue([], Sampling()) == []
    with pytest.raises(RequestError):
        scorer.score_or_continue([[256, 65]], Sampling(seed=2**64))
    for prompt in ("", "  \n"):
        with pytest.raises(EmptyPrompt):
            scorer.render(prompt=prompt)
    assert scorer.engine.counters.prefills == before


def test_one_failure_ends_them_all(
    scorer: Scorer, script: ScriptedEngine, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(script, "wait", lambda: 1 // 0)
    with pytest.raises(EngineError, match="ZeroDivisionError: integer division") as failed:
        scorer.score_or_continue([[256, 65]] * 3, Sampling(), GATE.at(1.0))
    assert isinstance(failed.value.__cause__, ZeroDivisionError)


def test_an_answer_that_the_engine_alone_gated_is_an_error(
    scorer: Scorer, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(EngineGate, "closes", lambda *_: True)
    with pytest.raises(EngineError, match="complete"):
        scorer.score_or_continue([[256, 65]], Sampling(), GATE.at(0.999999))


def test_another_model_or_other_golden_risks_are_refused(tmp_path: Path, script: Any) -> None:
    bundle, other = matching_bundle(script, tmp_path), ScriptedEngine()
    other.identity = replace(other.identity, architecture="OtherForCausalLM")
    with pytest.raises(WrongModel):
        Scorer(Scheduled(other), bundle)
    context = contextual_bundle(script, tmp_path)
    for index, name in enumerate(("asks", "passage", "stated")):
        bias = np.array(context.probes.context_bias)
        bias[index, 1] += 0.1
        with pytest.raises(GoldenMismatch, match=f"layer 1 of context probe {name}"):
            Scorer(
                Scheduled(script),
                replace(context, probes=replace(context.probes, context_bias=bias)),
            )
    script.activations = lambda prompt, site: np.ones((4, 16), np.float32)
    with pytest.raises(GoldenMismatch):
        Scorer(Scheduled(script), bundle)


def test_the_gate_closes_where_the_verdict_says_so(scorer: Scorer) -> None:
    for policy in (GATE, BLOCK.at(0.3), GATE.at(0.0)):
        gate = scorer.gate(policy)
        assert gate is not None
        assert (gate.weight, gate.intercept) == ((WEIGHT, 0.0, 0.0, 0.0, 0.0, 0.0), INTERCEPT)
        for depth in np.linspace(-3, 3, 61):
            value = float(
                risk(
                    np.array([depth, -0.5, 0.7, 0.0, 0.0, 0.0]),
                    np.array(gate.weight),
                    gate.intercept,
                )
            )
            verdict = judge(value, policy, scorer.bundle.manifest.threshold)
            assert (value >= gate.threshold) == (verdict.decision is not Decision.CONTINUE)
    for policy in (OBSERVE, OBSERVE.at(0.0), GATE.at(1.0)):  # which end nothing
        assert scorer.gate(policy) is None


def test_weights_go_to_their_signals(tmp_path: Path, script: ScriptedEngine) -> None:
    plain, weights = matching_bundle(script, tmp_path, "plain"), (2.0, 0.5, -0.25)
    results = script.score(GOLDEN, [Probes.of(Site.ATTENTION_HEAD, plain.probes)], first_token=True)
    trajectories = np.stack([result.trajectories[0] for result in results])
    tokens = [
        (result.first_token.entropy, result.first_token.log_max_prob)
        for result in results
        if result.first_token
    ]
    signals = np.column_stack([depth_mean(trajectories), np.array(tokens)])
    bundle = matching_bundle(
        script,
        tmp_path,
        signals=("depth_mean", "entropy", "log_max_prob"),
        classifier=Classifier(weights, INTERCEPT),
        golden=Golden.record(
            GOLDEN, trajectories, risk(signals, np.array(weights), INTERCEPT), signals[:, [2, 1]]
        ),
    )
    scorer = Scorer(Scheduled(script), bundle)
    gate = scorer.gate(GATE)
    assert gate is not None
    assert gate.weight == (2.0, -0.25, 0.5, 0.0, 0.0, 0.0)
    check_gated(scorer)
    scorer.engine.close()


RECALIBRATIONS = (
    Recalibration("platt", 0.5, 0.5, -1.0),
    Recalibration("beta", 0.2, 3.0, 0.5),
    Recalibration("isotonic", knots=(0.0, 0.3, 0.6, 1.0), values=(0.05, 0.1, 0.7, 0.9)),
)


@pytest.mark.parametrize("recalibration", RECALIBRATIONS, ids=lambda one: str(one.method))
def test_a_recalibrated_risk_is_served_gated_and_replayed(
    tmp_path: Path, script: ScriptedEngine, recalibration: Recalibration
) -> None:
    draft = matching_draft(script, "tiny", 0)
    draft.manifest = replace(draft.manifest, recalibration=recalibration)
    draft.golden = replace(draft.golden, risk=recalibration(draft.golden.risk))
    plain = Scorer(Scheduled(script), matching_bundle(script, tmp_path))
    scorer = Scorer(Scheduled(script), write_bundle(draft, tmp_path / "mapped"))
    raw, served = plain.score(asked(plain, 20)), check_gated(scorer)
    expected = [float(recalibration(report.risk)) for report in raw]
    assert [report.risk for report in served] == pytest.approx(expected, rel=1e-12)
    assert [report.depth_mean for report in served] == [report.depth_mean for report in raw]
    for threshold in (0.12, 0.5, 0.66):  # the engine's gate is on the classifier's own scale
        gate = scorer.gate(GATE.at(threshold))
        assert gate is not None
        assert float(recalibration(gate.threshold)) == pytest.approx(threshold, rel=1e-6)
        assert recalibration(gate.threshold) >= threshold
    assert (scorer.gate(GATE.at(0.95)) is None) == bool(recalibration.knots)
    wrong = replace(scorer.bundle, manifest=replace(scorer.bundle.manifest, recalibration=None))
    with pytest.raises(GoldenMismatch):
        Scorer(Scheduled(script), wrong)
    script.nan_layer = 1  # NaN is never a risk
    for one in (plain, scorer):
        with pytest.raises(NonFiniteReadout):
            one.score([[256, 65]])


CONTEXT_SIGNALS = {"depth_mean": WEIGHT, "stated": 1.5, "passage": -1.0, "stated_length": 0.25}


@pytest.mark.parametrize("names", [("asks",), ("passage", "stated", "asks")])
def test_context_probes_are_read_with_the_risks(
    tmp_path: Path, script: ScriptedEngine, names: tuple[ContextName, ...]
) -> None:
    signals = CONTEXT_SIGNALS if "stated" in names else {"depth_mean": WEIGHT}
    bundle = contextual_bundle(script, tmp_path, names=names, signals=signals)
    scorer, layers = Scorer(Scheduled(script), bundle), script.identity.geometry.num_layers
    assert (context := bundle.manifest.context) is not None
    assert len(scorer.probes) == 1 + len(names)
    ids, before = asked(scorer), script.counters.prefills
    reports = scorer.score(ids)
    assert script.counters.prefills == before + len(ids)
    for prompt, report in zip(ids, reports, strict=True):
        (result,) = script.score([prompt], scorer.probes)
        np.testing.assert_allclose(report.logits, np.concatenate(result.trajectories), atol=1e-6)
        np.testing.assert_array_equal(report.trajectory, report.logits[:layers])
        means = [float(trajectory.mean()) for trajectory in result.trajectories]
        chance: dict[str, Any] = {
            probe.name: 1 / (1 + np.exp(-probe.weight * mean - probe.intercept))
            for probe, mean in zip(context.probes, means[1:], strict=True)
        }
        passage = chance.get("passage")
        stated = passage * chance["stated"] if "stated" in names else None
        told = report.context
        results = {"asks": told.asks, "passage": told.passage, "stated": told.stated}
        assert results == pytest.approx(
            {"asks": chance["asks"], "passage": passage, "stated": stated}, abs=1e-6
        )
        values = {"depth_mean": means[0], "passage": passage, "stated": stated}
        values["stated_length"] = None if stated is None else stated * np.log(len(prompt))
        z = sum(weight * values[name] for name, weight in signals.items()) + INTERCEPT
        assert report.risk == pytest.approx(1 / (1 + np.exp(z)), abs=1e-6)
        [told] = scorer.score([prompt], GATE, [SMALL_TALK])
        assert told.context.applies is bool(chance["asks"] >= 0.5)
        assert (
            report.context.applies
        )  # where the conversation is not known, something may be left to ask
    risks, asks, *others = result.trajectories
    with pytest.raises(NonFiniteReadout):  # a NaN of a context probe is never told
        scorer.judge(replace(result, trajectories=(risks, asks * np.nan, *others)), GATE)


def test_shadows_read_their_own_places_behind_context_probes(
    tmp_path: Path, script: ScriptedEngine
) -> None:
    engine = Scheduled(script)
    own, asking, reading = (
        Scorer(engine, contextual_bundle(script, tmp_path, name, seed, **options))
        for seed, (name, options) in enumerate(
            {
                "own": {},
                "asking": {"names": ("asks",)},
                "reading": {"names": ("passage", "stated"), "signals": CONTEXT_SIGNALS},
            }.items()
        )
    )
    plain, last = (
        Scorer(engine, matching_bundle(script, tmp_path, name, seed))
        for seed, name in ((3, "p"), (4, "l"))
    )

    async def read(scorer: Scorer, prompt: list[int], others: list[Scorer]) -> RiskReport:
        async with aclosing(scorer.run(prompt, GATE, shadows=others)) as steps:
            return (await anext(steps))[0]

    for scorer, others in (
        (own, [plain, asking, last, reading]),
        (plain, [own, plain, asking, last, reading]),
    ):
        for prompt in asked(scorer, 5):
            report = asyncio.run(read(scorer, prompt, others))
            assert report.risk == pytest.approx(scorer.score([prompt])[0].risk, abs=1e-9)
            alone = [other.score([prompt])[0] for other in others]
            assert [one.risk for one in report.shadows] == pytest.approx(
                [one.risk for one in alone], abs=1e-9
            )
            assert [one.flagged for one in report.shadows] == [one.verdict.flagged for one in alone]
    engine.close()


@pytest.mark.parametrize("no_fact", [False, True])
@pytest.mark.parametrize(
    "recalibration", [None, *RECALIBRATIONS], ids=lambda one: str(one and one.method)
)
def test_gate_and_verdict_agree_on_every_kind_of_prompt(
    tmp_path: Path, script: ScriptedEngine, recalibration: Recalibration | None, no_fact: bool
) -> None:
    manifest = {"recalibration": recalibration}
    scorer = Scorer(
        Scheduled(script),
        contextual_bundle(script, tmp_path, signals=CONTEXT_SIGNALS, manifest=manifest),
    )
    ids = asked(scorer)
    middle = sorted(report.risk for report in scorer.score(ids))[30]
    policy = replace(GATE, threshold=middle, withhold_no_fact=no_fact)
    gate, seen = scorer.gate(policy, SMALL_TALK), set()
    assert gate is not None
    reports = scorer.score_or_continue(ids, Sampling(), policy, [SMALL_TALK] * len(ids))
    for prompt, report in zip(ids, reports, strict=True):
        (result,) = script.score([prompt], scorer.probes)
        high, applies = report.risk >= middle, (report.context.asks or 0.0) >= 0.5
        assert report.context.applies is applies
        assert report.verdict.flagged is (high and (applies or no_fact))
        assert (
            (report.completion is None)
            is report.verdict.flagged
            is (report.decision is Decision.ABSTAIN)
        )
        if report.risk != middle:  # there the gate leaves it to the verdict
            assert gate.closes(result) is report.verdict.flagged
        seen.add((high, applies))
    assert len(seen) == 4


def test_a_prompt_that_asks_for_no_fact_decodes_behind_a_gate_for_all(
    tmp_path: Path, script: ScriptedEngine
) -> None:
    """The embedded engine's own gate is open for it: one prefill, and the answer from it."""
    scorer = Scorer(Scheduled(script), contextual_bundle(script, tmp_path))
    ids = asked(scorer)
    scored = scorer.score(ids, GATE, [SMALL_TALK] * len(ids))
    none = [
        prompt for prompt, report in zip(ids, scored, strict=True) if not report.context.applies
    ]
    standings = [SMALL_TALK] * len(none)
    before = script.counters.prefills
    reports = scorer.score_or_continue(none, Sampling(), GATE.at(0.0), standings)
    assert script.counters.prefills == before + len(none)
    assert {report.completion and report.completion.text for report in reports} == {script.answer}
    assert all(
        report.decision is Decision.CONTINUE and not report.verdict.flagged for report in reports
    )
    judging_all = replace(GATE, threshold=0.0, withhold_no_fact=True)
    for report in scorer.score_or_continue(none, Sampling(), judging_all, standings):
        assert (report.decision, report.completion, report.context.applies) == (
            Decision.ABSTAIN,
            None,
            False,
        )


@pytest.mark.parametrize(
    "asks", ["inside", "beside", "elsewhere", "several", "earlier", "plain", None]
)
def test_no_fact_counts_only_where_nothing_is_left_to_ask(
    tmp_path: Path, script: ScriptedEngine, asks: Asks | None
) -> None:
    scorer = Scorer(Scheduled(script), contextual_bundle(script, tmp_path))
    standing = (
        UNKNOWN if asks is None else Standing(Shape("0", passage=False, system=False, asks=asks))
    )
    gate, untrained = scorer.gate(GATE.at(0.0), standing), asks in ("several", "earlier")
    assert gate is not None
    for prompt in asked(scorer):
        [report] = scorer.score_or_continue([prompt], Sampling(), GATE.at(0.0), [standing])
        sure = asks == "plain" and report.context.asks is not None and report.context.asks < SURE
        assert report.context.applies is not sure
        assert (report.decision is Decision.CONTINUE, report.completion is None) == (sure, not sure)
        (result,) = script.score([prompt], scorer.probes)
        assert gate.closes(result) is not sure
        [report] = scorer.score([prompt], GATE.at(1.0), [standing])
        assert (report.uncertain.untrained, report.decision is Decision.ABSTAIN) == (
            untrained,
            untrained,
        )


def test_a_bundle_of_reworded_questions_tells_small_talk_in_any_words_where_it_stands_alone(
    tmp_path: Path, script: ScriptedEngine
) -> None:
    bundle = contextual_bundle(script, tmp_path)
    reworded = replace(bundle.manifest, training=replace(bundle.manifest.training, reworded=80))
    assert reworded.context is not None
    assert reworded.context.applicability is not None
    limit = reworded.context.applicability.threshold
    sure, beside = (min(limit, SURE_REWORDED[asks]) for asks in ("inside", "beside"))
    assert limit > SURE
    assert sure > SURE
    for turns, asks, manifest, expected in (
        ("0", "plain", reworded, limit),
        ("0", "task", reworded, limit),
        ("0", "inside", reworded, sure),
        ("1", "inside", reworded, sure),
        ("0", "beside", reworded, beside),
        ("0", "elsewhere", reworded, 0.0),
        ("0", "several", reworded, 0.0),
        ("1", "earlier", reworded, 0.0),
        ("1", "plain", reworded, sure),
        ("1", "small_talk", reworded, limit),
        ("0", "plain", bundle.manifest, SURE),
        ("0", "inside", bundle.manifest, 0.0),
        ("0", "beside", bundle.manifest, 0.0),
        ("0", "small_talk", bundle.manifest, limit),
    ):
        standing = Standing(Shape(turns, passage=False, system=False, asks=asks))
        assert standing.no_fact_below(manifest) == expected, (turns, asks)
    assert UNKNOWN.no_fact_below(reworded) == 0.0


def test_what_training_had_nothing_like_is_withheld_unless_the_operator_opened_that(
    tmp_path: Path, script: ScriptedEngine
) -> None:
    scorer = Scorer(Scheduled(script), contextual_bundle(script, tmp_path))
    several = Standing(Shape("0", passage=False, system=False, asks="several"))
    prompt = asked(scorer)[0]
    for standing, policy, withheld in (
        (several, GATE, True),
        (several, BLOCK, True),
        (Standing(other_rendering=True), GATE, True),
        (several, OBSERVE, False),
        (several, replace(GATE, withhold_outside=False), False),
        (UNKNOWN, GATE, False),
    ):
        [report] = scorer.score([prompt], replace(policy, threshold=1.0), [standing])
        assert (report.decision is not Decision.CONTINUE) is withheld, (standing, policy)
        assert report.uncertain.outside is (
            unlike_training(scorer.bundle.manifest, standing) is not None
        )


@pytest.mark.parametrize("tells_outside", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_shape_that_training_never_had_is_outside_where_the_bundle_records_which_it_had(
    tmp_path: Path, script: ScriptedEngine, kind: str, tells_outside: bool
) -> None:
    lone, in_chat = Shape("0", passage=False, system=False), Shape("5+", passage=False, system=True)
    scorers = dict[tuple[str, ...] | None, Scorer]()
    engine = engine_of(script, kind)
    for shapes in (None, (lone.around,), (in_chat.around, lone.around)):
        name = "old" if shapes is None else f"had-{len(shapes)}"
        draft = matching_draft(script, name, 0)
        changes = {"training": replace(draft.manifest.training, shapes=shapes)}
        if tells_outside:
            bundle = contextual_bundle(script, tmp_path, name, manifest=changes, reach=1e3)
        else:
            draft.manifest = replace(draft.manifest, **changes)
            bundle = write_bundle(draft, tmp_path / name)
        scorers[shapes] = Scorer(engine, bundle)
    for shapes, scorer in scorers.items():
        for shape in (lone, replace(lone, asks="task"), in_chat, replace(in_chat, asks="inside")):
            [report] = scorer.score(
                asked(scorer, 1), replace(GATE, threshold=1.0), [Standing(shape)]
            )
            outside = shapes is not None and shape.around not in shapes
            because = (
                f"conversation: {shape.around}; training had none like it" if outside else None
            )
            assert (report.uncertain.outside, report.uncertain.outside_because) == (
                outside,
                because,
            )
            assert (report.decision is Decision.ABSTAIN) is outside
            [report] = scorer.score(
                asked(scorer, 1), replace(OBSERVE, threshold=1.0), [Standing(shape)]
            )
            assert (report.uncertain.outside, report.decision) == (outside, Decision.CONTINUE)
        [report] = scorer.score(asked(scorer, 1), replace(GATE, threshold=1.0), [UNKNOWN])
        assert not report.uncertain.outside, "what is not known is judged by its readings"
    engine.close()


@pytest.mark.parametrize("tells_outside", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_script_that_training_never_had_is_outside_where_the_bundle_records_which_it_had(
    tmp_path: Path, script: ScriptedEngine, kind: str, tells_outside: bool
) -> None:
    questions = {
        "What is the capital of France?": None,
        "What does 東京 mean?": None,
        "1 + 1 = ?": None,
        "法国的首都是哪里?": "Han",
        "Ποια είναι η πρωτεύουσα της Γαλλίας;": "Greek",
        "ما هي عاصمة فرنسا؟": "Arabic",
    }
    engine = engine_of(script, kind)
    for scripts in (None, ("Latin",), ("Arabic", "Greek", "Han", "Latin")):
        name = "old" if scripts is None else f"had-{len(scripts)}"
        draft = matching_draft(script, name, 0)
        changes = {"training": replace(draft.manifest.training, scripts=scripts)}
        if tells_outside:
            bundle = contextual_bundle(script, tmp_path, name, manifest=changes, reach=1e3)
        else:
            draft.manifest = replace(draft.manifest, **changes)
            bundle = write_bundle(draft, tmp_path / name)
        scorer = Scorer(engine, bundle)
        for question, other in questions.items():
            standing = Standing(shape_of([{"role": "user", "content": question}]))
            unlike = scripts == ("Latin",) and other is not None
            because = f"prompt: most of its letters are {other}; training had none like it"
            for policy in (GATE, OBSERVE):
                [report] = scorer.score(
                    asked(scorer, 1), replace(policy, threshold=1.0), [standing]
                )
                assert report.uncertain.outside_because == (because if unlike else None)
                withheld = unlike and policy is GATE
                assert (report.decision is Decision.ABSTAIN) is withheld, (question, scripts)
    engine.close()


def test_why_a_prompt_lies_outside_is_named(tmp_path: Path, script: ScriptedEngine) -> None:
    plain, several = (
        Standing(Shape("0", passage=False, system=False, asks=asks))
        for asks in ("plain", "several")
    )
    for name, reach, standing, because in (
        ("a", 1e-3, plain, FAR_READINGS),
        ("b", 1e3, plain, None),
        ("c", 1e-3, several, "conversation: several questions, on which no bundle is trained"),
        ("d", 1e3, Standing(other_rendering=True), OTHER_RENDERING),
    ):
        scorer = Scorer(
            Scheduled(script),
            contextual_bundle(script, tmp_path, name, reach=reach, applies_from=0.01),
        )
        [report] = scorer.score(asked(scorer, 1), GATE, [standing])
        assert report.uncertain.outside_because == because


def test_who_withholds_what_lies_outside_training(tmp_path: Path, script: ScriptedEngine) -> None:
    annotate = Policy("annotate", Action.ANNOTATE)
    for reach, outside, context in ((1e-3, True, True), (1e3, False, True), (1e-3, True, False)):
        folder, applies = tmp_path / f"{reach}{context}", 0.01  # of all that ask
        bundle = contextual_bundle(script, folder, reach=reach, applies_from=applies)
        scorer = Scorer(Scheduled(script), bundle)
        if not context:
            scorer.bundle = replace(bundle, manifest=replace(bundle.manifest, context=None))
        for policy, said in product((GATE, BLOCK, OBSERVE, annotate), (None, True, False)):
            withholds = said if said is not None else policy.action.withholds and context
            chosen = replace(policy, threshold=1.0, withhold_outside=said)
            assert scorer.withholds_outside(chosen) is withholds, (policy, said)
            if policy is GATE and context:
                for report in scorer.score(asked(scorer, 8), chosen):
                    assert report.uncertain.outside is outside
                    result = report.decision is Decision.ABSTAIN, report.verdict.flagged
                    assert result == (outside and withholds, False)
