"""Liveness, readiness and metrics.  Ready: the model is loaded and every bundle's golden prompts matched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter, Request, Response

from service.api.catalogue_schema import Status
from service.api.dependencies import TheService, knows_caller
from service.api.response_docs import errors
from service.errors import NotReady
from service.serving.service import Service

router = APIRouter(tags=["operations"])
_TEXT: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus' text format"}
}
SCRAPED = _TEXT | errors(_401="metrics are protected and no key was sent")
NOT_READY = errors(_503="loading, loading failed, or shutting down; the message says which")


@router.head("/health/live", include_in_schema=False)
@router.get(
    "/health/live",
    summary="Is the process alive?",
    response_model_exclude_none=True,
    responses=errors(_503="the process must be restarted"),
)
async def live(service: TheService, request: Request) -> Status:
    """200 unless the process must be restarted."""
    with _reasons_for(service, request):
        service.lifecycle.check_alive()
    return Status(status="live")


@router.head("/health/ready", include_in_schema=False)
@router.head("/health", include_in_schema=False)
@router.get("/health/ready", summary="Can it score?", response_model_exclude_none=True, responses=NOT_READY)
@router.get("/health", summary="Can it score? (/health/ready)", response_model_exclude_none=True, responses=NOT_READY)
async def ready(service: TheService, request: Request) -> Status:
    """200 once scores can be served, until then 503 with the reason."""
    with _reasons_for(service, request):
        service.lifecycle.check_ready()
    if not knows_caller(request, service):
        return Status(status="ready")
    return Status(
        status="ready",
        model=service.catalogue.scorers[0].engine.identity.model,
        bundles=[scorer.bundle.reference for scorer in service.catalogue.scorers],
        keys=service.access.keys.problem,
    )


@contextmanager
def _reasons_for(service: Service, request: Request) -> Iterator[None]:
    """Paths and names in a failure are for those with a key, where there are keys."""
    try:
        yield
    except NotReady:
        if knows_caller(request, service):
            raise
        raise NotReady("not ready; send a key for the reason") from None


@router.get("/metrics", summary="Prometheus metrics", response_class=Response, responses=SCRAPED)
def metrics(service: TheService) -> Response:
    """Counters, histograms and gauges of this service."""
    service.metrics.ready(service.lifecycle.is_ready)
    body, content_type = service.metrics.render()
    return Response(body, media_type=content_type)
