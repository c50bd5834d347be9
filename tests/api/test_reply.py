"""What an answer tells beside its risk: guarantee, uncertainty, whether the risk applies; and what
counts it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hallutracer_client.results import BundleList, ScoreResult, parse
from probes_store.bundle import Bundle
from probes_store.manifest import Manifest
from service.annexes.feedback.store import Feedback
from service.engines.base import Sampling
from service.feedback.databases import location
from service.judging.drift import DriftLimits
from service.judging.guarantee import (
    NO_FACT,
    TOKEN_IDS,
    GuaranteeStatus,
    Shape,
    Standing,
    decoding_violations,
    guarantee_status,
    outside_as_calibrated,
)
from service.policies.guard import GATE, OBSERVE, Action, Policy
from service.scoring import RiskReport, Scorer
from service.serving.judgement import Judgement, Monitor, digest_of
from service.vllm_plugin.note import Note
from tests.kit.api import CHAT, note_of, send_to, stream_events
from tests.kit.bundles import GUARANTEE, STRATA, UNCERTAINTY, write_bundle
from tests.kit.feedback import rows
from tests.matching import SMALL_TALKS, contextual_bundle, matching_bundle, matching_draft
from tests.running import App, app_of_module
from tests.scripted_engine import ScriptedEngine

GUARANTEED: dict[str, Any] = {"guarantee": GUARANTEE, "threshold": GUARANTEE.threshold}
ALONE = "0 earlier turns, no passage, no system prompt"
NEAR, FAR = [256, 65, 66], [256, 67]
CAREFUL = Policy(
    "careful", Action.ABSTAIN, threshold=1.0, message="Never heard of it.", withhold_outside=True
)
ALL = Policy("all", Action.ABSTAIN, message="Not sure.", withhold_no_fact=True)
OPEN = Policy("open", Action.ABSTAIN, message="Not sure.", withhold_outside=False)


def guaranteed(
    engine: ScriptedEngine, folder: Path, name: str = "sure", shapes: tuple[str, ...] | None = None
) -> Bundle:
    return matching_bundle(engine, folder, name, guarantee_shapes=shapes, **GUARANTEED)


def known(engine: ScriptedEngine, folder: Path) -> Bundle:
    """A bundle whose reference lies at the first golden prompt, and ends before the second."""
    draft = matching_draft(engine, "known", 0)
    near, far = draft.golden.trajectory
    whitening = np.eye(len(near), dtype=np.float32) / (float(np.linalg.norm(far - near)) / 2)
    draft.manifest = dataclasses.replace(draft.manifest, uncertainty=UNCERTAINTY)
    draft.probes = dataclasses.replace(
        draft.probes, reference_mean=near, reference_whitening=whitening
    )
    return write_bundle(draft, folder / "known")


def serving(folder: Path, reach: float = 1e3, **options: Any) -> App:
    """An app whose first bundle has context probes, and a reference that ends at ``reach``."""
    app = App(folder, policies={"all": ALL, "open": OPEN}, **options)
    app.bundles.insert(0, contextual_bundle(app.engine, folder, reach=reach))
    return app


# With bundles "one", "two", "sure" and "alone", which have guarantees, and "known".
service = app_of_module(
    policies={"careful": CAREFUL},
    add=[guaranteed, lambda engine, folder: guaranteed(engine, folder, "alone", (ALONE,)), known],
)


@pytest.fixture(scope="module")
def contextual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    with serving(tmp_path_factory.mktemp("context")).started() as app:
        yield app


def told(app: App, **body: Any) -> Any:
    """The answer, which the client reads as it is."""
    response = app.client.post("/score", json=body)
    assert response.status_code == 200, response.text
    document, parsed = response.json(), parse(ScoreResult, response.content)
    holds = None if parsed.guarantee is None else parsed.guarantee.holds
    assert document.get("guarantee", {}).get("holds") == holds
    row, parsed_row = document["data"][0], parsed.data[0]
    assert row.get("interval") == (parsed_row.interval and list(parsed_row.interval))
    for name in ("outside_training", "distance", "applies", "asks"):
        assert row.get(name) == getattr(parsed_row, name)
    return document


def events(app: App, **body: Any) -> list[Any]:
    *documents, _ = stream_events(app.client.post("/score", json=body | {"stream": True}).text)
    return documents


# --- guarantee ---

# A prompt without a template is withheld where it lies outside training; the calibration had none.
OUTSIDE = "policy: 'gate' also withholds prompts outside training, the calibration did not"
HOLDS = {"alpha": 0.1, "delta": 0.05, "holds": True, "void": []}
SYSTEM = {"role": "system", "content": "Be brief."}
ASKS, SAYS = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}


def unlike(*shapes: str) -> list[str]:
    return [f"conversation: {shape}; the calibration had none like it" for shape in shapes]


@pytest.mark.parametrize(
    ("bundle", "body", "reasons"),
    [
        *(
            ("sure", body, [])
            for body in (
                {},
                {"policy": "block"},
                {"threshold": 0.25},
                {"include": ["trajectory"]},
                {"generate": {"max_tokens": 12}},
            )
        ),
        ("sure", {"policy": "observe"}, ["policy: 'observe' withholds nothing"]),
        ("sure", {"threshold": 0.2}, ["threshold: 0.2 applies, 0.25 is guaranteed"]),
        (
            "sure",
            {"generate": {"max_tokens": 12, "temperature": 0.7}},
            ["decoding: temperature 0.7, not greedy"],
        ),
        (
            "sure",
            {"generate": {"max_tokens": 12, "stop": ["."]}},
            ["decoding: ends at texts of the request's own"],
        ),
        *(
            (
                "sure",
                {"generate": {"max_tokens": tokens}},
                [
                    f"decoding: at most {tokens} tokens, where the calibration's answers had 12 or"
                    " more"
                ],
            )
            for tokens in (1, 11)
        ),
        ("sure", {"input_ids": [1, 2]}, [OUTSIDE, TOKEN_IDS]),
        (
            "sure",
            {"policy": "observe", "threshold": 1.0},
            ["policy: 'observe' withholds nothing", "threshold: 1 applies, 0.25 is guaranteed"],
        ),
        ("alone", {}, []),
        ("alone", {"messages": [ASKS]}, []),
        (
            "alone",
            {"messages": [SYSTEM, ASKS]},
            unlike("0 earlier turns, no passage, a system prompt"),
        ),
        (
            "alone",
            {"messages": [ASKS, SAYS, ASKS]},
            unlike("1 earlier turn, no passage, no system prompt"),
        ),
        (
            "alone",
            {"prompt": f"Context: {'A fact. ' * 60}\n\nWhy?"},
            unlike("0 earlier turns, a passage, no system prompt"),
        ),
        ("alone", {"input_ids": [1, 2]}, [OUTSIDE, TOKEN_IDS, *unlike("not known")]),
        ("one", {}, None),
    ],
)
def test_a_guarantee_holds_or_says_why_not(
    service: App, bundle: str, body: dict[str, Any], reasons: list[str] | None
) -> None:
    asked = {} if {"messages", "input_ids", "prompt"} & set(body) else {"prompt": "Why?"}
    answer = told(service, bundle=bundle, **asked, **body).get("guarantee")
    assert answer == (None if reasons is None else HOLDS | {"holds": not reasons, "void": reasons})


def test_streams_bundles_and_metrics_tell_what_the_answer_tells(service: App) -> None:
    warm = {"max_tokens": 2, "temperature": 1.0}
    first, *_ = events(service, prompt="Why?", generate=warm, bundle="sure")
    assert first["guarantee"]["holds"] is False
    first, *_ = events(
        service, input_ids=FAR, generate={"max_tokens": 2}, policy="observe", bundle="known"
    )
    assert (first["data"][0]["outside_training"], len(first["data"][0]["interval"])) == (True, 2)
    response = service.client.get("/v1/bundles")
    one, _, sure, alone, near = response.json()["data"]
    assert (one["guarantee"], sure["guarantee"]) == (None, dataclasses.asdict(GUARANTEE))
    assert [card["guarantee_shapes"] for card in (one, sure, alone)] == [None, None, [ALONE]]
    assert (one["uncertainty"]["interval"], near["uncertainty"]) == (
        None,
        dataclasses.asdict(UNCERTAINTY),
    )
    parsed = parse(BundleList, response.content).data
    assert parsed[2].guarantee is not None
    assert parsed[2].guarantee.statement == GUARANTEE.statement
    assert parsed[4].uncertainty is not None
    assert parsed[4].uncertainty.statement == UNCERTAINTY.statement
    assert service.series("guarantee_info", bundle="sure:1", alpha="0.1", delta="0.05") == 1
    service.state.metrics.guarantees([])
    assert "guarantee_info{" not in service.client.get("/metrics").text


def status_of(
    manifest: Manifest, policy: Policy, dtype: str = "float32", *request: Any
) -> GuaranteeStatus:
    status = guarantee_status(manifest, policy, dtype, *request)
    assert status is not None
    return status


VOID = {
    (True, True): None,
    (True, None): None,
    (True, False): "does not withhold prompts outside training, the calibration did",
    (False, True): "also withholds prompts outside training, the calibration did not",
    (False, None): None,
    (False, False): None,
}


@pytest.mark.parametrize(("context", "outside"), VOID)
def test_a_guarantee_is_void_where_outside_is_treated_otherwise(
    contextual: App, context: bool, outside: bool | None
) -> None:
    manifest = dataclasses.replace(contextual.bundles[0].manifest, **GUARANTEED)
    if not context:
        manifest = dataclasses.replace(manifest, context=None)
    policy, why = Policy("mine", Action.BLOCK, withhold_outside=outside), VOID[context, outside]
    status = status_of(manifest, policy)
    assert status.violations == (() if why is None else (f"policy: 'mine' {why}",))
    assert status.holds is (why is None)
    assert outside_as_calibrated(manifest, policy) is (why is None)
    *_, reason = status_of(manifest, policy, "bfloat16").violations
    assert reason == "dtype: the engine computes in bfloat16, the calibration did in float32"
    assert (
        guarantee_status(dataclasses.replace(manifest, guarantee=None), OBSERVE, "float32") is None
    )
    assert decoding_violations(manifest, None) == decoding_violations(manifest, Sampling()) == ()


def test_a_request_is_held_to_the_guarantee_of_its_stratum(service: App) -> None:
    manifest = dataclasses.replace(
        service.bundles[0].manifest, **GUARANTEED, guarantee_strata=STRATA
    )
    alone, beside = (Shape("0", passage=passage, system=False) for passage in (False, True))
    # What a policy's threshold may be, by the prompts, and the delta that is told.
    cases: list[tuple[list[Shape | None], set[float], float]] = [
        ([alone], {0.25}, 0.025),
        ([beside], {0.5}, 0.025),
        ([beside, beside], {0.5}, 0.025),
        ([alone, beside], {0.25, 0.5}, 0.05),
        ([None], {0.25}, 0.05),
        ([], {0.25}, 0.05),
        ([beside, None], {0.25, 0.5}, 0.05),
    ]
    for shapes, thresholds, delta in cases:
        policy = Policy("mine", Action.BLOCK)
        status = status_of(manifest, policy, "float32", (), shapes)
        assert (status.delta, status.holds) == (delta, True)
        for chosen in (0.25, 0.5, 0.6):
            status = status_of(manifest, policy.at(chosen), "float32", (), shapes)
            assert list(status.violations) == [
                f"threshold: {chosen:g} applies, {threshold:g} is guaranteed"
                for threshold in sorted(thresholds - {chosen})
            ]


@pytest.fixture
def stratified(service: App, tmp_path: Path) -> Scorer:
    """With a threshold for prompts alone, and another beside a passage."""
    strata: dict[str, Any] = GUARANTEED | {"guarantee_strata": STRATA}
    return Scorer(service.engine, matching_bundle(service.engine, tmp_path, "strata", **strata))


def test_each_stratum_is_gated_at_its_own_threshold(stratified: Scorer) -> None:
    """Also where the engine decides; of a prompt that is not known, at the strictest."""
    alone, beside = (
        Standing(Shape("0", passage=passage, system=False)) for passage in (False, True)
    )
    moved = dataclasses.replace(beside, other_rendering=True)
    policy = Policy("mine", Action.ABSTAIN)
    for standing, threshold in ((alone, 0.25), (beside, 0.5), (Standing(), 0.25), (moved, 0.25)):
        [report] = stratified.score([NEAR], policy, [standing])
        gate = stratified.gate(policy, standing)
        assert gate is not None
        assert report.verdict.threshold == gate.threshold == threshold
        assert stratified.threshold(policy, standing) == threshold
        [report] = stratified.score([NEAR], policy.at(0.7), [standing])
        assert report.verdict.threshold == 0.7


def small_talk(scorer: Scorer) -> dict[bool | None, RiskReport]:
    """A prompt's report that asks for no fact, and one of another, by whether the risk applies."""
    ids = [scorer.render(prompt=text) for text in SMALL_TALKS]
    standings = [scorer.standing(text) for text in SMALL_TALKS]
    reports = scorer.score(ids, standings=standings)
    return {report.context.applies: report for report in reports}


def note(*judged: Judgement, **options: Any) -> dict[str, Any]:
    return Note(list(judged), **options).body() or {}


def test_vllms_note_has_it_all(service: App, contextual: App) -> None:
    scorers = {scorer.bundle.manifest.name: scorer for scorer in service.state.catalogue.scorers}
    judged = {name: Judgement.of(own, GATE, own.score([FAR])) for name, own in scorers.items()}
    body = note(judged["sure"], violations=("decoding: ...",))
    assert body["guarantee"] == HOLDS | {"holds": False, "void": ["decoding: ..."]}
    body = note(judged["known"])
    assert "guarantee" not in body
    assert (body["data"][0]["outside_training"], len(body["data"][0]["interval"])) == (True, 2)
    scorer = contextual.state.catalogue.scorers[0]
    body = note(Judgement.of(scorer, GATE, [small_talk(scorer)[False]]))
    assert body["data"][0]["applies"] is False


def test_a_guarantee_is_void_where_any_prompt_of_a_batch_passes_unjudged(contextual: App) -> None:
    scorer = copy(contextual.state.catalogue.scorers[0])
    manifest = dataclasses.replace(scorer.bundle.manifest, **GUARANTEED)
    scorer.bundle = dataclasses.replace(scorer.bundle, manifest=manifest)
    reports = small_talk(scorer)
    odd, usual = (Judgement.of(scorer, GATE, [reports[applies]]) for applies in (False, True))
    for order in ([odd, usual], [usual, odd]):
        body = note(*order)
        assert NO_FACT in body["guarantee"]["void"]
        risks = [judged.prompts[0].report.risk for judged in order]
        assert [row["risk"] for row in body["data"]] == risks
    assert NO_FACT not in note(usual)["guarantee"]["void"]


# --- uncertainty ---


def test_an_answer_tells_its_interval_and_its_distance(service: App) -> None:
    before = service.series("outside_training_total", bundle="known:1")
    near, far = (told(service, input_ids=ids, bundle="known")["data"][0] for ids in (NEAR, FAR))
    assert service.series("outside_training_total", bundle="known:1") == before + 1
    assert (near["outside_training"], far["outside_training"]) == (False, True)
    assert (near["distance"], far["distance"]) == (
        pytest.approx(0, abs=1e-5),
        pytest.approx(2, rel=1e-5),
    )
    for row in (near, far):
        low, high = row["interval"]
        assert 0 < low < row["risk"] < high < 1
        z = np.log((1 - row["risk"]) / row["risk"])
        half = UNCERTAINTY.interval.half_width(z, row["distance"])  # type: ignore[union-attr]
        assert np.log((1 - low) / low) - z == pytest.approx(half, rel=1e-4)


@pytest.mark.parametrize("generate", [None, {"max_tokens": 2}])
def test_a_policy_may_withhold_what_lies_outside(service: App, generate: Any) -> None:
    chosen = {"bundle": "known", "policy": "careful", "generate": generate}
    far, near = (told(service, input_ids=ids, **chosen)["data"][0] for ids in (FAR, NEAR))
    assert (far["decision"], far["flagged"], far["message"]) == (
        "abstain",
        False,
        "Never heard of it.",
    )
    assert "completion" not in far
    assert (near["decision"], "completion" in near) == ("continue", generate is not None)
    if generate is not None:
        (only,) = events(service, input_ids=FAR, **chosen)
        assert only["data"][0]["decision"] == "abstain"


# --- prompts that ask for no fact ---

Kind = tuple[
    bool, bool
]  # whether the risk is at or above the bundle's threshold, and whether it applies
KINDS: list[Kind] = [(high, applies) for high in (True, False) for applies in (True, False)]


@pytest.fixture(scope="module")
def prompts(contextual: App) -> dict[Kind, list[str]]:
    results: dict[Kind, list[str]] = {kind: [] for kind in KINDS}
    scorer = contextual.state.catalogue.scorers[0]
    ids, standings = zip(
        *((scorer.render(prompt=text), scorer.standing(text)) for text in SMALL_TALKS), strict=True
    )
    for text, report in zip(SMALL_TALKS, scorer.score(ids, standings=standings), strict=True):
        results[report.risk >= scorer.bundle.manifest.threshold, report.context.applies].append(
            text
        )
    assert all(len(results[kind]) >= 3 for kind in KINDS)
    return results


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["gate", "all"])
@pytest.mark.parametrize("generate", [None, {"max_tokens": 3}])
def test_an_answer_tells_whether_its_risk_applies_and_a_policy_may_judge_it_all_the_same(
    contextual: App, prompts: dict[Kind, list[str]], kind: Kind, policy: str, generate: Any
) -> None:
    high, applies = kind
    row = told(contextual, prompt=prompts[kind][0], policy=policy, generate=generate)["data"][0]
    flagged = high and (applies or policy == "all")
    assert row["applies"] is applies is (row["asks"] >= 0.5)
    assert (row["risk"] >= row["threshold"], row["flagged"]) == (high, flagged)
    assert row["decision"] == ("abstain" if flagged else "continue")
    assert ("completion" in row, "message" in row) == (
        generate is not None and not flagged,
        flagged,
    )
    turns = [{"role": "user", "content": prompts[kind][0]}]
    chosen = {"policy": policy}
    answer = send_to(contextual, CHAT, messages=turns, tokens=3, chosen=chosen).json()
    [noted], [choice] = note_of(answer)["data"], answer["choices"]
    assert (noted["applies"], noted["decision"]) == (applies, row["decision"])
    assert choice["message"]["content"] == (None if flagged else contextual.engine.answer[:3])
    assert not {"applies", "asks"} & set(
        told(contextual, prompt="a", bundle="one")["data"][0]
    )  # it cannot tell


def test_by_default_what_lies_outside_is_withheld_where_the_bundle_can_tell(
    tmp_path: Path, prompts: dict[Kind, list[str]]
) -> None:
    with serving(tmp_path, reach=1e-3).started() as app:
        for kind in KINDS:
            row = told(app, prompt=prompts[kind][0], generate={"max_tokens": 2})["data"][0]
            assert (row["outside_training"], row["decision"]) == (True, "abstain")
            row = told(app, prompt=prompts[kind][0], policy="open", generate={"max_tokens": 2})[
                "data"
            ][0]
            assert (row["decision"] == "abstain") is (kind == (True, True))


@pytest.mark.parametrize(
    ("kind", "policy", "moved"),
    [
        ((True, False), "gate", (1, 0, 0, 0, 1)),
        ((False, False), "gate", (1, 0, 0, 0, 1)),
        ((True, True), "gate", (0, 1, 1, 1, 1)),
        ((False, True), "gate", (0, 1, 1, 0, 1)),
        ((True, False), "all", (1, 0, 0, 1, 1)),
    ],
)
def test_metrics_count_it_apart(
    contextual: App, prompts: dict[Kind, list[str]], kind: Kind, policy: str, moved: tuple[int, ...]
) -> None:
    names = (
        "no_fact_total",
        "risk_count",
        "risk_by_conversation_count",
        "flagged_total",
        "prompts_total",
    )
    before = [contextual.series(name, bundle="context:1") for name in names]
    told(contextual, prompt=prompts[kind][1], policy=policy)
    assert (
        tuple(
            contextual.series(name, bundle="context:1") - old
            for name, old in zip(names, before, strict=True)
        )
        == moved
    )


def test_the_monitor_does_not_watch_it(contextual: App, prompts: dict[Kind, list[str]]) -> None:
    scorer = contextual.state.catalogue.scorers[0]
    monitor = Monitor(scorer, DriftLimits(window=50, every=10), lambda _: None)
    # compared with nothing: its window is never full
    monitor.reference = object()  # type: ignore[assignment]
    for kind in KINDS:
        for text in prompts[kind][:3]:
            ids = scorer.render(prompt=text)
            monitor.observe(
                scorer.score([ids], standings=[scorer.standing(text)]), [digest_of(ids)]
            )
    assert len(monitor._window) == monitor._seen == 6


def test_feedback_never_draws_it(tmp_path: Path, prompts: dict[Kind, list[str]]) -> None:
    where = location(str(tmp_path / "feedback.db"))
    keeping = serving(
        tmp_path, policy="observe", feedback=lambda metrics: Feedback(where, metrics, share=1.0)
    )
    with keeping.started() as app:
        for text in (text for kind in KINDS for text in prompts[kind][:2]):
            told(app, prompt=text, policy="gate")
            told(app, prompt=text, policy="all")
        app.state.feedback.close()
        query = (
            "SELECT policy, flagged, SUM(drawn), COUNT(*) FROM hallutracer_answers GROUP BY policy,"
            " flagged"
        )
        drawn = {row[:2]: row[2:] for row in rows(where, query)}
    # Of each kind two: only those that ask, and are answered, are what a guarantee is about.
    assert drawn == {
        ("gate", 0): (2, 6),
        ("gate", 1): (0, 2),
        ("all", 0): (2, 4),
        ("all", 1): (0, 4),
    }
