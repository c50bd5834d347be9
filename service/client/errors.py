"""What can go wrong between a caller and the service, as one tree.

    ClientError
    |-- Withheld                    an answer was asked for that the gate did not let through; carries the risk
    |-- TransportError              no whole answer: no connection, or one that broke off
    |   `-- TimedOut                the time for the whole call is used up
    |-- UnexpectedAnswer            an answer, but not HalluTracer's: a proxy's page, another service, a field missing
    `-- APIError                    the service's own refusal: status, code, message, param, request_id, retry_after
        |-- RequestRefused    4xx   the request is at fault and would fail again unchanged
        |   |-- Unauthorized  401
        |   `-- NotFound      404   no such bundle, model or path
        |-- Overloaded        429   the queue is full
        `-- ServerError       5xx
            |-- NotReady      503
            `-- DeadlineExceeded 504

A wrong argument is a ValueError or TypeError before anything is sent.  No message holds the API key or a prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.client.results import Risk


class ClientError(Exception):
    """Root of the tree."""


class Withheld(ClientError):
    """The decision was not ``continue``: there is no answer to read, only ``risk`` (and perhaps ``risk.message``)."""

    def __init__(self, risk: Risk) -> None:
        super().__init__(
            f"the answer was withheld: decision {risk.decision!r} at risk {risk.risk:.3f}, threshold "
            f"{risk.threshold:.3f}; look at 'gated' before reading the answer"
        )
        self.risk = risk


class TransportError(ClientError):
    """No connection, or it broke before the answer was whole."""


class TimedOut(TransportError):
    """The client's timeout passed."""


class UnexpectedAnswer(ClientError):
    """Something answered, but not a HalluTracer service of a version this client knows.

    ``status`` is the HTTP status; ``retry_after`` the seconds it asked to wait, where it did.
    """

    def __init__(self, message: str, *, status: int, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class APIError(ClientError):
    """The service refused or failed.  ``status`` is None for an error inside a stream that had begun as a 200."""

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
        known_as = f" [request {request_id}]" if request_id else ""
        super().__init__(f"{at} {code}: {message}{known_as}")
        self.message = message
        self.status = status
        self.code = code
        self.param = param  # the request field at fault
        self.request_id = request_id
        self.retry_after = retry_after  # seconds


class RequestRefused(APIError):
    """The request is at fault and would fail again unchanged."""


class Unauthorized(RequestRefused):
    """The service wants an API key, or another one."""


class NotFound(RequestRefused):
    """No such bundle, model or path on this service."""


class Overloaded(APIError):
    """The queue is full; ``retry_after`` says when to come back."""


class ServerError(APIError):
    """The service failed."""


class NotReady(ServerError):
    """The service is loading or shutting down."""


class DeadlineExceeded(ServerError):
    """The request's deadline passed on the server."""


_BY_STATUS = {401: Unauthorized, 404: NotFound, 429: Overloaded, 503: NotReady, 504: DeadlineExceeded}
_BY_CODE = {"overloaded": Overloaded, "not_ready": NotReady, "deadline_exceeded": DeadlineExceeded}


def error_class(status: int | None, code: str, kind: str) -> type[APIError]:
    """The class for an HTTP status, or, inside a stream (``status`` None), for the wire's code and type."""
    if status is None:
        return _BY_CODE.get(code, RequestRefused if kind == "invalid_request_error" else ServerError)
    return _BY_STATUS.get(status, RequestRefused if status < 500 else ServerError)
