"""Liveness, readiness and metrics.  Ready: the model is loaded and every bundle's golden prompts matched."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from service.api.dependencies import State
from service.api.response_schema import Status, errors

router = APIRouter(tags=["operations"])
_TEXT: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus' text format"}
}
SCRAPED = _TEXT | errors(_401="metrics are protected and no key was sent")
NOT_READY = errors(_503="loading, loading failed, or shutting down; the message says which")


@router.head("/health/live", include_in_schema=False)
@router.get("/health/live", response_model_exclude_none=True, responses=errors(_503="the process must be restarted"))
async def live(state: State) -> Status:
    """200 unless the process must be restarted."""
    state.check_alive()
    return Status(status="live")


@router.head("/health/ready", include_in_schema=False)
@router.head("/health", include_in_schema=False)
@router.get("/health/ready", response_model_exclude_none=True, responses=NOT_READY)
@router.get("/health", response_model_exclude_none=True, responses=NOT_READY)
async def ready(state: State) -> Status:
    """200 once scores can be served, until then 503 with the reason."""
    state.check_ready()
    return Status(
        status="ready",
        model=state.scorers[0].engine.identity.model,
        bundles=[scorer.bundle.reference for scorer in state.scorers],
    )


@router.get("/metrics", response_class=Response, responses=SCRAPED)
def metrics(state: State) -> Response:
    """Counters, histograms and gauges of this service."""
    state.metrics.ready(state.is_ready)
    body, content_type = state.metrics.render()
    return Response(body, media_type=content_type)
