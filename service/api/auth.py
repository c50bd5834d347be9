"""Bearer keys for every route but health checks, the pages' files and, unless protected, metrics.

Plain ASGI: before the body is read.  Unknown paths need a key too, so that the routes cannot be probed without one.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from service.access.callers import Key, on_loopback
from service.access.callers import Scope as KeyScope
from service.access.keys import KeyRing
from service.access.routes import METRICS, scopes_of
from service.api.error_handlers import respond
from service.errors import HalluTracerError, KeyExpired, KeyRevoked, MissingScope, Unauthorized

HEALTH = frozenset({"/health", "/health/live", "/health/ready"})
FORWARDED = ("x-forwarded-for", "forwarded", "x-real-ip", "via")


class BearerKeys:
    """Answers 401 unless ``Authorization: Bearer KEY``, or without that header ``X-Api-Key``, holds one of ``keys``.

    403 where the key does not open the route.  Without any keys all routes are open, except to other machines those
    that change the service.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, protect_metrics: bool, pages: Collection[str] = ()) -> None:
        """``pages`` are paths of files that all may get."""
        self.app = app
        self._keys = keys
        self._open = HEALTH if protect_metrics else HEALTH | {METRICS}
        self._pages = frozenset(pages)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan" or not self._keys.closed:
                await self.app(scope, receive, send)
            return  # no WebSocket routes: the server closes it
        path, is_open = scope["path"], scope["path"] in self._open or self._is_page(scope)
        try:
            key = self._keys.find(secret) if (secret := _secret(Headers(scope=scope))) else None
            if key is not None and not (is_open and _over(key)):
                self._note(scope, key)
            if not is_open:
                check_scopes(HTTPConnection(scope), self._keys, scopes_of(path))
        except HalluTracerError as refusal:
            await respond(refusal, scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _is_page(self, scope: Scope) -> bool:
        return scope["path"] in self._pages and scope["method"] in ("GET", "HEAD")

    @staticmethod
    def _note(scope: Scope, key: Key) -> None:
        state = scope.setdefault("state", {})
        state["key"] = key
        if "record" in state:
            state["record"].caller = key.name


def key_of(request: HTTPConnection) -> Key | None:
    """The key that a request was sent with, where it is known."""
    key = request.scope.get("state", {}).get("key")
    return key if isinstance(key, Key) else None


def check_scopes(request: HTTPConnection, keys: KeyRing, wanted: Collection[KeyScope]) -> None:
    """Raise Unauthorized or MissingScope unless the request's key has one of these scopes; none: any key will do."""
    if not keys.closed:
        if KeyScope.ADMIN in wanted and ("origin" in request.headers or not from_here(request)):
            raise MissingScope(
                "while there are no keys, only programs on this machine may change the service; to do it from "
                "elsewhere, make a key: hallutracer keys make NAME --scope admin"
            )
        return
    key = key_of(request)
    if key is None:
        raise Unauthorized("send a key of this service as 'Authorization: Bearer KEY'")
    if key.revoked is not None:
        raise KeyRevoked(f"key {key.name!r} was revoked; ask the operator for another")
    if key.expired():
        raise KeyExpired(f"key {key.name!r} expired on {key.expires:%Y-%m-%d}; ask the operator for another")
    if wanted and not key.scopes & set(wanted):
        needed = " or ".join(repr(str(one)) for one in sorted(wanted))
        raise MissingScope(f"this route needs the scope {needed}; key {key.name!r} has {', '.join(sorted(key.scopes))}")


def from_here(request: HTTPConnection) -> bool:
    """A connection of this machine that no proxy passes on, and that no foreign web page has a browser make."""
    if request.client is None or any(name in request.headers for name in FORWARDED):
        return False
    page = request.headers.get("origin")
    if page is not None and (
        page != f"{request.url.scheme}://{request.headers.get('host')}" or not on_loopback(request.url.hostname or "")
    ):
        return False
    return on_loopback(request.client.host)


def _over(key: Key) -> bool:
    return key.revoked is not None or key.expired()


def _secret(headers: Headers) -> str | None:
    scheme, _, secret = headers.get("authorization", f"Bearer {headers.get('x-api-key', '')}").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else None
