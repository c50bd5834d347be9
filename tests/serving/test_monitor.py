"""A bundle is watched while it serves: what voids its promise reaches responses, /v1/bundles, metrics and readiness."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes_store.bundle import Bundle, load_bundle
from service.engines.base import Engine
from service.engines.scheduler import Scheduled
from service.feedback.databases import location
from service.judging.drift import DriftLimits
from service.policies.guard import Action, Policy
from service.policies.policy import Policies
from service.scoring import Scorer
from service.serving.feedback import Feedback
from tests.api.test_reply import UNCERTAINTY
from tests.engine_kinds import KINDS
from tests.matching import matching_draft
from tests.probes_store.factory import GUARANTEE, write_bundle
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


@pytest.fixture
def app(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[App]:
    """On one engine: what is watched are reports, whoever made them; a test may ask for the other kind."""
    app = App(tmp_path, getattr(request, "param", KINDS[0]), names=(), add=[watched])
    app.state.catalogue.limits = LIMITS
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


@pytest.mark.parametrize(
    ("app", "away", "direction"), [(KINDS[0], 0.6, "lower"), (KINDS[1], -0.6, "higher")], indirect=["app"]
)
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
    from service.judging.uncertainty import Uncertain

    monkeypatch.setattr(scoring, "uncertain", lambda *_: Uncertain(2.0, None))
    found = ask(app, PROMPTS[:200])
    found = ask(app, PROMPTS[200:201])
    assert any(reason.startswith("outside: 100.0% of the last 200 prompts") for reason in found["guarantee"]["void"])
    assert voids(app)["outside"] == 1


def test_one_client_that_repeats_itself_voids_nobodys_promise(app: App) -> None:
    ask(app, PROMPTS[:200])
    for _ in range(10):
        found = ask(app, PROMPTS[:3] * 60)
    assert found["guarantee"]["void"] == []
    assert card(app)["void"] == []
    assert card(app)["drift"]["prompts"] == 200


@contextmanager
def labelled(folder: Path, bundle: Path, share: float) -> Iterator[App]:
    """A service that keeps feedback in ``folder`` and draws ``share`` of its answers."""
    where = location(str(folder / "feedback.db"))
    made = App(folder, names=(), add=[lambda engine, _: load_bundle(bundle)],
               feedback=lambda metrics: Feedback(where, metrics, share=share))  # fmt: skip
    with made.started() as app:
        yield app


@pytest.fixture
def promised(tmp_path: Path) -> Path:
    return watched(ScriptedEngine(), tmp_path / "made").path


def complain(app: App, prompts: Sequence[str], **said: Any) -> list[dict[str, Any]]:
    """Ask each, and call the answer wrong where there was one; what the labels came to."""
    found = []
    for prompt in prompts:
        answer = app.client.post("/score", json={"prompt": prompt, **said}).json()
        label = app.client.post("/v1/feedback", json={"id": answer["id"], "label": "hallucinated"})
        assert label.status_code == 200
        if answer["data"][0]["decision"] == "continue":
            found.append(label.json())
    return found


def test_labels_that_break_the_guarantee_are_told_and_known_to_the_next_process(tmp_path: Path, promised: Path) -> None:
    with labelled(tmp_path, promised, 1.0) as app:
        found = complain(app, PROMPTS[:60])
        assert 10 < len(found) < 60, "withheld answers do not count"
        assert all(one["drawn"] for one in found)
        assert card(app)["labels"] == {"drawn": len(found), "labelled": len(found), "wrong": len(found)}
        (reason,) = ask(app, ["a"])["guarantee"]["void"]
        assert reason == (f"labels: {len(found)} of {len(found)} answers that were drawn at random are wrong "
                          f"({len(found)} have a label, the others are taken for right), alpha 0.1")  # fmt: skip
        assert voids(app)["labels"] == 1
    with labelled(tmp_path, promised, 1.0) as app:
        assert card(app)["void"] == [reason]


def test_complaints_about_answers_that_were_not_drawn_void_nothing(tmp_path: Path, promised: Path) -> None:
    with labelled(tmp_path, promised, 0.0) as app:
        found = complain(app, PROMPTS[:60])
        assert not any(one["drawn"] for one in found)
        assert all(one["counts"] for one in found), "a recalibration learns from them"
        assert card(app)["void"] == []
        assert card(app).get("labels") is None or card(app)["labels"]["drawn"] == 0


def test_one_prompt_is_one_label_however_often_it_is_asked(tmp_path: Path, promised: Path) -> None:
    with labelled(tmp_path, promised, 1.0) as app:
        [answered] = [one for one in ask(app, PROMPTS[:20])["data"] if one["decision"] == "continue"][:1]
        complain(app, [PROMPTS[answered["index"]]] * 60)
        labels = card(app)["labels"]
        assert labels["wrong"] == labels["labelled"] == 1
        assert card(app)["void"] == []


def test_an_answer_without_a_label_is_taken_for_right(tmp_path: Path, promised: Path) -> None:
    with labelled(tmp_path, promised, 1.0) as app:
        for start in range(0, 2000, 40):
            ask(app, PROMPTS[start + 1 : start + 40])
            complain(app, [PROMPTS[start]])
        labels = card(app)["labels"]
        assert labels["wrong"] == labels["labelled"] > 10, "all that have a label are wrong"
        assert labels["drawn"] > 20 * labels["wrong"]
        assert card(app)["void"] == []


@pytest.mark.parametrize(
    "said",
    [{"threshold": 1.0}, {"generate": {"max_tokens": 1, "temperature": 1.0}}, {"policy": "outside"}],
    ids=["threshold", "temperature", "policy"],
)
def test_answers_that_the_guarantee_is_not_about_are_not_drawn(
    tmp_path: Path, promised: Path, said: dict[str, Any]
) -> None:
    with labelled(tmp_path, promised, 1.0) as app:
        named = app.state.catalogue.policies.named
        outside = Policy("outside", Action.ABSTAIN, withhold_outside=True)
        app.state.catalogue.policies = Policies({**named, "outside": outside})
        assert [one["drawn"] for one in complain(app, PROMPTS[:20], **said)].count(True) == 0
        assert any(one["drawn"] for one in complain(app, PROMPTS[:20], policy="observe"))


def test_golden_prompts_that_are_off_make_it_not_ready_until_they_are_right(app: App) -> None:
    def replay() -> None:
        app.client.portal.call(app.state.catalogue.replay_golden)  # type: ignore[union-attr]

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
    state.catalogue.monitors["watched:1"].golden("off")
    shifted(app, 0.0)

    def load(engine: Engine) -> dict[str, Scorer]:
        return {bundle.reference: Scorer(engine, bundle)}

    app.client.portal.call(state.lifecycle.reload, load)  # type: ignore[union-attr]
    assert [reason.partition(":")[0] for reason in state.catalogue.monitors["watched:1"].reasons] == ["drift"]
