"""Who owns a service on loopback that asks for no key, and who does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.requests import HTTPConnection

from service.access.callers import OWNERS
from service.api.auth import caller_of
from tests.running import App, Running, running

LOOSER = [{"policy": "observe"}, {"threshold": 1.0}]


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("gated"), callers_may=()) as service:
        yield service


def status(service: Running, choice: dict[str, object], **headers: str) -> int:
    body = {"prompt": "A"} | choice
    return httpx.post(f"{service.url}/score", json=body, headers=headers, timeout=30).status_code


@pytest.mark.parametrize("choice", LOOSER)
def test_who_calls_from_this_machine_may_choose_policy_and_threshold(gated: Running, choice: dict[str, object]) -> None:
    assert status(gated, choice) == 200
    assert status(gated, choice, origin=gated.url) == 200  # the playground


@pytest.mark.parametrize("choice", LOOSER)
@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-forwarded-for", "10.0.0.1"), ("forwarded", "for=10.0.0.1"), ("x-real-ip", "10.0.0.1"), ("via", "1.1 proxy"),
        ("origin", "https://foreign.example"), ("origin", "null"),
    ],
)  # fmt: skip
def test_not_what_a_proxy_or_a_foreign_page_sends(
    gated: Running, choice: dict[str, object], header: str, value: str
) -> None:
    assert status(gated, choice, **{header: value}) == 403


def test_another_bundle_is_not_the_owners_choice_by_itself(gated: Running) -> None:
    assert status(gated, {"bundle": "two"}) == 403


@pytest.mark.parametrize("choice", LOOSER)
@pytest.mark.parametrize(
    "options",
    [
        {"callers_may": ["none"]}, {"callers_may": ["feedback"]},
        {"callers_may": (), "host": "0.0.0.0"},
    ],
)  # fmt: skip
def test_nor_where_the_operator_says_what_callers_may_or_others_reach_it(
    tmp_path: Path, options: dict[str, object], choice: dict[str, object]
) -> None:
    with running(tmp_path, **options) as service:  # type: ignore[arg-type]
        assert status(service, choice) == 403
        assert status(service, {}) == 200


def test_nor_where_keys_are_asked_for(tmp_path: Path) -> None:
    with running(tmp_path, callers_may=(), api_keys=["secret-one"]) as service:
        for choice in LOOSER:
            assert status(service, choice, authorization="Bearer secret-one") == 403


def test_a_request_without_a_key_owns_nothing_where_keys_are_asked_for(tmp_path: Path) -> None:
    """It is refused before; this holds by itself, too."""
    request = HTTPConnection({"type": "http", "headers": [], "client": ("127.0.0.1", 9), "server": ("127.0.0.1", 1),
                              "scheme": "http", "path": "/score", "query_string": b""})  # fmt: skip
    for keys, rights in (([], OWNERS), (["secret-one"], frozenset())):
        with App(tmp_path / str(len(keys)), callers_may=(), api_keys=keys).started() as app:
            assert caller_of(request, app.state).may == rights
