"""The turn: what is shown of an answer and how it ends, under every policy, without an engine."""

from __future__ import annotations

import asyncio
import doctest
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from service import turn as turn_module
from service.engines.base import Completion, Sampling, Update
from service.policies.guard import GATE, Action, Decision, Policy, judge
from service.scoring import RiskReport
from service.turn import AnswerRisk, Chunk, Ended, Outcome, Turn
from tests.turn_cases import (
    CALL,
    RECORDED,
    TOOLS,
    Bed,
    Case,
    Played,
    all_cases,
    make_bench,
    may_be_held_for_its_risk,
    of_steps,
    outcomes_by_kind,
    played,
)


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Bed:
    return Bed(make_bench(tmp_path_factory.mktemp("turn") / "both"))


def check_shown(now: Played, ended: Ended) -> None:
    """What is shown is what the outcome says."""
    if ended.outcome is Outcome.WITHHELD:
        assert (now.text, ended.completion) == ("", None)
        assert ended.verdict.decision is not Decision.CONTINUE
        return
    assert ended.completion is not None
    assert ended.completion.text == now.text
    assert ended.verdict.decision is Decision.CONTINUE
    assert (ended.completion.finish_reason == "content_filter") == (
        ended.outcome is Outcome.STOPPED
    )
    if ended.outcome is Outcome.STOPPED:
        assert ended.completion.tokens == len(now.text), (
            "a token a character: none is counted that is not shown"
        )


def test_every_combination_ends_as_recorded(bed: Bed) -> None:
    recorded = json.loads(RECORDED.read_text())
    assert outcomes_by_kind(bed) == recorded
    outcomes = Counter[str]()
    for kind in recorded.values():
        outcomes.update(kind["outcomes"])
    assert outcomes.keys() == set(Outcome) - {Outcome.SCORED}
    assert outcomes.total() == 33696


def test_what_is_shown_is_what_the_outcome_says(bed: Bed) -> None:
    for case in all_cases():
        check_shown(*played(bed, case))


def test_an_answer_that_is_no_call_is_shown_as_where_no_tools_are_offered(bed: Bed) -> None:
    stopped = 0
    for case in all_cases():
        if not may_be_held_for_its_risk(case):
            continue
        now, ended = played(bed, case)
        alone, alone_ended = played(bed, replace(case, tools=None))
        if ended.outcome is Outcome.CALLED:
            continue
        assert (ended, now.text) == (alone_ended, alone.text), case
        stopped += ended.outcome is Outcome.STOPPED
    assert stopped, "else this tells nothing"


def test_what_is_not_to_be_answered_is_scored() -> None:
    for policy in (GATE.at(0.0), GATE.at(1.0)):
        verdict = judge(0.5, policy, 0.5)
        turn = Turn(policy, verdict, applies=True, answers=False, tools=TOOLS)
        assert list(turn.begin()) == [Ended(Outcome.SCORED, verdict)]
        with pytest.raises(AssertionError, match="ENDED"):
            list(turn.feed(Chunk("a", 1)))


def test_the_risk_of_an_answer_is_asked_for_where_it_counts_alone() -> None:
    """Where no policy decides by it, at the end of an answer; of a call never."""
    asked = list[str]()

    def risk_of(piece: str) -> Callable[[], AnswerRisk | None]:
        return lambda: asked.append(piece)

    for way, expected in (
        ({}, ["end"]),
        ({"recheck": True}, ["end"]),
        ({"stop_at": 0.5}, ["a", "end", "end"]),
    ):
        policy = replace(GATE.at(1.0), **way)
        turn = Turn(policy, judge(0.5, policy, 0.5), applies=True)
        assert list(turn.begin()) == []
        list(turn.feed(Chunk("a", 1, risk_of("a"))))
        list(turn.feed(Chunk("", 0, risk_of("end"), Completion("a", (1,), "length"))))
        assert turn.over
        assert asked == expected
        asked.clear()
        called = Turn(policy, judge(0.5, policy, 0.5), applies=True, tools=TOOLS)
        assert list(called.begin()) == []
        list(called.feed(Chunk(CALL, 1, risk_of("call"))))
        *_, ended = called.feed(Chunk("", 1, risk_of("end"), Completion(CALL, (1, 2), "stop")))
        assert isinstance(ended, Ended)
        assert (ended.outcome, asked) == (Outcome.CALLED, [])


def test_the_turn_knows_no_engine_no_protocol_and_no_loop() -> None:
    names = (
        "torch",
        "vllm",
        "transformers",
        "fastapi",
        "starlette",
        "asyncio",
        "service.engines.scheduler",
    )
    code = f"import sys, service.turn; print([name for name in {names} if name in sys.modules])"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert output.strip() == "[]"


def test_the_examples_run() -> None:
    assert doctest.testmod(turn_module) == doctest.TestResults(0, 10)


async def steps_of(bed: Bed, case: Case) -> list[tuple[RiskReport, Update]]:
    bed.bench.engine.updates = bed.updates(case)
    run = bed.bench.scorer.run(
        bed.bench.prompt,
        case.policy,
        Sampling(case.limit),
        tools=case.tools,
        standing=case.standing,
    )
    return [step async for step in run]


def test_the_service_drives_the_turn(bed: Bed) -> None:
    outcomes = Counter[Outcome]()

    async def compare() -> None:
        for case in list(all_cases())[::37]:
            steps = await steps_of(bed, case)
            now, ended = played(bed, case)
            assert of_steps(steps) == now, case
            assert steps[-1][0].outcome is ended.outcome
            assert {report.outcome for report, _ in steps[:-1]} <= {Outcome.SCORED}
            outcomes[ended.outcome] += 1

    asyncio.run(compare())
    assert outcomes.keys() == set(Outcome) - {Outcome.SCORED}


def test_the_service_counts_what_it_shows_of_a_risky_answer_that_began_like_a_call(
    bed: Bed,
) -> None:
    """With tools all nine tokens were counted and none was shown; without tools four are shown."""
    policy = Policy("stops", Action.ABSTAIN, threshold=1.0, stop_at=0.9, withhold_outside=False)
    for tools in (None, TOOLS):
        case = Case(
            policy,
            asks_for_fact=True,
            tools=tools,
            answer="almost a call",
            risks="high",
            engine="embedded",
            limit=200,
        )
        steps = asyncio.run(steps_of(bed, case))
        report = steps[-1][0]
        assert "".join(update.piece for _, update in steps) == "<too"
        assert report.completion == Completion("<too", (), "content_filter", 4)
        assert report.outcome is Outcome.STOPPED
