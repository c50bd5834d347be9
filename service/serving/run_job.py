"""One prompt on an OnlineEngine: judged at its onset, closed where it is gated, its news told to the end.

Runs on the engine's loop.  Knows no queue and no room, and nothing of other prompts.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

from service.engines.base import Completion
from service.engines.bridge import onset_of, unfinished
from service.engines.online import OnlineEngine, Update
from service.guard import Decision
from service.serving.answers import Tell
from service.serving.job import Event, Job


async def follow(engine: OnlineEngine, job: Job, tell: Tell) -> None:
    """See a job through.  Cancel it to end the request in the engine; then nothing more is told."""
    scorer = job.scorer
    try:
        answer = engine.answer(
            job.token_ids,
            [scorer.probes],
            first_token=scorer.needs_first_token,
            sampling=job.sampling,
            gate=scorer.gate(job.policy) if job.continues else None,
        )
        async with aclosing(answer) as updates:
            completion = await _read(job, updates, tell)
        if completion is not None:
            job.report = replace(job.outcome(), completion=completion)
        tell(job, Event.DONE, None)
    except Exception as error:
        tell(job, Event.FAILED, error)


async def _read(job: Job, updates: AsyncIterator[Update], tell: Tell) -> Completion | None:
    """To the end of the answer; None for one that does not begin."""
    judged: float | None = None
    async for update in updates:
        if judged is None:
            if not _judge(job, update):
                return None
            judged = time.monotonic()
            tell(job, Event.SCORED, None)
        job.tokens += update.tokens
        if job.streams and update.piece:
            tell(job, Event.PIECE, update.piece)
        if update.completion is not None:
            job.timings.decode = time.monotonic() - judged
            return update.completion
    raise unfinished()


def _judge(job: Job, update: Update) -> bool:
    """Whether the answer goes on.  What the engine's gate made of it has no say in that."""
    onset = onset_of(update)
    job.timings.queue, job.timings.prefill = update.queue_s, update.prefill_s
    started = time.monotonic()
    job.report = job.scorer.report(onset, onset.trajectories[0], job.policy, cached_tokens=update.cached_tokens)
    job.timings.probe = time.monotonic() - started
    return job.continues and job.report.decision is Decision.CONTINUE
