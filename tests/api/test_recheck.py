"""An answer that is read again: nothing of it is sent before its tokens were read, nor at all where they flag it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from probes_store.bundle import Bundle
from service.engines.base import Sampling
from service.engines.scheduler import Scheduled
from service.judging.guarantee import guarantee_status
from service.policies.guard import Action, Policy
from service.scoring import Scorer
from tests.api.test_answer_risk import two_parts
from tests.api.test_no_token import answered, responses
from tests.api.test_score import events
from tests.kit.bundles import ANSWER, GUARANTEE, write_bundle
from tests.matching import SMALL_TALK, answers_read, matching_draft, with_answer, with_context
from tests.running import App, Running, running, until
from tests.scripted_engine import ScriptedEngine

AGAIN = Policy("again", Action.ABSTAIN, message="No: {risk}.", recheck=True)
POLICIES = {
    "again": AGAIN, "warn": replace(AGAIN, name="warn", action=Action.ANNOTATE, message="Caution: {risk}."),
    "fetch": replace(AGAIN, name="fetch", action=Action.RETRIEVE),
    "once": Policy("once", Action.ABSTAIN, message="No."),
}  # fmt: skip
WORDS = ["one", "two", "three", "four"]
BODY: dict[str, Any] = {"policy": "again", "threshold": 1, "generate": {"max_tokens": 6}}
TEXT = "It is "


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("app")
    with running(folder, names=(), add=[two_parts], policies=POLICIES, policy="observe") as service:
        yield service


@pytest.fixture(scope="module")
def flagged(service: Running) -> dict[str, float]:
    """The risk of each word's answer; some are flagged, some are not."""
    rows = service.post(prompt=WORDS, **BODY | {"policy": "observe"}).json()["data"]
    found = {word: row["answer_risk"] for word, row in zip(WORDS, rows, strict=True)}
    assert {risk >= ANSWER.threshold for risk in found.values()} == {True, False}
    return found


def said_in(parts: list[dict[str, Any]]) -> str:
    """The text of a response, or of a stream's chunks."""
    choices = [choice for part in parts for choice in part["choices"]]
    told = [choice.get("message") or choice.get("delta") or choice for choice in choices]
    return "".join(one.get("content") or one.get("text") or "" for one in told)


def test_an_answer_that_its_own_tokens_flag_is_not_given(service: Running, flagged: dict[str, float]) -> None:
    found = service.post(prompt=WORDS, **BODY).json()
    for (word, risk), row in zip(flagged.items(), found["data"], strict=True):
        assert row["answer_risk"] == risk, word
        if row["answer_flagged"]:
            assert (row["decision"], row["message"], row["flagged"]) == ("abstain", f"No: {risk:.2f}.", False)
            assert "completion" not in row
        else:
            assert (row["decision"], row["completion"]["text"]) == ("continue", TEXT)
            assert "message" not in row
    given = sum(not row["answer_flagged"] for row in found["data"])
    assert found["usage"]["completion_tokens"] == 6 * given
    worst = max(flagged, key=lambda word: flagged[word])
    [fetched] = service.post(prompt=worst, **BODY | {"policy": "fetch"}).json()["data"]
    assert fetched["decision"] == "retrieve"


def test_a_stream_begins_once_the_answer_was_read(service: Running, flagged: dict[str, float]) -> None:
    for word, risk in flagged.items():
        first, *rest = events(service.post(prompt=word, stream=True, **BODY).text)
        row = first["data"][0]
        if risk >= ANSWER.threshold:
            assert (row["decision"], row["answer_risk"], rest) == ("abstain", risk, [])
        else:
            assert (row["decision"], "answer_risk" in row) == ("continue", False)
            assert "".join(chunk["delta"]["text"] for chunk in rest) == TEXT
            assert (rest[-1]["answer_risk"], rest[-1]["finish_reason"]) == (risk, "length")


def openai_says(
    service: Running, route: str, word: str, policy: str, *, stream: bool, tokens: int = 6
) -> tuple[list[dict[str, Any]], str]:
    """The response, or a stream's chunks, under a policy whose first risk lets everything begin; and its bytes."""
    asked = {"messages": [{"role": "user", "content": word}]} if route.startswith("chat") else {"prompt": word}
    xargs = {"hallutracer_policy": policy, "hallutracer_threshold": 1.0}
    body = {"model": "scripted", "max_tokens": tokens, "temperature": 0, "stream": stream, "vllm_xargs": xargs}
    said = httpx.post(f"{service.url}/v1/{route}", json=asked | body, timeout=30).text
    return events(said) if stream else [json.loads(said)], said


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_openai_s_routes_hold_it_too(service: Running, route: str, stream: bool) -> None:
    told = set()
    for word in WORDS:
        parts, said = openai_says(service, route, word, "again", stream=stream)
        row = parts[0]["hallutracer"]["data"][0]
        told.add(row["decision"])
        if row["decision"] == "continue":
            assert said_in(parts) == TEXT
            continue
        assert row["answer_risk"] >= ANSWER.threshold
        assert "It" not in said, "not a piece of the answer"
        assert parts[-1]["choices"][0]["finish_reason"] == "content_filter"
    assert told == {"continue", "abstain"}


def test_an_annotated_answer_comes_behind_its_warning(service: Running, flagged: dict[str, float]) -> None:
    for word, risk in flagged.items():
        for stream in (False, True):
            parts, _ = openai_says(service, "chat/completions", word, "warn", stream=stream)
            warning = f"Caution: {risk:.2f}.\n\n" if risk >= ANSWER.threshold else ""
            assert said_in(parts) == warning + TEXT


def test_what_could_not_be_read_is_withheld(service: Running) -> None:
    [row] = service.post(prompt="one", **BODY | {"generate": {"max_tokens": 1}}).json()["data"]
    assert (row["decision"], row["message"], "completion" in row) == ("abstain", "No: unknown.", False)
    assert "answer_risk" not in row
    [scored] = service.post(prompt="one", policy="again", threshold=1).json()["data"]
    assert scored["decision"] == "continue", "there is no answer to read"


def test_the_first_risk_still_saves_the_answer_s_cost(service: Running) -> None:
    before = service.engine.counters.decode_steps
    [row] = service.post(prompt="one", **BODY | {"threshold": 0}).json()["data"]
    assert (row["decision"], service.engine.counters.decode_steps) == ("abstain", before)


def test_an_answer_to_what_asks_for_no_fact_is_given(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    draft = with_answer(with_context(matching_draft(engine, "both", 3), engine, applies_from=1 - 1e-9), engine)
    scorer = Scorer(Scheduled(engine), write_bundle(draft, tmp_path / "both"))
    prompts = [scorer.render(word) for word in WORDS]
    standings = [SMALL_TALK] * len(prompts)
    given = scorer.score_or_continue(prompts, Sampling(max_tokens=6), AGAIN, standings)
    assert {report.context.applies for report in given} == {False}
    assert all(report.completion is not None for report in given)
    assert any(report.answer is not None and report.answer.flagged for report in given), "else this tells nothing"
    judging_all = replace(AGAIN, withhold_no_fact=True).at(1.0)
    strict = scorer.score_or_continue(prompts, Sampling(max_tokens=6), judging_all, standings)
    assert [one.completion is None for one in strict] == [bool(one.answer and one.answer.flagged) for one in given]


@pytest.mark.parametrize(
    ("blind", "said"),
    [(False, "bundle one:1 has no probes of answers: train it"),
     (True, "bundle both:1 has probes of answers, which this engine does not read")],
)  # fmt: skip
def test_a_service_that_cannot_read_answers_does_not_start_with_such_a_policy(
    tmp_path: Path, blind: bool, said: str
) -> None:
    app = App(tmp_path, names=() if blind else ("one",), add=[two_parts], policies={"again": AGAIN})
    app.served.reads_answers = not blind
    with app.client:
        until(lambda: app.state.lifecycle.failure is not None)
    assert "policy 'again' has recheck" in str(app.state.lifecycle.error)
    assert said in str(app.state.lifecycle.error)


def test_a_caller_cannot_choose_to_have_it_read_once(tmp_path: Path) -> None:
    options: dict[str, Any] = {"names": (), "add": [two_parts], "policies": POLICIES, "policy": "again"}
    with App(tmp_path, callers_may=(), **options).started() as app:
        for policy, status in (("once", 403), ("observe", 403), ("warn", 403), ("again", 200), ("fetch", 200)):
            answer = app.client.post("/score", json={"prompt": "one", "policy": policy})
            assert answer.status_code == status, answer.text
        said = app.client.post("/score", json={"prompt": "one", "policy": "once"}).json()["error"]
        assert (said["param"], "does not read the answer again" in said["message"]) == ("policy", True)


def all_flagged(engine: ScriptedEngine, folder: Path) -> Bundle:
    draft = with_answer(matching_draft(engine, "both", 3), engine)
    manifest = draft.manifest = replace(draft.manifest, answer=replace(ANSWER, intercept=-60.0))
    draft.answer = answers_read(engine, manifest)
    return write_bundle(draft, folder / "both")


def test_no_request_gets_a_token_of_answers_that_are_all_flagged(tmp_path: Path) -> None:
    """The requests of ``test_no_token``, under a first risk that lets all of them begin."""
    options: dict[str, Any] = {"names": (), "add": [all_flagged], "policies": POLICIES, "policy": "again"}
    with App(tmp_path, threshold=1.0, callers_may=(), **options).started() as app:
        for told, _, text in responses(app.client, 1000):
            assert not answered(text), told
        assert app.engine.counters.decode_steps > 100, "answers were begun, and held"


def test_a_guarantee_is_void_under_it(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    draft = matching_draft(engine, "promised", 0, guarantee=GUARANTEE, threshold=GUARANTEE.threshold)
    status = guarantee_status(draft.manifest, AGAIN, GUARANTEE.dtype)
    assert status is not None
    assert any("reads answers again" in one for one in status.violations)
    once = guarantee_status(draft.manifest, POLICIES["once"], GUARANTEE.dtype)
    assert once is not None
    assert not any("again" in one for one in once.violations)
