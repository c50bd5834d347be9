"""The turn: what is shown of an answer and how it ends, under every policy, without an engine."""

from __future__ import annotations

import asyncio
import doctest
import math
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any, cast

import numpy as np
import pytest

from service import turn as turn_module
from service.engines.base import AnswerReading, Completion, PrefillResult, Sampling, Update
from service.judging.guarantee import UNKNOWN, Standing
from service.policies.guard import GATE, Action, Decision, Policy, Verdict, judge
from service.scoring import RiskReport, Scorer
from service.tool_calls import Tools
from service.turn import AnswerRisk, Chunk, Ended, Event, Outcome, Text, Turn
from tests import turn_as_it_was
from tests.kit.bundles import ANSWER, write_bundle
from tests.matching import SMALL_TALK, matching_draft, with_answer, with_context
from tests.scripted_engine import ScriptedEngine

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
TOOLS = Tools(({"function": {"name": "f"}},))
ANSWERS = {
    "a call": CALL,
    "two calls": f" {CALL}\n{CALL}",
    "a call and text": f"{CALL} so",
    "text and a call": f"so {CALL}",
    "a call that is cut": CALL[:-3],
    "another tool's call": CALL.replace('"f"', '"g"'),
    "almost a call": "<tool_calX it is",
    "only the beginning of a call": "  <tool",
    "text": "It is so.",
    "nothing": "",
}
LIMITS = (6, len(CALL), 200)  # tokens of an answer: some are cut, among them a call that is whole
LOW, HIGH = 0.1, 0.95  # risks of an answer; the bundle flags those from 0.6 on
# The risk by how many tokens of an answer were read; None: none was read.
RISKS: dict[str, Callable[[int], float | None]] = {
    "low": lambda read: LOW,
    "high": lambda read: HIGH,
    "high for a while": lambda read: HIGH if read in (5, 6) else LOW,
    "high from the twelfth token on": lambda read: HIGH if read >= 12 else LOW,
    "unread": lambda read: None,
    "unread from the second token on": lambda read: LOW if read < 2 else None,
}
PER_UPDATE = {"embedded": 1, "vllm": 3}  # tokens that one update brings


class ReplayedEngine:
    """Answers with the updates that it was given."""

    def __init__(self) -> None:
        self.updates: Sequence[Update] = ()

    async def answer(self, *_: Any, **__: Any) -> AsyncGenerator[Update, None]:
        """Yield the updates."""
        for update in self.updates:
            yield update


def reading(tokens: int, risks: Callable[[int], float | None]) -> AnswerReading | None:
    """What was read of an answer of so many tokens, of all but the last, with the wanted risk."""
    read = tokens - 1
    value = risks(read) if read > 0 else None
    if value is None:
        return None
    mean = (math.log((1 - value) / value) - ANSWER.intercept) / ANSWER.weight
    return AnswerReading(read, np.full(4, mean))


def answer_updates(
    prefill: PrefillResult, text: str, risks: Callable[[int], float | None], engine: str, limit: int
) -> list[Update]:
    """The updates of an answer with one token for each character, and an end token, as this engine sends them."""
    cut = len(text) >= limit
    text = text[:limit] if cut else text
    completion = Completion(text, tuple(range(len(text) if cut else len(text) + 1)), "length" if cut else "stop")
    size = PER_UPDATE[engine]
    updates = list[Update]()
    for start in range(0, len(text), size):
        piece = text[start : start + size]
        updates.append(Update(piece=piece, tokens=len(piece), answer=reading(start + len(piece), risks)))
    last = reading(completion.tokens, risks)
    if engine == "embedded":  # the prefill and the end come by themselves
        return [Update(prefill), *updates, Update(completion=completion, answer=last)]
    if not cut:
        updates.append(Update(tokens=1, answer=last))
    updates[-1] = replace(updates[-1], completion=completion)
    updates[0] = replace(updates[0], prefill=prefill)
    return updates


@dataclass(frozen=True)
class Bench:
    """A scorer of a bundle that reads answers and tells what asks for no fact, and a prompt's prefill."""

    engine: ReplayedEngine
    scorer: Scorer
    prompt: list[int]
    prefill: PrefillResult


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    engine: Any = ScriptedEngine()
    draft = with_answer(with_context(matching_draft(engine, "both", 3), engine, applies_from=1 - 1e-9), engine)
    scorer = Scorer(engine, write_bundle(draft, tmp_path_factory.mktemp("turn") / "both"))
    prompt = scorer.render("one")
    [prefill] = engine.score([prompt], scorer.probes)
    scorer.engine = replayed = cast(Any, ReplayedEngine())
    return Bench(replayed, scorer, prompt, prefill)


@dataclass(frozen=True)
class Case:
    """One combination."""

    policy: Policy
    asks_for_fact: bool
    tools: Tools | None
    answer: str
    risks: str
    engine: str
    limit: int

    @property
    def standing(self) -> Standing:
        return UNKNOWN if self.asks_for_fact else SMALL_TALK


def policies() -> Iterator[Policy]:
    """Each kind of action, of prompts that are all flagged or none, and each way to decide by the answer's tokens."""
    ways: list[dict[str, Any]] = [{}, {"recheck": True}, {"stop_at": 0.9}]
    for action, threshold, way, no_fact, calls in product(
        (Action.OBSERVE, Action.ANNOTATE, Action.ABSTAIN), (0.0, 1.0), ways, (False, True), ("let_through", "gate")
    ):
        yield Policy(
            "mine",
            action,
            threshold=threshold,
            message="No, {risk}.",
            withhold_no_fact=no_fact,
            tools=calls,
            withhold_outside=False,
            **way,
        )


def all_cases() -> Iterator[Case]:
    """Every combination; where nothing reads the answer, one course of its risk is enough."""
    for policy, fact, tools, answer, engine, limit in product(
        policies(), (True, False), (None, TOOLS), ANSWERS, PER_UPDATE, LIMITS
    ):
        if (tools is None and policy.tools == "gate") or (fact and policy.withhold_no_fact):
            continue  # the one means nothing without the other
        if len(ANSWERS[answer]) < limit < LIMITS[-1]:
            continue  # it is not cut
        for risks in RISKS if policy.reads_answers_for else ("high",):
            yield Case(policy, fact, tools, answer, risks, engine, limit)


class Bed:
    """What the cases are played on: reports and updates are made once."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._reports = dict[tuple[Policy, bool], RiskReport]()
        self._updates = dict[tuple[str, str, str, int], list[Update]]()
        self.judge_answer = cache(bench.scorer.judge_answer)

    def report(self, case: Case) -> RiskReport:
        key = case.policy, case.asks_for_fact
        if key not in self._reports:
            report = self.bench.scorer.judge(self.bench.prefill, case.policy, standing=case.standing)
            assert report.context.applies is case.asks_for_fact
            self._reports[key] = report
        return self._reports[key]

    def updates(self, case: Case) -> list[Update]:
        key = case.answer, case.risks, case.engine, case.limit
        if key not in self._updates:
            text, risks = ANSWERS[case.answer], RISKS[case.risks]
            self._updates[key] = answer_updates(self.bench.prefill, text, risks, case.engine, case.limit)
        return self._updates[key]


@pytest.fixture(scope="module")
def bed(bench: Bench) -> Bed:
    return Bed(bench)


@dataclass(frozen=True)
class Played:
    """What a machine makes of a case."""

    pieces: tuple[str, ...]  # shown with each of the engine's updates
    held: tuple[bool, ...]  # whether it is undecided behind each
    verdict: Verdict
    tool_call: bool
    completion: Completion | None
    answer: AnswerRisk | None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def played_as_it_was(bed: Bed, case: Case) -> Played:
    steps = list(turn_as_it_was.run(bed.judge_answer, bed.report(case), bed.updates(case), case.policy, case.tools))
    return of_steps(steps)


def of_steps(steps: list[tuple[RiskReport, Update]]) -> Played:
    last = steps[-1][0]
    pieces, held = tuple(update.piece for _, update in steps), tuple(report.held for report, _ in steps)
    return Played(pieces, held, last.verdict, last.tool_call, last.completion, last.answer)


def played(bed: Bed, case: Case) -> tuple[Played, Ended]:
    """What the turn makes of it."""
    report = bed.report(case)
    turn = Turn(case.policy, report.verdict, applies=case.asks_for_fact, tools=case.tools)
    events: list[Event] = list(turn.begin())
    pieces, held = list[str](), list[bool]()
    for update in bed.updates(case):
        if not turn.over:
            risk = partial(bed.judge_answer, update.answer)
            events = list(turn.feed(Chunk(update.piece, update.tokens, risk, update.completion)))
        pieces.append("".join(event.text for event in events if isinstance(event, Text)))
        held.append(turn.undecided)
        if turn.over:
            break
    ended = events[-1]
    assert isinstance(ended, Ended)
    withheld = report.decision is not Decision.CONTINUE
    tool_call = ended.outcome is Outcome.CALLED and withheld
    found = Played(tuple(pieces), tuple(held), ended.verdict, tool_call, ended.completion, ended.answer)
    return found, ended


def may_be_held_for_its_risk(case: Case) -> bool:
    """Whether the answer may be held as a possible call under a policy that may end it by its risk."""
    return case.policy.stop_at is not None and case.tools is not None and case.policy.tools == "let_through"


def check_shown(now: Played, ended: Ended) -> None:
    """What is shown is what the outcome says."""
    if ended.outcome is Outcome.WITHHELD:
        assert (now.text, ended.completion) == ("", None)
        assert ended.verdict.decision is not Decision.CONTINUE
        return
    assert ended.completion is not None
    assert ended.completion.text == now.text
    assert ended.verdict.decision is Decision.CONTINUE
    assert (ended.completion.finish_reason == "content_filter") == (ended.outcome is Outcome.STOPPED)
    if ended.outcome is Outcome.STOPPED:
        assert ended.completion.tokens == len(now.text), "a token a character: none is counted that is not shown"


def test_it_decides_as_before_but_for_text_that_was_held_as_a_possible_call(bed: Bed) -> None:
    """An answer that begins like a call, under ``stop_at``: its tokens were counted as shown, and only the risk that it
    had when it was known to be no call counted."""
    outcomes, cases, others = Counter[Outcome](), 0, 0
    for case in all_cases():
        before, (now, ended) = played_as_it_was(bed, case), played(bed, case)
        cases += 1
        outcomes[ended.outcome] += 1
        check_shown(now, ended)
        if now == before:
            continue
        others += 1
        assert may_be_held_for_its_risk(case), case
        assert ended.outcome is Outcome.STOPPED, case
        assert ended.completion == Completion(now.text, (), "content_filter", len(now.text)), case
    assert (cases, others) == (33696, 1420)
    assert outcomes.keys() == set(Outcome) - {Outcome.SCORED}


def test_an_answer_that_is_no_call_is_shown_as_where_no_tools_are_offered(bed: Bed) -> None:
    stopped = 0
    for case in all_cases():
        if not may_be_held_for_its_risk(case):
            continue
        (now, ended), (alone, alone_ended) = played(bed, case), played(bed, replace(case, tools=None))
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

    for way, expected in (({}, ["end"]), ({"recheck": True}, ["end"]), ({"stop_at": 0.5}, ["a", "end", "end"])):
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
    names = ("torch", "vllm", "transformers", "fastapi", "starlette", "asyncio", "service.engines.scheduler")
    code = f"import sys, service.turn; print([name for name in {names} if name in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


def test_the_examples_run() -> None:
    assert doctest.testmod(turn_module) == doctest.TestResults(0, 10)


async def steps_of(bed: Bed, case: Case) -> list[tuple[RiskReport, Update]]:
    bed.bench.engine.updates = bed.updates(case)
    run = bed.bench.scorer.run(
        bed.bench.prompt, case.policy, Sampling(case.limit), tools=case.tools, standing=case.standing
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


def test_the_service_counts_what_it_shows_of_a_risky_answer_that_began_like_a_call(bed: Bed) -> None:
    """With tools all nine tokens were counted and none was shown; without tools four are shown."""
    policy = Policy("stops", Action.ABSTAIN, threshold=1.0, stop_at=0.9, withhold_outside=False)
    for tools in (None, TOOLS):
        case = Case(
            policy, asks_for_fact=True, tools=tools, answer="almost a call", risks="high", engine="embedded", limit=200
        )
        steps = asyncio.run(steps_of(bed, case))
        report = steps[-1][0]
        assert "".join(update.piece for _, update in steps) == "<too"
        assert report.completion == Completion("<too", (), "content_filter", 4)
        assert report.outcome is Outcome.STOPPED
