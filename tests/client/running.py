"""The real app on a scripted engine, behind a real socket."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvicorn

from service.api.app import create_app
from service.engines.scheduler import Scheduled
from service.engines.scripted import ScriptedEngine
from service.scoring import Scorer
from service.serving.state import ServiceState
from service.settings import ServiceSettings
from tests.matching import matching_bundle


@dataclass
class Running:
    """A listening service; ``engine`` has the knobs."""

    url: str
    engine: ScriptedEngine
    state: ServiceState

    def metric(self, name: str) -> float:
        """A sample's value, by name and labels as /metrics writes them; 0 where it is not there yet."""
        lines = httpx.get(f"{self.url}/metrics", trust_env=False).text.splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} ")), 0.0)


@contextmanager
def running(folder: Path, settings: ServiceSettings, *, answer: str = "It is so.") -> Iterator[Running]:
    engine = ScriptedEngine(answer=answer)
    bundles = [matching_bundle(engine, folder, name, seed) for seed, name in enumerate(("one", "two"))]
    loaded = threading.Event()
    served = Scheduled(engine)
    state = ServiceState(lambda: [Scorer(served, bundle) for bundle in bundles], settings=settings)
    app = create_app(state, lambda _: loaded.set())
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            assert loaded.wait(60)
            assert state.failure is None
            yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", engine, state)
        finally:
            server.should_exit = True
            thread.join(60)


def until(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Wait for ``true()``; whether it came."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
