"""The client's exceptions, as one tree with the root ``ClientError``.

A wrong argument raises ValueError or TypeError before anything is sent.  No message contains the
API key or a prompt.
"""

from __future__ import annotations


class ClientError(Exception):
    """Root of the tree."""


class TransportError(ClientError):
    """No connection, or it broke before the answer was complete."""


class TimedOut(TransportError):
    """The client's timeout has passed."""


class UnexpectedAnswer(ClientError):
    """The answer is not that of a HalluTracer service of a known version.

    ``status`` is the HTTP status, ``retry_after`` the seconds of a Retry-After header."""

    def __init__(self, message: str, *, status: int, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class APIError(ClientError):
    """The service refused or failed.  ``status`` is None inside a stream (which began with 200)."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None,
        code: str,
        param: str | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        at = "in the stream" if status is None else str(status)
        request = f" [request {request_id}]" if request_id else ""
        super().__init__(f"{at} {code}: {message}{request}")
        self.message = message
        self.status = status
        self.code = code
        self.request_id = request_id
        self.param = param  # the request field that is wrong
        self.retry_after = retry_after  # seconds


class RequestRefused(APIError):
    """4xx: the request is wrong and would fail again unchanged."""


class Unauthorized(RequestRefused):
    """401: the API key is missing or unknown."""


class NotFound(RequestRefused):
    """404: no such bundle, model or path on this service."""


class Overloaded(APIError):
    """429: the queue is full; retry after ``retry_after`` seconds."""


class ServerError(APIError):
    """5xx: the service failed."""


class NotReady(ServerError):
    """503: the service is loading or shutting down."""


class DeadlineExceeded(ServerError):
    """504: the request's deadline has passed on the server."""


_BY_STATUS = {
    401: Unauthorized,
    404: NotFound,
    429: Overloaded,
    503: NotReady,
    504: DeadlineExceeded,
}
_BY_CODE = {"overloaded": Overloaded, "not_ready": NotReady, "deadline_exceeded": DeadlineExceeded}


def error_class(status: int | None, code: str, kind: str) -> type[APIError]:
    """Return the class for an HTTP status, or inside a stream (``status`` None) for the error's
    code and type."""
    if status is None:
        return _BY_CODE.get(
            code, RequestRefused if kind == "invalid_request_error" else ServerError
        )
    return _BY_STATUS.get(status, RequestRefused if status < 500 else ServerError)
