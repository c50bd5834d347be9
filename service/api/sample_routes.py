"""GET /v1/bundles/{bundle}/sample/{number}: one question that the bundle carries, answered by the model and judged."""

from __future__ import annotations

import asyncio
from functools import lru_cache

from fastapi import APIRouter

from service.api.catalogue import RESPONSES
from service.api.catalogue_schema import SampleAnswerOut
from service.api.dependencies import TheService
from service.api.response_docs import errors
from service.errors import NotFound
from service.judging.sample import sample_of

router = APIRouter(tags=["catalogue"])
_sample_of = lru_cache(maxsize=32)(sample_of)  # reads a file; a bundle never changes
DOCUMENTED = RESPONSES | errors(_404="no such bundle is loaded, or it carries no such question")


@router.get(
    "/v1/bundles/{bundle}/sample/{number}", summary="A held-out question, answered and judged", responses=DOCUMENTED
)
async def sample_answer(bundle: str, number: int, service: TheService) -> SampleAnswerOut:
    """One question of the bundle's sample: the risk before the answer, the answer, and whether it is right."""
    scorer = service.ready.scorer(bundle, None)
    sample = await asyncio.to_thread(_sample_of, scorer.bundle)
    if sample is None or not 0 <= number < len(sample.questions):
        count = 0 if sample is None else len(sample.questions)
        raise NotFound(f"{scorer.bundle.reference} carries {count} questions, and none of number {number}")
    found = await service.sampled.answer(scorer, sample, number)
    report = found.report
    return SampleAnswerOut(
        number=number,
        prompt=found.question.prompt,
        kind=found.question.kind,
        risk=report.risk,
        threshold=report.verdict.threshold,
        flagged=report.verdict.flagged,
        outside_training=None if report.uncertain is None else report.uncertain.outside,
        answer=found.answer,
        verdict=found.verdict,
        accepted=list(found.question.answers),
    )
