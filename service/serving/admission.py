"""Who is let in: the rule that every room refuses by, and the speed that its estimate of the wait rests on.

Knows neither jobs nor engines, and holds nothing back itself.
"""

from __future__ import annotations

import math

from service.errors import Overloaded

LONGEST_RETRY_S = 60
HEADROOM = 0.75  # of its time that a request may expect to wait: an estimate errs, and what comes too late is wasted
NEW_SPEED = 0.2  # weight of the newest measurement in the running speed


def check_space(
    prompts: int, *, held: int, most: int, ahead: int, seconds: float, tokens_per_second: float | None
) -> None:
    """Raise Overloaded where ``prompts`` more do not fit, or could not be answered within ``seconds``.

    ``held`` of at most ``most`` prompts wait; ``ahead`` are the tokens to be read before the new ones' turn;
    ``tokens_per_second`` is the engine's recent speed under load, None where it has not been seen.
    """
    wait = ahead / tokens_per_second if tokens_per_second else 0.0
    retry = min(LONGEST_RETRY_S, max(1, math.ceil(wait)))
    if held + prompts > most:
        raise Overloaded(
            f"the queue holds {held} of at most {most} prompts; try again in {retry} s", retry_after_s=retry
        )
    if wait > HEADROOM * seconds:
        raise Overloaded(
            f"about {wait:.1f} s of work is waiting, too much for the {seconds:.1f} s that this request has left; "
            f"try again in {retry} s",
            retry_after_s=retry,
        )


class Speed:
    """Prompt tokens a second while there was a crowd: an idle engine's small batches say nothing about what it can do.

    Measured from one note to another, so that decoding's share of the time is in it.
    """

    def __init__(self, least_s: float = 0.0) -> None:
        """A measurement spans ``least_s`` seconds at least: more than one where prompts are noted one by one."""
        self.value: float | None = None
        self._least_s = least_s
        self._since: float | None = None
        self._tokens = 0

    def note(self, tokens: int, at: float, crowded: bool) -> None:
        """``tokens`` more were read by the time ``at``; ``crowded``: others had to wait meanwhile, and still do."""
        if self._since is not None:
            self._tokens += tokens
            span = at - self._since
            if span >= self._least_s:
                newest = self._tokens / max(span, 1e-6)
                self.value = newest if self.value is None else self.value + NEW_SPEED * (newest - self.value)
                self._since = None
        if not crowded:
            self._since = None
        elif self._since is None:
            self._since, self._tokens = at, 0
