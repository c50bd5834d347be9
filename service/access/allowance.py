"""What a key may still ask for: requests per minute, and prompt tokens per day.

Counted in the memory of one process, by a clock that nobody can set: several replicas each allow as much, and a restart
forgets.  A day is the 24 hours from a key's first token on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from service.access.callers import Key
from service.errors import QuotaExceeded, RateLimited

MINUTE_S, DAY_S = 60.0, 86_400.0


class Allowance:
    """What one key has used.  The limits are the key's, so that new ones hold from the next request on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._full_at = -math.inf  # when the minute's requests will all be there again, if none comes
        self._tokens = 0
        self._resets_at = -math.inf

    def take_request(self, key: Key) -> None:
        """Count a request.  Raises RateLimited, and QuotaExceeded where no token is left for its prompts.

        Requests come back one by one, evenly over the minute; a key that rested may send a minute's worth at once.
        """
        tokens = key.prompt_tokens_per_day
        if tokens is not None and self._tokens_left(tokens) <= 0:
            raise self._used_up(f"key {key.name!r} has used its {tokens} prompt tokens of the day")
        limit, now = key.requests_per_minute, self._clock()
        if limit is None:
            return
        full_at = max(self._full_at, now) + MINUTE_S / limit
        if (late := full_at - now - MINUTE_S) > 1e-6:
            message = f"key {key.name!r} may send {limit} requests per minute; the next one in {duration(late)}"
            raise RateLimited(message, retry_after_s=math.ceil(late))
        self._full_at = full_at

    def take_tokens(self, key: Key, tokens: int) -> None:
        """Count a request's prompt tokens, before any of them is read.  Raises QuotaExceeded, and counts none."""
        limit = key.prompt_tokens_per_day
        if limit is None:
            return
        if tokens > (left := self._tokens_left(limit)):
            raise self._used_up(
                f"the request has {tokens} prompt tokens; of its {limit} of the day key {key.name!r} has {left} left"
            )
        if not self._tokens:
            self._resets_at = self._clock() + DAY_S
        self._tokens += tokens

    def headers(self, key: Key) -> dict[str, str]:
        """As OpenAI's API names and writes them."""
        found: dict[str, str] = {}
        now = self._clock()
        if (limit := key.requests_per_minute) is not None:
            wait = max(0.0, self._full_at - now)
            left = math.floor((MINUTE_S - wait) * limit / MINUTE_S + 1e-6)
            found |= _headers("requests", limit, left, wait)
        if (limit := key.prompt_tokens_per_day) is not None:
            left = max(0, self._tokens_left(limit))  # first: it may begin another day
            found |= _headers("tokens", limit, left, max(0.0, self._resets_at - now) if self._tokens else 0.0)
        return found

    def _tokens_left(self, limit: int) -> int:
        if self._clock() >= self._resets_at:
            self._tokens = 0
        return limit - self._tokens

    def _used_up(self, message: str) -> QuotaExceeded:
        wait = max(1.0, self._resets_at - self._clock()) if self._tokens else 1.0
        return QuotaExceeded(f"{message}; the next day begins in {duration(wait)}", retry_after_s=math.ceil(wait))


def duration(seconds: float) -> str:
    """As Go writes one, and OpenAI's headers: 1h2m3s, 6m0s, 12.5s."""
    whole = round(seconds, 3)
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    text = f"{hours:.0f}h" if hours else ""
    text += f"{minutes:.0f}m" if hours or minutes else ""
    return f"{text}{round(left, 3):g}s"


def _headers(what: str, limit: int, left: int, reset_s: float) -> dict[str, str]:
    values = {"limit": str(limit), "remaining": str(left), "reset": duration(reset_s)}
    return {f"x-ratelimit-{name}-{what}": value for name, value in values.items()}
