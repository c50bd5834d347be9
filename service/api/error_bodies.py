"""An error in the words of a route's protocol: OpenAI's envelope, which is ours, Anthropic's, or an
annex's own."""

from __future__ import annotations

from service.access.routes import (
    CHAT_ROUTE,
    COUNT_ROUTE,
    MESSAGES_ROUTE,
    RESPONSES_ROUTE,
    TEXT_ROUTE,
)
from service.annexes import annexes, imported
from service.errors import ContextLengthExceeded, PromptTooLong

# Neither protocol has a 422.
_AS_400 = (RESPONSES_ROUTE, MESSAGES_ROUTE, COUNT_ROUTE)
# Both protocols answer 400 where a prompt is too long, and OpenAI's clients act on the code.
_TOO_LONG_AS_400 = (CHAT_ROUTE, TEXT_ROUTE, RESPONSES_ROUTE, MESSAGES_ROUTE, COUNT_ROUTE)
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(status: int, message: str, code: str, param: str | None = None) -> dict[str, object]:
    """Return the error envelope."""
    kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def anthropic_body(status: int, message: str, request_id: str) -> dict[str, object]:
    """Return Anthropic's envelope."""
    kind = _ANTHROPIC.get(status, "invalid_request_error" if 400 <= status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def body_on(
    route: str, request_id: str, status: int, message: str, code: str, param: str | None
) -> tuple[int, dict[str, object]]:
    """Return status and body of an error on a route."""
    if code == PromptTooLong.code and route in _TOO_LONG_AS_400:
        status, code = ContextLengthExceeded.status, ContextLengthExceeded.code
    status = 400 if status == 422 and route in _AS_400 else status
    if route.startswith(MESSAGES_ROUTE):  # what this service does not have below it, too
        return status, anthropic_body(status, message, request_id)
    for annex in annexes():
        if route in annex.error_bodies:
            return status, imported(annex.error_bodies[route])(status, message)
    return status, error_body(status, message, code, param)
