"""Who sends a request, what it may choose that lets more through than the operator's own policy, and whose answers it
may label."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Right = Literal["policy", "threshold", "bundle", "feedback", "admin"]


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A bearer key, the name that stands for it in the log, and the request fields that it may loosen."""

    secret: str = field(repr=False)
    name: str
    may: frozenset[Right] = frozenset()


@dataclass(frozen=True, slots=True)
class Caller:
    """One client: a key's name, or an address where there are no keys.  Callers share the engine evenly."""

    name: str = ""
    may: frozenset[Right] = frozenset()
