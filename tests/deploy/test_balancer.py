"""Several replicas behind one nginx: a real round trip, and a POST that may have begun is never
sent twice."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.access.routes import CHAT_ROUTE, SCORE_ROUTES
from service.errors import Overloaded
from service.settings import ServiceSettings
from tests.kit import balancer as b
from tests.kit.local_server import answer, free_port
from tests.running import Running, running, until

NOT_READY = b'{"error":{"code":"not_ready"}}'
Behaviour = Callable[[BaseHTTPRequestHandler], None]


def fine(handler: BaseHTTPRequestHandler) -> None:
    answer(handler, 200, b"{}")


def loading(handler: BaseHTTPRequestHandler) -> None:
    answer(handler, 503, NOT_READY, Retry_After="1")


def breaking(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True


def post(url: str, route: str = "/score", **headers: str) -> httpx.Response:
    return httpx.post(f"{url}{route}", json={"prompt": "x"}, headers=headers, timeout=60)


@contextmanager
def group(
    folder: Path, *behaviours: Behaviour, edits: tuple[b.Edit, ...] = (), order: int = 1
) -> Iterator[Any]:
    """The address of an nginx before replicas of these behaviours, and for each the ids that
    reached it."""
    with ExitStack() as stack:
        replicas = [stack.enter_context(b.replica(behave)) for behave in behaviours]
        addresses = [replica.address for replica in replicas][::order]
        # nginx wants two
        nginx = stack.enter_context(
            b.balancing(folder, addresses * (1 + (len(addresses) == 1)), *edits)
        )
        yield nginx.url, [replica.began for replica in replicas]


# --- the file ---


def test_its_limits_are_the_services_own() -> None:
    text, settings = b.CONFIGURATION.read_text(), ServiceSettings()
    assert b.FIRST.endswith(f":{settings.port}")
    for name in ("client_max_body_size", "client_body_buffer_size"):
        assert re.findall(rf"{name} (\d+)m;", text) == [str(settings.max_body_bytes // 1024**2)]
    [reads] = re.findall(r"proxy_read_timeout (\d+)s;", text)
    assert int(reads) > settings.deadline_s
    [idle] = re.findall(r"keepalive_timeout (\d+)s;", text)
    assert int(idle) < settings.keep_alive_s


# --- limits for each address ---

# As if each request came from the address that it names.
FROM = ("server_tokens off;", "real_ip_header X-From; set_real_ip_from 127.0.0.1;")


def refused_by_nginx(response: httpx.Response) -> bool:
    if response.status_code != 429:
        return False
    assert response.headers["retry-after"] == "1"
    assert response.headers["x-request-id"] == "mine"
    assert response.json()["error"]["code"] == Overloaded.code
    return True


def test_new_requests_of_an_address_are_limited_and_health_checks_by_themselves(
    tmp_path: Path,
) -> None:
    edits = (
        FROM,
        ("zone=requests:10m rate=500r/s", "zone=requests:10m rate=1r/m"),
        ("zone=requests burst=500", "zone=requests burst=3"),
        ("zone=checks:10m rate=50r/s", "zone=checks:10m rate=1r/m"),
        ("zone=checks burst=200", "zone=checks burst=3"),
    )
    with group(tmp_path, fine, fine, edits=edits) as (url, began):

        def refused(address: str, path: str = "/score") -> bool:
            response = post(url, path, **{"X-From": address, "X-Request-Id": "mine"})
            assert response.status_code in (200, 429)
            return refused_by_nginx(response)

        limit = [False] * 4 + [True]
        assert [refused("192.0.2.1") for _ in limit] == limit
        assert sum(map(len, began)) == 4
        assert not refused("192.0.2.2")
        for path in ("/v1/chat/completions", "/healthy", "/health/", "/v1/models"):
            assert refused("192.0.2.1", path)
        network = [f"2001:db8:0:a::{number}" for number in range(1, 6)]
        assert [refused(address) for address in network] == limit, "a /64 is one address"
        assert not refused("2001:db8:0:b::1")
        checks = ["/health", "/health/live", "/health/ready", "/health/ready", "/health"]
        assert [refused("192.0.2.1", path) for path in checks] == limit
        assert refused("192.0.2.3", "/health") is False
        assert sum(map(len, began)) == 4 + 1 + 4 + 1 + 4 + 1


def test_requests_under_way_of_an_address_are_limited(tmp_path: Path) -> None:
    begun, release = threading.Semaphore(0), threading.Event()

    def held(handler: BaseHTTPRequestHandler) -> None:
        if handler.path == CHAT_ROUTE:
            begun.release()
            release.wait(60)
        fine(handler)

    edits = (FROM, ("limit_conn under_way 256", "limit_conn under_way 2"))
    with group(tmp_path, held, held, edits=edits) as (url, _), ThreadPoolExecutor(2) as pool:

        def ask(path: str, address: str = "192.0.2.1") -> httpx.Response:
            return post(url, path, **{"X-From": address, "X-Request-Id": "mine"})

        waiting = [pool.submit(ask, CHAT_ROUTE) for _ in range(2)]
        try:
            assert all(begun.acquire(timeout=60) for _ in waiting)
            assert refused_by_nginx(ask("/score"))
            assert ask("/health/live").status_code == 200
            assert ask("/score", "192.0.2.2").status_code == 200
        finally:
            release.set()
        assert [task.result().status_code for task in waiting] == [200, 200]
        until(lambda: ask("/score").status_code == 200)


def test_a_replicas_own_429_comes_through(tmp_path: Path) -> None:
    def full(handler: BaseHTTPRequestHandler) -> None:
        answer(handler, 429, b"its own", Retry_After="7")

    with group(tmp_path, full, full) as (url, _):
        for route in (CHAT_ROUTE, *SCORE_ROUTES):
            response = post(url, route)
            received = response.status_code, response.headers["retry-after"], response.content
            assert received == (429, "7", b"its own")


# --- two replicas of the service ---


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Running]]:
    """Two without keys, which let a caller through nginx choose nothing."""
    folder = tmp_path_factory.mktemp("fleet")
    with ExitStack() as stack:
        yield [
            stack.enter_context(running(folder / name, names=["tiny"], callers_may=()))
            for name in ("one", "two")
        ]


@pytest.fixture(scope="module")
def fleet(
    services: list[Running], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[b.Balancer]:
    with b.balancing(
        tmp_path_factory.mktemp("nginx"), [f"127.0.0.1:{service.port}" for service in services]
    ) as nginx:
        yield nginx


def test_requests_are_spread_and_keep_their_ids(fleet: b.Balancer) -> None:
    names = [f"mine-{i}" for i in range(16)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda name: post(fleet.url, **{"X-Request-Id": name}), names))
    assert [(answer.status_code, answer.headers["x-request-id"]) for answer in answers] == [
        (200, name) for name in names
    ]
    lines = [line for line in fleet.lines(16) if line["request_id"].startswith("mine-")]
    assert sorted(line["request_id"] for line in lines) == sorted(names)
    assert len({line["replicas"] for line in lines}) == 2
    assert re.fullmatch("[0-9a-f]{32}", post(fleet.url).headers["x-request-id"])


def test_an_error_comes_through_readiness_is_the_fleets_and_metrics_are_each_replicas_own(
    fleet: b.Balancer,
) -> None:
    response = httpx.post(f"{fleet.url}/score", json={"prompt": 1}, timeout=60)
    assert (response.status_code, response.json()["error"]["code"]) == (422, "invalid_request")
    for path, status in (("/health/ready", 200), ("/metrics", 404)):
        assert httpx.get(f"{fleet.url}{path}", timeout=60).status_code == status


@pytest.mark.parametrize(
    "path", ["/v1/admin/reload", "//v1/admin/reload", "/v1/./admin/reload", "/v1/%61dmin/reload"]
)
def test_nobody_changes_a_replica_through_it(fleet: b.Balancer, path: str) -> None:
    """Without keys the replicas would take nginx for a program of this machine."""
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    port = int(fleet.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
        raw.sendall(head.encode())
        response = b"".join(iter(lambda: raw.recv(4096), b""))
    assert response.startswith(b"HTTP/1.1 404")
    assert b"x-request-id" not in response.lower()  # none of a replica


def test_no_client_of_it_is_taken_for_the_owner_of_a_replica_without_keys(
    fleet: b.Balancer, services: list[Running]
) -> None:
    for choice in ({"policy": "observe"}, {"threshold": 1.0}):
        for url, status in ((services[0].url, 200), (fleet.url, 403)):
            response = httpx.post(f"{url}/score", json={"prompt": "x"} | choice, timeout=60)
            assert response.status_code == status


def test_one_that_stops_is_not_noticed_and_without_any_nothing_is_answered(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first, second = [
            stack.enter_context(running(tmp_path / name, names=["tiny"])) for name in ("one", "two")
        ]
        nginx = stack.enter_context(
            b.balancing(tmp_path, [f"127.0.0.1:{service.port}" for service in (first, second)])
        )
        assert [post(nginx.url).status_code for _ in range(4)] == [200] * 4
        first.server.should_exit = True
        until(lambda: not first.server.started or first.state.lifecycle.stopping)
        assert [post(nginx.url).status_code for _ in range(8)] == [200] * 8
        second.server.should_exit = True
        until(lambda: post(nginx.url).status_code == 502)


# --- replicas that fail ---


def test_an_event_goes_out_before_the_next_is_there(tmp_path: Path) -> None:
    seen = threading.Event()

    def streaming(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()
        handler.wfile.write(b"data: risk\n\n")
        handler.wfile.write(b"data: after\n\n" if seen.wait(30) else b"data: too late\n\n")
        handler.close_connection = True

    received = []
    with (
        group(tmp_path, streaming) as (url, _),
        httpx.stream("POST", f"{url}/score", json={}, timeout=60) as stream,
    ):
        for line in stream.iter_lines():
            received.append(line)
            seen.set()
    assert [line for line in received if line] == ["data: risk", "data: after"]


def test_a_client_that_hangs_up_is_gone_for_the_replica_too(tmp_path: Path) -> None:
    gone, began = threading.Event(), threading.Event()

    def waiting(handler: BaseHTTPRequestHandler) -> None:
        began.set()
        if handler.connection.recv(1) == b"":
            gone.set()
        handler.close_connection = True

    with group(tmp_path, waiting) as (url, _):
        with httpx.Client() as client:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{url}/score", json={}, timeout=httpx.Timeout(60, read=0.2))
            assert began.wait(30)
        assert gone.wait(30)


def slow(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.recv(1)  # until nginx hangs up
    handler.close_connection = True


@pytest.mark.parametrize(
    ("behaviour", "route", "status", "reached"),
    [
        (breaking, CHAT_ROUTE, 502, [0, 1]),  # not repeated
        (slow, CHAT_ROUTE, 504, [0, 1]),
        *((breaking, route, 502, [0, 1, 1, 1, 1]) for route in SCORE_ROUTES),  # of no fifth
    ],
)
def test_how_often_a_post_is_sent(
    tmp_path: Path, behaviour: Behaviour, route: str, status: int, reached: list[int]
) -> None:
    """``reached``: how many requests each replica got."""
    short = ("proxy_read_timeout 60s", "proxy_read_timeout 300ms")
    edits = (short,) if behaviour is slow else ()
    with group(tmp_path, *[behaviour] * len(reached), edits=edits) as (url, began):
        assert post(url, route).status_code == status
        assert sorted(map(len, began)) == reached


@pytest.mark.parametrize(
    ("behaviours", "asked"),
    [
        ([breaking, fine], True),
        ([loading, fine], True),
        ([loading, loading, fine], True),
        ([None, fine], False),
    ],
    ids=["one broke off", "one is loading", "a third answers what two refused", "one is away"],
)
def test_a_score_is_answered_all_the_same(
    tmp_path: Path, behaviours: list[Behaviour | None], asked: bool
) -> None:
    with ExitStack() as stack:
        replicas = [stack.enter_context(b.replica(behave)) for behave in behaviours if behave]
        away = [f"127.0.0.1:{free_port()}"] * (len(behaviours) - len(replicas))
        nginx = stack.enter_context(
            b.balancing(tmp_path, [*away, *(behave.address for behave in replicas)])
        )
        names = [f"mine-{number}" for number in range(6)]
        for name in names:
            assert post(nginx.url, **{"X-Request-Id": name}).status_code == 200
        assert replicas[-1].began == names, "each is answered once"
        assert (len(replicas) > 1) is asked
        assert 1 <= len(replicas[0].began) <= 6


@pytest.mark.parametrize(
    ("ends", "route"), [(breaking, "/score"), (loading, "/score"), (loading, CHAT_ROUTE)]
)
@pytest.mark.parametrize("order", [1, -1], ids=["asked first", "asked last"])
def test_what_a_replica_leaves_goes_to_the_one_that_rests(
    tmp_path: Path, order: int, ends: Behaviour, route: str
) -> None:
    refuses, leaves = [True], list[object]()

    def first(handler: BaseHTTPRequestHandler) -> None:
        (loading if refuses else fine)(handler)

    def second(handler: BaseHTTPRequestHandler) -> None:
        (ends if leaves else fine)(handler)

    with group(tmp_path, first, second, order=order) as (url, began):
        while not began[0]:  # a GET that it refuses counts against it at once: nginx lets it rest
            assert httpx.get(f"{url}/health/ready").status_code == 200
        refuses.clear()
        leaves.append(True)  # and the first one, which is fine by now, rests
        assert [post(url, route).status_code for _ in range(8)] == [200] * 8


def test_while_all_rest_all_are_asked(tmp_path: Path) -> None:
    turn = iter(
        [loading, loading, loading, loading, fine]
    )  # each of the two, and each as a last resort; then ready
    with group(tmp_path, *[lambda handler: next(turn, fine)(handler)] * 2) as (url, _):
        statuses = [post(url, CHAT_ROUTE).status_code for _ in range(3)]
        assert statuses[-1] == 200  # at once: both have still to rest for seconds
        assert 502 not in statuses


def test_where_all_are_loading_the_client_hears_when_to_come_back(tmp_path: Path) -> None:
    with group(tmp_path, loading, loading) as (url, _):
        for route in (CHAT_ROUTE, *SCORE_ROUTES) * 2:  # the later ones while both rest
            response = post(url, route)
            received = response.status_code, response.headers["retry-after"], response.content
            assert received == (503, "1", NOT_READY)
