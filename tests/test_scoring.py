"""A request without HTTP, on the scripted engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes_store.errors import GoldenMismatch, WrongModel
from service.engines.base import Sampling
from service.engines.scripted import ScriptedEngine
from service.errors import EmptyPrompt, NonFiniteReadout, RequestError
from service.guard import GATE, Decision
from service.readout import Site
from service.risk import depth_mean, risk, truth_logits
from service.scoring import Scorer
from tests.matching import INTERCEPT, WEIGHT, matching_bundle, scripted


def test_risk_is_the_papers_rule_on_the_engines_rows(tmp_path: Path) -> None:
    engine, bundle = scripted(tmp_path)
    scorer = Scorer(engine, bundle)
    ids = scorer.render(prompt="What is the capital of France?")
    (report,) = scorer.score([ids])
    probes, shape = bundle.probes, engine.identity.geometry
    readout = shape.select(engine.rows(ids, Site.ATTENTION_HEAD), probes.head, Site.ATTENTION_HEAD)
    expected = truth_logits(readout, probes.direction, probes.bias)
    np.testing.assert_allclose(report.trajectory, expected, atol=1e-6)
    assert report.depth_mean == pytest.approx(float(depth_mean(expected)))
    assert report.risk == pytest.approx(float(risk(depth_mean(expected)[None], np.array([WEIGHT]), INTERCEPT)))
    assert report.prompt_tokens == len(ids)


def test_gate_and_continue(tmp_path: Path) -> None:
    engine, bundle = scripted(tmp_path)
    scorer = Scorer(engine, bundle)
    ids = [scorer.render(prompt=text) for text in ("a", "b", "c")]
    gated = scorer.score_or_continue(ids, Sampling(), GATE.at(0.0))
    assert all(report.decision is Decision.ABSTAIN and report.completion is None for report in gated)
    assert engine.counters.decode_steps == 0
    answered = scorer.score_or_continue(ids, Sampling(), GATE.at(1.0))
    assert [report.completion.text for report in answered if report.completion] == [engine.answer] * 3
    assert engine.counters.open_continuations == 0


def test_open_caches_are_bounded_and_gated_ones_freed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, bundle = scripted(tmp_path)
    scorer = Scorer(engine, bundle)
    ids = [scorer.render(prompt=f"prompt {n}") for n in range(20)]
    monkeypatch.setattr("service.scoring.KV_TOKENS", 3 * len(ids[0]) + 5)
    most = 0
    begin = engine.begin

    def watched(*arguments: Any) -> Any:
        nonlocal most
        opened = begin(*arguments)
        most = max(most, engine.counters.open_continuations)
        return opened

    monkeypatch.setattr(engine, "begin", watched)
    alone = scorer.score(ids)
    middle = sorted(report.risk for report in alone)[10]
    reports = scorer.score_or_continue(ids, Sampling(), GATE.at(middle))
    assert most <= 3
    assert engine.counters.open_continuations == 0
    assert [report.risk for report in reports] == [report.risk for report in alone]
    assert [report.completion is None for report in reports] == [report.risk >= middle for report in alone]


def test_impossible_sampling_costs_no_prefill(tmp_path: Path) -> None:
    engine, bundle = scripted(tmp_path)
    scorer = Scorer(engine, bundle)
    before = engine.counters.prefills
    with pytest.raises(RequestError):
        scorer.score_or_continue([[256, 65]], Sampling(seed=2**64))
    assert engine.counters.prefills == before


def test_a_failure_while_decoding_leaves_no_cache_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, bundle = scripted(tmp_path)
    scorer = Scorer(engine, bundle)
    monkeypatch.setattr(engine, "wait", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        scorer.score_or_continue([[256, 65]] * 3, Sampling(), GATE.at(1.0))
    assert engine.counters.open_continuations == 0


def test_nan_is_never_a_risk(tmp_path: Path) -> None:
    engine, bundle = scripted(tmp_path)
    scorer = Scorer(engine, bundle)
    engine.nan_layer = 1
    with pytest.raises(NonFiniteReadout):
        scorer.score([[256, 65]])


def test_another_model_or_other_golden_risks_are_refused(tmp_path: Path) -> None:
    engine, bundle = scripted(tmp_path)

    class Renamed(ScriptedEngine):
        """Says that it is another architecture."""

    other = Renamed()
    object.__setattr__(other.identity, "architecture", "OtherForCausalLM")
    with pytest.raises(WrongModel):
        Scorer(other, bundle)
    wrong = matching_bundle(engine, tmp_path / "two")
    engine.rows = lambda prompt, site: np.ones((4, 16), np.float32)  # type: ignore[method-assign]
    with pytest.raises(GoldenMismatch):
        Scorer(engine, wrong)


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt_is_refused(tmp_path: Path, prompt: str) -> None:
    scorer = Scorer(*scripted(tmp_path))
    with pytest.raises(EmptyPrompt):
        scorer.render(prompt=prompt)
