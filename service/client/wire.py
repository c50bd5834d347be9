"""Between httpx and our types: the checked base address, headers, and what a response means.

The only file that turns a status into an error.  Neither a body nor a header ends up in a message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import httpx

from service.client.errors import APIError, ClientError, TimedOut, TransportError, UnexpectedAnswer, error_class
from service.client.results import ErrorBody, ErrorEnvelope, NotOurs, parse
from service.client.retry import Attempts, RetryPolicy, retry_after_s

T = TypeVar("T")

SCORE, MODELS, BUNDLES, READY = "/v1/risk/score", "/v1/models", "/v1/bundles", "/health/ready"
CONNECT_S = 5.0  # a host that does not answer at all is known to be gone long before a model is known to be slow


def checked_base_url(base_url: str) -> httpx.URL:
    """The address, without a trailing slash.  Raises ValueError."""
    try:
        url = httpx.URL(base_url.rstrip("/"))
    except httpx.InvalidURL as error:
        raise ValueError(f"base_url is not an address: {error}") from None
    if url.userinfo:
        raise ValueError("base_url holds a user or a password; give a key as api_key instead")
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        raise ValueError(f"base_url is http(s)://HOST[:PORT][/PATH], not {base_url!r}")
    return url


def headers(api_key: str | None) -> dict[str, str]:
    """Headers of every request.  Raises ValueError for a key that no header can hold."""
    if api_key is None:
        return {}
    if not re.fullmatch(r"[!-~]+", api_key):
        raise ValueError("api_key is empty, or holds a space, a line break or a character outside ASCII")
    return {"Authorization": f"Bearer {api_key}"}


@dataclass(frozen=True)
class Shared:
    """What both clients are made of besides a connection pool."""

    base_url: httpx.URL
    timeout_s: float
    policy: RetryPolicy
    clock: Callable[[], float]
    draw: Callable[[], float]

    @classmethod
    def checked(
        cls, base_url: str, timeout: float, max_retries: int, clock: Callable[[], float], draw: Callable[[], float]
    ) -> Shared:
        """From a client's arguments.  Raises ValueError."""
        if not 0 < timeout < float("inf"):
            raise ValueError(f"timeout is a positive number of seconds, not {timeout}")
        return cls(checked_base_url(base_url), timeout, RetryPolicy(max_retries), clock, draw)

    @property
    def silence(self) -> str:
        """What to say when a stream stays silent for too long."""
        return f"the stream was silent for {self.timeout_s:g} s"

    def attempts(self) -> Attempts:
        """The attempts of a call that begins now."""
        return Attempts(self.policy, self.timeout_s, self.clock, self.draw)

    def request(
        self, http: httpx.Client | httpx.AsyncClient, path: str, content: bytes | None, remaining_s: float
    ) -> httpx.Request:
        """A GET, or with ``content`` a POST of JSON."""
        return http.build_request(
            "GET" if content is None else "POST",
            f"{self.base_url}{path}",
            content=content,
            headers=None if content is None else {"Content-Type": "application/json"},
            timeout=httpx.Timeout(remaining_s, connect=min(CONNECT_S, remaining_s)),
        )

    def allow_silence(self, response: httpx.Response) -> None:
        """Let each gap in a stream whose head is there, and whose body is unread, last as long as a whole call.

        The request was sent with what its attempt had left.  httpcore reads this entry when it begins to read a body.
        """
        response.request.extensions["timeout"]["read"] = self.timeout_s


@contextmanager
def transport_errors(url: httpx.URL, late: str) -> Iterator[None]:
    """Turn httpx's exceptions into ours; ``late`` is the message for a timeout."""
    at = f"{url.scheme}://{url.netloc.decode('ascii')}"
    try:
        yield
    except httpx.ConnectTimeout as error:
        raise TransportError(f"{at} did not take the connection in time; is the address right?") from error
    except httpx.TimeoutException as error:
        raise TimedOut(late) from error
    except httpx.ConnectError as error:
        raise TransportError(f"cannot connect to {at}: {error}; is the service running there?") from error
    except httpx.TransportError as error:
        raise TransportError(f"the connection to {at} broke: {str(error) or type(error).__name__}") from error
    except httpx.DecodingError as error:
        raise UnexpectedAnswer(f"{at} sent a body that is not in the encoding it names", status=200) from error


def answer(response: httpx.Response, shape: type[T]) -> T:
    """The body of a 200 as ``shape``.  Raises UnexpectedAnswer."""
    try:
        return parse(shape, response.content)
    except NotOurs as error:
        raise unexpected(response, str(error)) from None


def refusal(response: httpx.Response) -> ClientError:
    """The error of a response, read in full, whose status is not 200."""
    wait = retry_after_s(response.headers.get("retry-after"))
    try:
        body = parse(ErrorEnvelope, response.content).error
    except NotOurs:
        return unexpected(response, "its body is not HalluTracer's error", wait)
    request_id = response.headers.get("x-request-id")
    return api_error(body, response.status_code, request_id, wait)


def api_error(body: ErrorBody, status: int | None, request_id: str | None, wait: float | None = None) -> APIError:
    """The error that an envelope describes."""
    kind = error_class(status, body.code, body.type)
    return kind(body.message, status=status, code=body.code, param=body.param, request_id=request_id, retry_after=wait)


def unexpected(response: httpx.Response, problem: str, wait: float | None = None) -> UnexpectedAnswer:
    """An answer that is not ours: says what came, from where, and what may be the cause."""
    sent = response.headers.get("content-type", "no content type").partition(";")[0][:80]
    return UnexpectedAnswer(
        f"{response.url} answered {response.status_code} with {sent}, not as HalluTracer does: {problem}.  "
        "Is another service at this address, or a proxy in between, or the service older than this client?",
        status=response.status_code,
        retry_after=wait,
    )
