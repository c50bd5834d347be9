"""Refuses requests that are addressed to a name which is not this service's.  Plain ASGI: before the body is read.

A page of a foreign site can have its own name resolve to 127.0.0.1, or to an address of the browser's network (DNS
rebinding), and then read what a service there answers.  The browser still sends the foreign name as ``Host``.  An
address as ``Host`` cannot be such a page's: rebinding needs a name.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.error_handlers import respond
from service.errors import WrongHost


class KnownHosts:
    """Answers 421 unless ``Host``, its port left out, is an IP address or one of ``hosts``."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self.app = app
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request."""
        if scope["type"] != "http" or self._knows(_name(Headers(scope=scope).get("host", ""))):
            await self.app(scope, receive, send)
            return
        message = "this service does not answer to the name in the Host header; its operator can add it: --allowed-host"
        await respond(WrongHost(message), scope, receive, send)

    def _knows(self, name: str) -> bool:
        return name in self._hosts or _is_address(name)


def _name(host: str) -> str:
    """Without the port; an IPv6 address keeps its brackets."""
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() else host).lower()


def _is_address(name: str) -> bool:
    """As browsers write one in ``Host``: four decimal numbers, or IPv6 in brackets."""
    try:
        if name.startswith("[") and name.endswith("]"):
            return ipaddress.IPv6Address(name[1:-1]).scope_id is None
        ipaddress.IPv4Address(name)
    except ValueError:
        return False
    return True
