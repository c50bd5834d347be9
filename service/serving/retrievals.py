"""The risks of prompts that were sent to fetch a passage, until they are asked again with it."""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from dataclasses import dataclass

MOST = 10_000  # remembered at once; the oldest go first
SECONDS = 3600.0
PREFIX = re.compile(r"^(risk|chatcmpl|cmpl)-")  # of the ids that answers have; behind it is the request's own


@dataclass(frozen=True, slots=True)
class FirstRisk:
    """What a prompt was judged before retrieval."""

    risk: float
    digest: str  # of the bundle that said so
    until: float


@dataclass(frozen=True, slots=True)
class Retrieval:
    """A request that names an earlier one.  ``first`` None: it is not known here, or no longer."""

    of: str
    first: FirstRisk | None


class Retrievals:
    """Each caller's own: an id of another caller tells nothing.  Used on the event loop only."""

    def __init__(self, most: int = MOST, seconds: float = SECONDS) -> None:
        self._most, self._seconds = most, seconds
        self._known: OrderedDict[tuple[str, str], FirstRisk] = OrderedDict()

    def record(self, caller: str, request_id: str, risk: float, digest: str) -> None:
        """``request_id`` of a request whose only prompt was sent to fetch a passage."""
        self._known.pop((caller, request_id), None)
        self._known[caller, request_id] = FirstRisk(risk, digest, time.monotonic() + self._seconds)
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def recall(self, caller: str, named: str) -> Retrieval:
        """By the ``id`` of the first answer."""
        found = self._known.get((caller, PREFIX.sub("", named, count=1)))
        return Retrieval(named, found if found is not None and found.until > time.monotonic() else None)
