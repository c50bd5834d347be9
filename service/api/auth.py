"""Bearer keys for every route but health checks and, unless protected, metrics.  Plain ASGI: before the body is read.

Unknown paths need a key too, so that the routes cannot be probed without one.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.error_handlers import respond
from service.errors import Unauthorized

HEALTH = frozenset({"/health", "/health/live", "/health/ready"})
METRICS = "/metrics"


class BearerKeys:
    """Answers 401 unless ``Authorization: Bearer KEY`` holds one of ``keys``."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], protect_metrics: bool) -> None:
        self.app = app
        self._digests = [_digest(key) for key in keys]  # of equal length, so that timing does not reveal a key's
        self._open = HEALTH if protect_metrics else HEALTH | {METRICS}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request."""
        if scope["type"] == "lifespan" or scope["path"] in self._open or self._known(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no WebSocket routes: the server closes it
        await respond(Unauthorized("send a key of this service as 'Authorization: Bearer KEY'"), scope, receive, send)

    def _known(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
