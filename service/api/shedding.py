"""Load shedding: while the queue is full, a scoring request gets 429 before its body is read and parsed."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.error_handlers import respond
from service.api.request_schema import ROUTES
from service.errors import Overloaded


class LoadShedder:
    """Answers 429 if ``check_not_full`` raises Overloaded."""

    def __init__(self, app: ASGIApp, check_not_full: Callable[[], None]) -> None:
        self.app = app
        self._check_not_full = check_not_full

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request."""
        if scope["type"] == "http" and scope["path"] in ROUTES:
            try:
                self._check_not_full()
            except Overloaded as full:
                await respond(full, scope, receive, send)
                return
        await self.app(scope, receive, send)
