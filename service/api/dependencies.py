"""What routes depend on."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request
from starlette.requests import HTTPConnection

from service.access.callers import Caller, Scope
from service.api.auth import check_scopes, from_here, key_of
from service.audit.events import Who
from service.serving.service import Service


async def running_service(request: Request) -> Service:
    """Return the service that the app factory attached.  A coroutine: plain functions go through a thread pool."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


TheService = Annotated[Service, Depends(running_service)]


def caller_of(request: HTTPConnection, service: Service) -> Caller:
    """Return the key's owner; without keys, whoever has the connection's address."""
    return service.access.caller(key_of(request), address_of(request), here=from_here(request))


def address_of(request: HTTPConnection) -> str | None:
    """The connection's, which is a proxy's where there is one before the service."""
    return request.client.host if request.client else None


def who_of(request: HTTPConnection) -> Who:
    """For the audit log."""
    key = key_of(request)
    return Who(key=None if key is None else key.name, address=address_of(request))


def knows_caller(request: HTTPConnection, service: Service) -> bool:
    """Whether the request has a key, where there are keys; the health routes are open to all."""
    return not service.access.keys.closed or key_of(request) is not None


async def administrator(request: Request, service: TheService) -> Who:
    """Who calls a route of ``Scope.ADMIN``.  Raises as ``check_scopes``, also where the path does not ask for it."""
    check_scopes(request, service.access.keys, {Scope.ADMIN})
    return who_of(request)


Admin = Annotated[Who, Depends(administrator)]
