"""A bundle is watched while it serves: when a monitor compares, where each limit lies, where
violations are told."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from probes_store.bundle import Bundle
from service import scoring
from service.annexes.feedback.store import Feedback
from service.engines.base import UNKNOWN, Engine
from service.engines.scheduler import Scheduled
from service.feedback.databases import location
from service.feedback.rows import Tally
from service.judging.drift import DriftLimits, Reference
from service.judging.uncertainty import Uncertain
from service.policies.guard import Action, Policy
from service.policies.policy import Policies
from service.scoring import Scorer
from service.serving.judgement import Monitor, digest_of
from tests.engine_kinds import KINDS
from tests.kit.api import CHAT, note_of, send_to
from tests.kit.bundles import GUARANTEE, UNCERTAINTY, write_bundle
from tests.kit.tables import values
from tests.matching import matching_draft
from tests.running import App
from tests.scripted_engine import ScriptedEngine

Patch = pytest.MonkeyPatch
WINDOW = 1000
LIMITS = DriftLimits(window=WINDOW, every=50, ks=0.2, psi=10.0, outside=0.05)
EVEN = (np.arange(1000) + 0.5) / 1000
CAUSES = ("drift", "outside", "labels", "golden")
NUMBERS = itertools.count()
PROMPTS = [f"question {number}" for number in range(4000)]
Labelled = Callable[[], AbstractContextManager[App]]


@pytest.fixture
def reported(monkeypatch: Patch) -> list[Monitor]:
    """What monitors report; their reference: risks spread evenly, 5 % of the rows outside."""
    reference = Reference(EVEN, np.arange(1, 10) / 10, 0.05)
    monkeypatch.setattr("service.serving.judgement.reference_of", lambda bundle: reference)
    return []


def monitor(reported: list[Monitor], **limits: float) -> Monitor:
    manifest = SimpleNamespace(guarantee=SimpleNamespace(alpha=0.1))
    scorer: Any = SimpleNamespace(bundle=SimpleNamespace(reference="a:1", manifest=manifest))
    return Monitor(scorer, replace(LIMITS, **limits), reported.append)


def reports(
    count: int,
    *,
    top: float = 0.0,
    outside: float = 0.0,
    named: Sequence[int] = (),
    alike: bool = False,
) -> tuple[Any, list[bytes]]:
    """``count`` reports: the share ``top`` has a risk of 1, which is also the distance to the
    reference.

    In no order, or ``alike`` to their neighbours; all of them different prompts, or those that are
    ``named``."""
    high = round(top * count)
    risks = [1.0] * high + np.linspace(0, 1, count - high, endpoint=False).tolist()
    are_outside = [SimpleNamespace(outside=n < round(outside * count)) for n in range(count)]
    results = [
        SimpleNamespace(bundle_risk=risk, context=UNKNOWN, uncertain=uncertain)
        for risk, uncertain in zip(risks, are_outside, strict=True)
    ]
    order = np.arange(count) if alike else np.random.default_rng(0).permutation(count)
    names = named or [next(NUMBERS) for _ in range(count)]
    return [results[place] for place in order], [str(name).encode() for name in names]


def test_a_full_window_is_compared_now_and_then(reported: list[Monitor]) -> None:
    watched = monitor(reported, ks=1.0)
    no_fact, names = reports(WINDOW)
    for report in no_fact:
        report.context = replace(UNKNOWN, applies=False)
    watched.observe(no_fact, names)  # of which none asks for a fact: not watched
    for count, compared in ((999, 0), (1, 1), (49, 1), (1, 2), (50, 3), (10, 3)):
        watched.observe(*reports(count))
        assert len(reported) == compared


@pytest.mark.parametrize(
    ("limits", "windows"),
    values(
        """
        {} | [[{}, false], [{"top": 0.25}, true]]
        {"ks": 1.0, "psi": 0.2} | [[{}, false], [{"top": 0.25}, true]]
        {} | [[{"top": 0.18}, false], [{"top": 0.25}, true], [{"top": 0.18}, true], \
            [{"top": 0.1}, false]]
        {} | [[{"top": 0.25, "alike": true}, false], [{"top": 0.6, "alike": true}, true], \
            [{"top": 0.18, "alike": true}, true], [{"top": 0.1, "alike": true}, false]]
        """
    ),
    ids=["distance", "stability", "back", "alike"],
)
def test_a_drift_begins_at_a_limit_and_ends_well_below_it(
    reported: list[Monitor], limits: dict[str, float], windows: list[tuple[dict[str, Any], bool]]
) -> None:
    """By the distance or by the stability; no longer exceeded well below the limit.  Prompts that
    are alike void later and never mend: below 0.8 of the wide limit, not of the narrow one."""
    watched = monitor(reported, **limits)
    for shape, void in windows:
        watched.observe(*reports(WINDOW, **shape))
        assert list(watched.violations) == ["drift"] * void, shape


def test_the_share_outside_is_held_against_the_bundles_own(reported: list[Monitor]) -> None:
    watched = monitor(reported)
    for share, void in ((0.09, False), (0.12, True), (0.0, False)):
        watched.observe(*reports(WINDOW, outside=share))
        assert list(watched.violations) == ["outside"] * void, share
    calm, names = reports(WINDOW)
    for report in calm[
        200:320
    ]:  # one client's burst is not everybody's: 12 %, but one after the other
        report.uncertain.outside = True
    watched.observe(calm, names)
    assert watched.drift is not None
    assert (watched.drift.outside, watched.violations) == (0.12, {})


def test_a_prompt_that_comes_again_counts_once(reported: list[Monitor]) -> None:
    watched = monitor(reported)
    watched.observe(*reports(WINDOW))
    watched.observe(*reports(2000, top=1.0, named=[-1 - number % 20 for number in range(2000)]))
    assert not watched.violations
    assert reported[-1].drift is not None
    assert reported[-1].drift.prompts == WINDOW
    assert reported[-1].drift.shift == pytest.approx(20 / WINDOW / 2, abs=0.005)
    # Nor do repeats hide a drift: between any two prompts of it a client asks twenty known
    # questions in a loop.
    drifted, names = reports(WINDOW, top=0.5)
    calm, _ = reports(20)
    for number, (report, name) in enumerate(zip(drifted, names, strict=True)):
        watched.observe([report, *[calm[number % 20]] * 5], [name, *[b"%d" % (number % 20)] * 5])
    assert list(watched.violations) == ["drift"]


def test_few_different_prompts_are_compared_as_the_few_they_are(reported: list[Monitor]) -> None:
    watched, few = monitor(reported), list(range(100))
    watched.observe(*reports(100, top=0.25, named=few))
    watched.observe(*reports(899, top=0.25, named=[number % 100 for number in range(899)]))
    assert not reported
    watched.observe(*reports(100, top=0.25, named=few))
    assert reported[-1].drift is not None
    assert reported[-1].drift.prompts == 100
    assert not watched.violations  # 0.25 of 100 is chance
    watched.observe(*reports(100, top=0.6, named=few))
    assert list(watched.violations) == ["drift"]


def test_a_digest_tells_prompts_apart_and_nothing_else() -> None:
    assert digest_of([1, 2, 3]) == digest_of((1, 2, 3))
    assert len({digest_of(ids) for ids in ([1, 2, 3], [1, 2], [3, 2, 1], [258], [])}) == 5
    spec = importlib.util.find_spec("service.serving.judgement")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(again := importlib.util.module_from_spec(spec))
    assert again.digest_of([1, 2, 3]) != digest_of([1, 2, 3]), "the key is the process's own"


def test_labels_void_it_for_good_and_right_answers_never_do(reported: list[Monitor]) -> None:
    watched, wrong = monitor(reported), 0
    for tally in (Tally(500, 500, 0), Tally(1200, 30, 30)):  # one without a label counts as right
        watched.count(tally)
        assert not watched.violations
    while not watched.violations:
        wrong += 1
        watched.count(Tally(500 + wrong, 500 + wrong, wrong))
    watched.count(Tally(5500 + wrong, 5500, wrong))
    assert watched.violations["labels"].startswith(
        f"{wrong} of {5500 + wrong} answers that were drawn at random"
    )


@pytest.fixture(scope="module")
def promised(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Guaranteed, with a reference of trajectories so wide that nothing is outside, and its risks
    over ``PROMPTS``."""
    engine, folder = ScriptedEngine(), tmp_path_factory.mktemp("promised")
    draft = matching_draft(engine, "watched", 0)
    promise = replace(GUARANTEE, threshold=draft.manifest.threshold)
    layers = draft.golden.trajectory.shape[1]
    draft.manifest = replace(draft.manifest, guarantee=promise, uncertainty=UNCERTAINTY)
    draft.probes = replace(
        draft.probes,
        reference_mean=np.zeros(layers, np.float32),
        reference_whitening=np.eye(layers, dtype=np.float32) / 1000,
    )
    scorer = Scorer(Scheduled(engine), write_bundle(draft, folder / "first"))
    ids = [scorer.render(prompt) for prompt in PROMPTS[2000:]]
    risks = [report.risk for report in scorer.score(ids)]
    kept = {
        "risk": " ".join(map(str, risks)),
        "hallucinated": " ".join("1" if risk > 0.5 else "0" for risk in risks),
    }
    draft.evaluation["out_of_fold"] = {"risks": kept}
    return write_bundle(draft, folder / "watched")


@pytest.fixture
def app(tmp_path: Path, promised: Bundle, request: pytest.FixtureRequest) -> Iterator[App]:
    """On one engine: what is watched are reports, whoever made them; a test may ask for the other
    kind."""
    app = App(tmp_path, getattr(request, "param", KINDS[0]), names=(), add=[lambda *_: promised])
    app.state.catalogue.limits = DriftLimits(window=200, every=50)
    with app.started() as app:
        yield app


def card(app: App) -> dict[str, Any]:
    (found,) = app.client.get("/v1/bundles").json()["data"]
    return dict(found)


def shifted(app: App, away: float) -> None:
    """From now on the engine's readouts are moved along every probe."""
    engine: Any = app.engine
    [bundle] = app.bundles
    own, geometry = type(engine).activations, engine.identity.geometry
    step = np.zeros((geometry.num_layers, geometry.num_heads, geometry.head_dim), np.float32)
    step[np.arange(geometry.num_layers), bundle.probes.head] = away * bundle.probes.direction
    flat = step.reshape(geometry.num_layers, -1)
    engine.activations = lambda prompt, site: own(engine, prompt, site) + flat


@pytest.mark.parametrize(
    ("app", "away", "direction"),
    [(KINDS[0], 0.6, "lower"), (KINDS[1], -0.6, "higher")],
    indirect=["app"],
)
def test_a_shift_either_way_is_told_everywhere_and_taken_back(
    app: App, away: float, direction: str
) -> None:
    app.ask(prompt=PROMPTS[:199])
    assert card(app)["void"] == []
    assert card(app).get("drift") is None  # a window that is not full says nothing
    for start, end in ((199, 200), (2000, 2200), (2200, 2400)):  # traffic like training
        answer = app.ask(prompt=PROMPTS[start:end])
        assert answer["guarantee"]["void"] == card(app)["void"] == []
    assert card(app)["drift"]["prompts"] == 200
    assert card(app)["drift"]["ks"] < app.state.catalogue.limits.ks
    assert [app.series("void", cause=cause) for cause in CAUSES] == [0] * 4
    shifted(app, away)
    app.ask(prompt=PROMPTS[200:400])
    answer = app.ask(prompt=PROMPTS[400:401])
    (reason,) = answer["guarantee"]["void"]
    assert reason.startswith("drift: the last 200 risks are unlike those of training")
    assert direction in reason
    assert answer["guarantee"]["holds"] is False
    assert card(app)["void"] == [reason]
    assert app.series("void", cause="drift") == 1
    chat = note_of(send_to(app, CHAT).json())
    assert chat["guarantee"]["void"] == [reason]
    shifted(app, 0.0)
    app.ask(prompt=PROMPTS[600:800])
    app.ask(prompt=PROMPTS[800:850])
    assert card(app)["void"] == []
    assert app.series("void", cause="drift") == 0


def test_prompts_outside_training_are_told(app: App, monkeypatch: Patch) -> None:
    monkeypatch.setattr(scoring, "uncertain", lambda *_, **__: Uncertain(2.0, None))
    app.ask(prompt=PROMPTS[:200])
    answer = app.ask(prompt=PROMPTS[200:201])
    assert any(
        reason.startswith("outside: 100.0% of the last 200 prompts")
        for reason in answer["guarantee"]["void"]
    )
    assert app.series("void", cause="outside") == 1


@pytest.fixture
def labelled(tmp_path: Path, promised: Bundle) -> Labelled:
    """Makes a service that keeps feedback, each time in the same database, and draws all its
    answers."""
    where = location(str(tmp_path / "feedback.db"))

    def made() -> AbstractContextManager[App]:
        keeps: Any = {"feedback": lambda metrics: Feedback(where, metrics, share=1.0)}
        return App(tmp_path, names=(), add=[lambda *_: promised], **keeps).started()

    return made


def complain(app: App, prompts: Sequence[str], **choice: Any) -> list[dict[str, Any]]:
    """Ask each, and call the answer wrong where there was one; what the labels came to."""
    results = []
    for prompt in prompts:
        answer = app.ask(prompt=prompt, **choice)
        label = app.ask("/v1/feedback", id=answer["id"], label="hallucinated")
        if answer["data"][0]["decision"] == "continue":
            results.append(label)
    return results


def test_labels_that_break_the_guarantee_are_told_and_known_to_the_next_process(
    labelled: Labelled,
) -> None:
    """Which labels count, and how often: tests/feedback/test_rows.py."""
    with labelled() as app:
        result = complain(app, PROMPTS[:60])
        assert 10 < len(result) < 60, "withheld answers do not count"
        assert all(one["drawn"] for one in result)
        assert card(app)["labels"] == {
            "drawn": len(result),
            "labelled": len(result),
            "wrong": len(result),
        }
        (reason,) = app.ask(prompt=["a"])["guarantee"]["void"]
        assert reason.startswith(
            f"labels: {len(result)} of {len(result)} answers that were drawn at random are wrong"
        )
        assert app.series("void", cause="labels") == 1
    with labelled() as app:
        assert card(app)["void"] == [reason]


def test_answers_that_the_guarantee_is_not_about_are_not_drawn(labelled: Labelled) -> None:
    with labelled() as app:
        named = app.state.catalogue.policies.named
        outside = Policy("outside", Action.ABSTAIN, withhold_outside=True)
        app.state.catalogue.policies = Policies({**named, "outside": outside})
        others: list[dict[str, Any]] = [
            {"threshold": 1.0},
            {"generate": {"max_tokens": 1, "temperature": 1.0}},
            {"policy": "outside"},
        ]
        for choice in others:
            assert [one["drawn"] for one in complain(app, PROMPTS[:20], **choice)].count(True) == 0
        assert any(one["drawn"] for one in complain(app, PROMPTS[20:40], policy="observe"))


def test_golden_prompts_that_are_off_make_it_not_ready_until_they_are_right(app: App) -> None:
    for away, ready in ((0.0, 200), (0.3, 503), (0.0, 200)):
        shifted(app, away)
        app.client.portal.call(app.state.catalogue.replay_golden)  # type: ignore[union-attr]
        scored = app.client.post("/score", json={"prompt": "a"})
        assert (app.client.get("/health/ready").status_code, scored.status_code) == (ready, ready)
        assert app.client.get("/health/live").status_code == 200
        assert app.series("void", cause="golden") == (ready == 503)
        if ready == 503:
            assert scored.json()["error"]["code"] == "not_ready"
            assert "golden prompts" in scored.text


def test_a_reload_goes_on_with_the_same_bundle_and_mends_one_that_is_off(app: App) -> None:
    app.ask(prompt=PROMPTS[:200])
    shifted(app, 0.6)
    app.ask(prompt=PROMPTS[200:400])
    assert card(app)["void"]
    state, (bundle,) = app.state, app.bundles
    state.catalogue.monitors["watched:1"].golden("off")
    shifted(app, 0.0)

    def load(engine: Engine) -> dict[str, Scorer]:
        return {bundle.reference: Scorer(engine, bundle)}

    app.client.portal.call(state.lifecycle.reload, load)  # type: ignore[union-attr]
    assert [
        reason.partition(":")[0] for reason in state.catalogue.monitors["watched:1"].reasons
    ] == ["drift"]
