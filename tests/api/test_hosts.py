"""Where no key is asked for, a service answers to addresses and its own names: no page can rebind its name to it."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest

from service.cli.running import known_hosts
from service.errors import HalluTracerError
from service.settings import ServiceSettings
from tests.running import App
from tests.serve_process import serve

LOOPBACK = known_hosts(ServiceSettings(), keyed=False)
OWN = {"localhost", socket.gethostname()}


@pytest.mark.parametrize("host", ["localhost", "LocalHost:8765", "127.0.0.1:8765", "127.0.0.1", "[::1]:8765", "[::1]",
                                  "10.0.0.5:8765", "[fd00::17]:8765"])  # fmt: skip
def test_loopbacks_names_and_addresses_are_served(tmp_path: Path, host: str) -> None:
    with App(tmp_path, names=["tiny"], allowed_hosts=LOOPBACK).started() as app:
        assert app.client.post("/score", json={"prompt": "a"}, headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8765",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "",
        ":8765",
        "::1",
        "[evil.example]",
        "[127.0.0.1]",
        "10.0.0.5.",
        "10.0.0.005",
        "010.0.0.5",
        "0x7f.1",
        "2130706433",
        "[::1",
    ],
)
def test_other_names_are_refused_before_anything_is_read(tmp_path: Path, host: str) -> None:
    with App(tmp_path, names=["tiny"], allowed_hosts=LOOPBACK, api_keys=("sesame",)).started() as app:
        for method, path in (("POST", "/score"), ("GET", "/health"), ("GET", "/metrics"), ("GET", "/nothing")):
            refused = app.client.request(method, path, headers={"host": host})
            assert refused.status_code == 421, (method, path)
            assert refused.json()["error"]["code"] == "wrong_host"


@pytest.mark.parametrize(
    ("settings", "keyed", "known"),
    [
        (ServiceSettings(), False, {"localhost"}),
        (ServiceSettings(), True, {"localhost"}),
        (ServiceSettings(host="::1"), True, {"localhost"}),
        (ServiceSettings(host="localhost"), False, {"localhost"}),
        (ServiceSettings(host="0.0.0.0"), False, OWN),
        (ServiceSettings(host="::"), False, OWN),
        (ServiceSettings(host="10.0.0.5"), False, OWN),
        (ServiceSettings(host="guard.example"), False, OWN | {"guard.example"}),
        (ServiceSettings(host="0.0.0.0"), True, {"*"}),
        (ServiceSettings(host="0.0.0.0", allowed_hosts=("guard.example",)), False, {"guard.example"}),
        (ServiceSettings(host="0.0.0.0", allowed_hosts=("guard.example",)), True, {"guard.example"}),
        (ServiceSettings(host="0.0.0.0", allowed_hosts=("*",)), False, {"*"}),
        (ServiceSettings(allowed_hosts=("*",)), False, {"*"}),
    ],
)
def test_the_names_follow_from_the_address_and_the_keys(
    settings: ServiceSettings, keyed: bool, known: set[str]
) -> None:
    assert set(known_hosts(settings, keyed=keyed)) == known


@pytest.mark.parametrize("name", ["a:8765", "http://a", "a,b", "*.example", "a/b", "[::1]:80", ""])
def test_a_name_that_no_request_could_have_is_refused(name: str) -> None:
    with pytest.raises(HalluTracerError, match="--allowed-host"):
        known_hosts(ServiceSettings(allowed_hosts=("good.example", name)), keyed=True)


def test_a_service_for_everybody_is_not_for_every_name(tmp_path: Path) -> None:
    """As a browser would ask it, on all interfaces, without keys and without ``--allowed-host``."""
    with serve("--host", "0.0.0.0", "--allow-anonymous", HALLUTRACER_STORE=str(tmp_path)) as service:
        port = service.url.rpartition(":")[2]

        def ask(method: str, path: str, host: str) -> int:
            body = {"json": {"prompt": "Why?"}} if method == "POST" else {}
            return httpx.request(method, service.url + path, headers={"host": host}, timeout=60, **body).status_code

        for method, path in (("POST", "/score"), ("GET", "/metrics"), ("GET", "/")):
            assert ask(method, path, f"evil.example:{port}") == 421
            for host in ("127.0.0.1", "localhost", "10.0.0.5", socket.gethostname()):
                assert ask(method, path, f"{host}:{port}") == 200, (path, host)
        assert "--allowed-host" in service.log()


def test_any_name_where_the_operator_says_so(tmp_path: Path) -> None:
    with App(tmp_path, names=["tiny"], allowed_hosts=("*",)).started() as app:
        assert app.client.get("/health", headers={"host": "evil.example"}).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready"])
def test_health_answers_head(tmp_path: Path, path: str) -> None:
    with App(tmp_path, names=["tiny"]).started() as app:
        answer = app.client.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
