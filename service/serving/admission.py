"""Admission: the rule that refuses requests, and the measured speed that its estimate of the wait is based on."""

from __future__ import annotations

import math

from service.errors import Overloaded

MAX_RETRY_S = 60
HEADROOM = 0.75  # share of its deadline that a request may be expected to wait: work that ends too late is wasted
NEW_SPEED = 0.2  # weight of the newest measurement in the running speed
LEAST_MEASUREMENTS = 4  # the first one has the engine's warm-up in it: alone it would refuse what fits easily


def check_space(
    prompts: int, *, waiting: int, max_waiting: int, ahead: int, seconds: float, tokens_per_second: float | None
) -> None:
    """Raise Overloaded where ``prompts`` more do not fit, or could not be answered within ``seconds``.

    ``waiting`` of at most ``max_waiting`` prompts wait; ``ahead`` tokens will be read before the new ones;
    ``tokens_per_second`` is the engine's recent speed under load, None where it has not been measured.
    """
    wait = ahead / tokens_per_second if tokens_per_second else 0.0
    retry = min(MAX_RETRY_S, max(1, math.ceil(wait)))
    if waiting + prompts > max_waiting:
        raise Overloaded(
            f"the queue holds {waiting} of at most {max_waiting} prompts; try again in {retry} s", retry_after_s=retry
        )
    if wait > HEADROOM * seconds:
        raise Overloaded(
            f"about {wait:.1f} s of work is waiting, too much for the {seconds:.1f} s that this request has left; "
            f"try again in {retry} s",
            retry_after_s=retry,
        )


class Speed:
    """Prompt tokens a second under load: an idle engine's small batches say nothing about its capacity.

    Measured from one call of ``note`` to another, so that the time spent on decoding is included.
    """

    def __init__(self, min_span_s: float = 0.0) -> None:
        """A measurement spans at least ``min_span_s`` seconds, because prompts leave an engine in bursts."""
        self._mean = 0.0
        self._measurements = 0
        self._min_span_s = min_span_s
        self._since: float | None = None
        self._tokens = 0

    @property
    def value(self) -> float | None:
        """The running speed; None until it was measured ``LEAST_MEASUREMENTS`` times."""
        return self._mean if self._measurements >= LEAST_MEASUREMENTS else None

    def note(self, tokens: int, at: float, crowded: bool) -> None:
        """``tokens`` more were read by the time ``at``; ``crowded``: prompts had to wait meanwhile."""
        if self._since is not None:
            self._tokens += tokens
            span = at - self._since
            if span >= self._min_span_s:
                self._measurements += 1
                weight = max(NEW_SPEED, 1 / self._measurements)
                self._mean += weight * (self._tokens / max(span, 1e-6) - self._mean)
                self._since = None
        if not crowded:
            self._since = None
        elif self._since is None:
            self._since, self._tokens = at, 0
