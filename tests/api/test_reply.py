"""What an answer tells beside its risk: guarantee, uncertainty, whether the risk applies; and what
counts it."""

from __future__ import annotations

import dataclasses
import json
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
from service.engines.base import PromptContext
from service.errors import RequestError
from service.feedback.databases import location
from service.judging.guarantee import (
    ANSWERED,
    NO_FACT,
    TOKEN_IDS,
    UNKNOWN,
    GuaranteeStatus,
    Shape,
    Standing,
    guarantee_status,
    outside_as_calibrated,
)
from service.policies.guard import GATE, Action, Policy, risk_beside_passage
from service.scoring import Scorer, beside_passage
from service.serving.judgement import Judgement
from service.vllm_plugin.note import Note
from tests.kit.api import CHAT, note_of, send_to, stream_events
from tests.kit.bundles import GUARANTEE, STRATA, UNCERTAINTY, write_bundle
from tests.kit.feedback import rows
from tests.kit.tables import cells, values
from tests.matching import SMALL_TALKS, contextual_bundle, matching_bundle, matching_draft
from tests.running import App, app_of_module
from tests.scripted_engine import ScriptedEngine

GUARANTEED: dict[str, Any] = {"guarantee": GUARANTEE, "threshold": GUARANTEE.threshold}
ALONE = "0 earlier turns, no passage, no system prompt"
NEAR, FAR = [256, 65, 66], [256, 67]
ALL = Policy("all", Action.ABSTAIN, message="Not sure.", withhold_no_fact=True)


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


def serving(folder: Path, **options: Any) -> App:
    """An app whose first bundle has context probes, and a reference that ends far away."""
    app = App(folder, policies={"all": ALL}, **options)
    app.bundles.insert(0, contextual_bundle(app.engine, folder, reach=1e3))
    return app


TRUTH = 0.5  # the share of passages that these take for true
HALF = Policy("half", Action.ABSTAIN, message="No.", passage_truth=TRUTH)
SEEN = Policy("seen", Action.OBSERVE)
WATCH = Policy("watch", Action.OBSERVE, passage_truth=TRUTH)
BESIDE = f"Context: {'A fact. ' * 60}\n\nWhy?"


# With bundles "one", "two", "sure" and "alone", which have guarantees, and "known".
service = app_of_module(
    policies={policy.name: policy for policy in (HALF, SEEN, WATCH)},
    add=[guaranteed, lambda engine, folder: guaranteed(engine, folder, "alone", (ALONE,)), known],
)


@pytest.fixture(scope="module")
def contextual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    with serving(tmp_path_factory.mktemp("context")).started() as app:
        yield app


# Whether the risk is at or above the bundle's threshold, and whether it applies.
Kind = tuple[bool, bool]
KINDS: list[Kind] = [(high, applies) for high in (True, False) for applies in (True, False)]


@pytest.fixture(scope="module")
def prompts(contextual: App) -> dict[Kind, list[str]]:
    results: dict[Any, list[str]] = {kind: [] for kind in KINDS}
    scorer = contextual.state.catalogue.scorers[0]
    for text in SMALL_TALKS:
        [report] = scorer.score([scorer.render(text)], standings=[scorer.standing(text)])
        high = report.risk >= scorer.bundle.manifest.threshold
        results[high, report.context.applies].append(text)
    assert all(len(results[kind]) >= 3 for kind in KINDS)
    return results


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

HOLDS = {"alpha": 0.1, "delta": 0.05, "holds": True, "void": []}
# Bundle, further fields of a request, and why its guarantee is void.  A prompt without a template
# is withheld where it lies outside training; the calibration had none.
OUTSIDE = "policy: 'gate' also withholds prompts outside training, the calibration did not"
UNLIKE = "the calibration had none like it"
SHORT = "where the calibration's answers had 12 or more"
GUARANTEES = cells(
    f"""
    sure | {{}}
    sure | {{"policy": "block"}}
    sure | {{"threshold": 0.25}}
    sure | {{"include": ["trajectory"]}}
    sure | {{"generate": {{"max_tokens": 12}}}}
    sure | {{"policy": "observe"}} | policy: 'observe' withholds nothing
    sure | {{"threshold": 0.2}} | threshold: 0.2 applies, 0.25 is guaranteed
    sure | {{"generate": {{"temperature": 0.7}}}} | decoding: temperature 0.7, not greedy
    sure | {{"generate": {{"stop": ["."]}}}} | decoding: ends at texts of the request's own
    sure | {{"generate": {{"max_tokens": 1}}}} | decoding: at most 1 tokens, {SHORT}
    sure | {{"generate": {{"max_tokens": 11}}}} | decoding: at most 11 tokens, {SHORT}
    sure | {{"input_ids": [1, 2]}} | {OUTSIDE} | {TOKEN_IDS}
    sure | {{"policy": "observe", "threshold": 1}} | policy: 'observe' withholds nothing \
        | threshold: 1 applies, 0.25 is guaranteed
    alone | {{}}
    alone | {{"messages": ["user"]}}
    alone | {{"messages": ["user", "assistant"]}} | {OUTSIDE} | {ANSWERED}
    alone | {{"messages": ["system", "user"]}} \
        | conversation: 0 earlier turns, no passage, a system prompt; {UNLIKE}
    alone | {{"messages": ["user", "assistant", "user"]}} \
        | conversation: 1 earlier turn, no passage, no system prompt; {UNLIKE}
    alone | {{"prompt": "Context: {"A fact. " * 60}\\u000a\\u000aWhy?"}} \
        | conversation: 0 earlier turns, a passage, no system prompt; {UNLIKE}
    alone | {{"input_ids": [1, 2]}} | {OUTSIDE} | {TOKEN_IDS} | conversation: not known; {UNLIKE}
    """
)


@pytest.mark.parametrize(("bundle", "body", "reasons"), [(b, f, r) for b, f, *r in GUARANTEES])
def test_a_guarantee_holds_or_says_why_not(
    service: App, bundle: str, body: str, reasons: list[str]
) -> None:
    fields = json.loads(body)
    if "messages" in fields:
        texts = {"system": "Be brief.", "user": "Why?", "assistant": "So."}
        turns = [{"role": role, "content": texts[role]} for role in fields["messages"]]
        fields["messages"] = turns
    asked = {"bundle": bundle} | fields
    if not {"messages", "input_ids", "prompt"} & set(fields):
        asked["prompt"] = "Why?"
    answer = told(service, **asked)["guarantee"]
    assert answer == HOLDS | {"holds": not reasons, "void": reasons}


def test_a_bundle_without_a_guarantee_says_nothing_of_one(service: App) -> None:
    assert "guarantee" not in told(service, prompt="Why?", bundle="one")


def test_streams_bundles_and_metrics_tell_what_the_answer_tells(service: App) -> None:
    warm = {"max_tokens": 2, "temperature": 1.0}
    first, *_ = events(service, prompt="Why?", generate=warm, bundle="sure")
    assert first["guarantee"]["holds"] is False
    first, *_ = events(
        service, input_ids=FAR, generate={"max_tokens": 2}, policy="observe", bundle="known"
    )
    assert (first["data"][0]["outside_training"], len(first["data"][0]["interval"])) == (True, 2)
    response = service.client.get("/v1/bundles")
    cards, parsed = response.json()["data"], parse(BundleList, response.content).data
    assert [card["guarantee_shapes"] for card in cards] == [None, None, None, [ALONE], None]
    plain, _, sure, _, near = cards
    assert (plain["guarantee"], plain["uncertainty"]["interval"]) == (None, None)
    assert (sure["guarantee"], near["uncertainty"]) == (
        dataclasses.asdict(GUARANTEE),
        dataclasses.asdict(UNCERTAINTY),
    )
    read: Any = [parsed[2].guarantee, parsed[4].uncertainty]
    assert [promise.statement for promise in read] == [GUARANTEE.statement, UNCERTAINTY.statement]
    assert service.series("guarantee_info", bundle="sure:1", alpha="0.1", delta="0.05") == 1
    service.state.metrics.guarantees([])
    assert "guarantee_info{" not in service.client.get("/metrics").text


def status_of(
    manifest: Manifest, policy: Policy, dtype: str = "float32", *request: Any
) -> GuaranteeStatus:
    status = guarantee_status(manifest, policy, dtype, *request)
    assert status is not None
    return status


@pytest.mark.parametrize(
    ("context", "fields", "why"),
    values(
        """
        true | {"withhold_outside": true} | ""
        true | {} | ""
        true | {"withhold_outside": false} | "does not withhold prompts outside training, ... did"
        false | {"withhold_outside": true} | "also withholds prompts outside training, ... did not"
        false | {} | ""
        false | {"withhold_outside": false} | ""
        false | {"recheck": true} | "reads answers again, ... did not"
        false | {"stop_at": 0.6} | "ends answers under way, ... did not"
        false | {"passage_truth": 0.5} | "takes 0.5 of passages for true, ... all"
        """
    ),
)
def test_a_guarantee_is_void_where_a_policy_does_otherwise_than_the_calibration(
    contextual: App, context: bool, fields: dict[str, Any], why: str
) -> None:
    manifest = dataclasses.replace(contextual.bundles[0].manifest, **GUARANTEED)
    if not context:
        manifest = dataclasses.replace(manifest, context=None)
    policy = Policy("mine", Action.BLOCK, **fields)
    status, reason = status_of(manifest, policy), why.replace("...", "the calibration")
    assert status.violations == ((f"policy: 'mine' {reason}",) if why else ())
    assert status.holds is (not why)
    if "outside" in why or not why:
        assert outside_as_calibrated(manifest, policy) is (not why)


def test_a_guarantee_is_void_in_another_dtype(service: App) -> None:
    manifest = dataclasses.replace(service.bundles[0].manifest, **GUARANTEED)
    [reason] = status_of(manifest, GATE, "bfloat16").violations
    assert reason == "dtype: the engine computes in bfloat16, the calibration did in float32"


def test_a_request_is_held_to_the_guarantee_of_its_stratum(service: App) -> None:
    manifest = dataclasses.replace(
        service.bundles[0].manifest, **GUARANTEED, guarantee_strata=STRATA
    )
    known = {name: Shape("0", passage="beside" in name, system=False) for name in ("", "beside")}
    policy = Policy("mine", Action.BLOCK)
    # The prompts, what a policy's threshold may be, and the delta that is told.
    for names, thresholds, delta in values(
        """
        [""] | [0.25] | 0.025
        ["beside"] | [0.5] | 0.025
        ["beside", "beside"] | [0.5] | 0.025
        ["", "beside"] | [0.25, 0.5] | 0.05
        ["unknown"] | [0.25] | 0.05
        [] | [0.25] | 0.05
        ["beside", "unknown"] | [0.25, 0.5] | 0.05
        """
    ):
        shapes = [known.get(name) for name in names]
        status = status_of(manifest, policy, "float32", (), shapes)
        assert (status.delta, status.holds) == (delta, True)
        for chosen in (0.25, 0.5, 0.6):
            status = status_of(manifest, policy.at(chosen), "float32", (), shapes)
            assert list(status.violations) == [
                f"threshold: {chosen:g} applies, {threshold:g} is guaranteed"
                for threshold in thresholds
                if threshold != chosen
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


def note(*judged: Judgement, **options: Any) -> dict[str, Any]:
    return Note(list(judged), **options).body() or {}


def test_vllms_note_has_it_all(service: App) -> None:
    scorers = {scorer.bundle.manifest.name: scorer for scorer in service.state.catalogue.scorers}
    judged = {name: Judgement.of(own, GATE, own.score([FAR])) for name, own in scorers.items()}
    body = note(judged["sure"], violations=("decoding: ...",))
    assert body["guarantee"] == HOLDS | {"holds": False, "void": ["decoding: ..."]}
    body = note(judged["known"])
    assert "guarantee" not in body
    assert (body["data"][0]["outside_training"], len(body["data"][0]["interval"])) == (True, 2)


def test_a_guarantee_is_void_where_any_prompt_of_a_batch_passes_unjudged(
    contextual: App, prompts: dict[Kind, list[str]]
) -> None:
    """In vLLM's note, too."""
    scorer = copy(contextual.state.catalogue.scorers[0])
    manifest = dataclasses.replace(scorer.bundle.manifest, **GUARANTEED)
    scorer.bundle = dataclasses.replace(scorer.bundle, manifest=manifest)

    def judged(applies: bool) -> Judgement:
        text = prompts[False, applies][0]
        reports = scorer.score([scorer.render(text)], standings=[scorer.standing(text)])
        return Judgement.of(scorer, GATE, reports)

    odd, usual = judged(False), judged(True)
    assert NO_FACT not in note(usual)["guarantee"]["void"]
    for order in ([odd, usual], [usual, odd]):
        body = note(*order)
        assert NO_FACT in body["guarantee"]["void"]
        told = [(row["risk"], row["applies"]) for row in body["data"]]
        assert told == [(each.prompts[0].report.risk, each is usual) for each in order]


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


# --- prompts that ask for no fact ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["gate", "all"])
@pytest.mark.parametrize("generate", [None, {"max_tokens": 3}])
def test_an_answer_tells_whether_its_risk_applies_and_a_policy_may_judge_it_all_the_same(
    contextual: App, prompts: dict[Kind, list[str]], kind: Kind, policy: str, generate: Any
) -> None:
    high, applies = kind
    flagged = high and (applies or policy == "all")
    moves = {
        "no_fact_total": not applies,
        "risk_count": applies,
        "risk_by_conversation_count": applies,
        "flagged_total": flagged,
        "prompts_total": True,
    }
    before = {name: contextual.series(name, bundle="context:1") for name in moves}
    row = told(contextual, prompt=prompts[kind][0], policy=policy, generate=generate)["data"][0]
    for name, moved in moves.items():
        assert contextual.series(name, bundle="context:1") - before[name] == moved, name
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


# --- a policy that takes only a share of passages for true ---


def test_the_risk_beside_a_passage_rises_before_the_threshold_and_is_said(service: App) -> None:
    [alone, beside] = service.ask(policy="seen", prompt=["Why?", BESIDE])["data"]
    [same, raised] = service.ask(policy="watch", prompt=["Why?", BESIDE])["data"]
    assert same == alone
    assert "passage_truth" not in beside
    assert raised["risk"] == pytest.approx(1 - TRUTH * (1 - beside["risk"]))
    assert raised["passage_truth"] == TRUTH
    for past, flagged in ((1e-6, False), (-1e-6, True)):
        [row] = service.ask(policy="half", prompt=BESIDE, threshold=raised["risk"] + past)["data"]
        assert (row["flagged"], row["decision"]) == (flagged, "abstain" if flagged else "continue")
    [unknown] = service.ask(policy="watch", input_ids=[1, 2])["data"]
    [read_so] = service.ask(policy="seen", input_ids=[1, 2])["data"]
    assert unknown["risk"] == pytest.approx(1 - TRUTH * (1 - read_so["risk"])), (
        "it may be a passage"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_withheld_by_it_is_not_decoded(service: App, stream: bool) -> None:
    [own] = service.ask(policy="seen", prompt=BESIDE)["data"]
    between = (own["risk"] + 1 - TRUTH * (1 - own["risk"])) / 2
    messages = [{"role": "user", "content": BESIDE}]
    for policy, withheld in (("half", True), ("seen", False)):
        decoded = service.engine.counters.decode_steps
        chosen = {"policy": policy, "threshold": between}
        response = send_to(service, CHAT, messages=messages, chosen=chosen, stream=stream)
        assert (service.engine.counters.decode_steps == decoded) is withheld, policy
        assert (f'"passage_truth": {TRUTH}' in response.text) is withheld


@pytest.mark.parametrize(
    ("form", "reads", "beside"),
    values(
        """
        true | null | true
        false | null | false
        null | null | true
        false | 0.6 | true
        true | 0.1 | true
        false | 0.4 | false
        null | 0.4 | false
        null | 0.6 | true
        """
    ),
)
def test_a_passage_is_told_by_its_form_or_by_what_the_bundle_reads(
    form: bool | None, reads: float | None, beside: bool
) -> None:
    standing = UNKNOWN if form is None else Standing(Shape("0", form, system=False))
    assert beside_passage(standing, PromptContext(passage=reads)) is beside


def test_the_arithmetic() -> None:
    assert [risk_beside_passage(risk, 0.8) for risk in (0.0, 0.5, 1.0)] == pytest.approx(
        [0.2, 0.6, 1.0]
    )
    assert risk_beside_passage(0.123456789, 1.0) == 0.123456789
    for truth in (0.0, -1.0, 1.1, float("nan")):
        with pytest.raises(RequestError, match="passage_truth"):
            Policy("a", Action.BLOCK, passage_truth=truth)
