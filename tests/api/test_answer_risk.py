"""The risk of an answer's own tokens: its numbers, who counts them, and policies that decide by it.

What a policy makes of the risk: tests/test_turn.py; where it is shown: test_turns.py."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from hallutracer_client import Client, Generate
from service.engines.base import AnswerReading, Sampling
from service.engines.scheduler import Scheduled
from service.errors import NonFiniteReadout
from service.policies.guard import OBSERVE, Action, Policy
from service.readout import Probes, Site
from service.risk import depth_mean, risk
from service.scoring import RiskReport, Scorer
from service.turn import LEAST_READ
from tests.api.test_no_token import responses
from tests.kit.api import all_flagged, stream_events, two_parts
from tests.kit.bundles import ANSWER
from tests.matching import matching_bundle
from tests.running import App, Running, running, service_of_module, until
from tests.scripted_engine import ScriptedEngine

TEXT = "It is so, and so it was."
OBSERVED: dict[str, Any] = {"bundle": "both", "threshold": 1}
ANSWERED = OBSERVED | {"generate": {"max_tokens": 6}}
WORDS = ["one", "two", "three", "four"]
AGAIN = Policy("again", Action.ABSTAIN, message="No.", recheck=True)
STOPS = Policy("stops", Action.ABSTAIN, message="No.", stop_at=0.6)
POLICIES = {"again": AGAIN, "stops": STOPS}


service = service_of_module(names=("one",), add=[two_parts], policy="observe", answer=TEXT)


def by_hand(app: App, word: str, tokens: int) -> float:
    """The risk of the first tokens of the answer to a word, each of which another one follows."""
    stored = app.bundles[-1].answer
    assert stored is not None
    prompt = app.engine.render_chat([{"role": "user", "content": word}])
    probes = Probes.of(Site.ATTENTION_HEAD, stored)
    mean = depth_mean(app.engine.read_last([*prompt, *TEXT.encode()[:tokens]], tokens, probes))
    return float(risk(mean[None], np.array([ANSWER.weight]), ANSWER.intercept))


# --- its numbers ---


def test_a_finished_answer_has_a_risk_of_its_own(service: Running) -> None:
    rows = service.post(prompt=WORDS, **ANSWERED).json()["data"]
    risks = [row["answer_risk"] for row in rows]
    assert risks == pytest.approx([by_hand(service, word, 5) for word in WORDS])
    assert [row["answer_flagged"] for row in rows] == [value >= ANSWER.threshold for value in risks]
    assert {row["answer_flagged"] for row in rows} == {True, False}


@pytest.mark.parametrize("body", [{"bundle": "both"}, ANSWERED | {"bundle": "one"}])
def test_there_is_none_where_nothing_is_answered_or_the_bundle_reads_none(
    service: Running, body: dict[str, Any]
) -> None:
    """Nor of what is withheld, or too short: turns.json."""
    [row] = service.post(prompt="one", **body).json()["data"]
    assert not {"answer_risk", "answer_tokens", "answer_flagged"} & set(row)


def test_a_stream_has_the_risk_of_the_answer_so_far_and_the_client_follows_it(
    service: Running,
) -> None:
    expected = [by_hand(service, "one", tokens) for tokens in range(1, len(TEXT))]
    body = OBSERVED | {"generate": {"max_tokens": 40}, "include": ["answer_risk"]}
    _, first, *pieces, _, _ = stream_events(service.post(prompt="one", stream=True, **body).text)
    assert "answer_risk" not in first, "nothing of the answer was read before it"
    assert [piece["answer_risk"] for piece in pieces] == pytest.approx(expected)
    body["generate"] = Generate(max_tokens=40)
    with Client(service.url) as client, client.stream(prompt="one", **body) as answer:
        assert answer.answer_risk is None
        seen = [(piece, answer.answer_risk) for piece in answer]
        assert "".join(piece for piece, _ in seen) == TEXT
        assert [value for _, value in seen] == [None, *map(pytest.approx, expected)]
        assert answer.answer_risk == pytest.approx(expected[-1])
        assert answer.answer_flagged is (expected[-1] >= ANSWER.threshold)


def test_what_is_sent_before_an_answer_has_no_risk_of_it(tmp_path: Path) -> None:
    engine = ScriptedEngine(answer=TEXT)
    scorer = Scorer(Scheduled(engine), two_parts(engine, tmp_path))

    async def reports() -> list[RiskReport]:
        steps = scorer.run(scorer.render("one"), OBSERVE, Sampling(40), running=True)
        return [report async for report, _ in steps]

    seen = asyncio.run(reports())
    assert [report.answer is None for report in seen] == [True, True] + [False] * len(TEXT)
    assert {report.before_answer().answer for report in seen} == {None}


def test_no_nan_is_served_as_a_risk(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    scorer = Scorer(engine, two_parts(engine, tmp_path))
    with pytest.raises(NonFiniteReadout):
        scorer.judge_answer(AnswerReading(3, np.array([0.1, np.nan, 0.2, 0.3])))
    without = Scorer(engine, matching_bundle(engine, tmp_path, "without"))
    assert without.judge_answer(AnswerReading(3, np.zeros(4))) is None
    assert scorer.judge_answer(None) is None


# --- who counts it ---


def test_what_only_the_answer_s_own_risk_flags_is_counted(tmp_path: Path) -> None:
    with running(tmp_path, names=("one",), add=[two_parts]) as service:
        rows = service.post(prompt=WORDS, **ANSWERED).json()["data"]
        service.post(prompt="five", bundle="one", threshold=1, generate={})
        assert service.metric("hallutracer_answer_risk_count") == 4
        assert service.metric("hallutracer_answer_risk_sum") == pytest.approx(
            sum(row["answer_risk"] for row in rows),
        )
        flagged = sum(row["answer_flagged"] for row in rows)
        assert service.metric("hallutracer_answers_flagged_total") == flagged > 0


def test_a_reader_that_leaves_counts_no_finished_answer(tmp_path: Path) -> None:
    with running(tmp_path, names=(), add=[two_parts], policy="observe") as service:
        engine, gone = service.engine, threading.Event()
        engine.answer = TEXT
        engine.wait = lambda: engine.counters.decode_steps < 5 or gone.wait(30)  # type: ignore
        body = OBSERVED | {"prompt": "one", "generate": {"max_tokens": 40}, "stream": True}
        body["include"] = ["answer_risk"]
        with httpx.stream("POST", f"{service.url}/score", json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            while "answer_risk" not in next(lines):
                pass
        until(lambda: service.metric("hallutracer_requests_in_flight") == 0)
        gone.set()
        until(lambda: engine.counters.open_continuations == 0)
        assert service.metric("hallutracer_answer_risk_count") == 0


def test_of_a_stopped_answer_no_more_is_decoded_than_was_read(tmp_path: Path) -> None:
    with running(
        tmp_path,
        names=(),
        add=[all_flagged],
        policies=POLICIES,
        policy="stops",
    ) as service:
        engine, go_on = service.engine, threading.Event()
        engine.answer = TEXT

        def wait() -> None:
            if engine.counters.decode_steps > LEAST_READ:  # the verdict is known
                assert go_on.wait(30)

        engine.wait = wait  # type: ignore[method-assign]
        try:
            service.post(prompt="one", threshold=1, generate={"max_tokens": 40})
        finally:
            go_on.set()
        assert service.metric("hallutracer_answers_stopped_total") == 1
        assert service.metric("hallutracer_answer_risk_count") == 1
        until(lambda: engine.counters.open_continuations == 0)
        assert engine.counters.decode_steps <= LEAST_READ + 2


# --- policies that decide by it ---


@pytest.mark.parametrize(
    ("policy", "blind", "message"),
    [
        (
            AGAIN,
            False,
            "policy 'again' has recheck, and bundle one:1 has no probes of answers: train it",
        ),
        (
            AGAIN,
            True,
            "has recheck, and bundle both:1 has probes of answers, which this engine does not read",
        ),
        (STOPS, False, "policy 'stops' has stop_at, and bundle one:1 has no probes of answers"),
    ],
)
def test_a_service_that_cannot_read_answers_does_not_start(
    tmp_path: Path,
    policy: Policy,
    blind: bool,
    message: str,
) -> None:
    app = App(
        tmp_path,
        names=() if blind else ("one",),
        add=[two_parts],
        policies={policy.name: policy},
    )
    app.served.reads_answers = not blind
    with app.client:
        until(lambda: app.state.lifecycle.failure is not None)
    assert message in str(app.state.lifecycle.error)


def test_no_request_sees_more_than_the_first_tokens_of_answers_that_are_all_flagged(
    tmp_path: Path,
) -> None:
    """The requests of ``test_no_token``, under a first risk that lets all of them begin."""
    options: dict[str, Any] = {
        "names": (),
        "add": [all_flagged],
        "policies": POLICIES,
        "threshold": 1.0,
    }
    for policy, shown, length in (("again", 0, 10), ("stops", LEAST_READ, 30)):
        with App(tmp_path / policy, callers_may=(), policy=policy, **options).started() as app:
            app.engine.answer = "@" * length
            for told, _, content, response in responses(app.client, 1000):
                text = response.text
                assert text.count("@") <= shown * (1 + content.count(b",")), told
                assert "@" * (shown + 1) not in text, told
            assert app.engine.counters.decode_steps > 100, "answers were begun, and held or ended"
