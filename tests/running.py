"""An app on a real socket, served by uvicorn in a thread: for what a test client cannot show."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from service.api.app import create_app
from service.engines.scripted import ScriptedEngine
from service.scoring import Scorer
from service.serving.state import ServiceState
from service.settings import ServiceSettings
from tests.engine_kinds import KINDS, engine_of
from tests.matching import matching_bundle


class Running:
    """A service on the scripted engine, listening; ``kind`` is one of ``KINDS``."""

    def __init__(self, tmp_path: Path, kind: str = KINDS[0], max_kv_tokens: int = 16_384, **settings: Any) -> None:
        self.engine = ScriptedEngine()
        self.served = engine_of(self.engine, kind, max_kv_tokens=max_kv_tokens)
        self.bundles = [matching_bundle(self.engine, tmp_path, name, seed) for seed, name in enumerate(("one", "two"))]
        self.state = ServiceState(
            lambda: [Scorer(self.served, bundle) for bundle in self.bundles], settings=ServiceSettings(**settings)
        )
        self.app = create_app(self.state)
        self.server = uvicorn.Server(uvicorn.Config(self.app, log_level="warning", timeout_graceful_shutdown=10))
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def post(self, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/score", json=body, timeout=30)

    def metric(self, name: str) -> float:
        """The sum of a metric's series, as a scraper reads it."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        found = [float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name]
        assert found, f"{name} is not on /metrics"
        return sum(found)


@contextmanager
def running(tmp_path: Path, kind: str = KINDS[0], **settings: Any) -> Iterator[Running]:
    """A ready service; stopped, and its thread ended, afterwards."""
    service = Running(tmp_path, kind, **settings)
    thread = threading.Thread(target=lambda: service.server.run(sockets=[service.socket]))
    thread.start()
    try:
        until(lambda: service.state.is_ready)
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
