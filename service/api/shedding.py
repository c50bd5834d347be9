"""Load shedding: while the queue is full, a scoring request gets 429 before its body is read and parsed."""

from __future__ import annotations

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.dependencies import caller_of
from service.api.error_handlers import respond
from service.errors import Overloaded
from service.routes import PROMPT_ROUTES
from service.serving.state import ServiceState


class LoadShedder:
    """Answers 429 if ``ServiceState.check_not_full`` raises Overloaded."""

    def __init__(self, app: ASGIApp, state: ServiceState) -> None:
        self.app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request."""
        if scope["type"] == "http" and scope["path"] in PROMPT_ROUTES:
            try:
                self._state.check_not_full(caller_of(HTTPConnection(scope), self._state))
            except Overloaded as full:
                await respond(full, scope, receive, send)
                return
        await self.app(scope, receive, send)
