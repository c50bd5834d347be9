"""Who may ask: known hosts, bearer keys for every route but health, pages and open metrics, and
what routes depend on.

Plain ASGI: before the body is read.  Unknown paths need a key too, so that the routes cannot be
probed without one."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from typing import Annotated

from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from service.access.callers import Caller, Key, on_loopback
from service.access.callers import Scope as KeyScope
from service.access.keys import KeyRing
from service.access.routes import METRICS, is_health_check, scopes_of
from service.api.error_handlers import respond
from service.audit.auditor import Who
from service.errors import (
    HalluTracerError,
    KeyExpired,
    KeyRevoked,
    MissingScope,
    NotAllowed,
    Unauthorized,
    WrongHost,
)
from service.serving.service import Service

FORWARDED = ("x-forwarded-for", "forwarded", "x-real-ip", "via")


class BearerKeys:
    """Answers 401 unless ``Authorization: Bearer KEY``, or without that header ``X-Api-Key``, holds
    one of ``keys``.

    403 where the key does not open the route.  Without any keys all routes are open, except to
    other machines those that change the service.  Before all that 421 to who names neither an
    address nor one of ``hosts``; none: any name. ``pages`` are paths of files that all may get."""

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing,
        protect_metrics: bool,
        pages: Collection[str],
        hosts: Collection[str],
    ) -> None:
        self.app = app
        self._keys = keys
        self._pages = frozenset(pages)
        self._open = frozenset() if protect_metrics else frozenset({METRICS})
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan" or not self._keys.closed:
                await self.app(scope, receive, send)
            return  # no WebSocket routes: the server closes it
        path, headers = scope["path"], Headers(scope=scope)
        is_open = path in self._open or is_health_check(scope["method"], path)
        is_open = is_open or (path in self._pages and scope["method"] in ("GET", "HEAD"))
        try:
            if self._hosts:
                _check_host(headers, scope["http_version"], self._hosts)
            key = self._keys.find(secret) if (secret := _secret(headers)) else None
            if key is not None and not (is_open and (key.revoked is not None or key.expired())):
                scope.setdefault("state", {})["key"] = key
                if (record := scope["state"].get("record")) is not None:
                    record.caller = key.name
            if not is_open:
                check_scopes(HTTPConnection(scope), self._keys, scopes_of(path))
        except HalluTracerError as refusal:
            await respond(refusal, scope, receive, send)
            return
        await self.app(scope, receive, send)


def _secret(headers: Headers) -> str | None:
    scheme, _, secret = headers.get(
        "authorization", f"Bearer {headers.get('x-api-key', '')}"
    ).partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else None


def key_of(request: HTTPConnection) -> Key | None:
    """Return the key that a request was sent with, where it is known."""
    key: Key | None = request.scope.get("state", {}).get("key")
    return key


def check_scopes(request: HTTPConnection, keys: KeyRing, wanted: Collection[KeyScope]) -> None:
    """Raise Unauthorized or MissingScope unless the request's key has one of these scopes; none:
    any key will do."""
    if not keys.closed:
        if KeyScope.ADMIN in wanted and ("origin" in request.headers or not from_here(request)):
            raise MissingScope(
                "without keys only programs on this machine may change the service; elsewhere it"
                " takes a key: hallutracer keys make NAME --scope admin"
            )
        return
    key = key_of(request)
    if key is None:
        raise Unauthorized("send a key of this service as 'Authorization: Bearer KEY'")
    if key.revoked is not None:
        raise KeyRevoked(f"key {key.name!r} was revoked; ask the operator for another")
    if key.expired():
        raise KeyExpired(
            f"key {key.name!r} expired on {key.expires:%Y-%m-%d}; ask the operator for another"
        )
    if wanted and not key.scopes & set(wanted):
        needed = " or ".join(repr(str(scope)) for scope in sorted(wanted))
        raise MissingScope(
            f"this route needs the scope {needed}; key {key.name!r} has"
            f" {', '.join(sorted(key.scopes))}"
        )


def from_here(request: HTTPConnection) -> bool:
    """Return whether no proxy passes a connection of this machine on, and no foreign web page has a
    browser make it."""
    if request.client is None or any(name in request.headers for name in FORWARDED):
        return False
    page = request.headers.get("origin")
    if page is not None and (
        page != _origin_of(request) or not on_loopback(request.url.hostname or "")
    ):
        return False
    return on_loopback(request.client.host)


def check_page(request: HTTPConnection, origins: Collection[str]) -> None:
    """Raise NotAllowed where a browser says that a page of another site asks, and its origin is
    none of ``origins``.

    For a GET that has the engine work: any page can have a browser send one, as the address of an
    image."""
    page = request.headers.get("origin")
    if page is None:
        foreign = request.headers.get("sec-fetch-site") in ("cross-site", "same-site")
    else:
        foreign = not {page, "*"} & {_origin_of(request), *origins}
    if foreign:
        cure = "the operator can allow its origin with --cors-origin"
        raise NotAllowed("a page of another site asks for this", param="origin", cure=cure)


def _origin_of(request: HTTPConnection) -> str:
    """Return the origin of this service, as the request names it."""
    return f"{request.url.scheme}://{request.headers.get('host')}"


def _check_host(headers: Headers, version: str, hosts: Collection[str]) -> None:
    """Raise WrongHost unless ``Host`` names this service.

    A page of a foreign site can have its own name resolve to 127.0.0.1 (DNS rebinding), and then
    read what a service there answers.  The browser still sends the foreign name; an address as
    ``Host`` cannot be such a page's.  HTTP/1.0 has no ``Host``: no browser speaks it, and
    balancers' health checks do."""
    host = headers.get("host")
    if host is None:
        if version != "1.0":
            raise WrongHost("there is no Host header, which HTTP/1.1 asks for")
    elif not _names_us(host, hosts):
        raise WrongHost(
            f"the Host header names another service, {_shown(host)}; the operator can add its name:"
            " --allowed-host"
        )


def _shown(host: str, limit: int = 80) -> str:
    """Return a ``Host`` as an error may repeat it."""
    return repr(host if len(host) <= limit else f"{host[:limit]}...")


def _names_us(host: str, hosts: Collection[str]) -> bool:
    """Return whether ``Host``, its port left out, is one of ``hosts`` or an IP address as browsers
    write it."""
    name, _, port = host.rpartition(":")
    name = (name if name and port.isdigit() else host).lower()
    if name in hosts or (
        name.removesuffix(".") in hosts and name != "."
    ):  # a last dot: a whole name, as DNS has it
        return True
    try:
        if name.startswith("[") and name.endswith("]"):
            return ipaddress.IPv6Address(name[1:-1]).scope_id is None
        ipaddress.IPv4Address(name)
    except ValueError:
        return False
    return True


async def running_service(request: Request) -> Service:
    """Return the service that the app factory attached.  A coroutine: plain functions go through a
    thread pool."""
    service: Service = request.app.state.service
    return service


TheService = Annotated[Service, Depends(running_service)]


def caller_of(request: HTTPConnection, service: Service) -> Caller:
    """Return the key's owner; without keys, whoever has the connection's address."""
    return service.access.caller(key_of(request), who_of(request).address, here=from_here(request))


def who_of(request: HTTPConnection) -> Who:
    """Return whom the audit log names; the address is a proxy's where there is one before the
    service."""
    key, client = key_of(request), request.client
    return Who(key=None if key is None else key.name, address=client.host if client else None)


def knows_caller(request: HTTPConnection, service: Service) -> bool:
    """Return whether the request has a key, where there are keys; the health routes are open to
    all."""
    return not service.access.keys.closed or key_of(request) is not None


async def administrator(request: Request, service: TheService) -> Who:
    """Return who calls a route of ``KeyScope.ADMIN``.  Raises as ``check_scopes``, whatever the
    path asks for."""
    check_scopes(request, service.access.keys, {KeyScope.ADMIN})
    return who_of(request)


Admin = Annotated[Who, Depends(administrator)]
