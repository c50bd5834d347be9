"""What routes depend on."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request
from starlette.requests import HTTPConnection

from service.access.callers import OWNERS, Caller, Scope
from service.api.auth import check_scopes, from_here, key_of
from service.audit.events import Who
from service.serving.state import ServiceState


async def service_state(request: Request) -> ServiceState:
    """The state that the app factory attached.  A coroutine: FastAPI sends plain functions through a thread pool."""
    state = request.app.state.service
    assert isinstance(state, ServiceState)
    return state


State = Annotated[ServiceState, Depends(service_state)]


def caller_of(request: HTTPConnection, state: ServiceState) -> Caller:
    """The key's owner; without keys, whoever has the connection's address."""
    everyone = frozenset(state.settings.callers_may)
    if (key := key_of(request)) is not None:
        return Caller(key.name, everyone | key.may, key.policies)
    if state.owned and from_here(request):
        everyone = OWNERS
    return Caller(address_of(request) or "", everyone)


def address_of(request: HTTPConnection) -> str | None:
    """The connection's, which is a proxy's where there is one before the service."""
    return request.client.host if request.client else None


def who_of(request: HTTPConnection) -> Who:
    """For the audit log."""
    key = key_of(request)
    return Who(key=None if key is None else key.name, address=address_of(request))


def knows_caller(request: HTTPConnection, state: ServiceState) -> bool:
    """Whether the request has a key, where there are keys; the health routes are open to all."""
    return not state.keys.closed or key_of(request) is not None


async def administrator(request: Request, state: State) -> Who:
    """Who calls a route of ``Scope.ADMIN``.  Raises as ``check_scopes``, also where the path does not ask for it."""
    check_scopes(request, state.keys, {Scope.ADMIN})
    return who_of(request)


Admin = Annotated[Who, Depends(administrator)]
