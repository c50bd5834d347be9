"""A server that is told to stop refuses first, so that a balancer can take each request elsewhere, and then closes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import httpx
import pytest

from service.api import connections
from tests.matching import Held
from tests.running import Served, until


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Served, threading.Thread]]:
    for name in ("LEAVING_S", "MOST_S"):
        monkeypatch.setattr(connections, name, 60.0)  # each test ends it earlier
    served = Served(tmp_path)
    thread = threading.Thread(target=lambda: served.server.run(sockets=[served.socket]))
    thread.start()
    until(lambda: served.state.lifecycle.is_ready)
    yield served, thread
    served.server.should_exit = served.server.force_exit = True
    thread.join(30)
    assert not thread.is_alive()


def told_to_stop(served: Served) -> None:
    served.server.should_exit = True
    until(lambda: served.state.lifecycle.stopping)


def test_a_request_on_an_idle_connection_is_refused_and_not_reset(service: tuple[Served, threading.Thread]) -> None:
    served, _ = service
    with httpx.Client(base_url=served.url, timeout=30) as client:
        assert client.post("/score", json={"prompt": "x"}).headers.get("connection") is None
        told_to_stop(served)
        found = client.post("/score", json={"prompt": "x"})
    assert (found.status_code, found.json()["error"]["code"]) == (503, "not_ready")
    assert int(found.headers["retry-after"]) > 0
    assert found.headers["connection"] == "close"


def test_so_is_one_on_a_new_connection(service: tuple[Served, threading.Thread]) -> None:
    served, _ = service
    with httpx.Client(base_url=served.url, timeout=30) as client:
        client.get("/health/ready")
        told_to_stop(served)
        assert [httpx.get(f"{served.url}/health/{name}").status_code for name in ("ready", "live")] == [503, 200]
        assert httpx.post(f"{served.url}/score", json={"prompt": "x"}).status_code == 503


def test_without_clients_it_stops_at_once(service: tuple[Served, threading.Thread]) -> None:
    served, thread = service
    served.server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()


def test_a_request_under_way_is_answered(service: tuple[Served, threading.Thread]) -> None:
    served, thread = service
    held = Held()
    served.engine.before = held
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(served.post(prompt="x")))
    asking.start()
    assert held.entered.wait(30)
    told_to_stop(served)
    held.release.set()
    asking.join(30)
    assert [answer.status_code for answer in answers] == [200]
    assert thread.is_alive()  # it goes on refusing


@pytest.mark.parametrize(
    ("gaps", "seconds"),
    [
        ((), connections.LEAVING_S),
        ((0.9, 0.9), 1.8 + connections.LEAVING_S),
        ((0.9, 1.2), 0.9 + connections.LEAVING_S),
        ((0.5,) * 100, connections.MOST_S),
    ],
    ids=["none comes", "two come", "one comes too late", "they never end"],
)
def test_it_refuses_until_no_request_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gaps: tuple[float, ...], seconds: float
) -> None:
    server = Served(tmp_path).server
    due = list(accumulate(gaps))

    async def refusing() -> float:
        loop, now = asyncio.get_running_loop(), 0.0

        async def sleep(slept: float) -> None:
            nonlocal now
            now += slept
            server.server_state.total_requests = sum(moment <= now for moment in due)

        monkeypatch.setattr(loop, "time", lambda: now)
        monkeypatch.setattr(connections.asyncio, "sleep", sleep)
        await server._refuse()
        return now

    assert asyncio.run(refusing()) == pytest.approx(seconds, abs=0.06)
