"""Who waits, and whose turn it is: callers share the queue and the engine evenly, however many prompts each sends.

Start-time fair queueing (Goyal, Vin, Cheng, 1996): a prompt's place is the tokens that its caller had been given before
it.  A caller that comes back starts where the others are; it is neither rewarded nor punished for the pause.
"""

from __future__ import annotations

from collections import Counter

RESERVE = 8  # one caller leaves one of this many free places to those who wait for nothing yet
MAX_REMEMBERED = 4096  # callers whose account is kept although they wait for nothing


class FairShare:
    """Counts waiting prompts by caller and hands out their places.  On the event loop only."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._prompts: Counter[str] = Counter()
        self._tokens: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}  # by whether they may be decoded
        self._given: dict[str, int] = {}  # caller -> the place after its newest prompt
        self._now = 0  # the place of the prompt that was served last

    @property
    def waiting(self) -> int:
        """Prompts of all callers."""
        return self._prompts.total()

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits, and no token is counted for it."""
        return not (self._prompts or self._tokens[True] or self._tokens[False])

    def most_waiting(self, caller: str) -> int:
        """As many prompts may wait, those of the others included, after ``caller`` has added its own.

        The last places are for callers that have nothing in the queue.
        """
        own = self._prompts[caller]
        left = self._max_waiting - (self.waiting - own)
        return self._max_waiting - (left // RESERVE if own else 0)

    def tokens_ahead(self, caller: str, *, answers: bool) -> int:
        """Tokens that will be read before a new prompt of ``caller``; ``answers``: of prompts to be decoded, too."""
        waiting = self._tokens[False] + self._tokens[True] if answers else self._tokens[False]
        own = waiting[caller]
        return sum(min(tokens, own) for tokens in waiting.values())

    def add(self, caller: str, prompts: int) -> None:
        """``prompts`` more wait; a negative number has left."""
        self._prompts[caller] += prompts
        if not self._prompts[caller]:
            del self._prompts[caller]

    def add_tokens(self, caller: str, tokens: int, *, answers: bool) -> None:
        """The waiting prompts have so many tokens more; a negative number has left."""
        counter = self._tokens[answers]
        counter[caller] += tokens
        if not counter[caller]:
            del counter[caller]

    def place(self, caller: str, cost: int) -> int:
        """The place of the caller's next prompt, which will take about ``cost`` tokens; the lowest is served first."""
        place = max(self._now, self._given.get(caller, 0))
        self._given[caller] = place + cost
        return place

    def served(self, place: int) -> None:
        """The prompt at ``place`` has been read."""
        self._now = max(self._now, place)
        if len(self._given) > MAX_REMEMBERED:
            self._given = {caller: next_ for caller, next_ in self._given.items() if next_ > self._now}
