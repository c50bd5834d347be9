"""Prompts, policies and answers in every combination, for the tests of the turn and of what drives
it.

``turn_outcomes.json`` has what the turn makes of them, by class of combination.  It was recorded
when the machines that the turn replaced were still there and decided the same of all but 1,420 of
the 33,696: under ``stop_at``, answers that began like a call of a tool.  ``python -m
tests.turn_cases`` records it anew."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np

from service.engines.base import AnswerReading, Completion, PrefillResult, Update
from service.judging.guarantee import UNKNOWN, Standing
from service.policies.guard import Action, Decision, Policy, Verdict
from service.scoring import RiskReport, Scorer
from service.tool_calls import Tools
from service.turn import AnswerRisk, Chunk, Ended, Event, Outcome, Text, Turn
from tests.kit.bundles import ANSWER, write_bundle
from tests.matching import SMALL_TALK, matching_draft, with_answer, with_context
from tests.scripted_engine import ScriptedEngine

RECORDED = Path(__file__).parent / "turn_outcomes.json"
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
PER_UPDATE = {"embedded": 1, "vllm": 3, "vllm, read late": 9}  # tokens that one update brings


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
    prefill: PrefillResult,
    text: str,
    risks: Callable[[int], float | None],
    engine: str,
    limit: int,
    size: int = 0,
) -> list[Update]:
    """The updates of an answer with one token for each character, and an end token, as this engine
    sends them.

    ``size``: tokens of an update; 0: the engine's."""
    cut = len(text) >= limit
    text = text[:limit] if cut else text
    completion = Completion(
        text, tuple(range(len(text) if cut else len(text) + 1)), "length" if cut else "stop"
    )
    size = size or PER_UPDATE[engine]
    updates = list[Update]()
    for start in range(0, len(text), size):
        piece = text[start : start + size]
        updates.append(
            Update(piece=piece, tokens=len(piece), answer=reading(start + len(piece), risks))
        )
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
    """A scorer of a bundle that reads answers and tells what asks for no fact, and a prompt's
    prefill."""

    engine: ReplayedEngine
    scorer: Scorer
    prompt: list[int]
    prefill: PrefillResult


def make_bench(folder: Path) -> Bench:
    """Write the bundle into a folder that is not there yet."""
    engine: Any = ScriptedEngine()
    draft = with_answer(
        with_context(matching_draft(engine, "both", 3), engine, applies_from=1 - 1e-9), engine
    )
    scorer = Scorer(engine, write_bundle(draft, folder))
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

    @property
    def kind(self) -> str:
        """What it is recorded under."""
        policy = self.policy
        prompt = "flagged" if policy.threshold == 0.0 else "passed"
        asks = (
            "of a fact"
            if self.asks_for_fact
            else "of no fact" + ", judged all the same" * policy.withhold_no_fact
        )
        tools = "no tools" if self.tools is None else f"tools: {policy.tools}"
        way = policy.reads_answers_for or "the prompt's risk alone"
        return f"{policy.action}, {way}, {prompt}, {asks}, {tools}"


def policies() -> Iterator[Policy]:
    """Each kind of action, of prompts that are all flagged or none, and each way to decide by the
    answer's tokens."""
    ways: list[dict[str, Any]] = [{}, {"recheck": True}, {"stop_at": 0.9}]
    for action, threshold, way, no_fact, calls in product(
        (Action.OBSERVE, Action.ANNOTATE, Action.ABSTAIN),
        (0.0, 1.0),
        ways,
        (False, True),
        ("let_through", "gate"),
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
        policies(), (True, False), (None, TOOLS), ANSWERS, ("embedded", "vllm"), LIMITS
    ):
        if (tools is None and policy.tools == "gate") or (fact and policy.withhold_no_fact):
            continue  # the one means nothing without the other
        if len(ANSWERS[answer]) < limit < LIMITS[-1]:
            continue  # it is not cut
        for risks in RISKS if policy.reads_answers_for else ("high",):
            yield Case(policy, fact, tools, answer, risks, engine, limit)


class Bed:
    """What the cases are played on: reports and updates are made once, and each case is played
    once."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._reports = dict[tuple[Policy, bool], RiskReport]()
        self._updates = dict[tuple[str, str, str, int], list[Update]]()
        self.plays = dict[tuple[Any, ...], tuple[Played, Ended]]()
        self.judge_answer = cache(bench.scorer.judge_answer)

    def report(self, case: Case) -> RiskReport:
        key = case.policy, case.asks_for_fact
        if key not in self._reports:
            report = self.bench.scorer.judge(
                self.bench.prefill, case.policy, standing=case.standing
            )
            assert report.context.applies is case.asks_for_fact
            self._reports[key] = report
        return self._reports[key]

    def updates(self, case: Case) -> list[Update]:
        key = case.answer, case.risks, case.engine, case.limit
        if key not in self._updates:
            text, risks = ANSWERS[case.answer], RISKS[case.risks]
            self._updates[key] = answer_updates(
                self.bench.prefill, text, risks, case.engine, case.limit
            )
        return self._updates[key]


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


def of_steps(steps: list[tuple[RiskReport, Update]]) -> Played:
    last = steps[-1][0]
    pieces = tuple(update.piece for _, update in steps)
    held = tuple(report.held for report, _ in steps)
    return Played(pieces, held, last.verdict, last.tool_call, last.completion, last.answer)


def played(bed: Bed, case: Case) -> tuple[Played, Ended]:
    """What the turn makes of it."""
    key = case.policy, case.asks_for_fact, case.tools is None, case.answer, case.risks
    key += case.engine, case.limit
    if key not in bed.plays:
        bed.plays[key] = play(bed, case)
    return bed.plays[key]


def play(bed: Bed, case: Case) -> tuple[Played, Ended]:
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
    return Played(
        tuple(pieces), tuple(held), ended.verdict, tool_call, ended.completion, ended.answer
    ), ended


def may_be_held_for_its_risk(case: Case) -> bool:
    """Whether the answer may be held as a possible call under a policy that may end it by its
    risk."""
    return (
        case.policy.stop_at is not None
        and case.tools is not None
        and case.policy.tools == "let_through"
    )


def as_recorded(now: Played, ended: Ended) -> tuple[Any, ...]:
    """What is recorded of one combination: risks but for their last digits, which another numpy may
    have otherwise."""
    shown, answer, verdict = now.completion, now.answer, now.verdict
    completion = None if shown is None else (shown.text, shown.tokens, shown.finish_reason)
    risk = None if answer is None else (round(answer.risk, 6), answer.flagged, answer.tokens)
    decided = str(verdict.decision), verdict.flagged, verdict.message
    return str(ended.outcome), now.pieces, now.held, decided, completion, risk


def outcomes_by_kind(bed: Bed) -> dict[str, dict[str, Any]]:
    """How the combinations of each kind end, and a digest of all that the turn makes of them."""
    outcomes = defaultdict[str, Counter[str]](Counter)
    digests = defaultdict[str, Any](hashlib.sha256)
    for case in all_cases():
        now, ended = played(bed, case)
        outcomes[case.kind][str(ended.outcome)] += 1
        digests[case.kind].update(repr(as_recorded(now, ended)).encode())
    return {
        kind: {
            "outcomes": dict(sorted(outcomes[kind].items())),
            "digest": digests[kind].hexdigest()[:16],
        }
        for kind in sorted(outcomes)
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        by_kind = outcomes_by_kind(Bed(make_bench(Path(made) / "both")))
    rows = [f"{json.dumps(kind)}: {json.dumps(outcomes)}" for kind, outcomes in by_kind.items()]
    RECORDED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
