"""POST /v1/feedback: was an earlier answer right?"""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Body, Request

from service.access.routes import FEEDBACK_ROUTE
from service.api.answering import while_connected
from service.api.body import JsonRoute
from service.api.dependencies import TheService, caller_of
from service.api.feedback_schema import FeedbackRequest, FeedbackResponse
from service.api.response_docs import errors
from service.errors import DeadlineExceeded, NotFound
from service.feedback.rows import Label, Stored

router = APIRouter(tags=["feedback"], route_class=JsonRoute)
RESPONSES = errors(
    _400="the body is not JSON",
    _401="no bearer key, or an unknown one",
    _404="no such answer is known to this caller, or the service keeps no feedback",
    _408="the body did not arrive in time",
    _413="the body is too large",
    _422="a field is wrong",
    _429="too much feedback waits to be written",
    _503="the database cannot be written just now, or the service is shutting down",
    _504="the database took too long; the label may be there or not: send it again",
)


@router.post(FEEDBACK_ROUTE, summary="Say whether an answer was right", responses=RESPONSES)
async def feedback(body: Annotated[FeedbackRequest, Body()], request: Request, service: TheService) -> FeedbackResponse:
    """Store whether an answer was right.  The response is sent once the label is on disk."""
    kept = service.feedback
    if kept is None:
        raise NotFound("this service keeps no feedback: its operator can start it with --feedback-db")
    caller = caller_of(request, service)
    seconds = service.settings.deadline_s
    try:
        async with while_connected(request), asyncio.timeout(seconds):
            stored = await kept.label(caller, body.id, body.index, body.label, body.comment)
    except TimeoutError:
        message = f"the label was not on disk within {seconds:g} s and may come to be: send it again"
        raise DeadlineExceeded(message) from None
    if stored is None:
        past = "" if kept.days is None else f", it is older than {kept.days:g} days"
        raise NotFound(
            f"no answer with this id and index {body.index} is known to this caller: the id is another one, of another "
            f"caller{past}, or the answer was not kept",
            param="id",
        )
    reason = _reason(body.label, stored)
    monitor = service.catalogue.monitors.get(stored.bundle)
    if monitor is not None and stored.tally is not None:
        monitor.count(stored.tally)
    return FeedbackResponse(
        id=body.id,
        index=body.index,
        label=body.label,
        standing=stored.standing,
        conflict=stored.conflict,
        drawn=stored.drawn,
        counts=reason is None,
        reason=reason,
    )


def _reason(label: Label, stored: Stored) -> str | None:
    """Why a label does not count."""
    if not stored.answered:
        return f"the decision was {stored.decision}: no answer of this model was given"
    if label == "unclear":
        return "it decides nothing"
    if stored.conflict:
        return "another caller says otherwise"
    return None
