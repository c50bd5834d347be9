"""The list of those that are told of a judgement, by our own service and by the vLLM plugin alike.

To add one, write a function, here or in a module of its own, and name it in ``JUDGED`` or
``ENDED``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from service.audit.auditor import JudgedEvent, decision
from service.policies.guard import Decision
from service.serving.judgement import AnswerEnd, Judgement, digest_of
from service.serving.request_log import RequestRecord
from service.serving.service import Service

MOST_ID = 256  # characters of the audit log's request id: vLLM takes over whatever its client sends


async def judged(service: Service, judgement: Judgement) -> None:
    """Tell ``JUDGED``, before anybody else can know a risk or the request's id.

    Raises AuditUnavailable where the audit log is required and cannot be written."""
    for observer in JUDGED:
        await observer(service, judgement)


def ended(
    service: Service,
    judgement: Judgement,
    answers: Sequence[AnswerEnd],
    record: RequestRecord | None = None,
) -> None:
    """Tell ``ENDED``, once, when nothing more will be sent.  ``answers``: one for each of the
    judged prompts.

    ``record`` is the request's log line; None where somebody else writes one."""
    for observer in ENDED:
        observer(service, judgement, answers, record)


async def _audit(service: Service, judgement: Judgement) -> None:
    if service.audit is None:
        return
    prompts = [
        JudgedEvent(
            prompt.index,
            round(report.risk, 6),
            report.decision.value,
            report.verdict.flagged,
            report.decided_by,
        )
        for prompt, report in zip(judgement.prompts, judgement.reports, strict=True)
    ]
    line = decision(
        judgement.who,
        request_id=judgement.request_id[:MOST_ID],
        route=judgement.route,
        model=judgement.model,
        bundle=judgement.bundle,
        digest=judgement.digest,
        policy=judgement.policy.name,
        threshold=judgement.threshold,
        prompts=prompts,
    )
    await service.audit.decided(line)


async def _store_for_feedback(service: Service, judgement: Judgement) -> None:
    if service.feedback is not None and not judgement.of_sample:
        service.feedback.record(judgement)


async def _record_retrieval(service: Service, judgement: Judgement) -> None:
    """Record the risk of a prompt that was sent to fetch a passage, until it is asked again with
    one."""
    if len(judgement.prompts) == 1 and judgement.reports[0].decision is Decision.RETRIEVE:
        risk = judgement.reports[0].risk
        service.retrievals.record(
            judgement.caller.name, judgement.request_id, risk, judgement.digest
        )


def _count(
    service: Service, judgement: Judgement, answers: Sequence[AnswerEnd], _: RequestRecord | None
) -> None:
    service.metrics.judged(judgement, answers)


def _watch_drift(
    _: Service, judgement: Judgement, __: Sequence[AnswerEnd], ___: RequestRecord | None
) -> None:
    if judgement.monitor is not None and not judgement.of_sample:
        judgement.monitor.observe(
            judgement.reports, [digest_of(prompt.token_ids) for prompt in judgement.prompts]
        )


def _log(
    _: Service, judgement: Judgement, answers: Sequence[AnswerEnd], record: RequestRecord | None
) -> None:
    """Give the log line its numbers; the request's spans are written from it, too."""
    if record is not None:
        record.judgement, record.answers = judgement, answers


Ended = Callable[[Service, Judgement, Sequence[AnswerEnd], RequestRecord | None], None]
JUDGED: tuple[Callable[[Service, Judgement], Awaitable[None]], ...] = (
    _audit,
    _store_for_feedback,
    _record_retrieval,
)
ENDED: tuple[Ended, ...] = (_count, _watch_drift, _log)
