"""Refuses requests that are addressed to a name which is not this service's.  Plain ASGI: before the body is read.

A page of a foreign site can have its own name resolve to 127.0.0.1 (DNS rebinding) and then read answers of a service
that listens on loopback.  The browser still sends the foreign name as ``Host``.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.error_handlers import respond
from service.errors import WrongHost


class KnownHosts:
    """Answers 421 unless ``Host``, its port left out, is one of ``hosts``."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self.app = app
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request."""
        if scope["type"] != "http" or _name(Headers(scope=scope).get("host", "")) in self._hosts:
            await self.app(scope, receive, send)
            return
        message = "this service does not answer to the name in the Host header; its operator can add it: --allowed-host"
        await respond(WrongHost(message), scope, receive, send)


def _name(host: str) -> str:
    """Without the port; an IPv6 address keeps its brackets."""
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() else host).lower()
