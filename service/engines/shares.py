"""Who has the engine next: its time is shared evenly by callers, and a caller's share by the kinds
of its work.

Start-time fair queueing (Goyal, Vin, Cheng, 1996), in seconds of the engine: whoever was given
least goes first, and whoever comes back starts where the others are.  On the engine's thread
only."""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum, auto
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)

MAX_REMEMBERED = 4096  # callers whose account is kept although others were given as much


class Kind(Enum):
    """A caller's kinds of work: what it is given of the engine, it shares between them evenly."""

    PROMPT = auto()  # prompts of one forward pass
    LONG = auto()  # prompts of several passes
    ANSWER = auto()  # steps of decoding


class Account(Generic[Name]):
    """Seconds that each of several had."""

    def __init__(self) -> None:
        self._given: dict[Name, float] = {}
        self._now = 0.0  # what the one had that went last, before it went

    def given(self, name: Name) -> float:
        """Return what counts as given: one that had nothing to do was given what the others were
        meanwhile."""
        return max(self._now, self._given.get(name, 0.0))

    def begin(self, name: Name) -> None:
        """Note that it is its turn."""
        self._now = self.given(name)

    def give(self, name: Name, seconds: float) -> None:
        """Add to what it had."""
        self._given[name] = self.given(name) + seconds

    def forget(self) -> list[Name]:
        """Forget those that count as new ones; return them."""
        gone = [name for name, seconds in self._given.items() if seconds <= self._now]
        for name in gone:
            del self._given[name]
        return gone


class Shares:
    """The engine's time, by caller and kind of work."""

    def __init__(self) -> None:
        self._callers = Account[str]()
        self._kinds: dict[str, Account[Kind]] = {}

    def given(self, caller: str, kind: Kind) -> tuple[float, float]:
        """Return what puts work in order: the lowest goes first."""
        kinds = self._kinds.get(caller)
        return self._callers.given(caller), 0.0 if kinds is None else kinds.given(kind)

    def begin(self, caller: str, kind: Kind) -> None:
        """Note whose turn it is."""
        self._callers.begin(caller)
        self._kinds.setdefault(caller, Account()).begin(kind)

    def give(self, caller: str, kind: Kind, seconds: float) -> None:
        """Note that the engine worked so long for a caller."""
        self._callers.give(caller, seconds)
        self._kinds.setdefault(caller, Account()).give(kind, seconds)
        if len(self._kinds) > MAX_REMEMBERED:
            for gone in self._callers.forget():
                self._kinds.pop(gone, None)
