"""Retry policy: which failures are retried, and after which delay.

Retried: 429, 503, and connections that fail before the response headers arrive.  Scoring has no side effects, so a
repeated request is harmless, also with ``generate``: no part of the first answer was seen.
Not retried: timeouts (no time is left, and a second request does not help a slow server), any other status, and every
failure after a stream has begun.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hallutracer_client.errors import APIError, ClientError, TimedOut, TransportError, UnexpectedAnswer

RETRIED = (429, 503)


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with full jitter: uniform in [0, min(max_s, base_s 2^n)] before retry n = 0, 1, .."""

    max_retries: int = 2
    base_s: float = 0.25
    max_s: float = 8.0
    max_retry_after_s: float = 60.0  # a longer Retry-After fails the call at once

    def __post_init__(self) -> None:
        if self.max_retries < 0:
            raise ValueError(f"max_retries must be 0 or more, not {self.max_retries}")


class Attempts:
    """One call's remaining time and retries.  ``clock`` gives monotonic seconds, ``draw`` a number in [0, 1)."""

    def __init__(
        self, policy: RetryPolicy, timeout_s: float, clock: Callable[[], float], draw: Callable[[], float]
    ) -> None:
        self._policy, self._clock, self._draw = policy, clock, draw
        self._timeout_s = timeout_s
        self._end = clock() + timeout_s
        self._retries = 0

    @property
    def timeout_message(self) -> str:
        """The message of a TimedOut."""
        tries = f" in {self._retries + 1} attempts" if self._retries else ""
        return f"no answer within {self._timeout_s:g} s{tries}; raise 'timeout', or ask for less"

    def remaining(self) -> float:
        """Seconds left for this attempt.  Raises TimedOut if there are none."""
        left = self._end - self._clock()
        if left <= 0:
            raise TimedOut(self.timeout_message)
        return left

    def pause(self, error: ClientError) -> float:
        """Seconds to wait before the next attempt.  Raises ``error`` if there is none, or no time for it."""
        if self._retries >= self._policy.max_retries or not _retryable(error):
            raise error
        backoff = self._draw() * min(self._policy.max_s, self._policy.base_s * 2.0**self._retries)
        retry_after = getattr(error, "retry_after", None)
        # Never before Retry-After, and with jitter, so that not all clients come back at once.
        wait = backoff if retry_after is None else retry_after + self._draw() * self._policy.base_s
        if (retry_after or 0.0) > self._policy.max_retry_after_s or self._clock() + wait >= self._end:
            raise error
        self._retries += 1
        return float(wait)


def _retryable(error: ClientError) -> bool:
    if isinstance(error, TransportError):
        return not isinstance(error, TimedOut)
    return isinstance(error, APIError | UnexpectedAnswer) and error.status in RETRIED


def retry_after_s(header: str | None) -> float | None:
    """The seconds of a Retry-After header; None if it is absent or a date (the backoff applies then)."""
    text = (header or "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) <= 9 else None
