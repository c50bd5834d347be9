"""An answer that ends where its own tokens' risk is too high: nothing of it is sent behind the verdict; and that risk,
told while the answer is written."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from hallutracer_client import Client, Generate
from service.engines.base import Sampling, Update
from service.engines.scheduler import Scheduled
from service.errors import HalluTracerError
from service.judging.guarantee import guarantee_status
from service.policies.guard import OBSERVE, Action, Policy
from service.policies.policy import read_policies
from service.scoring import RiskReport, Scorer
from service.turn import LEAST_READ
from tests.api.test_answer_risk import by_hand, two_parts
from tests.api.test_no_token import responses
from tests.api.test_recheck import all_flagged, openai_says, said_in
from tests.api.test_score import events
from tests.kit.bundles import ANSWER, GUARANTEE, write_bundle
from tests.matching import SMALL_TALK, matching_draft, with_answer, with_context
from tests.running import App, Running, running, until
from tests.scripted_engine import ScriptedEngine

SAID = "It is so, and so it was."
STOPS = Policy("stops", Action.ABSTAIN, message="No.", stop_at=0.6)
POLICIES = {
    "stops": STOPS, "later": replace(STOPS, name="later", stop_at=0.9),
    "again": Policy("again", Action.ABSTAIN, recheck=True),
    "warns": replace(STOPS, name="warns", action=Action.ANNOTATE),
    "once": Policy("once", Action.ABSTAIN, message="No."),
}  # fmt: skip
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
BODY: dict[str, Any] = {"policy": "stops", "threshold": 1, "generate": {"max_tokens": 40}}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("app")
    with running(folder, names=("one",), add=[two_parts], policies={}, policy="observe") as service:
        service.engine.answer = SAID
        yield service


@pytest.fixture(scope="module")
def stopping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("stopping")
    with running(folder, names=(), add=[two_parts], policies=POLICIES, policy="observe") as service:
        service.engine.answer = SAID
        yield service


def grown(service: Running, word: str) -> list[float]:
    """The risk of the answer's first tokens, one more each time."""
    prompt = service.engine.render_chat([{"role": "user", "content": word}])
    return [by_hand(service, prompt, f"{SAID[:count]}!") for count in range(1, len(SAID) + 1)]


@pytest.fixture(scope="module")
def ends(stopping: Running) -> dict[str, int | None]:
    """How many tokens of each word's answer are given; None: all."""
    service, found = stopping, dict[str, int | None]()
    for word in WORDS:
        prompt = service.engine.render_chat([{"role": "user", "content": word}])
        probed = [_read(service, prompt, count) for count in range(1, len(SAID) + 1)]
        found[word] = next((n for n, one in enumerate(probed, 1) if n >= LEAST_READ and one >= 0.6), None)
    assert None in found.values(), "else this tells nothing"
    assert any(end is not None and end > LEAST_READ for end in found.values()), "else this tells little"
    return found


def _read(service: Running, prompt: list[int], count: int) -> float:
    [bundle] = service.bundles
    assert bundle.answer is not None
    scorer = service.state.catalogue.scorers[0]
    mean = service.engine.read_last([*prompt, *SAID[:count].encode()], count, scorer.answer_probes)
    return float(scorer._answer_risk(mean))


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_where_its_running_risk_is_too_high(
    stopping: Running, ends: dict[str, int | None], stream: bool
) -> None:
    for word, end in ends.items():
        response = stopping.post(prompt=word, stream=stream, **BODY)
        if stream:
            first, *chunks = events(response.text)
            text, last = "".join(chunk["delta"]["text"] for chunk in chunks), chunks[-1]
            assert first["data"][0]["decision"] == "continue"
            tokens, reason = last["usage"]["completion_tokens"], last["finish_reason"]
        else:
            [last] = response.json()["data"]
            text, reason = last["completion"]["text"], last["completion"]["finish_reason"]
            tokens = last["completion"]["completion_tokens"]
        given = SAID[:end]
        assert (text, reason, tokens) == (given, "stop" if end is None else "content_filter", len(given)), word
        assert (last["answer_risk"] >= 0.6) == (end is not None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_openai_s_routes_end_it_too(stopping: Running, route: str, stream: bool) -> None:
    reasons = set()
    for word in WORDS:
        parts, _ = openai_says(stopping, route, word, "stops", stream=stream, tokens=40)
        reason = parts[-1]["choices"][0]["finish_reason"]
        reasons.add(reason)
        assert (said_in(parts) == SAID) == (reason == "stop")
        assert SAID.startswith(said_in(parts))
    assert "content_filter" in reasons


def test_what_was_decoded_is_counted_and_no_more_is_decoded(stopping: Running, ends: dict[str, int | None]) -> None:
    word, end = next((word, end) for word, end in ends.items() if end is not None)
    before, engine = stopping.metric("hallutracer_answers_stopped_total"), stopping.engine
    risks, steps = stopping.metric("hallutracer_answer_risk_count"), engine.counters.decode_steps
    go_on = threading.Event()

    def wait() -> None:
        if engine.counters.decode_steps - steps > end:  # the verdict is known: nothing waits for a further token
            assert go_on.wait(30)

    engine.wait = wait  # type: ignore[method-assign]
    try:
        stopping.post(prompt=word, **BODY)
    finally:
        go_on.set()
        del engine.wait
    assert stopping.metric("hallutracer_answers_stopped_total") == before + 1
    assert stopping.metric("hallutracer_answer_risk_count") == risks + 1
    until(lambda: engine.counters.open_continuations == 0)
    assert engine.counters.decode_steps - steps <= end + 2


def test_a_warned_of_answer_ends_likewise(stopping: Running, ends: dict[str, int | None]) -> None:
    word, end = next((word, end) for word, end in ends.items() if end is not None)
    [row] = stopping.post(prompt=word, **BODY | {"policy": "warns"}).json()["data"]
    assert (row["completion"]["text"], row["completion"]["finish_reason"]) == (SAID[:end], "content_filter")


def test_what_asks_for_no_fact_is_not_ended(tmp_path: Path) -> None:
    engine = ScriptedEngine(answer=SAID)
    draft = with_answer(with_context(matching_draft(engine, "both", 3), engine, applies_from=1 - 1e-9), engine)
    scorer = Scorer(Scheduled(engine), write_bundle(draft, tmp_path / "both"))
    prompts = [scorer.render(word) for word in WORDS]
    low = replace(STOPS, stop_at=1e-9)
    standings = [SMALL_TALK] * len(prompts)
    given = scorer.score_or_continue(prompts, Sampling(max_tokens=40), low, standings)
    assert [one.completion and one.completion.text for one in given] == [SAID] * len(WORDS)
    judging_all = replace(low, withhold_no_fact=True).at(1.0)
    strict = scorer.score_or_continue(prompts, Sampling(max_tokens=40), judging_all, standings)
    assert [one.completion and one.completion.text for one in strict] == [SAID[:LEAST_READ]] * len(WORDS)


@pytest.mark.parametrize("least", [0, 1, 2])
def test_an_answer_whose_tokens_are_not_read_ends_at_once(tmp_path: Path, least: int) -> None:
    class Forgets(Scheduled):
        async def answer(self, *arguments: Any, **options: Any) -> AsyncGenerator[Update, None]:
            count = 0
            async for update in super().answer(*arguments, **options):
                count += update.tokens
                yield replace(update, answer=None) if count > least + 1 else update

    engine = ScriptedEngine(answer=SAID)
    scorer = Scorer(Forgets(engine), two_parts(engine, tmp_path))
    policy, prompt = replace(STOPS, stop_at=1.0).at(1.0), scorer.render("one")

    async def steps() -> list[tuple[RiskReport, Update]]:
        return [step async for step in scorer.run(prompt, policy, Sampling(40))]

    found = asyncio.run(steps())
    completion = found[-1][0].completion
    assert completion is not None
    assert (completion.text, completion.finish_reason) == (SAID[: least + 1], "content_filter")
    assert "".join(update.piece for _, update in found) == SAID[: least + 1]


def test_no_request_gets_more_than_the_first_tokens_of_answers_that_are_all_flagged(tmp_path: Path) -> None:
    policies = {"stops": replace(STOPS, stop_at=0.5), "later": replace(STOPS, name="later", stop_at=0.9)}
    options: dict[str, Any] = {"names": (), "add": [all_flagged], "policies": policies, "policy": "stops"}
    with App(tmp_path, threshold=1.0, callers_may=(), **options).started() as app:
        app.engine.answer = "@" * 30
        for told, content, text in responses(app.client, 1000):
            assert text.count("@") <= LEAST_READ * (1 + content.count(b",")), told
            assert "@" * (LEAST_READ + 1) not in text, told
        assert app.served.counters.decode_steps > 100, "answers were begun, and ended"


def test_a_caller_cannot_choose_to_have_it_end_later(tmp_path: Path) -> None:
    options: dict[str, Any] = {"names": (), "add": [two_parts], "policies": POLICIES, "policy": "stops"}
    with App(tmp_path, callers_may=(), **options).started() as app:
        for policy, status in (("once", 403), ("observe", 403), ("later", 403), ("stops", 200), ("again", 200)):
            answer = app.client.post("/score", json={"prompt": "one", "policy": policy})
            assert answer.status_code == status, answer.text
        said = app.client.post("/score", json={"prompt": "one", "policy": "later"}).json()["error"]
        assert (said["param"], "does not end an answer as early" in said["message"]) == ("policy", True)


def test_reading_again_is_no_way_around_a_stop_below_the_bundle_s_threshold_for_answers(tmp_path: Path) -> None:
    policies = {**POLICIES, "stops": replace(STOPS, stop_at=ANSWER.threshold - 0.01)}
    options: dict[str, Any] = {"names": (), "add": [two_parts], "policies": policies, "policy": "stops"}
    with App(tmp_path, callers_may=(), **options).started() as app:
        refused = app.client.post("/score", json={"prompt": "one", "policy": "again"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, "policy"), refused.text


@pytest.mark.parametrize(
    ("table", "said"),
    [("action = 'abstain'\nstop_at = 0", "greater than 0"), ("action = 'abstain'\nstop_at = 1.1", "less than or equal"),
     ("action = 'abstain'\nstop_at = 'high'", "number"), ("action = 'observe'\nstop_at = 0.5", "another action"),
     ("action = 'abstain'\nstop_at = 0.5\nrecheck = true", "remove one of them"),
     ("action = 'abstain'\nstopat = 0.5", "stopat")],
)  # fmt: skip
def test_a_table_that_cannot_hold_is_refused(tmp_path: Path, table: str, said: str) -> None:
    path = tmp_path / "policies.toml"
    path.write_text(f"[mine]\n{table}\n")
    with pytest.raises(HalluTracerError, match=said):
        read_policies(path)


def test_it_is_read_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "policies.toml"
    path.write_text("[mine]\naction = 'annotate'\nstop_at = 0.8\n")
    assert read_policies(path).named["mine"].stop_at == 0.8


def test_a_service_that_cannot_read_answers_does_not_start_with_it(tmp_path: Path) -> None:
    app = App(tmp_path, names=("one",), policies={"stops": STOPS})
    with app.client:
        until(lambda: app.state.lifecycle.failure is not None)
    assert "policy 'stops' has stop_at, and bundle one:1 has no probes of answers" in str(app.state.lifecycle.error)


def test_a_guarantee_is_void_under_it() -> None:
    draft = matching_draft(ScriptedEngine(), "promised", 0, guarantee=GUARANTEE, threshold=GUARANTEE.threshold)
    status = guarantee_status(draft.manifest, STOPS, GUARANTEE.dtype)
    assert status is not None
    assert any("ends answers under way" in one for one in status.violations)


def test_a_stream_tells_the_risk_of_the_answer_so_far_where_it_is_asked_to(service: Running) -> None:
    body = {"bundle": "both", "threshold": 1, "generate": {"max_tokens": 40}, "stream": True}
    first, *pieces, last = events(service.post(prompt="one", include=["answer_risk"], **body).text)
    assert "answer_risk" not in first["data"][0]
    expected = grown(service, "one")
    assert "answer_risk" not in pieces[0], "the first token comes before anything of the answer was read"
    assert [piece["answer_tokens"] for piece in pieces[1:]] == [*range(1, len(SAID))]
    assert [piece["answer_risk"] for piece in pieces[1:]] == pytest.approx(expected[:-1])
    assert (last["answer_risk"], last["answer_tokens"]) == (pytest.approx(expected[-2]), len(SAID) - 1)
    silent = events(service.post(prompt="one", **body).text)[1:-1]
    assert not any("answer_risk" in piece for piece in silent)


def test_what_is_sent_before_an_answer_says_nothing_of_it(tmp_path: Path) -> None:
    engine = ScriptedEngine(answer=SAID)
    scorer = Scorer(Scheduled(engine), two_parts(engine, tmp_path))

    async def reports() -> list[RiskReport]:
        steps = scorer.run(scorer.render("one"), OBSERVE, Sampling(40), running=True)
        return [report async for report, _ in steps]

    seen = asyncio.run(reports())
    assert [report.answer is None for report in seen] == [True, True] + [False] * len(SAID)
    assert {report.before_answer().answer for report in seen} == {None}


def test_openai_s_streams_tell_it_under_our_name(service: Running) -> None:
    xargs = {"hallutracer_bundle": "both", "hallutracer_threshold": 1.0, "hallutracer_include": ["answer_risk"]}
    body = {"model": "scripted", "max_tokens": 40, "temperature": 0, "stream": True, "vllm_xargs": xargs}
    body |= {"messages": [{"role": "user", "content": "one"}]}
    chunks = events(httpx.post(f"{service.url}/v1/chat/completions", json=body, timeout=30).text)
    told = [chunk["hallutracer"] for chunk in chunks[2:-1]]
    assert [one["answer_risk"] for one in told] == pytest.approx(grown(service, "one")[:-1])
    del xargs["hallutracer_include"]
    chunks = events(httpx.post(f"{service.url}/v1/chat/completions", json=body, timeout=30).text)
    assert sum("hallutracer" in chunk for chunk in chunks) == 2


def test_a_bundle_without_answer_probes_has_none_to_tell(service: Running) -> None:
    refused = service.post(prompt="one", bundle="one", include=["answer_risk"], generate={}, stream=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "include")
    assert "one:1 reads no answers here" in refused.json()["error"]["message"]


def test_the_client_follows_it(service: Running) -> None:
    with Client(service.url) as client:
        generate = Generate(max_tokens=40)
        asked: dict[str, Any] = {"bundle": "both", "threshold": 1, "include": ["answer_risk"], "generate": generate}
        with client.stream(prompt="one", **asked) as answer:
            seen = [(piece, answer.answer_risk) for piece in answer]
        expected = grown(service, "one")
        assert "".join(piece for piece, _ in seen) == SAID
        assert [risk for _, risk in seen] == [None, *(pytest.approx(risk) for risk in expected[:-1])]
        assert answer.answer_risk == pytest.approx(expected[-2])


def test_a_reader_that_leaves_counts_no_finished_answer(service: Running) -> None:
    service.engine.sleep_s = 0.02
    before = service.metric("hallutracer_answer_risk_count")
    body = {"bundle": "both", "threshold": 1, "generate": {"max_tokens": 40}, "stream": True, "prompt": "one"}
    with httpx.stream("POST", f"{service.url}/score", json=body | {"include": ["answer_risk"]}, timeout=30) as answer:
        lines = answer.iter_lines()
        while "answer_risk" not in next(lines):
            pass
    service.engine.sleep_s = 0
    until(lambda: service.metric("hallutracer_requests_in_flight") == 0)
    assert service.metric("hallutracer_answer_risk_count") == before
