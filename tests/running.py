"""The app on a scripted engine: in this process, or listening in a thread."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar, get_args

import httpx
import pytest
import uvicorn
from fastapi.testclient import TestClient

from probes_store.bundle import Bundle
from service.access.callers import ApiKey, Key, Right
from service.access.keys import KeyRing
from service.annexes.feedback.store import Feedback
from service.annexes.traces.tracing import Tracing
from service.api.app import create_app
from service.audit.auditor import Auditor
from service.cli.running import make_server
from service.policies.guard import Policy
from service.policies.policy import Policies, built_in
from service.scoring import Scorer
from service.serving.metrics import Metrics
from service.serving.service import Service
from service.settings import ServiceSettings
from tests.engine_kinds import KINDS, engine_of
from tests.matching import matching_bundle
from tests.scripted_engine import ScriptedEngine


class App:
    """The app on a scripted engine; ``kind`` is one of ``KINDS``, ``names`` its bundles, ``add``
    makes further ones."""

    def __init__(
        self,
        tmp_path: Path,
        kind: str = KINDS[0],
        *,
        names: Sequence[str] = ("one", "two"),
        policies: Mapping[str, Policy] = MappingProxyType({}),
        aliases_of: Callable[[str], Mapping[str, int]] = lambda name: {},
        add: Sequence[Callable[[ScriptedEngine, Path], Bundle]] = (),
        max_kv_tokens: int = 16_384,
        api_keys: Sequence[str | ApiKey | Key] = (),
        keys_file: Path | None = None,
        callers_may: Sequence[Right] = get_args(Right),
        tracing: Tracing | None = None,
        feedback: Callable[[Metrics], Feedback] | None = None,
        audit: Callable[[Metrics], Auditor] | None = None,
        **settings: Any,
    ) -> None:
        named = [
            ApiKey(key, f"key-{n}") if isinstance(key, str) else key
            for n, key in enumerate(api_keys, 1)
        ]
        keys = [key.hashed() if isinstance(key, ApiKey) else key for key in named]
        self.engine = ScriptedEngine()
        self.served = engine_of(self.engine, kind, max_kv_tokens=max_kv_tokens)
        self.bundles = [
            matching_bundle(self.engine, tmp_path, name, seed) for seed, name in enumerate(names)
        ]
        self.bundles += [make(self.engine, tmp_path) for make in add]
        metrics, named_policies = Metrics(), built_in() | policies
        self.state = Service(
            lambda: {bundle.reference: Scorer(self.served, bundle) for bundle in self.bundles},
            aliases_of=aliases_of,
            policies=Policies(named_policies),
            keys=KeyRing(keys, keys_file, named_policies),
            settings=ServiceSettings(
                callers_may=tuple(callers_may), **{"policy": "gate"} | settings
            ),
            metrics=metrics,
            feedback=None if feedback is None else feedback(metrics),
            audit=None if audit is None else audit(metrics),
            tracing=tracing,
        )
        self.app = create_app(self.state)
        self.client = TestClient(self.app, raise_server_exceptions=False)

    @contextmanager
    def started(self) -> Iterator[Self]:
        """Ready, in this process and without a socket: ``client`` reaches it."""
        with self.client:
            until(lambda: self.state.lifecycle.is_ready)
            yield self

    def ask(
        self,
        path: str = "/score",
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        **body: Any,
    ) -> Any:
        """The document of an answer that has this status."""
        response = self.client.post(path, json=body, headers=headers)
        assert response.status_code == status, response.text
        return response.json()

    def scraped(self) -> str:
        """All metrics, as a scraper reads them."""
        return self.client.get("/metrics").text

    def series(self, name: str, **labels: str) -> float:
        """The sum of a metric's series that have these labels."""
        lines = self.scraped().splitlines()
        lines = [line for line in lines if re.match(rf"hallutracer_{name}[{{ ]", line)]
        for label, value in labels.items():
            lines = [line for line in lines if f'{label}="{value}"' in line]
        assert lines, f"{name} is not on /metrics with {labels}"
        return sum(float(line.split()[-1]) for line in lines)


class Running(App):
    """The app, listening; ``thread`` runs the server."""

    thread: threading.Thread

    def __init__(self, tmp_path: Path, kind: str = KINDS[0], **options: Any) -> None:
        super().__init__(tmp_path, kind, **options)
        self.server = uvicorn.Server(
            uvicorn.Config(
                self.app, log_level="warning", timeout_graceful_shutdown=10, timeout_keep_alive=75
            )
        )
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def post(self, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/score", json=body, timeout=30)

    def scraped(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=60).text

    def metric(self, name: str) -> float:
        """The sum of the series of a metric of ours, by its whole name."""
        return self.series(name.removeprefix("hallutracer_"))

    def connect(
        self, *chunks: bytes, host: str = "127.0.0.1", buffer: int | None = None
    ) -> socket.socket:
        """A connection from this address on which these bytes were sent; ``buffer`` bytes of an
        answer that nobody reads fit in."""
        connection = socket.socket()
        connection.settimeout(20)
        connection.bind((host, 0))
        if buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.connect(("127.0.0.1", self.port))
        for chunk in chunks:
            connection.sendall(chunk)
        return connection


@contextmanager
def running(tmp_path: Path, kind: str = KINDS[0], **settings: Any) -> Iterator[Running]:
    """A ready service; stopped, and its thread ended, afterwards."""
    with listening(Running(tmp_path, kind, **settings)) as service:
        yield service


def service_of_module(**options: Any) -> Any:
    """A fixture: a listening service that all tests of a module share; as ``app_of_module``."""
    return _of_module(Running, **options)


def served_of_module(**options: Any) -> Any:
    """A fixture: as ``service_of_module``, behind the server of ``hallutracer serve``."""
    return _of_module(Served, **options)


def app_of_module(**options: Any) -> Any:
    """A fixture: an app in this process that all tests of a module share.

    ``kinds``: of engines, each of which the tests see.  ``takes_tools`` and ``answer``: of the
    script.  Further options: the app's."""
    return _of_module(App, **options)


def _of_module(
    make: type[App],
    *,
    kinds: Sequence[str] = (),
    takes_tools: bool = False,
    answer: str | None = None,
    **options: Any,
) -> Any:
    @pytest.fixture(scope="module", params=kinds or None)
    def made(
        tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
    ) -> Iterator[App]:
        kind = getattr(request, "param", KINDS[0])
        app = make(tmp_path_factory.mktemp("app"), kind, **options)
        app.engine.takes_tools = takes_tools
        app.engine.answer = app.engine.answer if answer is None else answer
        with listening(app) if isinstance(app, Running) else app.started() as started:
            yield started

    return made


@contextmanager
def in_process(
    load: Callable[[], Mapping[str, Scorer]],
    policies: Mapping[str, Policy] = MappingProxyType({}),
    **settings: Any,
) -> Iterator[TestClient]:
    """The app on these scorers, ready, in this process; stopped afterwards."""
    known = Policies(built_in() | policies)
    state = Service(load, settings=ServiceSettings(**settings), policies=known)
    with TestClient(create_app(state)) as client:
        until(lambda: state.lifecycle.is_ready)
        yield client


Some = TypeVar("Some", bound=Running)


class Served(Running):
    """The app behind the server that ``hallutracer serve`` makes."""

    def __init__(self, tmp_path: Path, kind: str = KINDS[0], **options: Any) -> None:
        super().__init__(tmp_path, kind, **options)
        self.server = make_server(self.app, self.state.lifecycle)


@contextmanager
def listening(service: Some) -> Iterator[Some]:
    """``service``, ready; stopped, and its thread ended, afterwards."""
    service.thread = thread = threading.Thread(
        target=lambda: service.server.run(sockets=[service.socket])
    )
    thread.start()
    try:
        until(lambda: service.state.lifecycle.is_ready)
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


async def until_on_loop(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """As ``until``, while the event loop goes on."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition never became true"
        await asyncio.sleep(0.01)
