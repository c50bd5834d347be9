"""Liveness, readiness and metrics.  Ready: the model is loaded and every golden prompt matched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from fastapi import APIRouter, Request, Response

from service.api.auth import TheService, knows_caller
from service.api.reply import errors
from service.api.request_schema import Strict
from service.errors import NotReady
from service.serving.service import Service


class Status(Strict):
    """A health check's answer."""

    status: Literal["live", "ready"]
    model: str | None = None
    bundles: list[str] | None = None
    keys: str | None = None  # why the file of named keys, as it is now, is not in force


router = APIRouter(tags=["operations"])
_TEXT: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"text/plain": {"schema": {"type": "string"}}},
        "description": "Prometheus' text format",
    }
}
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
@router.get(
    "/health/ready", summary="Can it score?", response_model_exclude_none=True, responses=NOT_READY
)
@router.get(
    "/health",
    summary="Can it score? (/health/ready)",
    response_model_exclude_none=True,
    responses=NOT_READY,
)
async def ready(service: TheService, request: Request) -> Status:
    """200 once scores can be served, until then 503 with the reason."""
    with _reasons_for(service, request):
        service.lifecycle.check_serves()
    if not knows_caller(request, service):
        return Status(status="ready")
    scorers = service.catalogue.scorers
    names = [scorer.bundle.reference for scorer in scorers]
    model, problem = scorers[0].engine.identity.model, service.access.keys.problem
    return Status(status="ready", model=model, bundles=names, keys=problem)


@router.options("/", include_in_schema=False)
async def plain_check(service: TheService, request: Request) -> Response:
    """204 once scores can be served, as HAProxy's ``option httpchk`` asks where it names nothing
    else."""
    with _reasons_for(service, request):
        service.lifecycle.check_ready()
    return Response(status_code=204)


@contextmanager
def _reasons_for(service: Service, request: Request) -> Iterator[None]:
    """Paths and names in a failure are for those with a key, where there are keys."""
    try:
        yield
    except NotReady:
        if knows_caller(request, service):
            raise
        raise NotReady("not ready; send a key for the reason") from None


@router.head("/metrics", include_in_schema=False)
@router.get(
    "/metrics",
    summary="Prometheus metrics",
    response_class=Response,
    responses=_TEXT | errors(_401="metrics are protected and no key was sent"),
)
def metrics(service: TheService) -> Response:
    """Counters, histograms and gauges of this service."""
    service.metrics.ready(service.lifecycle.is_ready)
    body, content_type = service.metrics.render()
    return Response(body, media_type=content_type)
