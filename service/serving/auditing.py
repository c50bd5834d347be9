"""A request's decisions as a line of the audit log: the same for our own service and for the vLLM plugin."""

from __future__ import annotations

from collections.abc import Iterable

from service.audit.events import Judged, Line, Who, decision
from service.policies.guard import Policy
from service.scoring import RiskReport, Scorer

MOST_ID = 256  # characters: vLLM takes over whatever its client sends


def decision_line(
    who: Who, request_id: str, route: str, scorer: Scorer, policy: Policy, reports: Iterable[tuple[int, RiskReport]]
) -> Line:
    """``reports`` with the index of each one's prompt; one or more."""
    indexed = list(reports)
    return decision(
        who,
        request_id=request_id[:MOST_ID],
        route=route,
        model=scorer.engine.identity.model,
        bundle=scorer.bundle.reference,
        digest=scorer.bundle.manifest.digest,
        policy=policy.name,
        threshold=indexed[0][1].verdict.threshold,
        prompts=[
            Judged(index, round(report.risk, 6), report.decision.value, report.verdict.flagged)
            for index, report in indexed
        ],
    )
