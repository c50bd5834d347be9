"""Several replicas behind one Envoy: the same promises as behind nginx (``test_balancer``)."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import httpx
import pytest

from service.access.routes import CHAT_ROUTE, SCORE_ROUTES
from service.settings import ServiceSettings
from tests.deploy import balancer as b
from tests.deploy import envoy as e
from tests.deploy.test_balancer import NOT_READY, breaking, fine, loading, post
from tests.local_server import answer, listening

RESETS = ("retry_on: connect-failure,", "retry_on: connect-failure,reset,")
TWO = (b.FIRST, b.SECOND)


@contextmanager
def replica(behave: Callable[[BaseHTTPRequestHandler], None], ready: bool = True) -> Iterator[b.Replica]:
    """It says whether it is ready; ``began`` holds the ids of the other requests that reached it."""
    began: list[str] = []

    def begin(request: BaseHTTPRequestHandler, _: bytes) -> None:
        if request.path == "/health/ready":
            answer(request, 200 if ready else 503, b"{}")
            return
        began.append(request.headers["X-Request-Id"])
        behave(request)

    with listening(begin, "HTTP/1.1") as address:
        yield b.Replica(address, began)


def test_envoy_takes_the_configuration_and_sees_a_fault(tmp_path: Path) -> None:
    done = e.check(e.configuration(tmp_path, TWO, b.free_port()))
    assert done.returncode == 0, done.stderr
    done = e.check(e.configuration(tmp_path, TWO, b.free_port(), ("num_retries: 1", "num_retry: 1")))
    assert done.returncode != 0
    assert "num_retry" in done.stderr


def test_its_limits_are_the_services_own() -> None:
    text, settings = e.CONFIGURATION.read_text(), ServiceSettings()
    assert b.FIRST.endswith(f":{settings.port}")
    assert re.findall(r"request_body_buffer_limit: (\d+)", text) == [str(settings.max_body_bytes)]
    [idle] = re.findall(r"stream_idle_timeout: (\d+)s", text)
    assert int(idle) > settings.deadline_s


def test_requests_are_answered_keep_their_ids_and_are_logged_without_their_queries(tmp_path: Path) -> None:
    with replica(fine) as one, replica(fine) as two, e.balancing(tmp_path, (one.address, two.address)) as envoy:
        for name in (names := [f"mine-{i}" for i in range(12)]):
            found = httpx.post(f"{envoy.url}/score?q=a%20prompt", json={}, headers={"X-Request-Id": name}, timeout=60)
            assert found.status_code == 200
        assert sorted(one.began + two.began) == sorted(names)
        assert post(envoy.url).status_code == 200  # it gets an id
        lines = envoy.lines(13)
    assert {line["request_id"] for line in lines} >= set(names)
    assert {line["path"] for line in lines} == {"/score"}
    assert "prompt" not in envoy.log.read_text()
    assert all(one.began + two.began)


def test_an_event_goes_out_before_the_next_is_there(tmp_path: Path) -> None:
    seen = threading.Event()

    def streaming(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(b"data: risk\n\n")
        handler.wfile.write(b"data: after\n\n" if seen.wait(30) else b"data: too late\n\n")
        handler.close_connection = True

    with replica(streaming) as one, e.balancing(tmp_path, (one.address, one.address)) as envoy:
        found = []
        with httpx.stream("POST", f"{envoy.url}/score", json={}, timeout=60) as stream:
            for line in stream.iter_lines():
                found.append(line)
                seen.set()
    assert [line for line in found if line] == ["data: risk", "data: after"]


def test_a_post_whose_connection_broke_is_not_repeated(tmp_path: Path) -> None:
    with replica(breaking) as one, replica(breaking) as two, \
            e.balancing(tmp_path, (one.address, two.address)) as envoy:  # fmt: skip
        assert post(envoy.url, CHAT_ROUTE).status_code == 503
        assert len(one.began + two.began) == 1


def test_the_broken_post_would_be_repeated_under_another_rule(tmp_path: Path) -> None:
    with replica(breaking) as one, replica(breaking) as two, \
            e.balancing(tmp_path, (one.address, two.address), RESETS) as envoy:  # fmt: skip
        assert post(envoy.url, CHAT_ROUTE).status_code == 503
        assert len(one.began + two.began) == 2


@pytest.mark.parametrize("route", SCORE_ROUTES)
def test_a_score_survives_the_replica_that_broke_off(tmp_path: Path, route: str) -> None:
    with replica(breaking) as one, replica(fine) as two, e.balancing(tmp_path, (one.address, two.address)) as envoy:
        assert [post(envoy.url, f"{route}?x=1").status_code for _ in range(12)] == [200] * 12
        assert one.began


def test_a_score_is_asked_three_times_and_no_more(tmp_path: Path) -> None:
    with replica(breaking) as one, replica(breaking) as two, \
            e.balancing(tmp_path, (one.address, two.address)) as envoy:  # fmt: skip
        assert post(envoy.url).status_code == 503
        assert len(one.began + two.began) == 3


def test_a_post_that_takes_too_long_is_not_repeated(tmp_path: Path) -> None:
    done = threading.Event()

    def slow(handler: BaseHTTPRequestHandler) -> None:
        done.wait(30)
        handler.close_connection = True

    soon = ("stream_idle_timeout: 60s", "stream_idle_timeout: 0.3s")
    with replica(slow) as one, replica(slow) as two, \
            e.balancing(tmp_path, (one.address, two.address), soon) as envoy:  # fmt: skip
        assert post(envoy.url, CHAT_ROUTE).status_code == 504
        assert len(one.began + two.began) == 1
        done.set()


def test_a_replica_that_is_away_or_not_ready_costs_nobody_an_answer(tmp_path: Path) -> None:
    with replica(fine) as two, replica(fine, ready=False) as loads:
        for address in (f"127.0.0.1:{b.free_port()}", loads.address):
            with e.balancing(tmp_path, (address, two.address), ready=1) as envoy:
                assert [post(envoy.url).status_code for _ in range(6)] == [200] * 6
        assert (len(two.began), len(loads.began)) == (12, 0)


def test_what_a_loading_replica_refused_another_one_answers_once(tmp_path: Path) -> None:
    """It said that it was ready a moment ago."""
    with replica(loading) as one, replica(fine) as two, e.balancing(tmp_path, (one.address, two.address)) as envoy:
        names = [f"mine-{i}" for i in range(12)]
        assert [post(envoy.url, **{"X-Request-Id": name}).status_code for name in names] == [200] * 12
        assert two.began == names
        assert one.began


def test_where_all_refuse_the_client_hears_when_to_come_back(tmp_path: Path) -> None:
    with replica(loading) as one, replica(loading) as two, e.balancing(tmp_path, (one.address, two.address)) as envoy:
        found = post(envoy.url)
        assert (found.status_code, found.headers["retry-after"], found.content) == (503, "1", NOT_READY)


@pytest.mark.parametrize(
    "path", ["/metrics", "/v1/admin/reload", "//v1/admin/reload", "/v1/%61dmin/reload", "/v1%2Fadmin/x"]
)
def test_what_is_one_replicas_own_is_not_passed_on(tmp_path: Path, path: str) -> None:
    with replica(fine) as one, e.balancing(tmp_path, (one.address, one.address)) as envoy:
        assert httpx.post(httpx.URL(f"{envoy.url}/", raw_path=path.encode()), timeout=60).status_code in (400, 404)
        assert one.began == []
