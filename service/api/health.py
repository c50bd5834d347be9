"""Live and ready.  Ready means: the model is loaded and every bundle's golden prompts matched."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from service.api.score import service_state
from service.api.state import ServiceState

router = APIRouter(tags=["health"])


@router.get("/health/live")
async def live() -> dict[str, str]:
    """The process answers."""
    return {"status": "live"}


@router.get("/health/ready")
@router.get("/health")
async def ready(state: Annotated[ServiceState, Depends(service_state)]) -> dict[str, Any]:
    """200 once scores can be served, 503 with the reason before that."""
    state.check_ready()
    return {
        "status": "ready",
        "model": state.scorers[0].engine.identity.model,
        "bundles": [scorer.bundle.reference for scorer in state.scorers],
    }
