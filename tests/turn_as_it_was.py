"""The decisions of ``Scorer.run`` as they were before ``service.turn``, for the test that compares the two.

A copy without the engine: the updates are given, and the report of the prompt.  It goes with that test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from service.engines.base import AnswerReading, Completion, Update
from service.policies.guard import Decision, Policy, stopped_by
from service.scoring import RiskReport
from service.tool_calls import Tools, may_be_calls
from service.turn import LEAST_READ, AnswerRisk

Step = tuple[RiskReport, Update]
JudgeAnswer = Callable[[AnswerReading | None], AnswerRisk | None]


def run(
    judge_answer: JudgeAnswer, report: RiskReport, updates: Sequence[Update], policy: Policy, tools: Tools | None
) -> Iterator[Step]:
    """Yield a report and what is shown with each update; ``report``: of the prompt, whose answer was asked for."""
    tools = None if policy.tools == "gate" else tools
    shown_texts, tokens = list[str](), 0
    begun, may_be_call = "", tools is not None
    if report.decision is not Decision.CONTINUE:
        if tools is None:
            yield report, replace(updates[0], piece="", tokens=0, completion=None)
            return
        report = replace(report, held=True)
    for update in updates:
        if may_be_call:
            begun += update.piece
            may_be_call = may_be_calls(begun)
            if policy.stop_at is not None and not may_be_call:
                update = replace(update, piece=begun)
        undecided = may_be_call and policy.stop_at is not None
        ended = update.completion
        if ended is not None and tools is not None and ended.finish_reason == "stop" and tools.only_calls(ended.text):
            shown = not (report.held or policy.recheck or undecided)
            yield (
                replace(_called(report), completion=ended),
                update if shown else replace(update, piece=ended.text),
            )
            return
        if report.held:
            over = ended is not None or not may_be_call
            yield replace(report, held=not over), replace(update, piece="", completion=None)
            if over:
                return
            continue
        answer = judge_answer(update.answer) if policy.stop_at is not None else None
        last = ended is not None
        if (last or not undecided) and _stops(report, policy, answer, tokens, last=last):
            stopped = Completion("".join(shown_texts), (), "content_filter", tokens)
            yield replace(report, completion=stopped, answer=answer), replace(update, piece="", tokens=0)
            return
        if ended is not None:
            yield _finished(judge_answer, report, policy, replace(update, piece=ended.text) if undecided else update)
            return
        tokens += update.tokens
        hidden = policy.recheck or undecided
        shown_texts.append("" if hidden else update.piece)
        yield report, replace(update, piece="") if hidden else update


def _stops(report: RiskReport, policy: Policy, answer: AnswerRisk | None, tokens: int, *, last: bool) -> bool:
    if policy.stop_at is None or not (report.context.applies or policy.withhold_no_fact):
        return False
    if answer is None:
        return tokens > 1 or (tokens > 0 and not last)
    return answer.tokens >= LEAST_READ and answer.risk >= policy.stop_at


def _finished(judge_answer: JudgeAnswer, report: RiskReport, policy: Policy, last: Update) -> Step:
    answer = judge_answer(last.answer)
    report = replace(report, completion=last.completion, answer=answer)
    judged = policy.recheck and (report.context.applies or policy.withhold_no_fact)
    if judged and (answer is None or answer.flagged):
        report = replace(report, verdict=stopped_by(policy, report.verdict, None if answer is None else answer.risk))
    if not policy.recheck or last.completion is None:
        return report, last
    if report.decision is not Decision.CONTINUE:
        return replace(report, completion=None), replace(last, piece="", completion=None)
    return report, replace(last, piece=last.completion.text)


def _called(report: RiskReport) -> RiskReport:
    verdict = replace(report.verdict, decision=Decision.CONTINUE, message=None) if report.held else report.verdict
    return replace(report, verdict=verdict, answer=None, held=False, tool_call=report.held, decided_by=None)
