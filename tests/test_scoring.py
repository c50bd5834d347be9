"""A request without HTTP, on the scripted engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes_store.bundle import Bundle
from probes_store.errors import GoldenMismatch, WrongModel
from probes_store.manifest import Classifier
from probes_store.recalibration import Recalibration
from probes_store.tensors import Golden
from service.engines.base import Gate, Sampling
from service.engines.scheduler import Scheduled
from service.errors import EmptyPrompt, EngineError, NonFiniteReadout, RequestError
from service.guard import BLOCK, GATE, OBSERVE, Decision, judge
from service.readout import Probes, Site
from service.risk import depth_mean, risk, truth_logits
from service.scoring import Scorer
from tests.engine_kinds import KINDS, engine_of
from tests.matching import GOLDEN, INTERCEPT, WEIGHT, matching_bundle, matching_draft
from tests.probes_store.factory import write_bundle
from tests.scripted_engine import ScriptedEngine


@pytest.fixture
def script() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(params=KINDS)
def scorer(tmp_path: Path, script: ScriptedEngine, request: pytest.FixtureRequest) -> Iterator[Scorer]:
    engine = engine_of(script, request.param)
    yield Scorer(engine, matching_bundle(script, tmp_path))
    engine.close()
    assert script.counters.open_continuations == 0


def test_risk_is_the_papers_rule_on_the_engines_rows(scorer: Scorer, script: ScriptedEngine) -> None:
    ids = scorer.render(prompt="What is the capital of France?")
    (report,) = scorer.score([ids])
    probes, shape = scorer.bundle.probes, script.identity.geometry
    readout = shape.select(script.activations(ids, Site.ATTENTION_HEAD), probes.head, Site.ATTENTION_HEAD)
    expected = truth_logits(readout, probes.direction, probes.bias)
    np.testing.assert_allclose(report.trajectory, expected, atol=1e-6)
    assert report.depth_mean == pytest.approx(float(depth_mean(expected)))
    assert report.risk == pytest.approx(float(risk(depth_mean(expected)[None], np.array([WEIGHT]), INTERCEPT)))
    assert report.prompt_tokens == len(ids)


@pytest.mark.parametrize("honoured", [True, False])
def test_gate_and_continue(
    scorer: Scorer, script: ScriptedEngine, honoured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not honoured:
        monkeypatch.setattr(Gate, "closes", lambda *_: False)
    ids = [scorer.render(prompt=f"prompt {n}") for n in range(20)]
    alone = scorer.score(ids)
    middle = sorted(report.risk for report in alone)[10]
    reports = scorer.score_or_continue(ids, Sampling(), GATE.at(middle))
    assert [report.risk for report in reports] == [report.risk for report in alone]
    assert [report.completion is None for report in reports] == [report.risk >= middle for report in alone]
    assert {report.completion.text for report in reports if report.completion} == {script.answer}


def test_where_all_are_gated_nothing_is_decoded(scorer: Scorer, script: ScriptedEngine) -> None:
    ids = [scorer.render(prompt=text) for text in ("a", "b", "c")]
    gated = scorer.score_or_continue(ids, Sampling(), GATE.at(0.0))
    assert all(report.decision is Decision.ABSTAIN and report.completion is None for report in gated)
    assert script.counters.decode_steps == 0


def test_no_prompts_are_no_work(scorer: Scorer) -> None:
    assert scorer.score_or_continue([], Sampling()) == []


def test_impossible_sampling_costs_no_prefill(scorer: Scorer) -> None:
    before = scorer.engine.counters.prefills
    with pytest.raises(RequestError):
        scorer.score_or_continue([[256, 65]], Sampling(seed=2**64))
    assert scorer.engine.counters.prefills == before


def test_one_failure_ends_them_all(scorer: Scorer, script: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "wait", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        scorer.score_or_continue([[256, 65]] * 3, Sampling(), GATE.at(1.0))


def test_an_answer_that_the_engine_alone_gated_is_an_error(scorer: Scorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gate, "closes", lambda *_: True)
    with pytest.raises(EngineError, match="complete"):
        scorer.score_or_continue([[256, 65]], Sampling(), GATE.at(0.999999))


def test_nan_is_never_a_risk(scorer: Scorer, script: ScriptedEngine) -> None:
    script.nan_layer = 1
    with pytest.raises(NonFiniteReadout):
        scorer.score([[256, 65]])


def test_another_model_or_other_golden_risks_are_refused(tmp_path: Path, script: ScriptedEngine) -> None:
    bundle = matching_bundle(script, tmp_path)

    class Renamed(ScriptedEngine):
        """Says that it is another architecture."""

    other = Renamed()
    object.__setattr__(other.identity, "architecture", "OtherForCausalLM")
    with pytest.raises(WrongModel):
        Scorer(Scheduled(other), bundle)
    wrong = matching_bundle(script, tmp_path / "two")
    script.activations = lambda prompt, site: np.ones((4, 16), np.float32)  # type: ignore[method-assign]
    with pytest.raises(GoldenMismatch):
        Scorer(Scheduled(script), wrong)


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt_is_refused(scorer: Scorer, prompt: str) -> None:
    with pytest.raises(EmptyPrompt):
        scorer.render(prompt=prompt)


def test_the_gate_closes_where_the_verdict_says_so(scorer: Scorer) -> None:
    for policy in (GATE, BLOCK.at(0.3), GATE.at(0.0)):
        gate = scorer.gate(policy)
        assert gate is not None
        assert gate.weight == (WEIGHT, 0.0, 0.0, 0.0, 0.0)
        assert gate.intercept == INTERCEPT
        for depth in np.linspace(-3, 3, 61):
            value = float(risk(np.array([depth, -0.5, 0.7, 0.0, 0.0]), np.array(gate.weight), gate.intercept))
            verdict = judge(value, policy, scorer.bundle.manifest.threshold)
            assert (value >= gate.threshold) == (verdict.decision is not Decision.CONTINUE)


def test_no_gate_where_nothing_is_ended(scorer: Scorer) -> None:
    assert scorer.gate(OBSERVE) is None
    assert scorer.gate(OBSERVE.at(0.0)) is None
    assert scorer.gate(GATE.at(1.0)) is None


def test_weights_go_to_their_signals(tmp_path: Path, script: ScriptedEngine) -> None:
    plain = matching_bundle(script, tmp_path, "plain")
    weight = np.array([WEIGHT, 0.5, -0.25])
    results = script.score(GOLDEN, [Probes.of(Site.ATTENTION_HEAD, plain.probes)], first_token=True)
    signals: Any = np.array(
        [
            (depth_mean(one.trajectories[0]), one.first_token.entropy, one.first_token.log_max_prob)
            for one in results
            if one.first_token
        ]
    )
    golden = Golden.record(
        GOLDEN,
        np.stack([one.trajectories[0] for one in results]),
        risk(signals, weight, INTERCEPT),
        signals[:, [2, 1]],
    )
    bundle = matching_bundle(
        script,
        tmp_path,
        signals=("depth_mean", "entropy", "log_max_prob"),
        classifier=Classifier((2.0, 0.5, -0.25), INTERCEPT),
        golden=golden,
    )
    engine = Scheduled(script)
    scorer = Scorer(engine, bundle)
    gate = scorer.gate(GATE)
    assert gate is not None
    assert gate.weight == (2.0, -0.25, 0.5, 0.0, 0.0)
    ids = [scorer.render(prompt=f"prompt {n}") for n in range(20)]
    middle = sorted(report.risk for report in scorer.score(ids))[10]
    reports = scorer.score_or_continue(ids, Sampling(), GATE.at(middle))
    assert sum(report.completion is None for report in reports) == 10
    engine.close()


RECALIBRATIONS = (
    Recalibration("platt", 0.5, 0.5, -1.0),
    Recalibration("beta", 0.2, 3.0, 0.5),
    Recalibration("isotonic", knots=(0.0, 0.3, 0.6, 1.0), values=(0.05, 0.1, 0.7, 0.9)),
)


def recalibrated_bundle(script: ScriptedEngine, folder: Path, recalibration: Recalibration) -> Bundle:
    draft = matching_draft(script, "tiny", 0)
    draft.manifest = replace(draft.manifest, recalibration=recalibration)
    draft.golden = replace(draft.golden, risk=recalibration(draft.golden.risk))
    return write_bundle(draft, folder / "mapped")


@pytest.mark.parametrize("recalibration", RECALIBRATIONS, ids=lambda one: str(one.method))
def test_a_recalibrated_risk_is_served_gated_and_replayed(
    tmp_path: Path, script: ScriptedEngine, recalibration: Recalibration
) -> None:
    plain = Scorer(Scheduled(script), matching_bundle(script, tmp_path))
    scorer = Scorer(Scheduled(script), recalibrated_bundle(script, tmp_path, recalibration))
    ids = [scorer.render(prompt=f"prompt {n}") for n in range(20)]
    raw, served = plain.score(ids), scorer.score(ids)
    expected = [float(recalibration(report.risk)) for report in raw]
    assert [report.risk for report in served] == pytest.approx(expected, rel=1e-12)
    assert [report.depth_mean for report in served] == [report.depth_mean for report in raw]
    middle = sorted(report.risk for report in served)[10]
    answered = scorer.score_or_continue(ids, Sampling(), GATE.at(middle))
    assert [report.completion is None for report in answered] == [report.risk >= middle for report in served]
    wrong = replace(scorer.bundle, manifest=replace(scorer.bundle.manifest, recalibration=None))
    with pytest.raises(GoldenMismatch):
        Scorer(Scheduled(script), wrong)


@pytest.mark.parametrize("recalibration", RECALIBRATIONS, ids=lambda one: str(one.method))
def test_the_engines_gate_is_on_the_classifiers_own_scale(
    tmp_path: Path, script: ScriptedEngine, recalibration: Recalibration
) -> None:
    """It closes where the recalibrated risk reaches the threshold, and never before."""
    scorer = Scorer(Scheduled(script), recalibrated_bundle(script, tmp_path, recalibration))
    for threshold in (0.12, 0.5, 0.66):
        gate = scorer.gate(GATE.at(threshold))
        assert gate is not None
        assert float(recalibration(gate.threshold)) == pytest.approx(threshold, rel=1e-6)
        assert recalibration(gate.threshold) >= threshold
    never = scorer.gate(GATE.at(0.95))
    assert never is None if recalibration.knots else never is not None


def test_nan_is_no_risk_of_a_recalibrated_bundle_either(tmp_path: Path, script: ScriptedEngine) -> None:
    for recalibration in RECALIBRATIONS:
        scorer = Scorer(Scheduled(script), recalibrated_bundle(script, tmp_path / recalibration.method, recalibration))
        script.nan_layer = 1
        with pytest.raises(NonFiniteReadout):
            scorer.score([[256, 65]])
        script.nan_layer = None
