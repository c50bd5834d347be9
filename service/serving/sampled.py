"""Questions of a bundle's evaluation, answered by the model and judged as in training."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from service.data.judges import make_judge
from service.data.labels import answer_texts, verdict_on
from service.data.options import JudgeOptions
from service.engines.base import Sampling, TokenIds
from service.judging.evaluation import Sample, SampleQuestion
from service.policies.guard import OBSERVE
from service.scoring import RiskReport, Scorer
from service.turn import Outcome

TOGETHER = 8  # questions that ``hallutracer try`` asks at once; more would crowd out traffic
Verdict = Literal["right", "wrong", "abstained"]
VERDICTS: dict[str, Verdict] = {
    "factual": "right",
    "hallucinated": "wrong",
    "abstained": "abstained",
    "empty": "abstained",
    "unfinished thought": "abstained",
}


@dataclass(frozen=True)
class Answered:
    """One question of the sample and what came of it."""

    question: SampleQuestion
    report: RiskReport
    # as in training; None where the policy withholds the answer, or ends it under way
    verdict: Verdict | None
    # what the model said, or thinks where that never ends; None where the policy withholds it
    answer: str | None


async def ask(scorer: Scorer, sample: Sample, number: int) -> Answered:
    """Score and answer question ``number``, whatever the risk.  Raises what ``Scorer.run``
    raises."""
    sampling = Sampling(max_tokens=sample.max_tokens)
    prompt = scorer.render(sample.questions[number].prompt)
    return judged(
        sample, number, scorer, prompt, await scorer.last_report(prompt, OBSERVE, sampling)
    )


def judged(
    sample: Sample, number: int, scorer: Scorer, prompt: TokenIds, report: RiskReport
) -> Answered:
    """Return question ``number``, rendered as ``prompt``, with its last report, judged.

    A thought does not count, whether the answer or the end of the prompt opened it."""
    question = sample.questions[number]
    if not report.outcome.shows:
        return Answered(question, report, None, None)
    if report.outcome is Outcome.STOPPED:
        return Answered(question, report, None, report.shown.text.strip())
    text, spoken = answer_texts(report.shown, prompt, scorer.engine)
    judge = make_judge(JudgeOptions("exact" if sample.judge == "exact" else "contains"))
    verdict = verdict_on(
        spoken, question.prompt, question.answers, judge, re.compile(sample.abstain_pattern)
    )
    return Answered(
        question, report, VERDICTS[verdict], (text if spoken is None else spoken).strip()
    )
