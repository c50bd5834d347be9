"""A service on loopback answers to loopback's names only: a page of a foreign site cannot rebind its own name to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.cli.listening import known_hosts
from service.settings import ServiceSettings
from tests.running import App

LOOPBACK = known_hosts(ServiceSettings())


@pytest.mark.parametrize("host", ["localhost", "LocalHost:8765", "127.0.0.1:8765", "127.0.0.1", "[::1]:8765", "[::1]"])
def test_loopbacks_names_are_served(tmp_path: Path, host: str) -> None:
    with App(tmp_path, names=["tiny"], allowed_hosts=LOOPBACK).started() as app:
        assert app.client.post("/score", json={"prompt": "a"}, headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8765", "localhost.evil.example", "127.0.0.1.evil.example", "", ":8765", "::1"],
)
def test_other_names_are_refused_before_anything_is_read(tmp_path: Path, host: str) -> None:
    with App(tmp_path, names=["tiny"], allowed_hosts=LOOPBACK, api_keys=("sesame",)).started() as app:
        for method, path in (("POST", "/score"), ("GET", "/health"), ("GET", "/metrics"), ("GET", "/nothing")):
            refused = app.client.request(method, path, headers={"host": host})
            assert refused.status_code == 421, (method, path)
            assert refused.json()["error"]["code"] == "wrong_host"


@pytest.mark.parametrize(
    ("settings", "known"),
    [
        (ServiceSettings(host="127.0.0.2"), {"localhost", "127.0.0.1", "[::1]", "127.0.0.2"}),
        (ServiceSettings(host="::1"), {"localhost", "127.0.0.1", "[::1]"}),
        (ServiceSettings(host="localhost"), {"localhost", "127.0.0.1", "[::1]"}),
        (ServiceSettings(host="0.0.0.0"), {"*"}),
        (ServiceSettings(host="::"), {"*"}),
        (ServiceSettings(host="guard.example"), {"*"}),
        (ServiceSettings(host="0.0.0.0", allowed_hosts=("guard.example",)), {"guard.example"}),
        (ServiceSettings(allowed_hosts=("*",)), {"*"}),
    ],
)
def test_the_names_follow_from_the_address(settings: ServiceSettings, known: set[str]) -> None:
    assert set(known_hosts(settings)) == known


def test_any_name_where_the_operator_says_so(tmp_path: Path) -> None:
    with App(tmp_path, names=["tiny"], allowed_hosts=("*",)).started() as app:
        assert app.client.get("/health", headers={"host": "evil.example"}).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready"])
def test_health_answers_head(tmp_path: Path, path: str) -> None:
    with App(tmp_path, names=["tiny"]).started() as app:
        answer = app.client.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
