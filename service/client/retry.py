"""Whether a failed call is tried again, and after how long.  Knows no HTTP library and does not sleep itself.

Tried again: 429, 503, and a connection that could not be made or broke before the answer's head was there.  A score
changes nothing on the server, so a repeated one is harmless, with ``generate`` too: nobody has seen the first answer.
Not tried again: a timeout (the call's time is used up, and a slow server is not helped by a second request), any other
status, and whatever fails after a stream has begun.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from service.client.errors import APIError, ClientError, TimedOut, TransportError, UnexpectedAnswer

RETRIED = (429, 503)


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with full jitter: before retry n, counted from 0, uniform in [0, min(cap, first * 2^n)]."""

    max_retries: int = 2
    first_s: float = 0.25
    cap_s: float = 8.0
    longest_retry_after_s: float = 60.0  # told to wait longer than this, the call fails at once

    def __post_init__(self) -> None:
        if self.max_retries < 0:
            raise ValueError(f"max_retries is 0 or more, not {self.max_retries}")


class Attempts:
    """One call's attempts: time left, retries left.

    ``clock`` gives monotonic seconds and ``draw`` a number in [0, 1).
    """

    def __init__(
        self, policy: RetryPolicy, timeout_s: float, clock: Callable[[], float], draw: Callable[[], float]
    ) -> None:
        self._policy, self._clock, self._draw = policy, clock, draw
        self._timeout_s = timeout_s
        self._end = clock() + timeout_s
        self._retries = 0

    @property
    def late(self) -> str:
        """What to say when the time is used up."""
        tries = f" in {self._retries + 1} attempts" if self._retries else ""
        return f"no answer within {self._timeout_s:g} s{tries}; raise 'timeout', or ask for less"

    def remaining(self) -> float:
        """Seconds left for this attempt.  Raises TimedOut where there are none."""
        left = self._end - self._clock()
        if left <= 0:
            raise TimedOut(self.late)
        return left

    def pause(self, error: ClientError) -> float:
        """Seconds to wait before the next attempt.  Raises ``error`` where there is none, or no time for it."""
        if self._retries >= self._policy.max_retries or not _retryable(error):
            raise error
        backoff = self._draw() * min(self._policy.cap_s, self._policy.first_s * 2.0**self._retries)
        told = getattr(error, "retry_after", None)
        # Never earlier than the server asked, and not all clients at the same moment.
        wait = backoff if told is None else told + self._draw() * self._policy.first_s
        if (told or 0.0) > self._policy.longest_retry_after_s or self._clock() + wait >= self._end:
            raise error
        self._retries += 1
        return float(wait)


def _retryable(error: ClientError) -> bool:
    if isinstance(error, TransportError):
        return not isinstance(error, TimedOut)
    return isinstance(error, APIError | UnexpectedAnswer) and error.status in RETRIED


def retry_after_s(header: str | None) -> float | None:
    """The header's seconds; None where it is absent or a date (then the backoff decides)."""
    text = (header or "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) <= 9 else None
