"""What the scoring routes answer: risks, answers, a stream's chunks."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from service.api.request_schema import Risk, Strict


class BundleRef(Strict):
    """The bundle whose probes gave the risk."""

    name: str
    version: int
    digest: str


class CompletionOut(Strict):
    """The answer, decoded from the same KV cache as the risk."""

    text: str
    finish_reason: Literal["stop", "length"]
    completion_tokens: int


class GuaranteeOut(Strict):
    """The promise of the bundle's threshold, as it stands for this request."""

    alpha: float = Field(
        description="of the question groups that are answered, counted equally, at most this share is answered with a "
        "hallucination"
    )
    delta: float = Field(description="the promise has confidence 1 - delta")
    holds: bool = Field(description="nothing is known here that voids it; GET /v1/bundles has its whole statement")
    void: list[str] = Field(description="why it does not hold for this request")


class RiskOut(Strict):
    """One prompt's risk."""

    index: int
    risk: Risk
    depth_mean: float
    decision: Literal["continue", "abstain", "block", "retrieve", "fallback"]
    flagged: bool = Field(description="the risk applies and reached the threshold, whatever the policy's action")
    threshold: float
    interval: list[Risk] | None = Field(
        None,
        min_length=2,
        max_length=2,
        description="where 95 % of refits on other training rows would put the risk; not where the truth lies",
    )
    outside_training: bool | None = Field(None, description="the prompt lies outside what training saw")
    distance: float | None = Field(None, description="of the prompt's logits to training's; outside from 1 on")
    applies: bool | None = Field(
        None,
        description="false: the prompt asks for no fact, so the risk says nothing of it; null: the bundle cannot tell",
    )
    asks: Risk | None = Field(None, description="the probability that the prompt asks for a fact")
    message: str | None = Field(None, description="to show instead of an answer; before it, if that is given")
    trajectory: list[float] | None = Field(None, description="truth logit of each layer")
    running_mean: list[float] | None = Field(None, description="mean of the truth logits up to each layer")
    completion: CompletionOut | None = None


class Usage(Strict):
    """Token counts, as vLLM and OpenAI name them."""

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int


class RetrievalOut(Strict):
    """What fetching a passage changed."""

    of: str = Field(description="id of the earlier answer")
    known: bool = Field(description="this service remembers its risk, and the same bundle says both")
    risk_before: Risk | None = None
    drop: float | None = Field(None, description="risk_before minus the risk now")


class ScoreResponse(Strict):
    """A list of risks, in the order of the prompts."""

    id: str
    object: Literal["risk.list"] = "risk.list"
    created: int
    model: str
    policy: str
    bundle: BundleRef
    guarantee: GuaranteeOut | None = Field(None, description="if the bundle has one")
    retrieval: RetrievalOut | None = Field(None, description="if the request names an earlier one")
    data: list[RiskOut]
    usage: Usage


class Delta(Strict):
    """A piece of an answer."""

    text: str


class CompletionChunk(Strict):
    """One event of a stream, after the risk.  The last one has a ``finish_reason`` and the usage."""

    id: str
    object: Literal["completion.chunk"] = "completion.chunk"
    index: int = 0
    delta: Delta
    finish_reason: Literal["stop", "length"] | None = None
    usage: Usage | None = None


class ErrorBody(BaseModel):
    """The cause and the remedy."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str


class ErrorResponse(BaseModel):
    """The error envelope."""

    error: ErrorBody


RISK_EXAMPLE: dict[str, Any] = {
    "id": "risk-c67afd5b1cb64cdeadfda66467e28928",
    "object": "risk.list",
    "created": 1795186131,
    "model": "hallutracer-demo",
    "policy": "gate",
    "bundle": {"name": "demo", "version": 1, "digest": "sha256:" + "b" * 64},
    "data": [
        {
            "index": 0, "risk": 0.0321, "depth_mean": 1.986, "decision": "continue", "flagged": False,
            "threshold": 0.3098,
            "completion": {"text": " It is Rome.", "finish_reason": "stop", "completion_tokens": 5},
        },
        {
            "index": 1, "risk": 0.8138, "depth_mean": -1.422, "decision": "abstain", "flagged": True,
            "threshold": 0.3098, "message": "I am not sure.",
        },
    ],
    "usage": {"prompt_tokens": 22, "cached_tokens": 0, "completion_tokens": 5, "total_tokens": 27},
}  # fmt: skip

STREAM_EXAMPLE = (
    'data: {"id": "risk-1f", "object": "risk.list", "data": [{"index": 0, "risk": 0.0321, "decision": "continue", '
    "...}], ...}\n\n"
    'data: {"id": "risk-1f", "object": "completion.chunk", "index": 0, "delta": {"text": " It"}}\n\n'
    'data: {"id": "risk-1f", "object": "completion.chunk", "index": 0, "delta": {"text": ""}, '
    '"finish_reason": "stop", "usage": {...}}\n\n'
    "data: [DONE]\n\n"
)


def events(data: str) -> dict[str, Any]:
    """Server-sent events, as their readers see each; ``data``: what its JSON may be."""
    return {
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"type": "string", "description": f"JSON: {data}; at last [DONE]"}},
    }


HEADERS: dict[str, Any] = {
    name: {"description": description, "schema": {"type": "string"}}
    for name, description in {
        "x-request-id": "the request's own, or a generated one",
        "x-queue-time": "milliseconds until the forward pass began",
        "x-total-time": "milliseconds until the answer began",
        "x-inference-time": "milliseconds of prefill, probe and decoding",
        "x-hallutracer-bundle": "name:version of the bundle",
        "x-hallutracer-risk": "if there is one prompt",
        "x-hallutracer-decision": "if there is one prompt",
    }.items()
}
_RETRY = {"Retry-After": {"description": "seconds to wait", "schema": {"type": "integer"}}}


def errors(**descriptions: str) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses of the error envelope: ``errors(_404="no such bundle")``."""
    return {
        int(status.removeprefix("_")): {"model": ErrorResponse, "description": description}
        | ({"headers": _RETRY} if status in ("_429", "_503") else {})
        for status, description in descriptions.items()
    }


FAILURES = errors(
    _400="the body is not JSON",
    _401="no bearer key, or an unknown one",
    _403="the request lets more through than its caller may (--callers-may)",
    _404="no such model, bundle or policy is loaded",
    _408="the body did not arrive in time",
    _413="the body or a prompt is too large; prompts are never truncated",
    _422="a field is wrong, or not supported",
    _429="the queue is full",
    _500="the engine failed",
    _502="the server that the policy falls back on failed",
    _503="not ready: loading, or shutting down; or no memory for the body: Retry-After",
    _504="the deadline passed",
)
"""Of every route that reads a prompt."""

_SCORED: dict[int | str, dict[str, Any]] = {
    200: {
        "model": ScoreResponse,
        "description": "the risks, or with 'stream' the events: the risk first, then the answer",
        "headers": HEADERS,
        "content": {
            "application/json": {"example": RISK_EXAMPLE},
            "text/event-stream": {
                "schema": events("first one risk.list, then completion.chunk objects or an error"),
                "example": STREAM_EXAMPLE,
            },
        },
    }
}
SCORE_RESPONSES = _SCORED | FAILURES
