"""What the OpenAPI document says of responses beside their models: errors, headers, streams, examples."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from service.api.response_schema import ScoreResponse


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
