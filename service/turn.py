"""One prompt under one policy, from the verdict on the prompt to the end of its answer.

A ``Turn`` decides what the caller may see of an answer and how it ends.  It knows no engine, no
protocol and no clock: a driver feeds it what was decoded, chunk by chunk, and acts on the events.

>>> from service.policies.guard import GATE, judge
>>> turn = Turn(GATE, judge(0.2, GATE, default_threshold=0.7), applies=True)
>>> list(turn.begin())  # nothing has ended: the answer may begin
[]
>>> [text] = turn.feed(Chunk("Sana'a", tokens=3))
>>> text.text
"Sana'a"
>>> [_, ended] = turn.feed(Chunk("", 0, end=Completion("Sana'a", (5, 6, 7, 2), "stop")))
>>> str(ended.outcome)
'answered'

A prompt that the policy withholds ends before anything is decoded:

>>> turn = Turn(GATE, judge(0.9, GATE, default_threshold=0.7), applies=True)
>>> [ended] = turn.begin()
>>> str(ended.outcome), str(ended.verdict.decision)
('withheld', 'abstain')"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, StrEnum, auto

from service.engines.base import Completion
from service.policies.guard import Decision, Policy, Verdict, stopped_by
from service.tool_calls import Tools, may_be_calls

LEAST_READ = 4  # tokens of an answer that were read, before their risk may end it


@dataclass(frozen=True, slots=True)
class AnswerRisk:
    """The risk that an answer is wrong, read from its own tokens."""

    risk: float
    flagged: bool  # it reached the bundle's own threshold for answers
    tokens: int  # that were read


class Outcome(StrEnum):
    """How a turn has ended."""

    SCORED = "scored"  # no answer was asked for
    ANSWERED = "answered"  # the whole answer was shown
    CALLED = "called"  # nothing but calls of the request's tools, shown whatever the risk
    # the risk of its own tokens ended the answer; the text before that was shown
    STOPPED = "stopped"
    WITHHELD = "withheld"  # nothing was shown

    @property
    def shows(self) -> bool:
        """Return whether an answer was shown, or its beginning."""
        return self in (Outcome.ANSWERED, Outcome.CALLED, Outcome.STOPPED)


def _not_read() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Chunk:
    """What an engine has decoded since the last chunk."""

    text: str
    tokens: int
    # by all tokens so far; called where it is needed, maybe again
    answer_risk: Callable[[], AnswerRisk | None] = _not_read
    end: Completion | None = None  # with an answer's last chunk


@dataclass(frozen=True, slots=True)
class Text:
    """What the caller may see: one event for each chunk that is shown, in their order."""

    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event of a turn."""

    outcome: Outcome
    verdict: Verdict  # on the prompt; under ``recheck`` on the answer, where that changed it
    # what was shown of the answer, of one that is not withheld
    completion: Completion | None = None
    answer: AnswerRisk | None = None  # the risk that decided, or that of the whole answer


Event = Text | Ended


def judges_answer(policy: Policy, *, applies: bool) -> bool:
    """Return whether an answer's own tokens count under ``policy``; ``applies``: its prompt asks
    for a fact."""
    return applies or policy.withhold_no_fact


def stops(
    policy: Policy, answer: AnswerRisk | None, shown_tokens: int, *, applies: bool, last: bool
) -> bool:
    """Return whether ``policy`` ends an answer here, of which so many tokens were shown, by what
    was read of it.

    ``applies``: its prompt asks for a fact.  ``last``: it has ended by itself.  Closed where
    nothing was read, but for the first token, which nothing was read before, and for the end behind
    it."""
    if policy.stop_at is None or not judges_answer(policy, applies=applies):
        return False
    if answer is None:
        return shown_tokens > 1 or (shown_tokens > 0 and not last)
    return answer.tokens >= LEAST_READ and answer.risk >= policy.stop_at


def verdict_on_answer(
    policy: Policy, verdict: Verdict, answer: AnswerRisk | None, *, applies: bool
) -> Verdict:
    """Return the verdict on a whole answer: under ``recheck`` by its own tokens, else the prompt's.

    Closed where nothing was read."""
    flagged = answer is None or answer.flagged
    if not (policy.recheck and flagged and judges_answer(policy, applies=applies)):
        return verdict
    return stopped_by(policy, verdict, None if answer is None else answer.risk)


class Phase(Enum):
    """How far a turn has come.  A thought before the answer would be one phase more, with a
    decision at its end."""

    PROMPT = auto()  # judged, and nothing decoded
    MAYBE_CALL = auto()  # the answer so far may be nothing but calls of tools
    ANSWER = auto()
    ENDED = auto()


class Turn:
    """One prompt, one policy, at most one answer: call ``begin``, then ``feed`` until an ``Ended``
    comes.

    Both return iterators, which the driver has to exhaust."""

    def __init__(
        self,
        policy: Policy,
        verdict: Verdict,
        *,
        applies: bool,
        answers: bool = True,
        tools: Tools | None = None,
    ) -> None:
        """Make the turn of a prompt that was judged.

        ``applies``: the prompt asks for a fact.  ``answers``: an answer was asked for.  ``tools``:
        the request's; a policy that gates calls as it gates answers knows none."""
        self.phase = Phase.PROMPT
        self._policy = policy
        self._verdict = verdict
        self._answers = answers
        self._tools = None if policy.tools == "gate" else tools
        self._withheld = verdict.decision is not Decision.CONTINUE
        self._applies = applies
        self._beginning = ""  # of the answer, for as long as it may be calls
        self._held = list[Chunk]()  # neither shown nor dropped
        self._shown, self._shown_tokens = list[str](), 0

    @property
    def over(self) -> bool:
        """Return whether it has ended: nothing is to be fed any more."""
        return self.phase is Phase.ENDED

    @property
    def undecided(self) -> bool:
        """Return whether a withheld prompt's answer is held all the same, since it may be calls of
        tools."""
        return self._withheld and self.phase is Phase.MAYBE_CALL

    def begin(self) -> Iterator[Event]:
        """Yield the end of a turn of which nothing is to be decoded."""
        if not self._answers:
            yield self._end(Outcome.SCORED)
        elif self._tools is not None:
            self.phase = Phase.MAYBE_CALL
        elif self._withheld:
            yield self._end(Outcome.WITHHELD)
        else:
            self.phase = Phase.ANSWER

    def feed(self, chunk: Chunk) -> Iterator[Event]:
        """Yield what follows from one more chunk of the answer.  Raises what ``chunk.answer_risk``
        raises."""
        assert self.phase in (Phase.MAYBE_CALL, Phase.ANSWER), (
            f"a turn is fed that is at {self.phase.name}"
        )
        self._held.append(chunk)
        if self.phase is Phase.MAYBE_CALL:
            yield from self._maybe_call(chunk)
        else:
            yield from self._answer(chunk)

    def _maybe_call(self, chunk: Chunk) -> Iterator[Event]:
        """Let an answer through that is nothing but calls; treat any other as one without tools."""
        self._beginning += chunk.text
        if chunk.end is not None and self._is_call(chunk.end):
            yield from self._show_held()
            verdict = (
                replace(self._verdict, decision=Decision.CONTINUE, message=None)
                if self._withheld
                else None
            )
            yield self._end(Outcome.CALLED, verdict, chunk.end)
            return
        # a call has no risk of its own
        holds = self._withheld or self._policy.reads_answers_for is not None
        if chunk.end is None and may_be_calls(self._beginning):
            if not holds:
                yield from self._show_held()
            return
        if self._withheld:
            yield self._end(Outcome.WITHHELD)
            return
        self.phase = Phase.ANSWER
        yield from self._answer(chunk)

    def _is_call(self, completion: Completion) -> bool:
        """Return whether an answer ended by itself and is nothing but calls: one that was cut is
        none."""
        assert self._tools is not None
        return completion.finish_reason == "stop" and self._tools.only_calls(completion.text)

    def _answer(self, chunk: Chunk) -> Iterator[Event]:
        """Show what is held, unless the policy decides by the answer's own tokens and these say
        otherwise."""
        if self._policy.recheck:
            if chunk.end is not None:
                yield from self._recheck(chunk, chunk.end)
            return
        if self._policy.stop_at is None:
            yield from self._show_held()
        else:
            yield from self._show_until_it_stops()
        if chunk.end is not None and not self.over:
            yield self._end(Outcome.ANSWERED, None, chunk.end, chunk.answer_risk())

    def _recheck(self, last: Chunk, completion: Completion) -> Iterator[Event]:
        """Judge a whole answer by its own tokens, and show all of it or nothing."""
        answer = last.answer_risk()
        verdict = verdict_on_answer(self._policy, self._verdict, answer, applies=self._applies)
        if verdict.decision is not Decision.CONTINUE:
            yield self._end(Outcome.WITHHELD, verdict, None, answer)
            return
        yield from self._show_held()
        yield self._end(Outcome.ANSWERED, verdict, completion, answer)

    def _show_until_it_stops(self) -> Iterator[Event]:
        """Show what is held up to the chunk at which ``stop_at`` ends the answer, if there is one.

        Chunks that were held as a possible call are judged one after the other, as where no tools
        are offered."""
        for chunk in self._held:
            answer, last = chunk.answer_risk(), chunk.end is not None
            if stops(self._policy, answer, self._shown_tokens, applies=self._applies, last=last):
                shown = Completion("".join(self._shown), (), "content_filter", self._shown_tokens)
                yield self._end(Outcome.STOPPED, None, shown, answer)
                return
            yield self._show(chunk)
        self._held.clear()

    def _show_held(self) -> Iterator[Text]:
        for chunk in self._held:
            yield self._show(chunk)
        self._held.clear()

    def _show(self, chunk: Chunk) -> Text:
        self._shown.append(chunk.text)
        self._shown_tokens += chunk.tokens
        return Text(chunk.text, chunk.tokens)

    def _end(
        self,
        outcome: Outcome,
        verdict: Verdict | None = None,
        completion: Completion | None = None,
        answer: AnswerRisk | None = None,
    ) -> Ended:
        """Return the last event; ``verdict`` None: the prompt's."""
        self.phase = Phase.ENDED
        self._held.clear()
        return Ended(outcome, self._verdict if verdict is None else verdict, completion, answer)
