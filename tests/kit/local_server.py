"""An HTTP server of this machine that behaves as a test says, and a port for one that a test
starts."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Behaviour = Callable[[BaseHTTPRequestHandler, bytes], None]  # the request, and its body


def free_port() -> int:
    """Return a port for a server that binds it later: below those that the kernel gives to others
    in the meantime."""
    for port in random.sample(range(20_000, 32_000), 99):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("no free port in 99 attempts")


class QuietHandler(BaseHTTPRequestHandler):
    """One that writes no log."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """``host:port`` of a server with this handler."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:  # left alone on a closed socket, its thread would spin to the end of the run
            server.shutdown()


@contextmanager
def listening(behave: Behaviour, protocol: str = "HTTP/1.0") -> Iterator[str]:
    """``host:port`` of a server that calls ``behave`` for each request."""

    class Handler(QuietHandler):
        protocol_version = protocol

        def do_POST(self) -> None:
            behave(self, self.rfile.read(int(self.headers.get("Content-Length", 0))))

        do_GET = do_HEAD = do_PUT = do_POST

    with served(Handler) as address:
        yield address


def answer(
    request: BaseHTTPRequestHandler,
    status: int,
    body: bytes,
    kind: str = "application/json",
    **headers: str,
) -> None:
    """A whole response."""
    request.send_response(status)
    for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
        request.send_header(name.replace("_", "-"), value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)
