"""An app on a real socket, served by uvicorn in a thread: for what a test client cannot show."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from service.api.app import create_app
from service.api.state import ServiceState
from service.engines.base import Engine
from service.engines.scripted import ScriptedEngine
from service.scoring import Scorer
from service.settings import ServiceSettings
from tests.matching import matching_bundle
from tests.scripted_online import ScriptedOnlineEngine

ROOMS = ["room", "live"]
PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # without certificates: reading them takes longer than a request


class Running:
    """A service on the scripted engine, listening; ``room`` says which kind of engine it is made to be."""

    def __init__(self, tmp_path: Path, room: str = "room", **settings: Any) -> None:
        self.engine = ScriptedEngine()
        self.served = served(self.engine, room)
        self.bundles = [matching_bundle(self.engine, tmp_path, name, seed) for seed, name in enumerate(("one", "two"))]
        self.state = ServiceState(
            lambda: [Scorer(self.served, bundle) for bundle in self.bundles], settings=ServiceSettings(**settings)
        )
        self.app = create_app(self.state)
        self.server = uvicorn.Server(uvicorn.Config(self.app, log_level="warning", timeout_graceful_shutdown=10))
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def ready(self) -> bool:
        return self.state._room is not None

    def post(self, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/score", json=body, timeout=30, verify=PLAIN)

    def metric(self, name: str) -> float:
        """The sum of a metric's series, as a scraper reads it."""
        lines = httpx.get(f"{self.url}/metrics", verify=PLAIN).text.splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name]
        assert values, f"{name} is not on /metrics"
        return sum(values)


def served(script: ScriptedEngine, room: str) -> Engine:
    """What runs ``script``: itself, or for "live" a scheduler of its own in front of it."""
    assert room in ROOMS
    return script if room == "room" else ScriptedOnlineEngine(script)


@contextmanager
def running(tmp_path: Path, room: str = "room", **settings: Any) -> Iterator[Running]:
    """A ready service; stopped, and its thread ended, afterwards."""
    service = Running(tmp_path, room, **settings)
    thread = threading.Thread(target=lambda: service.server.run(sockets=[service.socket]))
    thread.start()
    try:
        until(lambda: service.ready)
        yield service
    finally:
        service.server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def until(condition: Any, seconds: float = 20.0) -> None:
    """Wait for a condition; fail where it does not come."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition never became true"
        time.sleep(0.01)
