"""The same requests without HTTP on an engine that schedules by itself, and the gate it is told of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from probes_store.manifest import Classifier
from probes_store.tensors import Golden
from service.engines.base import Sampling
from service.engines.scripted import ScriptedEngine
from service.errors import EngineError, RequestError
from service.guard import BLOCK, GATE, OBSERVE, Decision, judge
from service.risk import depth_mean, risk
from service.scoring import Scorer, probes_of
from tests.matching import GOLDEN, INTERCEPT, WEIGHT, matching_bundle
from tests.scripted_online import ScriptedOnlineEngine


@pytest.fixture
def scorer(tmp_path: Path) -> Iterator[Scorer]:
    script = ScriptedEngine()
    engine = ScriptedOnlineEngine(script)
    yield Scorer(engine, matching_bundle(script, tmp_path))
    assert engine.open == 0
    engine.close()
    assert engine.counters.open_continuations == 0


def engine_of(scorer: Scorer) -> ScriptedOnlineEngine:
    assert isinstance(scorer.engine, ScriptedOnlineEngine)
    return scorer.engine


@pytest.mark.parametrize("honoured", [True, False])
def test_gate_and_continue(scorer: Scorer, honoured: bool) -> None:
    engine = engine_of(scorer)
    engine.gates, engine.cached_tokens = honoured, 2
    ids = [scorer.render(prompt=f"prompt {n}") for n in range(20)]
    alone = scorer.score(ids)
    middle = sorted(report.risk for report in alone)[10]
    reports = scorer.score_or_continue(ids, Sampling(), GATE.at(middle))
    assert [report.risk for report in reports] == [report.risk for report in alone]
    assert [report.completion is None for report in reports] == [report.risk >= middle for report in alone]
    assert {report.completion.text for report in reports if report.completion} == {engine.script.answer}
    assert {report.cached_tokens for report in reports} == {2}
    assert engine.gated == (10 if honoured else 0)


def test_nothing_is_asked_of_no_prompts(scorer: Scorer) -> None:
    assert scorer.score_or_continue([], Sampling()) == []


def test_impossible_sampling_costs_no_prefill(scorer: Scorer) -> None:
    before = scorer.engine.counters.prefills
    with pytest.raises(RequestError):
        scorer.score_or_continue([[256, 65]], Sampling(seed=2**64))
    assert scorer.engine.counters.prefills == before


def test_one_failure_ends_them_all(scorer: Scorer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(scorer)
    monkeypatch.setattr(engine.script, "wait", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        scorer.score_or_continue([[256, 65]] * 3, Sampling(), GATE.at(1.0))
    assert engine.open == 0


def test_an_answer_that_the_engine_alone_gated_is_an_error(scorer: Scorer) -> None:
    engine_of(scorer).gates_all = True
    with pytest.raises(EngineError, match="before its answer was whole"):
        scorer.score_or_continue([[256, 65]], Sampling(), GATE.at(0.999999))


def test_the_gate_closes_where_the_verdict_says_so(scorer: Scorer) -> None:
    for policy in (GATE, BLOCK.at(0.3), GATE.at(0.0)):
        gate = scorer.gate(policy)
        assert gate is not None
        assert gate.weight == (WEIGHT, 0.0, 0.0)
        assert gate.intercept == INTERCEPT
        for depth in np.linspace(-3, 3, 61):
            value = float(risk(np.array([depth, -0.5, 0.7]), np.array(gate.weight), gate.intercept))
            verdict = judge(value, policy, scorer.bundle.manifest.threshold)
            assert (value >= gate.threshold) == (verdict.decision is not Decision.CONTINUE)


def test_no_gate_where_nothing_is_ended(scorer: Scorer) -> None:
    assert scorer.gate(OBSERVE) is None
    assert scorer.gate(OBSERVE.at(0.0)) is None
    assert scorer.gate(GATE.at(1.0)) is None


def test_weights_go_to_their_signals(tmp_path: Path) -> None:
    script = ScriptedEngine()
    engine = ScriptedOnlineEngine(script)
    plain = matching_bundle(script, tmp_path, "plain")
    weight = np.array([WEIGHT, 0.5, -0.25])
    onsets = script.score(GOLDEN, [probes_of(plain)], first_token=True)
    signals = np.array(
        [
            (depth_mean(o.trajectories[0]), o.first_token.entropy, o.first_token.log_max_prob)
            for o in onsets
            if o.first_token
        ]
    )
    golden = Golden.record(
        GOLDEN,
        np.stack([onset.trajectories[0] for onset in onsets]),
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
    scorer = Scorer(engine, bundle)
    gate = scorer.gate(GATE)
    assert gate is not None
    assert gate.weight == (2.0, -0.25, 0.5)
    ids = [scorer.render(prompt=f"prompt {n}") for n in range(20)]
    middle = sorted(report.risk for report in scorer.score(ids))[10]
    reports = scorer.score_or_continue(ids, Sampling(), GATE.at(middle))
    assert sum(report.completion is None for report in reports) == 10
    assert engine.gated >= 9  # the one at the threshold may fall on either side
    engine.close()
