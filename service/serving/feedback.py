"""What the service keeps of its answers and takes of labels; answering never waits for it, and never fails by it."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
import uuid
from collections.abc import Mapping
from typing import Any

from probes_store.manifest import PROBES
from service.access.callers import Caller
from service.data.rows import mark_of
from service.feedback.databases import Location
from service.feedback.rows import Answer, Given, Label, Stored, Tally, tally_of
from service.feedback.writer import Writer
from service.judging.guarantee import outside_as_calibrated
from service.policies.guard import Decision
from service.serving.judgement import Judgement, StoredPrompt
from service.serving.metrics import Metrics
from service.serving.retrievals import PREFIX
from service.settings import DEFAULT_DRAWN

log = logging.getLogger("hallutracer")
_CHANCE = random.SystemRandom()  # nobody can know or choose what is drawn
Content = Mapping[str, Any]  # prompt, messages, text without a template, or input_ids


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

    def stored(self, content: Content) -> StoredPrompt:
        """Return what is stored of a prompt; slow for a long one, so it is called where prompts are tokenized."""
        return StoredPrompt(mark_of(content), json.dumps(dict(content)) if self._prompts else None)

    def record(self, judgement: Judgement) -> None:
        """Keep a row for each prompt, as soon as the answer's id is going to be known."""
        try:
            manifest, policy, now = judgement.scorer.bundle.manifest, judgement.policy, time.time()
            same = outside_as_calibrated(manifest, policy) and judgement.scorer.threshold(policy) == manifest.threshold
            guaranteed = same and not judgement.request_violations
            rows = []
            for one in judgement.prompts:
                report = one.report
                assert one.stored is not None
                given = report.decision is Decision.CONTINUE and not report.verdict.flagged
                row = Answer(
                    uid=uuid.uuid4().hex,
                    request_id=judgement.request_id,
                    index=one.index,
                    caller=judgement.caller.name,
                    time=now,
                    route=judgement.route,
                    model=judgement.model,
                    bundle=judgement.bundle,
                    digest=manifest.digest,
                    probes=manifest.files[PROBES].sha256,
                    policy=policy.name,
                    threshold=report.verdict.threshold,
                    risk=report.risk,
                    flagged=report.verdict.flagged,
                    decision=str(report.decision),
                    signals=dict(zip(manifest.signals, report.signals, strict=True)),
                    mark=one.stored.mark,
                    prompt=one.stored.prompt,
                    drawn=guaranteed and report.context.applies and given and _CHANCE.random() < self._share,
                )
                rows.append(row)
            self._writer.record(rows)
        except Exception as error:  # the answer is not to blame
            log.error("an answer was not kept for feedback", exc_info=error)
            self._metrics.feedback_answers("dropped", len(judgement.prompts))

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
