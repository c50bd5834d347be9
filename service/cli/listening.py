"""Listening: a socket that is bound before the model is loaded, and the server around it."""

from __future__ import annotations

import errno
import logging
import math
import re
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from service.access.callers import address_in, on_loopback
from service.cli.options import UsageError
from service.errors import HalluTracerError
from service.settings import ServiceSettings

if TYPE_CHECKING:
    import uvicorn

HOST_NAME = re.compile(r"[\w.-]+|\[[0-9a-fA-F:.]+\]", re.ASCII)  # as it stands in ``Host``


def make_server(app: object, settings: ServiceSettings, leave: Callable[[], None]) -> uvicorn.Server:
    """uvicorn around the app, with every log line as JSON on stderr.  ``leave``: refuse work, the server will stop."""
    import uvicorn

    from service.api.connections import LeavingServer, connections
    from service.serving.request_log import JsonLines

    lines = logging.StreamHandler()
    lines.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[lines])
    logging.captureWarnings(True)
    for library in ("httpx", "uvicorn"):
        logging.getLogger(library).setLevel(logging.WARNING)
    return LeavingServer(
        uvicorn.Config(
            app,  # type: ignore[arg-type]
            host=settings.host,
            port=settings.port,
            log_config=None,
            access_log=False,
            http=connections(settings.max_connections),
            ws="none",
            server_header=False,
            proxy_headers=False,  # an address that a client could choose would get it another one's share
            timeout_graceful_shutdown=math.ceil(settings.drain_s),
        ),
        leave,
    )


def listen(host: str, port: int) -> socket.socket:
    """Bind before the model is loaded: a taken port is said at once, not after minutes."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only for sockets that name TCP; with it a lone answer waits 40 ms for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is taken; choose another with --port (0: any free)"
            raise HalluTracerError(message) from None
        raise HalluTracerError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return listener


def known_hosts(settings: ServiceSettings, *, keyed: bool) -> tuple[str, ...]:
    """The names that requests may be addressed to; "*": any.  Addresses (``service.api.auth``) are taken besides.

    Those given; else loopback's on loopback, and beyond it this machine's own, or any where every caller has a key
    (``keyed``), which a foreign page has not.  Raises UsageError for what no ``Host`` could be.
    """
    for name in settings.allowed_hosts:
        if name != "*" and not HOST_NAME.fullmatch(name):
            raise UsageError("--allowed-host", f"{name!r} is not a host's name, without scheme and port, or * for any")
    if settings.allowed_hosts:
        return settings.allowed_hosts
    if on_loopback(settings.host):
        return ("localhost",)
    own = (settings.host,) if address_in(settings.host) is None else ()
    return ("*",) if keyed else ("localhost", socket.gethostname(), *own)


def in_url(host: str) -> str:
    """A host as it stands in an address that can be called: IPv6 in brackets, "all interfaces" as loopback."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
