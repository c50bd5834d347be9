"""What routes depend on."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request
from starlette.requests import HTTPConnection

from service.callers import ApiKey, Caller
from service.serving.state import ServiceState


async def service_state(request: Request) -> ServiceState:
    """The state that the app factory attached.  A coroutine: FastAPI sends plain functions through a thread pool."""
    state = request.app.state.service
    assert isinstance(state, ServiceState)
    return state


def caller_of(request: HTTPConnection, state: ServiceState) -> Caller:
    """The key's owner; without keys, whoever has the connection's address."""
    everyone = frozenset(state.settings.callers_may)
    key = request.scope["state"].get("key")
    if isinstance(key, ApiKey):
        return Caller(key.name, everyone | key.may)
    return Caller(request.client.host if request.client else "", everyone)


def knows_caller(request: HTTPConnection, state: ServiceState) -> bool:
    """Whether the request has a key, where there are keys; the health routes are open to all."""
    return not state.settings.api_keys or isinstance(request.scope["state"].get("key"), ApiKey)


State = Annotated[ServiceState, Depends(service_state)]
