"""A bundle is watched while it serves: what voids its promise reaches responses, /v1/bundles, metrics and readiness."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes_store.bundle import Bundle
from service.drift import DriftLimits
from service.engines.base import Engine
from service.engines.scheduler import Scheduled
from service.feedback.databases import location
from service.scoring import Scorer
from service.serving.feedback import Feedback
from tests.api.test_uncertainty import UNCERTAINTY
from tests.engine_kinds import KINDS
from tests.matching import matching_draft
from tests.probes_store.factory import write_bundle
from tests.probes_store.test_guarantee import GUARANTEE
from tests.running import App
from tests.scripted_engine import ScriptedEngine

LIMITS = DriftLimits(window=200, every=50)
PROMPTS = [f"question {number}" for number in range(4000)]


def watched(engine: ScriptedEngine, folder: Path) -> Bundle:
    """Guaranteed, with a reference of trajectories so wide that nothing is outside, and its risks over ``PROMPTS``."""
    draft = matching_draft(engine, "watched", 0)
    promise = dataclasses.replace(GUARANTEE, threshold=draft.manifest.threshold)
    layers = draft.golden.trajectory.shape[1]
    draft.manifest = dataclasses.replace(draft.manifest, guarantee=promise, uncertainty=UNCERTAINTY)
    draft.probes = dataclasses.replace(
        draft.probes,
        reference_mean=np.zeros(layers, np.float32),
        reference_whitening=np.eye(layers, dtype=np.float32) * 1e-3,
    )
    first = write_bundle(draft, folder / "first")
    scorer = Scorer(Scheduled(engine), first)
    risks = [report.risk for report in scorer.score([scorer.render(prompt) for prompt in PROMPTS[2000:]])]
    kept = {"risk": " ".join(map(str, risks)), "hallucinated": " ".join("1" if risk > 0.5 else "0" for risk in risks)}
    draft.evaluation["out_of_fold"] = {"risks": kept}
    return write_bundle(draft, folder / "watched")


@pytest.fixture(params=KINDS)
def app(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[App]:
    app = App(tmp_path, request.param, names=(), add=[watched])
    app.state.limits = LIMITS
    with app.started() as app:
        yield app


def card(app: App) -> dict[str, Any]:
    (found,) = app.client.get("/v1/bundles").json()["data"]
    assert isinstance(found, dict)
    return found


def voids(app: App) -> dict[str, float]:
    lines = [line for line in app.client.get("/metrics").text.splitlines() if line.startswith("hallutracer_void{")]
    return {line.split('cause="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}


def ask(app: App, prompts: list[str]) -> dict[str, Any]:
    answer = app.client.post("/score", json={"prompt": prompts})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert isinstance(found, dict)
    return found


def shifted(app: App, away: float) -> None:
    """From now on the engine's readouts are moved along every probe."""
    engine, (bundle,) = app.engine, app.bundles
    own = type(engine).activations
    geometry = engine.identity.geometry
    step = np.zeros((geometry.num_layers, geometry.num_heads, geometry.head_dim), np.float32)
    for layer, head in enumerate(bundle.probes.head):
        step[layer, head] = away * bundle.probes.direction[layer]
    flat = step.reshape(geometry.num_layers, -1)
    engine.activations = lambda prompt, site: own(engine, prompt, site) + flat  # type: ignore[method-assign]


def test_traffic_like_training_voids_nothing(app: App) -> None:
    for start in range(0, 1000, 200):
        found = ask(app, PROMPTS[start : start + 200])
    assert found["guarantee"]["void"] == []
    assert card(app)["void"] == []
    assert card(app)["drift"]["prompts"] == 200
    assert card(app)["drift"]["ks"] < LIMITS.ks
    assert voids(app) == {"drift": 0, "outside": 0, "labels": 0, "golden": 0}


@pytest.mark.parametrize(("away", "direction"), [(0.6, "lower"), (-0.6, "higher")])
def test_a_shift_either_way_is_told_everywhere_and_taken_back(app: App, away: float, direction: str) -> None:
    ask(app, PROMPTS[:200])
    shifted(app, away)
    ask(app, PROMPTS[200:400])
    found = ask(app, PROMPTS[400:401])
    (reason,) = found["guarantee"]["void"]
    assert reason.startswith("drift: the last 200 risks are unlike those of training")
    assert direction in reason
    assert found["guarantee"]["holds"] is False
    assert card(app)["void"] == [reason]
    assert voids(app)["drift"] == 1
    body = {"model": "scripted", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "temperature": 0}
    assert app.client.post("/v1/chat/completions", json=body).json()["hallutracer"]["guarantee"]["void"] == [reason]
    shifted(app, 0.0)
    ask(app, PROMPTS[600:800])
    ask(app, PROMPTS[800:850])
    assert card(app)["void"] == []
    assert voids(app)["drift"] == 0


def test_a_window_that_is_not_full_says_nothing(app: App) -> None:
    shifted(app, 5.0)
    ask(app, PROMPTS[:199])
    assert card(app)["void"] == []
    assert "drift" not in {name for name, value in card(app).items() if value is not None}


def test_prompts_outside_training_are_told(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    from service import scoring
    from service.uncertainty import Uncertain

    monkeypatch.setattr(scoring, "uncertain", lambda *_: Uncertain(2.0, None))
    found = ask(app, PROMPTS[:200])
    found = ask(app, PROMPTS[200:201])
    assert any(reason.startswith("outside: 100.0% of the last 200 prompts") for reason in found["guarantee"]["void"])
    assert voids(app)["outside"] == 1


def test_labels_that_break_the_guarantee_are_told(tmp_path: Path) -> None:
    app = App(tmp_path, names=(), add=[watched])
    app.state.feedback = Feedback(location(str(tmp_path / "feedback.db")), app.state.metrics)
    with app.started():
        for number in range(0, 60):
            answer = ask(app, [PROMPTS[number]])
            for label in ("hallucinated", "hallucinated", "factual")[: 1 if number % 2 else 3]:
                body = {"id": answer["id"], "label": label}
                assert app.client.post("/v1/feedback", json=body).status_code == 200
        answered = app.state.monitors["watched:1"].state
        assert 10 < answered.labels < 60, "withheld answers and later labels do not count"
        assert answered.wrong == answered.labels
        (reason,) = ask(app, ["a"])["guarantee"]["void"]
        assert reason == f"labels: {answered.wrong} of {answered.labels} labelled answers are wrong, alpha 0.1"
        assert voids(app)["labels"] == 1


def test_golden_prompts_that_are_off_make_it_not_ready_until_they_are_right(app: App) -> None:
    def replay() -> None:
        app.client.portal.call(app.state.replay_golden)  # type: ignore[union-attr]

    replay()
    assert app.client.get("/health/ready").status_code == 200
    shifted(app, 0.3)
    replay()
    refused = app.client.post("/score", json={"prompt": "a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
    assert "golden prompts" in refused.text
    assert app.client.get("/health/ready").status_code == 503
    assert app.client.get("/health/live").status_code == 200
    assert voids(app)["golden"] == 1
    shifted(app, 0.0)
    replay()
    assert app.client.post("/score", json={"prompt": "a"}).status_code == 200
    assert voids(app)["golden"] == 0


def test_a_reload_goes_on_with_the_same_bundle_and_mends_one_that_is_off(app: App) -> None:
    ask(app, PROMPTS[:200])
    shifted(app, 0.6)
    ask(app, PROMPTS[200:400])
    assert card(app)["void"]
    state, (bundle,) = app.state, app.bundles
    state.monitors["watched:1"].golden("off")
    shifted(app, 0.0)

    def load(engine: Engine) -> dict[str, Scorer]:
        return {bundle.reference: Scorer(engine, bundle)}

    app.client.portal.call(state.reload, load)  # type: ignore[union-attr]
    assert [reason.partition(":")[0] for reason in state.monitors["watched:1"].reasons] == ["drift"]
