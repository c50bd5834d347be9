"""What routes depend on."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Annotated

from fastapi import Depends, Request
from starlette.requests import HTTPConnection

from service.callers import ApiKey, Caller
from service.errors import NotAdministrator
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


async def administrator(request: Request) -> None:
    """Raise NotAdministrator unless the key may administer; without keys, unless the caller is on this machine."""
    key = request.scope["state"].get("key")
    if isinstance(key, ApiKey):
        if "admin" not in key.may:
            raise NotAdministrator("this key may not administer the service: give it may=admin")
        return
    host = request.client.host if request.client else ""
    try:
        here = ip_address(host).is_loopback
    except ValueError:
        here = False
    if not here:
        raise NotAdministrator("without keys the service is administered from its own machine only")


Admin = Annotated[None, Depends(administrator)]
State = Annotated[ServiceState, Depends(service_state)]
