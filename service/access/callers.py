"""Who sends a request: which routes its key opens, what it may choose that lets more through than
the operator's own policy, and whose answers it may label."""

from __future__ import annotations

import hashlib
import ipaddress
import re
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Literal

Right = Literal["policy", "threshold", "bundle", "rendering", "feedback"]
Loosened = Literal[Right, "none"]  # as an operator says it of all callers; "none": that it was said
# on loopback, where there are no keys
OWNERS: frozenset[Right] = frozenset({"policy", "threshold"})


class Scope(StrEnum):
    """The routes that a key opens (``service.access.routes.scopes_of``)."""

    SCORE = "score"
    OBSERVE = "observe"
    ADMIN = "admin"


USER_SCOPES = frozenset({Scope.SCORE, Scope.OBSERVE})


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A bearer key, the name that stands for it in the log, and the request fields that it may
    loosen."""

    secret: str = field(repr=False)
    name: str
    may: frozenset[Right] = frozenset()

    def hashed(self) -> Key:
        """Return it as it is looked up: no administrator, which takes a key of the file."""
        return Key(name=self.name, digest=digest_of(self.secret), may=self.may)


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key as the service knows it, without its secret."""

    name: str
    digest: str = field(repr=False)  # as ``digest_of``
    may: frozenset[Right] = frozenset()
    scopes: frozenset[Scope] = USER_SCOPES
    policies: tuple[str, ...] | None = None  # that its requests may be judged by; None: all
    expires: datetime | None = None
    revoked: datetime | None = None

    def expired(self) -> bool:
        """Return whether its time is over."""
        return self.expires is not None and now() >= self.expires


@dataclass(frozen=True, slots=True)
class Caller:
    """One client: a key's name, or an address where there are no keys.  Callers share the engine
    evenly."""

    name: str = ""
    may: frozenset[Loosened] = frozenset()
    policies: tuple[str, ...] | None = None  # None: all


_START = datetime.now(UTC), time.monotonic()


def now() -> datetime:
    """Return the clock's time; where it was set back since the process began, the time that it
    would show."""
    began, ticks = _START
    return max(datetime.now(UTC), began + timedelta(seconds=time.monotonic() - ticks))


_PLACEHOLDER = re.compile(
    r"(replace|change)[\W_]*me|your[\W_]*(api[\W_]*)?key|placeholder", re.IGNORECASE
)


def is_placeholder(secret: str) -> bool:
    """Return whether it stands in an example for a key that is still to be made, as
    ``REPLACE-ME-app-one``."""
    return _PLACEHOLDER.search(secret) is not None


def digest_of(secret: str) -> str:
    """Return the SHA-256 in hexadecimal: enough for a secret of 256 random bits, which nobody can
    guess."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def address_in(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that ``host`` is; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def on_loopback(host: str) -> bool:
    """Return whether ``host`` is this machine alone, to listen on or to call from."""
    address = address_in(host)
    return host == "localhost" if address is None else address.is_loopback
