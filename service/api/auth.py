"""Bearer keys for every route but health checks, the pages' files and, unless protected, metrics.

Plain ASGI: before the body is read.

Unknown paths need a key too, so that the routes cannot be probed without one.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.error_handlers import respond
from service.callers import ApiKey
from service.errors import Unauthorized

HEALTH = frozenset({"/health", "/health/live", "/health/ready"})
METRICS = "/metrics"


class BearerKeys:
    """Answers 401 unless ``Authorization: Bearer KEY``, or without that header ``X-Api-Key``, holds one of ``keys``."""

    def __init__(
        self, app: ASGIApp, keys: Sequence[ApiKey], protect_metrics: bool, pages: Collection[str] = ()
    ) -> None:
        """``pages`` are paths of files that all may get."""
        self.app = app
        # Digests are of equal length, so that timing does not reveal a key's.
        self._keys = [(_digest(key.secret), key) for key in keys]
        self._open = HEALTH if protect_metrics else HEALTH | {METRICS}
        self._pages = frozenset(pages)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request."""
        key = None if scope["type"] == "lifespan" else self._key(Headers(scope=scope))
        if key is not None:
            state = scope.setdefault("state", {})
            state["key"] = key
            if "record" in state:
                state["record"].caller = key.name
        if scope["type"] == "lifespan" or key is not None or scope["path"] in self._open or self._is_page(scope):
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no WebSocket routes: the server closes it
        await respond(Unauthorized("send a key of this service as 'Authorization: Bearer KEY'"), scope, receive, send)

    def _is_page(self, scope: Scope) -> bool:
        return scope["type"] == "http" and scope["path"] in self._pages and scope["method"] in ("GET", "HEAD")

    def _key(self, headers: Headers) -> ApiKey | None:
        scheme, _, secret = headers.get("authorization", f"Bearer {headers.get('x-api-key', '')}").partition(" ")
        given = _digest(secret.strip())
        matches = [key for digest, key in self._keys if hmac.compare_digest(given, digest)]
        return matches[0] if matches and scheme.lower() == "bearer" else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
