"""The plugin drives the turn as the service does: what vLLM's outputs make a caller see, in every
combination."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from service.engines.base import AnswerReading, Completion, PrefillResult, Update
from service.errors import EngineError
from service.policies.guard import Action, Policy
from service.scoring import RiskReport
from service.serving import observers
from service.serving.judgement import AnswerEnd, Judgement
from service.turn import Ended, Outcome
from tests.engines.vllm.installed import vllm_or_skip
from tests.turn_cases import (
    ANSWERS,
    PER_UPDATE,
    RISKS,
    TOOLS,
    Bed,
    Case,
    Played,
    all_cases,
    answer_updates,
    make_bench,
    played,
)

vllm_or_skip()

from vllm.outputs import CompletionOutput, RequestOutput  # noqa: E402
from vllm.sampling_params import RequestOutputKind, SamplingParams  # noqa: E402

from service.vllm_plugin.note import Note  # noqa: E402
from service.vllm_plugin.turn import TurnDriver  # noqa: E402

KINDS = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
END_TOKEN = 9


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Bed:
    return Bed(make_bench(tmp_path_factory.mktemp("turn") / "both"))


class Lease:
    """Reads outputs whose payload is the engine's update, and insists that none is left out."""

    def __init__(self, *, answers: bool = True) -> None:
        self.directive = SimpleNamespace(answer=answers or None, encode=dict)
        self.tokens = 0
        self.answers_read = 0
        self.released = False
        self.error: EngineError | None = None

    def prefill(self, output: Any, prompt_tokens: int) -> tuple[PrefillResult, bool]:
        update: Update = output.prompt_token_id_logprobs
        if update.prefill is None:
            raise EngineError("no payload")
        return update.prefill, False

    def answer(self, output: Any, decoded: int, *, first: bool = False) -> AnswerReading | None:
        if self.error is not None:
            raise self.error
        if self.directive.answer is None:
            return None
        assert first is (self.answers_read == 0)
        self.answers_read += 1
        self.tokens += output.prompt_token_id_logprobs.tokens
        assert decoded == self.tokens, "an output was not read in its turn"
        answer: AnswerReading | None = output.prompt_token_id_logprobs.answer
        return answer

    def release(self) -> None:
        self.released = True


def vllm_outputs(updates: Sequence[Update], kind: RequestOutputKind) -> Iterator[Any]:
    """The updates in vLLM's form; a whole answer's outputs share their list of tokens, which
    grows."""
    text, token_ids = "", list[int]()
    for update in updates:
        tokens = [7] * update.tokens
        token_ids += tokens
        text += update.piece
        pieces = kind is RequestOutputKind.DELTA
        reason = None if update.completion is None else update.completion.finish_reason
        answer = CompletionOutput(
            0, update.piece if pieces else text, tokens if pieces else token_ids, None, None
        )
        answer.finish_reason = reason
        finished = reason is not None
        yield RequestOutput(
            "a", None, [1, 2], None, [answer], finished, prompt_token_id_logprobs=update
        )  # type: ignore[arg-type]


@dataclass(frozen=True)
class Seen:
    """What becomes of a request."""

    outputs: list[Any]  # of those that the caller sees
    note: Note
    judged_before: int  # outputs that were seen before the observers knew of the judgement
    report: RiskReport
    end: AnswerEnd
    lease: Lease

    @property
    def text(self) -> str:
        return "".join(output.outputs[0].text for output in self.outputs)

    @property
    def counted(self) -> int:
        """Tokens that vLLM's server bills, without an end token that stands for an answer."""
        return (
            sum(len(output.outputs[0].token_ids) for output in self.outputs)
            - self.note.end_tokens()
        )


def drive(
    bed: Bed,
    case: Case,
    updates: Sequence[Update],
    kind: RequestOutputKind,
    monkeypatch: pytest.MonkeyPatch,
    lease: Lease,
) -> tuple[list[Any], Note, list[int], list[tuple[Judgement, AnswerEnd]]]:
    """What the caller sees, the request's note, and what the observers are told, and behind how
    many outputs."""
    judged = list[int]()
    ends = list[tuple[Judgement, AnswerEnd]]()
    outputs = list[Any]()

    async def observer(service: Any, judgement: Judgement) -> None:
        judged.append(len(outputs))

    def ended(service: Any, judgement: Judgement, answers: Sequence[AnswerEnd]) -> None:
        ends.append((judgement, answers[0]))

    monkeypatch.setattr(observers, "judged", observer)
    monkeypatch.setattr(observers, "ended", ended)

    async def lend(*_: Any, **__: Any) -> Lease:
        return lease

    async def start() -> AsyncGenerator[Any, None]:
        for output in vllm_outputs(updates, parameters.output_kind):
            yield output

    class Driver(TurnDriver):
        async def _check_rendering(self) -> None:
            self._standing = case.standing

    parameters = SamplingParams(output_kind=kind)
    note = Note(chats=[None], judgements=[None], tools=case.tools)
    engine: Any = SimpleNamespace(lease=lend, end_token=END_TOKEN)
    service: Any = SimpleNamespace(catalogue=SimpleNamespace(monitors={}))
    driver = Driver(
        service,
        engine,
        bed.bench.scorer,
        case.policy,
        note,
        0,
        parameters,
        "a",
        lambda: None,
        (),
        compared=False,
    )

    async def read() -> None:
        async for output in driver.outputs(start):
            outputs.append(output)

    asyncio.run(read())
    return outputs, note, judged, ends


def plugin_sees(
    bed: Bed,
    case: Case,
    updates: Sequence[Update],
    kind: RequestOutputKind,
    monkeypatch: pytest.MonkeyPatch,
    lease: Lease | None = None,
) -> Seen:
    """What the plugin makes of an answer that vLLM sends so."""
    lease = lease or Lease()
    outputs, note, [judged_before], [(judgement, end)] = drive(
        bed, case, updates, kind, monkeypatch, lease
    )
    return Seen(outputs, note, judged_before, judgement.reports[0], end, lease)


def check(seen: Seen, now: Played, ended: Ended, kind: RequestOutputKind) -> None:
    """What a caller sees, is billed and is told, is what the turn says."""
    assert seen.text == now.text
    assert seen.counted == (0 if ended.completion is None else ended.completion.tokens)
    assert seen.counted == (0 if ended.outcome is Outcome.WITHHELD else seen.end.tokens)
    report = seen.report
    assert (report.outcome, report.verdict, report.answer) == (
        ended.outcome,
        ended.verdict,
        ended.answer,
    )
    assert (seen.end.outcome, seen.end.risk, report.tool_call) == (
        ended.outcome,
        ended.answer,
        now.tool_call,
    )
    assert [output.finished for output in seen.outputs] == [False] * (len(seen.outputs) - 1) + [
        True
    ]
    assert len(seen.outputs) == 1 or kind is RequestOutputKind.DELTA
    assert seen.outputs[0].outputs[0].token_ids, (
        "vLLM's streams skip a first output without a token"
    )
    reasons = {Outcome.WITHHELD: "stop", Outcome.STOPPED: "content_filter"}
    reason = reasons.get(ended.outcome) or (ended.completion and ended.completion.finish_reason)
    assert seen.outputs[-1].outputs[0].finish_reason == reason
    assert seen.judged_before == 0, "nothing is shown before the audit log has it"
    assert seen.lease.released
    assert seen.note.judgements[0] is not None
    assert (seen.note.withheld(0) is not None) is (ended.outcome is Outcome.WITHHELD)
    assert seen.note.stopped is (ended.outcome is Outcome.STOPPED)
    if ended.outcome is Outcome.CALLED:
        assert not seen.lease.answers_read, "a call has no risk of its own"


@pytest.mark.parametrize("kind", KINDS)
def test_the_plugin_and_the_service_make_the_same_of_every_answer(
    bed: Bed, kind: RequestOutputKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token as the embedded engine has them, merged by vLLM, and read so late that the
    most came at once."""
    outcomes = Counter[Outcome]()
    for number, case in enumerate(list(all_cases())[:: 2 * 53]):
        engine = [*PER_UPDATE][number % len(PER_UPDATE)]
        now, ended = played(bed, replace(case, engine=engine))
        prefill = bed.bench.prefill
        text = ANSWERS[case.answer]
        risks = RISKS[case.risks]
        updates = answer_updates(prefill, text, risks, "vllm", case.limit, size=PER_UPDATE[engine])
        check(plugin_sees(bed, case, updates, kind, monkeypatch), now, ended, kind)
        outcomes[ended.outcome] += 1
    assert outcomes.keys() == set(Outcome) - {Outcome.SCORED}


STOPS = Policy("stops", Action.ABSTAIN, threshold=1.0, stop_at=0.9, withhold_outside=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize(
    ("engine", "shown"), [("embedded", "<too"), ("vllm", "<to"), ("vllm, read late", "")]
)
def test_a_risky_answer_that_begins_like_a_call_is_shown_and_billed_as_far_as_the_service_does(
    bed: Bed,
    kind: RequestOutputKind,
    tools: Any,
    engine: str,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where nothing of it is shown, an end token stands for it, which is not billed."""
    case = Case(
        STOPS,
        asks_for_fact=True,
        tools=tools,
        answer="almost a call",
        risks="high",
        engine=engine,
        limit=200,
    )
    prefill, risks = bed.bench.prefill, RISKS[case.risks]
    updates = answer_updates(
        prefill, ANSWERS[case.answer], risks, "vllm", 200, size=PER_UPDATE[engine]
    )
    now, ended = played(bed, case)
    seen = plugin_sees(bed, case, updates, kind, monkeypatch)
    check(seen, now, ended, kind)
    assert (seen.text, seen.counted, seen.report.outcome) == (shown, len(shown), Outcome.STOPPED)
    assert seen.report.completion == Completion(shown, (), "content_filter", len(shown))
    if not shown:
        assert seen.outputs[-1].outputs[0].token_ids == [END_TOKEN]


PLAIN = Case(
    replace(STOPS, stop_at=None),
    asks_for_fact=True,
    tools=None,
    answer="text",
    risks="low",
    engine="vllm",
    limit=200,
)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_cannot_be_read_is_given_where_nothing_is_decided_by_it_alone(
    bed: Bed, kind: RequestOutputKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates, lease = bed.updates(PLAIN), Lease()
    lease.error = EngineError("not read")
    seen = plugin_sees(bed, PLAIN, updates, kind, monkeypatch, lease)
    assert (seen.text, seen.report.outcome, seen.report.answer) == (
        ANSWERS["text"],
        Outcome.ANSWERED,
        None,
    )
    for policy in (STOPS, replace(STOPS, stop_at=None, recheck=True)):
        with pytest.raises(EngineError, match="not read"):
            plugin_sees(bed, replace(PLAIN, policy=policy), updates, kind, monkeypatch, lease)


def test_a_whole_answer_of_which_no_token_is_read_comes_as_one_output(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    for case in (PLAIN, replace(PLAIN, policy=replace(PLAIN.policy, threshold=0.0))):
        [update] = answer_updates(
            bed.bench.prefill, ANSWERS["text"], RISKS["low"], "vllm", 200, size=200
        )[:1]
        completion = Completion(ANSWERS["text"], (), "stop")
        whole, kind = replace(update, completion=completion), RequestOutputKind.FINAL_ONLY
        seen = plugin_sees(bed, case, [whole], kind, monkeypatch, Lease(answers=False))
        withheld = case.policy.threshold == 0.0
        assert seen.text == ("" if withheld else ANSWERS["text"])
        assert seen.report.outcome is (Outcome.WITHHELD if withheld else Outcome.ANSWERED)
        assert (len(seen.outputs), seen.report.answer) == (1, None)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_without_a_risk_passes_as_vllm_sends_it_where_the_policy_observes(
    bed: Bed, kind: RequestOutputKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = [replace(update, prefill=None) for update in bed.updates(PLAIN)]
    case = replace(PLAIN, policy=replace(PLAIN.policy, action=Action.OBSERVE))
    outputs, note, judged, ends = drive(bed, case, updates, kind, monkeypatch, Lease())
    assert "".join(output.outputs[0].text for output in outputs) == ANSWERS["text"]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert (note.unread, judged, ends) == ("no payload", [], [])
    with pytest.raises(EngineError, match="no payload"):
        drive(bed, PLAIN, updates, kind, monkeypatch, Lease())
