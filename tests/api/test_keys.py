"""Named keys over HTTP: what each opens, and what a changed file does to a running service."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from starlette.routing import Route

from service.access.callers import Key, Scope, digest_of
from service.access.routes import ADMIN, CALLED, CATALOGUE, METRICS, scopes_of
from service.api.app import pages
from service.api.auth import HEALTH, Admin
from service.audit.events import Who
from service.policies.guard import Action, Policy
from tests.key_files import add_key, revoke_key
from tests.running import App, running, until

NOW = datetime.now(UTC)
FILE = Who(by="file")


def named(name: str, **fields: Any) -> Key:
    return Key(name=name, digest=digest_of(name), **{"scopes": frozenset({Scope.SCORE})} | fields)


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


KEYS = [named(str(scope), scopes=frozenset({scope})) for scope in Scope]


def with_admin_route(app: App) -> TestClient:
    """As the rollout's routes are made."""

    @app.app.post(f"{ADMIN}try")
    async def change(who: Admin) -> dict[str, Any]:
        return {"key": who.key, "address": who.address}

    return app.client


def test_each_scope_opens_its_routes_and_no_others(tmp_path: Path) -> None:
    with App(tmp_path, names=["tiny"], api_keys=KEYS, protect_metrics=True).started() as app:
        client = with_admin_route(app)
        opened = {
            ("POST", "/score"): {"score"}, ("POST", "/v1/risk/score"): {"score"}, ("POST", "/classify"): {"score"},
            ("POST", "/v1/chat/completions"): {"score"}, ("POST", "/v1/completions"): {"score"},
            ("POST", "/beta/litellm_basic_guardrail_api"): {"score"}, ("POST", "/v1/feedback"): {"score"},
            ("GET", "/metrics"): {"observe"}, ("GET", "/v1/models"): {"observe", "score"},
            ("GET", "/v1/models/scripted"): {"observe", "score"}, ("GET", "/v1/bundles"): {"observe", "score"},
            ("GET", "/v1/bundles/tiny"): {"observe", "score"}, ("POST", f"{ADMIN}try"): {"admin"},
            ("POST", f"{ADMIN}nothing"): {"admin"},
            ("GET", "/openapi.json"): {"admin", "observe", "score"}, ("GET", "/nowhere"): {"admin", "observe", "score"},
        }  # fmt: skip
        for (method, path), scopes in opened.items():
            assert client.request(method, path, json={}).status_code == 401, path
            for key in KEYS:
                answer = client.request(method, path, json={"prompt": "a"}, headers=bearer(key.name))
                if key.name in scopes:
                    assert answer.status_code not in (401, 403), (path, key.name, answer.text)
                    continue
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (403, "missing_scope"), (path, key.name)
                assert all(repr(scope) in error["message"] for scope in scopes)
                assert key.name in error["message"]
        assert client.post(f"{ADMIN}try", headers=bearer("admin")).json() == {"key": "admin", "address": "testclient"}


def test_every_route_is_sorted_into_a_scope(tmp_path: Path) -> None:
    """A new route is open to every key until it stands in service/access/routes.py, or here."""
    open_to_all_keys = {"/openapi.json", "/docs/oauth2-redirect"} | HEALTH | set(pages(True))
    with App(tmp_path, names=["tiny"]).started() as app:
        found = {route.path for route in app.app.routes if isinstance(route, Route)}
        found |= set(app.app.openapi()["paths"])
    assert {*CALLED, METRICS, *CATALOGUE} <= found
    assert {path for path in found if not scopes_of(path)} <= open_to_all_keys


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"expires": NOW - timedelta(seconds=1)}, "key_expired"),
        ({"revoked": NOW}, "key_revoked"),
        ({"revoked": NOW, "expires": NOW - timedelta(1)}, "key_revoked"),
    ],
)
def test_a_key_that_is_over_is_401_with_its_own_code_and_learns_nothing(
    tmp_path: Path, fields: dict[str, Any], code: str
) -> None:
    keys = [named("over", **fields), named("soon", expires=NOW + timedelta(hours=1))]
    with App(tmp_path, names=["tiny"], api_keys=keys).started() as app:
        refused = app.client.post("/score", json={"prompt": "a"}, headers=bearer("over"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, code)
        assert refused.headers["www-authenticate"] == "Bearer"
        assert app.client.get("/health/ready", headers=bearer("over")).json() == {"status": "ready"}
        assert app.client.get("/", headers=bearer("over")).status_code == 200
        assert app.client.post("/score", json={"prompt": "a"}, headers=bearer("soon")).status_code == 200
        assert app.client.get("/health/ready", headers=bearer("soon")).json()["bundles"] == ["tiny:1"]


def test_a_key_may_be_held_to_some_policies(tmp_path: Path) -> None:
    mild = Policy("mild", Action.ABSTAIN, threshold=0.2, message="Ask Ada.")
    keys = [named("held", policies=("mild", "block"), may=frozenset({"policy"})), named("free")]
    with App(tmp_path, api_keys=keys, policies={"mild": mild}).started() as app:

        def ask(**choice: Any) -> httpx.Response:
            return app.client.post("/score", json={"prompt": "a", **choice}, headers=bearer("held"))

        for policy in ("mild", "block"):
            assert ask(policy=policy).status_code == 200
        for choice in ({"policy": "observe"}, {"policy": "gate"}, {}):
            error = ask(**choice)
            assert (error.status_code, error.json()["error"]["code"]) == (403, "not_allowed"), choice
            assert "'mild' or 'block' alone" in error.json()["error"]["message"]
            assert "--callers-may" not in error.text
        chat = {"model": "scripted", "messages": [{"role": "user", "content": "a"}]}
        assert app.client.post("/v1/chat/completions", json=chat, headers=bearer("held")).status_code == 403
        assert app.client.post("/classify", json={"inputs": "a"}, headers=bearer("held")).status_code == 403
        assert app.client.post("/score", json={"prompt": "a"}, headers=bearer("free")).status_code == 200


# --- who may change the service while there are no keys ---


def test_without_keys_only_programs_of_this_machine_are_administrators(tmp_path: Path) -> None:
    with running(tmp_path, names=["tiny"]) as service:
        with_admin_route(service)
        url = f"{service.url}{ADMIN}try"
        assert httpx.post(url).json() == {"key": None, "address": "127.0.0.1"}
        through = [
            ("x-forwarded-for", "10.0.0.1"),
            ("forwarded", "for=10.0.0.1"),
            ("x-real-ip", "10.0.0.1"),
            ("via", "1.1 p"),
        ]
        for header in [*through, ("origin", "http://evil.example"), ("origin", "null")]:
            refused = httpx.post(url, headers=dict([header]))
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "missing_scope"), header
            assert httpx.post(f"{service.url}/score", json={"prompt": "a"}, headers=dict([header])).status_code == 200
        for path in (f"{ADMIN}try", f"{ADMIN}nothing"):
            elsewhere = service.client.post(path)  # whose address is "testclient"
            assert (elsewhere.status_code, "keys make NAME --scope admin" in elsewhere.text) == (403, True)


@pytest.mark.parametrize("host", ["10.1.2.3", "::2", "127.0.0.1.example", ""])
def test_other_addresses_are_not_this_machine(tmp_path: Path, host: str) -> None:
    with App(tmp_path, names=["tiny"]).started() as app:
        with_admin_route(app)
        assert TestClient(app.app, client=(host, 1)).post(f"{ADMIN}try").status_code == 403
        assert TestClient(app.app, client=("::1", 1)).post(f"{ADMIN}try").status_code == 200


def test_a_route_that_only_depends_is_closed_too(tmp_path: Path) -> None:
    with App(tmp_path, names=["tiny"], api_keys=KEYS).started() as app:

        @app.app.post("/v1/elsewhere")
        async def change(who: Admin) -> str:
            return str(who.key)

        assert app.client.post("/v1/elsewhere", headers=bearer("score")).json()["error"]["code"] == "missing_scope"
        assert app.client.post("/v1/elsewhere", headers=bearer("admin")).json() == "admin"


# --- a file that changes ---


def stale(app: App) -> bool:
    return "hallutracer_keys_stale 1.0" in app.client.get("/metrics").text


def test_a_changed_file_is_in_force_soon_and_a_broken_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.serving.access.WATCH_S", 0.02)
    path = tmp_path / "keys.toml"
    one = add_key(path, "one", {"scopes": ["score"]})
    with App(tmp_path, names=["tiny"], keys_file=path).started() as app:

        def status(secret: str) -> int:
            return app.client.post("/score", json={"prompt": "a"}, headers=bearer(secret)).status_code

        assert status(one) == 200
        two = add_key(path, "two", {"scopes": ["score"]})
        until(lambda: status(two) == 200)
        good = path.read_text()
        for broken in ("[one", "", good.replace("sha256", "sha265"), good + '[three]\nscopes = ["score"]\n'):
            path.write_text(broken)
            until(lambda: stale(app))
            assert [status(one), status(two)] == [200, 200]
            told = app.client.get("/health/ready", headers=bearer(one)).json()
            assert told["keys"].startswith(f"the keys in force stay: {path}")
            assert "keys" not in app.client.get("/health/ready").json()
            path.write_text(good)
            until(lambda: not stale(app))
            assert "keys" not in app.client.get("/health/ready", headers=bearer(one)).json()
        revoke_key(path, "one")
        until(lambda: status(one) == 401)
        assert status(two) == 200


def test_a_hangup_reads_the_file_without_a_change(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    add_key(path, "one", {"scopes": ["score"]})
    app = App(tmp_path, names=["tiny"], keys_file=path)
    two = add_key(path, "two", {"scopes": ["score"]})
    assert app.state.access.keys.changed_on_disk()  # seen, and not yet read
    assert asyncio.run(app.state.access.reload(FILE))
    assert app.state.access.keys.find(two) is not None


def test_prompts_are_counted_by_the_name_of_the_key_and_never_by_the_key(tmp_path: Path) -> None:
    with App(tmp_path, api_keys=[named("app"), named("batch")]).started() as app:
        for key, threshold in (("app", 1.0), ("app", 0.0), ("batch", 1.0)):
            body = {"prompt": "A", "threshold": threshold}
            assert app.client.post("/score", json=body, headers=bearer(key)).status_code == 200
        lines = [
            line for line in app.client.get("/metrics").text.splitlines() if "hallutracer_key_prompts_total{" in line
        ]
    assert sorted(lines) == [
        'hallutracer_key_prompts_total{key="app",withheld="no"} 1.0',
        'hallutracer_key_prompts_total{key="app",withheld="yes"} 1.0',
        'hallutracer_key_prompts_total{key="batch",withheld="no"} 1.0',
    ]
