"""POST /v1/feedback: whether an earlier answer was right."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Request
from pydantic import AfterValidator, Field, StrictInt, StrictStr

from service.annexes.feedback import FEEDBACK_ROUTE
from service.annexes.feedback.store import Feedback
from service.api.asking import while_connected
from service.api.auth import TheService, caller_of
from service.api.json_body import JsonRoute
from service.api.reply import errors
from service.api.request_schema import RequestModel, Strict
from service.errors import DeadlineExceeded, NotFound
from service.feedback.rows import Label, Standing

EXAMPLE: dict[str, Any] = {
    "id": "risk-c67afd5b1cb64cdeadfda66467e28928",
    "label": "hallucinated",
    "comment": "It is Honiara.",
}


def _text(value: str) -> str:
    if any(char == "\0" or "\ud800" <= char <= "\udfff" for char in value):
        raise ValueError("holds a NUL, or half of a surrogate pair: it is not text")
    return value


class FeedbackRequest(RequestModel):
    """What somebody says of an earlier answer."""

    model_config = RequestModel.model_config | {"json_schema_extra": {"example": EXAMPLE}}

    id: StrictStr = Field(
        pattern=r"^[A-Za-z0-9._:-]{1,140}$",
        description=(
            "of an answer (risk-.., chatcmpl-.., cmpl-.., resp_.., msg_..), or its x-request-id"
            " where a route has no ids"
        ),
    )
    index: StrictInt = Field(0, ge=0, le=4095, description="of the prompt, in a request of several")
    label: Label = Field(
        description="unclear: looked at and undecided; it also takes an earlier label back"
    )
    comment: Annotated[StrictStr, Field(max_length=2000), AfterValidator(_text)] | None = Field(
        None, description="kept beside the label, as it is"
    )


class FeedbackResponse(Strict):
    """The label is on disk."""

    object: Literal["feedback"] = "feedback"
    id: str
    index: int
    label: Label
    standing: Standing = Field(
        description="new; repeated: you said so before; changed: your earlier label is history"
    )
    conflict: bool = Field(description="another caller says otherwise")
    drawn: bool = Field(
        description=(
            "the service drew this answer at random when it gave it: only such labels are "
            "held against a guarantee"
        )
    )
    counts: bool = Field(
        description="whether a recalibration would use this answer's label as things stand"
    )
    reason: str | None = Field(description="why it does not count")


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
async def feedback(
    body: Annotated[FeedbackRequest, Body()], request: Request, service: TheService
) -> FeedbackResponse:
    """Store whether an answer was right.  The response is sent once the label is on disk."""
    store = service.feedback
    if not isinstance(store, Feedback):
        raise NotFound(
            "this service keeps no feedback: its operator can start it with --feedback-db"
        )
    caller = caller_of(request, service)
    seconds = service.settings.deadline_s
    try:
        async with while_connected(request), asyncio.timeout(seconds):
            stored = await store.label(caller, body.id, body.index, body.label, body.comment)
    except TimeoutError:
        raise DeadlineExceeded(
            f"the label was not on disk within {seconds:g} s and may come to be: send it again"
        ) from None
    if stored is None:
        past = "" if store.days is None else f", it is older than {store.days:g} days"
        raise NotFound(
            f"no answer with this id and index {body.index} is known to this caller: the id is"
            f" another one, of another caller{past}, or the answer was not kept",
            param="id",
        )
    monitor = service.catalogue.monitors.get(stored.bundle)
    if monitor is not None and stored.tally is not None:
        monitor.count(stored.tally)
    reason = None  # why a label does not count
    if not stored.answered:
        reason = f"the decision was {stored.decision}: no answer of this model was given"
    elif body.label == "unclear":
        reason = "it decides nothing"
    elif stored.conflict:
        reason = "another caller says otherwise"
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
