"""The lines of the audit log, before they are written.  None has a prompt, an answer or a key's secret.

Whatever happened: ``event``, ``time``, and who it was: ``key`` (its name), ``address``, ``by``.
A decision (``event`` "decision"): ``request_id``, ``route``, ``model``, ``bundle``, ``digest`` (the bundle's),
``policy``, ``threshold`` and ``prompts``, each with ``index``, ``risk``, ``decision`` and ``flagged``.
A change (any other ``event``): ``outcome`` (begun, done or failed) and ``what``.

Prompts have no digest: from one, a prompt that was guessed could be confirmed.  The request's id names them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal

Outcome = Literal["begun", "done", "failed"]
Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Who:
    """Whose doing it is.  ``address`` is the connection's, of a proxy where there is one before the service."""

    key: str | None = None
    address: str | None = None
    by: str = "api"  # or "signal", "file", "alias", "service"


SERVICE = Who(by="service")


@dataclass(frozen=True, slots=True)
class JudgedEvent:
    """One prompt of a request."""

    index: int
    risk: float
    decision: str
    flagged: bool


def decision(
    who: Who, *, request_id: str, route: str, model: str, bundle: str, digest: str, policy: str, threshold: float,
    prompts: Sequence[JudgedEvent],
) -> Line:  # fmt: skip
    """Return the line that says what became of a request's prompts."""
    return _line("decision", who, request_id=request_id, route=route, model=model, bundle=bundle, digest=digest,
                 policy=policy, threshold=threshold, prompts=[asdict(one) for one in prompts])  # fmt: skip


def change(who: Who, event: str, outcome: Outcome, what: Mapping[str, Any]) -> Line:
    """Return the line of something of the service that is another from then on."""
    return _line(event, who, outcome=outcome, what=dict(what))


def _line(event: str, who: Who, **fields: Any) -> Line:
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    return {"time": time, "event": event, **asdict(who), **fields}
