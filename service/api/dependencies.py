"""What routes depend on."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from service.serving.state import ServiceState


async def service_state(request: Request) -> ServiceState:
    """The state that the app factory attached.  A coroutine: FastAPI sends plain functions through a thread pool."""
    state = request.app.state.service
    assert isinstance(state, ServiceState)
    return state


State = Annotated[ServiceState, Depends(service_state)]
