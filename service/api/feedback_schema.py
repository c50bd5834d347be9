"""Request and answer of /v1/feedback."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StrictInt, StrictStr

from service.api.request_schema import RequestModel, Strict
from service.feedback.rows import Label, Standing

EXAMPLE: Any = {"id": "risk-c67afd5b1cb64cdeadfda66467e28928", "label": "hallucinated", "comment": "It is Honiara."}


def _text(value: str) -> str:
    if any(char == "\0" or "\ud800" <= char <= "\udfff" for char in value):
        raise ValueError("holds a NUL, or half of a surrogate pair: it is not text")
    return value


class FeedbackRequest(RequestModel):
    """What somebody says of an earlier answer."""

    model_config = RequestModel.model_config | {"json_schema_extra": {"example": EXAMPLE}}

    id: StrictStr = Field(
        pattern=r"^[A-Za-z0-9._:-]{1,140}$",
        description="of an answer (risk-.., chatcmpl-.., cmpl-..), or its x-request-id where a route has no ids",
    )
    index: StrictInt = Field(0, ge=0, le=4095, description="of the prompt, in a request of several")
    label: Label = Field(description="unclear: looked at and undecided; it also takes an earlier label back")
    comment: Annotated[StrictStr, Field(max_length=2000), AfterValidator(_text)] | None = Field(
        None, description="kept beside the label, as it is"
    )


class FeedbackResponse(Strict):
    """The label is on disk."""

    object: Literal["feedback"] = "feedback"
    id: str
    index: int
    label: Label
    standing: Standing = Field(description="new; repeated: you said so before; changed: your earlier label is history")
    conflict: bool = Field(description="another caller says otherwise")
    drawn: bool = Field(
        description="the service drew this answer at random when it gave it: only such labels are held against a "
        "guarantee"
    )
    counts: bool = Field(description="whether a recalibration would use this answer's label as things stand")
    reason: str | None = Field(description="why it does not count")
