"""Questions of a bundle's evaluation that the running service answers, judged as in training."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from typing import Literal

from service.data.judges import make_judge
from service.data.labels import verdict_on
from service.data.options import JudgeOptions
from service.engines.base import Sampling
from service.judging.evaluation import Sample, SampleQuestion
from service.policies.guard import OBSERVE
from service.scoring import RiskReport, Scorer

TOGETHER = 8  # questions; more would crowd out traffic
Verdict = Literal["right", "wrong", "abstained"]
VERDICTS: dict[str, Verdict] = {
    "factual": "right", "hallucinated": "wrong", "abstained": "abstained", "empty": "abstained"
}  # fmt: skip


@dataclass(frozen=True)
class Answered:
    """One question of the sample, answered and judged as in training."""

    question: SampleQuestion
    report: RiskReport
    verdict: Verdict
    answer: str  # what the model said


async def ask(scorer: Scorer, sample: Sample, number: int, threshold: float | None = None) -> Answered:
    """Score and answer question ``number``, whatever the risk.  Raises what ``Scorer.run`` raises.

    ``threshold``: that of the service, where it has one of its own."""
    question, sampling = sample.questions[number], Sampling(max_tokens=sample.max_tokens)
    report = await scorer.last_report(scorer.render(question.prompt), OBSERVE.at(threshold), sampling)
    assert report.completion is not None
    text = report.completion.text
    judge = make_judge(JudgeOptions("exact" if sample.judge == "exact" else "contains"))
    verdict = verdict_on(text, question.prompt, question.answers, judge, re.compile(sample.abstain_pattern))
    return Answered(question, report, VERDICTS[verdict], text.strip())


@dataclass
class Sampled:
    """The answers of the running service, by the bundle's digest and the question's number."""

    threshold: float | None = None  # the service's own
    answers: dict[tuple[str, int], Answered] = field(default_factory=dict)
    _turn: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(TOGETHER))

    async def answer(self, scorer: Scorer, sample: Sample, number: int) -> Answered:
        """Return what ``ask`` gives, or gave before."""
        key = scorer.bundle.manifest.digest, number
        async with self._turn:
            if key not in self.answers:
                self.answers[key] = await ask(scorer, sample, number, self.threshold)
        return self.answers[key]
