"""What the service keeps of its answers and takes of labels; answering never waits for it, and
never fails by it."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from probes_store.manifest import PROBES
from service.access.callers import Caller
from service.data.rows import mark_of
from service.feedback.databases import Location
from service.feedback.rows import Answer, Given, Label, Stored, Tally, tally_of
from service.feedback.writer import Writer
from service.judging.guarantee import outside_as_calibrated
from service.policies.guard import Decision
from service.serving.judgement import PREFIX, Judgement, StoredPrompt
from service.serving.metrics import Metrics
from service.settings import DEFAULT_DRAWN

log = logging.getLogger("hallutracer")
_CHANCE = random.SystemRandom()  # nobody can know or choose what is drawn
Content = Mapping[str, Any]  # prompt, messages, text without a template, or input_ids


@dataclass(eq=False)
class Feedback:
    """Answers and labels, into one database."""

    where: Location
    metrics: Metrics
    prompts: bool = field(default=False, kw_only=True)  # whether they are kept, too
    # after so many everything of an answer is deleted; None: never
    days: float | None = field(default=None, kw_only=True)
    # of the answers that a guarantee is about, drawn at random: labels of these are held against it
    share: float = field(default=DEFAULT_DRAWN, kw_only=True)

    def __post_init__(self) -> None:
        """Raises FeedbackUnavailable where the database cannot be opened."""
        self._count: Callable[[str, int], None] = lambda fate, number: self.metrics.count(
            "feedback_answers_total", fate, by=number
        )
        self._writer = Writer(self.where, days=self.days, count=self._count)

    def stored(self, content: Content) -> StoredPrompt:
        """Return what is stored of a prompt; slow for a long one."""
        return StoredPrompt(mark_of(content), json.dumps(dict(content)) if self.prompts else None)

    def record(self, judgement: Judgement) -> None:
        """Keep a row for each prompt, as soon as the answer's id is going to be known."""
        try:
            self._writer.record(self._rows(judgement))
        except Exception as error:  # the answer is not to blame
            log.error("an answer was not kept for feedback", exc_info=error)
            self._count("dropped", len(judgement.prompts))

    def _rows(self, judgement: Judgement) -> list[Answer]:
        manifest = judgement.scorer.bundle.manifest
        policy = judgement.policy
        now = time.time()
        rows = []
        guaranteed = outside_as_calibrated(manifest, policy) and policy.passage_truth == 1.0
        guaranteed = guaranteed and not judgement.request_violations
        for prompt in judgement.prompts:
            report, verdict = prompt.report, prompt.report.verdict
            assert prompt.stored is not None
            passage = None if prompt.shape is None else prompt.shape.passage
            calibrated = guaranteed and verdict.threshold == manifest.threshold_for(passage)
            given = report.decision is Decision.CONTINUE and not verdict.flagged
            rows.append(
                Answer(
                    uid=uuid.uuid4().hex,
                    request_id=judgement.request_id,
                    index=prompt.index,
                    caller=judgement.caller.name,
                    time=now,
                    route=judgement.route,
                    model=judgement.model,
                    bundle=judgement.bundle,
                    digest=manifest.digest,
                    probes=manifest.files[PROBES].sha256,
                    policy=policy.name,
                    threshold=verdict.threshold,
                    risk=report.bundle_risk,
                    flagged=verdict.flagged,
                    decision=str(report.decision),
                    signals=dict(zip(manifest.signals, report.signals, strict=True)),
                    mark=prompt.stored.mark,
                    prompt=prompt.stored.prompt,
                    drawn=calibrated
                    and report.context.applies
                    and given
                    and _CHANCE.random() < self.share,
                )
            )
        return rows

    async def label(
        self, caller: Caller, named: str, index: int, label: Label, comment: str | None
    ) -> Stored | None:
        """Store a label by the ``id`` of an answer and return it, on disk; None: no such answer for
        this caller.

        Raises as ``Writer.label`` does."""
        request_id, every = PREFIX.sub("", named, count=1), "feedback" in caller.may
        given = Given(request_id, index, caller.name, every, label, comment, time.time())
        stored = await asyncio.wrap_future(self._writer.label(given))
        if stored is not None:
            agrees = stored.standing == "new" and stored.answered
            self.metrics.feedback(
                stored.model, stored.bundle, label, stored.flagged if agrees else None
            )
        return stored

    def tally(self, digest: str) -> Tally:
        """Return what labels say of a bundle's drawn answers; slow.  Raises FeedbackUnavailable."""
        with closing(self.where.open(create=False)) as database:
            return tally_of(database, digest)

    def close(self) -> None:
        """Write what waits; the database is not used afterwards."""
        self._writer.close()
