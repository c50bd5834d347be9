"""What the service keeps of its answers and takes of labels; answering never waits for it, and never fails by it."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from probes_store.manifest import PROBES
from service.access.callers import Caller
from service.data.rows import mark_of
from service.feedback.databases import Location
from service.feedback.rows import Answer, Given, Label, Stored, Tally
from service.feedback.statements import tally_of
from service.feedback.writer import Writer
from service.judging.guarantee import outside_as_calibrated
from service.policies.guard import Decision, Policy
from service.scoring import RiskReport, Scorer
from service.serving.metrics import Metrics
from service.serving.retrievals import PREFIX
from service.settings import DEFAULT_DRAWN

log = logging.getLogger("hallutracer")
_CHANCE = random.SystemRandom()  # nobody can know or choose what is drawn
Content = Mapping[str, Any]  # prompt, messages, text without a template, or input_ids


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of one prompt's text."""

    mark: str
    prompt: str | None


class Feedback:
    """Answers and labels, into one database."""

    def __init__(
        self,
        where: Location,
        metrics: Metrics,
        *,
        prompts: bool = False,
        days: float | None = None,
        share: float = DEFAULT_DRAWN,
    ) -> None:
        """``prompts`` keeps them too; ``days`` after which everything of an answer is deleted.

        ``share`` of the answers that a guarantee is about is drawn at random: labels of these are held against it.
        Raises FeedbackUnavailable where the database cannot be opened.
        """
        self._where, self._prompts, self._days, self._share, self._metrics = where, prompts, days, share, metrics
        self._writer = Writer(where, days=days, count=metrics.feedback_answers)

    def kept(self, contents: Sequence[Content]) -> list[Kept]:
        """Of each prompt; slow for a long one, so it is called where prompts are tokenized."""
        return [Kept(mark_of(one), json.dumps(dict(one)) if self._prompts else None) for one in contents]

    def remember(
        self,
        caller: Caller,
        request_id: str,
        route: str,
        scorer: Scorer,
        policy: Policy,
        reports: Sequence[RiskReport],
        kept: Sequence[Kept],
        departures: Sequence[str],
    ) -> None:
        """Keep a row for each prompt, as soon as the answer's id is going to be told.

        ``departures`` are the request's from what a guarantee was calibrated on.
        """
        try:
            manifest, now = scorer.bundle.manifest, time.time()
            same = outside_as_calibrated(manifest, policy) and scorer.threshold(policy) == manifest.threshold
            promised = same and not departures
            self._writer.record([
                Answer(
                    uid=uuid.uuid4().hex,
                    request_id=request_id,
                    index=index,
                    caller=caller.name,
                    time=now,
                    route=route,
                    model=scorer.engine.identity.model,
                    bundle=scorer.bundle.reference,
                    digest=manifest.digest,
                    probes=manifest.files[PROBES].sha256,
                    policy=policy.name,
                    threshold=report.verdict.threshold,
                    risk=report.risk,
                    flagged=report.verdict.flagged,
                    decision=str(report.decision),
                    signals=dict(zip(manifest.signals, report.signals, strict=True)),
                    mark=own.mark,
                    prompt=own.prompt,
                    drawn=promised and report.context.applies and _is_given(report) and _CHANCE.random() < self._share,
                )
                for index, (report, own) in enumerate(zip(reports, kept, strict=True))
            ])  # fmt: skip
        except Exception as error:  # the answer is not to blame
            log.error("an answer was not kept for feedback", exc_info=error)
            self._metrics.feedback_answers("dropped", len(reports))

    async def label(self, caller: Caller, named: str, index: int, label: Label, comment: str | None) -> Stored | None:
        """By the ``id`` of an answer; on disk when this returns.  None: there is no such answer for this caller.

        Raises as ``Writer.label`` does.
        """
        given = Given(
            PREFIX.sub("", named, count=1), index, caller.name, "feedback" in caller.may, label, comment, time.time()
        )
        stored = await asyncio.wrap_future(self._writer.label(given))
        if stored is not None:
            agrees = stored.standing == "new" and stored.answered
            self._metrics.feedback(stored.model, stored.bundle, label, stored.flagged if agrees else None)
        return stored

    def tally(self, digest: str) -> Tally:
        """What labels say of a bundle's drawn answers; slow.  Raises FeedbackUnavailable."""
        database = self._where.open(create=False)
        try:
            return tally_of(database, digest)
        finally:
            database.close()

    @property
    def days(self) -> float | None:
        """After which answers are deleted; None: never."""
        return self._days

    def close(self) -> None:
        """Write what waits; the database is not used afterwards."""
        self._writer.close()


def _is_given(report: RiskReport) -> bool:
    return report.decision is Decision.CONTINUE and not report.verdict.flagged
