"""From httpx to our types and back: base URL, headers, requests, retries, and the meaning of a
response.

The only module that turns a status into an error.  No message holds a body or a header.

Retried: 429, 503, and connections that fail before the response headers arrive.  Scoring has no
side effects, so a repeated request is harmless, also with ``generate``: no part of the first answer
was seen.  Not retried: timeouts (no time is left, and a second request does not help a slow
server), any other status, and a stream that has begun."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import httpx

from hallutracer_client.errors import (
    APIError,
    ClientError,
    TimedOut,
    TransportError,
    UnexpectedAnswer,
    error_class,
)
from hallutracer_client.results import ErrorBody, ErrorEnvelope, InvalidBody, parse

T = TypeVar("T")

SCORE, MODELS, BUNDLES, READY = "/v1/risk/score", "/v1/models", "/v1/bundles", "/health/ready"
CONNECT_S = 5.0  # connect timeout: an unreachable host is reported long before a slow model
RETRIED = (429, 503)
# full jitter: uniform in [0, min(MOST_S, BASE_S 2^n)] before retry n = 0, 1, ..
BASE_S, MOST_S = 0.25, 8.0
MOST_RETRY_AFTER_S = 60.0  # a longer Retry-After fails the call at once


def checked_base_url(base_url: str) -> httpx.URL:
    """Return the URL without its trailing slash.  Raises ValueError."""
    try:
        url = httpx.URL(base_url.rstrip("/"))
    except httpx.InvalidURL as error:
        raise ValueError(f"base_url is not a URL: {error}") from None
    if url.userinfo:
        raise ValueError("base_url contains credentials; pass the key as api_key")
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        raise ValueError(f"base_url must be http(s)://HOST[:PORT][/PATH], not {base_url!r}")
    return url


def headers(api_key: str | None) -> dict[str, str]:
    """Return the headers of every request.  Raises ValueError for a key that is not a valid header
    value."""
    if api_key is None:
        return {}
    if not re.fullmatch(r"[!-~]+", api_key):
        raise ValueError("api_key is empty, or contains whitespace or non-ASCII characters")
    return {"Authorization": f"Bearer {api_key}"}


class Attempts:
    """One call's remaining time and retries.  ``clock`` gives monotonic seconds, ``draw`` a number
    in [0, 1)."""

    def __init__(
        self,
        max_retries: int,
        timeout_s: float,
        clock: Callable[[], float],
        draw: Callable[[], float],
    ) -> None:
        self._max_retries = max_retries
        self._timeout_s = timeout_s
        self._clock = clock
        self._draw = draw
        self._end = clock() + timeout_s
        self._retries = 0

    @property
    def timeout_message(self) -> str:
        """The message of a TimedOut."""
        tries = f" in {self._retries + 1} attempts" if self._retries else ""
        return f"no answer within {self._timeout_s:g} s{tries}; raise 'timeout', or ask for less"

    def remaining(self) -> float:
        """Return the seconds left for this attempt.  Raises TimedOut if there are none."""
        left = self._end - self._clock()
        if left <= 0:
            raise TimedOut(self.timeout_message)
        return left

    def pause(self, error: ClientError) -> float:
        """Return the seconds before the next attempt.  Raises ``error`` if there is none, or no
        time for it."""
        broke = isinstance(error, TransportError) and not isinstance(error, TimedOut)
        retryable = broke or (
            isinstance(error, APIError | UnexpectedAnswer) and error.status in RETRIED
        )
        if self._retries >= self._max_retries or not retryable:
            raise error
        retry_after: float | None = getattr(error, "retry_after", None)
        # Never before Retry-After, and with jitter, so that not all clients come back at once.
        most = min(MOST_S, BASE_S * 2.0**self._retries) if retry_after is None else BASE_S
        wait = (retry_after or 0.0) + self._draw() * most
        if (retry_after or 0.0) > MOST_RETRY_AFTER_S or self._clock() + wait >= self._end:
            raise error
        self._retries += 1
        return wait


def request(
    http: httpx.Client | httpx.AsyncClient, url: str, content: bytes | None, remaining_s: float
) -> httpx.Request:
    """Return a GET, or with ``content`` a POST of JSON; it continues the caller's trace, if there
    is one."""
    own = {} if content is None else {"Content-Type": "application/json"}
    if "opentelemetry.trace" in sys.modules:  # the program traces; nothing is imported for it
        from opentelemetry.propagate import inject

        inject(own)
    timeout = httpx.Timeout(remaining_s, connect=min(CONNECT_S, remaining_s))
    method = "GET" if content is None else "POST"
    return http.build_request(method, url, content=content, headers=own, timeout=timeout)


@contextmanager
def transport_errors(url: httpx.URL, timeout_message: str) -> Iterator[None]:
    """Turn httpx's exceptions into ours."""
    at = f"{url.scheme}://{url.netloc.decode('ascii')}"
    try:
        yield
    except httpx.ConnectTimeout as error:
        raise TransportError(f"connecting to {at} timed out; is the address right?") from error
    except httpx.TimeoutException as error:
        raise TimedOut(timeout_message) from error
    except httpx.ConnectError as error:
        raise TransportError(
            f"cannot connect to {at}: {error}; is the service running there?"
        ) from error
    except httpx.TransportError as error:
        raise TransportError(
            f"the connection to {at} broke: {str(error) or type(error).__name__}"
        ) from error
    except httpx.DecodingError as error:
        raise UnexpectedAnswer(
            f"{at} sent a body that does not match its Content-Encoding", status=200
        ) from error


def parsed(response: httpx.Response, shape: type[T]) -> T:
    """Return the body of a 200 as ``shape``.  Raises UnexpectedAnswer."""
    try:
        return parse(shape, response.content)
    except InvalidBody as error:
        raise unexpected(response, str(error)) from None


def refusal(response: httpx.Response) -> ClientError:
    """Return the error of a fully read response whose status is not 200."""
    text = response.headers.get("retry-after", "").strip()
    # None where it is absent or a date: the backoff applies then.
    retry_after = float(text) if text.isascii() and text.isdigit() and len(text) <= 9 else None
    try:
        body = parse(ErrorEnvelope, response.content).error
    except InvalidBody:
        return unexpected(response, "its body is not HalluTracer's error", retry_after)
    return api_error(body, response.status_code, response.headers.get("x-request-id"), retry_after)


def api_error(
    body: ErrorBody, status: int | None, request_id: str | None, retry_after: float | None = None
) -> APIError:
    """Return the error that an envelope describes."""
    return error_class(status, body.code, body.type)(
        body.message,
        status=status,
        code=body.code,
        param=body.param,
        request_id=request_id,
        retry_after=retry_after,
    )


def unexpected(
    response: httpx.Response, problem: str, retry_after: float | None = None
) -> UnexpectedAnswer:
    """Return the error for an answer that is not HalluTracer's: what came, from where, and the
    likely cause."""
    content_type = response.headers.get("content-type", "no content type").partition(";")[0][:80]
    return UnexpectedAnswer(
        f"{response.url} answered {response.status_code} with {content_type}, not as HalluTracer"
        f" does: {problem}.  Is another service at this address, or a proxy in between, or the"
        " service older than this client?",
        status=response.status_code,
        retry_after=retry_after,
    )
