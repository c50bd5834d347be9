"""Who may ask, and what each may choose: keys, their scopes and their file, hosts, owners,
rights."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter
from fastapi.testclient import TestClient
from starlette.requests import HTTPConnection
from starlette.routing import Route

from service.access.callers import OWNERS, ApiKey, Key, Right, Scope, digest_of
from service.access.routes import ADMIN, CALLED, CATALOGUE, HEALTH, METRICS, scopes_of
from service.api import app as application
from service.api.app import pages
from service.api.auth import Admin, caller_of
from service.cli.running import known_hosts
from service.errors import HalluTracerError
from service.policies.guard import Action, Policy
from service.settings import ServiceSettings
from tests.kit.api import bodies_by_route, check_error
from tests.kit.key_files import add_key
from tests.kit.tables import cells, values
from tests.running import App, Running, Served, app_of_module, listening, running, until

NOW = datetime.now(UTC)
KEY = {"authorization": "Bearer sesame"}


@contextmanager
def client(tmp_path: Path, **options: Any) -> Iterator[TestClient]:
    with App(tmp_path, **{"names": ["tiny"]} | options).started() as app:
        yield app.client


def named(name: str, **fields: Any) -> Key:
    return Key(name=name, digest=digest_of(name), **{"scopes": frozenset({Scope.SCORE})} | fields)


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


def score(opened: TestClient, key: str, **body: Any) -> httpx.Response:
    return opened.post("/score", json={"prompt": "a"} | body, headers=bearer(key))


def refusal(answer: httpx.Response) -> tuple[int, str, str]:
    """Status, code and message of an error in whichever protocol the route speaks; Anthropic's has
    a type and no code, a detector's the status alone."""
    error = answer.json().get("error", answer.json())
    names = {"authentication_error": 401, "permission_error": 403}
    code = names.get(error.get("type"), error.get("code"))
    code = {401: "unauthorized", 403: "missing_scope"}.get(code, code)
    return answer.status_code, code, error["message"]


KEYS = [named(str(scope), scopes=frozenset({scope})) for scope in Scope]


# --- a key is asked for ---


@pytest.mark.parametrize("protect_metrics", [False, True])
def test_every_route_but_health_metrics_and_the_pages_asks_for_a_key(
    tmp_path: Path, protect_metrics: bool
) -> None:
    with client(tmp_path, api_keys=("other", "sesame"), protect_metrics=protect_metrics) as opened:
        service: Any = opened.app
        routes = [route for route in service.routes if hasattr(route, "endpoint")]
        walked = {(method, route.path) for route in routes for method in route.methods or ()}
        paths = {path for _, path in walked}
        assert {"/score", "/v1/models", "/openapi.json", "/docs", METRICS} <= paths
        walked |= {("GET", "/nothing"), ("POST", "/health/%2e%2e/score"), ("POST", "//score")}
        for method, path in walked:
            refused = opened.request(method, path, json={"prompt": "a"}, follow_redirects=False)
            is_open = (
                path in HEALTH
                or (method, path) == ("OPTIONS", "/")
                or (path == METRICS and not protect_metrics)
                or (path in pages(True) and method in ("GET", "HEAD"))
            )
            assert (refused.status_code == 401) is not is_open, (method, path, refused.status_code)
            if not is_open and method != "HEAD":
                assert refusal(refused)[1] == "unauthorized"
                assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.headers["x-request-id"]
            allowed = opened.request(method, path, json={"prompt": "a"}, headers=KEY)
            assert allowed.status_code != 401
        assert opened.post("/score", content=b"{" * 100).status_code == 401, "no body is read"


keyed = app_of_module(api_keys=("sesame",))


@pytest.mark.parametrize(
    ("headers", "status"),
    values(
        r"""
        {} | 401
        {"x-api-key": ""} | 401
        {"x-api-key": "Bearer sesame"} | 401
        {"x-api-key": "sesame", "authorization": "Bearer no"} | 401
        {"authorization": ""} | 401
        {"authorization": "sesame"} | 401
        {"authorization": "Bearer"} | 401
        {"authorization": "Bearer "} | 401
        {"authorization": "Bearer sesam"} | 401
        {"authorization": "Bearer sesamee"} | 401
        {"authorization": "Basic sesame"} | 401
        {"authorization": "Bearer SESAME"} | 401
        {"authorization": "Bearer \u00ff\u00fe"} | 401
        {"authorization": "bearer sesame"} | 200
        {"x-api-key": "sesame"} | 200
        """
    ),
)
def test_what_is_the_key(keyed: App, headers: dict[str, str], status: int) -> None:
    sent = {name: value.encode("latin-1") for name, value in headers.items()}
    assert keyed.client.get("/v1/models", headers=sent).status_code == status


def test_without_the_key_health_names_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client(tmp_path, api_keys=("sesame",)) as opened:
        assert opened.get("/health/ready").json() == {"status": "ready"}
        assert opened.get("/health/ready", headers=KEY).json()["bundles"] == ["tiny:1"]
        state = opened.app.state.service  # type: ignore[attr-defined]
        monkeypatch.setattr(state.lifecycle, "error", OSError("/srv/models/secret"))
        for path in ("/health/live", "/health/ready"):
            hidden, told = opened.get(path), opened.get(path, headers=KEY)
            assert (hidden.status_code, told.status_code) == (503, 503)
            assert ("/srv" in hidden.text, "/srv/models/secret" in told.text) == (False, True)


def test_openapi_declares_the_keys_where_they_are_asked_for(keyed: App, tmp_path: Path) -> None:
    document = keyed.client.get("/openapi.json", headers=KEY).json()
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert document["paths"]["/score"]["post"]["security"] == [{"key": []}]
    for path in ("/health/live", "/metrics"):
        assert "security" not in document["paths"][path]["get"]
    with client(tmp_path) as opened:
        assert "securitySchemes" not in opened.get("/openapi.json").json()["components"]


# --- what a key opens ---


def with_admin_route(app: App) -> TestClient:
    """As the rollout's routes are made."""

    @app.app.post(f"{ADMIN}try")
    async def change(who: Admin) -> dict[str, Any]:
        return {"key": who.key, "address": who.address}

    return app.client


# Beside those that read prompts, which are for the scope "score".
SCOPES = cells(
    f"""
    GET /v1/models | observe, score
    GET /v1/models/scripted | observe, score
    GET /v1/bundles | observe, score
    GET /v1/bundles/tiny | observe, score
    GET /v1/bundles/tiny/sample/0 | score
    GET /v1/bundles/tiny:1/sample/1 | score
    GET /v1/bundles/tiny@live/sample/0 | score
    GET /v1/bundles/tiny%2Fsample/0 | score
    GET /metrics | observe
    POST {ADMIN}try | admin
    POST {ADMIN}nothing | admin
    GET /openapi.json | admin, observe, score
    GET /nowhere | admin, observe, score
    """
)


def test_each_scope_opens_its_routes_and_no_others(tmp_path: Path) -> None:
    opened = [[f"POST {path}", "score"] for path in CALLED] + SCOPES
    with App(tmp_path, names=["tiny"], api_keys=KEYS, protect_metrics=True).started() as app:
        client = with_admin_route(app)
        for request, listed in opened:
            (method, path), scopes = request.split(), listed.split(", ")
            assert client.request(method, path, json={}).status_code == 401, path
            for key in KEYS:
                body, headers = {"prompt": "a"}, bearer(key.name)
                answer = client.request(method, path, json=body, headers=headers)
                if key.name in scopes:
                    assert answer.status_code not in (401, 403), (path, key.name, answer.text)
                    continue
                status, code, message = refusal(answer)
                assert (status, code) == (403, "missing_scope"), (path, key.name)
                for name in (*map(repr, scopes), key.name):
                    assert name in message
        tried = client.post(f"{ADMIN}try", headers=bearer("admin")).json()
        assert tried == {"key": "admin", "address": "testclient"}

        @app.app.post("/v1/elsewhere")  # it only depends on who is an administrator
        async def change(who: Admin) -> str:
            return str(who.key)

        refused, allowed = (
            client.post("/v1/elsewhere", headers=bearer(name)) for name in ("score", "admin")
        )
        assert (refusal(refused)[1], allowed.json()) == ("missing_scope", "admin")


def test_every_route_is_sorted_into_a_scope(tmp_path: Path) -> None:
    """A new route is open to every key until it stands in service/access/routes.py, in its annex's
    ``prompt_routes`` or ``score_routes``, or here."""
    open_to_all_keys = {"/openapi.json", "/docs/oauth2-redirect"} | HEALTH | set(pages(True))
    with App(tmp_path, names=["tiny"]).started() as app:
        results = {route.path for route in app.app.routes if isinstance(route, Route)} | set(
            app.app.openapi()["paths"]
        )
    assert {*CALLED, METRICS, *CATALOGUE} <= results
    assert {path for path in results if not scopes_of(path)} <= open_to_all_keys


def test_a_new_route_is_a_router_and_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What docs/contributing.md says: the module, and its router in ``ROUTERS``."""
    router, path = APIRouter(tags=["mine"]), "/v1/models/hello/mine"

    @router.get(path)
    async def hello() -> str:
        return "hello"

    monkeypatch.setattr(application, "ROUTERS", (router, *application.ROUTERS))
    with client(tmp_path, api_keys=[named("score")]) as opened:
        assert opened.get(path).status_code == 401
        opened.headers.update(bearer("score"))
        assert opened.get(path).json() == "hello"
        assert path in opened.get("/openapi.json").json()["paths"]


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
    with client(tmp_path, api_keys=keys) as opened:
        over, soon = bearer("over"), bearer("soon")
        refused = score(opened, "over")
        assert refusal(refused)[:2] == (401, code)
        assert refused.headers["www-authenticate"] == "Bearer"
        assert opened.get("/health/ready", headers=over).json() == {"status": "ready"}
        assert opened.get("/", headers=over).status_code == 200
        assert score(opened, "soon").status_code == 200
        assert opened.get("/health/ready", headers=soon).json()["bundles"] == ["tiny:1"]


def test_a_key_may_be_held_to_some_policies(tmp_path: Path) -> None:
    mild = Policy("mild", Action.ABSTAIN, threshold=0.2, message="Ask Ada.")
    keys = [named("held", policies=("mild", "block"), may=frozenset({"policy"})), named("free")]
    with client(tmp_path, api_keys=keys, policies={"mild": mild}) as opened:
        taken = [score(opened, "held", policy=name) for name in ("mild", "block")]
        assert [answer.status_code for answer in (*taken, score(opened, "free"))] == [200] * 3
        refused = [score(opened, "held", policy=name) for name in ("observe", "gate")]
        for path, body in bodies_by_route("a").items():
            refused.append(opened.post(path, json=body, headers=bearer("held")))
        for answer in refused:
            assert answer.status_code == 403, answer.request.url
            assert "'mild' or 'block' alone" in answer.text


def test_prompts_are_counted_by_the_name_of_the_key(tmp_path: Path) -> None:
    with App(tmp_path, api_keys=[named("app"), named("batch")]).started() as app:
        for key, threshold in (("app", 1.0), ("app", 0.0), ("batch", 1.0)):
            assert score(app.client, key, threshold=threshold).status_code == 200
        for key, withheld in (("app", "no"), ("app", "yes"), ("batch", "no")):
            assert app.series("key_prompts_total", key=key, withheld=withheld) == 1


# --- a file of keys that changes ---


def test_a_broken_file_is_told_and_the_keys_in_force_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That a file that is well is in force soon: test_observers.py."""
    monkeypatch.setattr("service.serving.service.WATCH_S", 0.02)
    path = tmp_path / "keys.toml"
    secret = add_key(path, "one", {"scopes": ["score"]})
    good = path.read_text()
    with App(tmp_path, keys_file=path).started() as app:

        def told(headers: dict[str, str]) -> str:
            return str(app.client.get("/health/ready", headers=headers).json().get("keys", ""))

        for broken in ("[one", "", good.replace("sha256", "sha265")):
            path.write_text(broken)
            until(lambda: app.series("keys_stale") == 1)
            assert score(app.client, secret).status_code == 200
            assert told(bearer(secret)).startswith(f"the keys in force stay: {path}")
            assert told({}) == ""
            path.write_text(good)
            until(lambda: app.series("keys_stale") == 0)
            assert told(bearer(secret)) == ""


# --- without keys: this machine's programs ---


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("gated"), callers_may=()) as service:
        with_admin_route(service)
        yield service


FOREIGN = cells(
    """
    x-forwarded-for | 10.0.0.1
    forwarded | for=10.0.0.1
    x-real-ip | 10.0.0.1
    via | 1.1 p
    origin | http://evil.example
    origin | null
    """
)
LOOSER = [{"policy": "observe"}, {"threshold": 1.0}]


def status(service: Running, choice: dict[str, Any], **headers: str) -> int:
    body = {"prompt": "A"} | choice
    return httpx.post(f"{service.url}/score", json=body, headers=headers, timeout=30).status_code


def test_programs_of_this_machine_own_the_service(gated: Running) -> None:
    tried = httpx.post(f"{gated.url}{ADMIN}try").json()
    assert tried == {"key": None, "address": "127.0.0.1"}
    for choice in LOOSER:
        assert status(gated, choice) == status(gated, choice, origin=gated.url) == 200
    assert status(gated, {"bundle": "two"}) == 403, "not the owner's choice by itself"


@pytest.mark.parametrize(("name", "value"), FOREIGN)
def test_what_others_pass_on_does_not_own_it(gated: Running, name: str, value: str) -> None:
    header = {name: value}
    refused = httpx.post(f"{gated.url}{ADMIN}try", headers=header)
    assert refusal(refused)[:2] == (403, "missing_scope")
    assert [status(gated, choice, **header) for choice in ({}, *LOOSER)] == [200, 403, 403]


OTHERS = ["10.1.2.3", "::2", "::ffff:10.0.0.7", "127.0.0.1.example", "", "testclient"]


@pytest.mark.parametrize(("host", "allowed"), [*((host, 403) for host in OTHERS), ("::1", 200)])
def test_no_other_address_owns_it(gated: Running, host: str, allowed: int) -> None:
    caller = TestClient(gated.app, client=(host, 1))
    for path in (f"{ADMIN}try", f"{ADMIN}nothing"):
        answer = caller.post(path)
        assert answer.status_code == (404 if "nothing" in path and allowed == 200 else allowed)
        assert ("keys make NAME --scope admin" in answer.text) is (allowed == 403)


@pytest.mark.parametrize(
    ("options", "headers"),
    values(
        """
        {"callers_may": ["none"]} | {}
        {"callers_may": ["feedback"]} | {}
        {"callers_may": [], "host": "0.0.0.0"} | {}
        {"callers_may": [], "api_keys": ["sesame"]} | {"authorization": "Bearer sesame"}
        """
    ),
)
def test_nobody_owns_it_where_the_operator_says_what_callers_may_or_others_reach_it(
    tmp_path: Path, options: dict[str, Any], headers: dict[str, str]
) -> None:
    app = App(tmp_path, **options)
    with TestClient(app.app, client=("127.0.0.1", 1), base_url="http://127.0.0.1") as here:
        until(lambda: app.state.lifecycle.is_ready)
        answers = [
            here.post("/score", json={"prompt": "A"} | choice, headers=headers)
            for choice in ({}, *LOOSER)
        ]
        assert [answer.status_code for answer in answers] == [200, 403, 403]


def test_a_request_without_a_key_owns_nothing_where_keys_are_asked_for(tmp_path: Path) -> None:
    """It is refused before; this holds by itself, too."""
    request = HTTPConnection(
        {
            "type": "http",
            "headers": [],
            "client": ("127.0.0.1", 9),
            "server": ("127.0.0.1", 1),
            "scheme": "http",
            "path": "/score",
            "query_string": b"",
        }
    )
    for keys, rights in (([], OWNERS), (["secret-one"], frozenset())):
        app = App(tmp_path / str(len(keys)), callers_may=(), api_keys=keys)
        assert caller_of(request, app.state).may == rights


# --- a caller may always be stricter than the operator ---

LOOSE = Policy("loose", Action.ABSTAIN, threshold=0.9, message="Ask Ada.")
# What a request chooses, and the field that it may not: under a policy that withholds at
# 0.5, the threshold of bundle "one".
CHOICES = values(
    """
    {} | null
    {"policy": "gate"} | null
    {"policy": "block"} | null
    {"threshold": 0.0} | null
    {"threshold": 0.5} | null
    {"threshold": 0.2, "policy": "block"} | null
    {"bundle": "one"} | null
    {"bundle": "one:1"} | null
    {"threshold": 0.2, "policy": "loose"} | null
    {"policy": "observe"} | "policy"
    {"policy": "observe", "threshold": 0.0} | "policy"
    {"policy": "observe", "threshold": 1} | "policy"
    {"threshold": 0.500001} | "threshold"
    {"threshold": 1} | "threshold"
    {"policy": "loose"} | "threshold"
    {"policy": "block", "threshold": 0.9} | "threshold"
    {"bundle": "two"} | "bundle"
    {"bundle": "two", "threshold": 0.0} | "bundle"
    """
)
EVERY: tuple[Right, ...] = ("policy", "threshold", "bundle")
RIGHTS: list[tuple[Right, ...]] = [(), *((right,) for right in EVERY), EVERY]


def test_only_what_is_allowed_loosens(tmp_path: Path) -> None:
    keys = [ApiKey(f"secret-{n}", f"key-{n}", frozenset(may)) for n, may in enumerate(RIGHTS)]
    options: dict[str, Any] = {"callers_may": (), "policies": {"loose": LOOSE}, "api_keys": keys}
    with client(tmp_path, names=["one", "two"], **options) as opened:
        for key, (choice, needed) in itertools.product(keys, CHOICES):
            answer = score(opened, key.secret, **choice)
            if needed is None or needed in key.may:
                assert answer.status_code == 200, (choice, answer.text)
                continue
            error = check_error(answer, 403, code="not_allowed", param=needed)
            assert f"--callers-may {needed}" in error["message"]


def test_the_services_own_threshold_is_the_highest_and_a_key_may_be_allowed_more(
    tmp_path: Path,
) -> None:
    keys = [ApiKey("evaluating", "evaluation", frozenset({"policy"})), ApiKey("asking", "app")]
    options: dict[str, Any] = {"callers_may": ("bundle",), "threshold": 0.8, "api_keys": keys}
    with client(tmp_path, names=["one", "two"], **options) as opened:
        for choice, *statuses in values(
            """
            {"threshold": 0.8} | 200 | 200
            {"threshold": 0.79} | 200 | 200
            {"threshold": 0.81} | 403 | 403
            {"policy": "observe"} | 200 | 403
            {"bundle": "two"} | 200 | 200
            """
        ):
            answers = [score(opened, key.secret, **choice) for key in keys]
            assert [answer.status_code for answer in answers] == statuses, choice


# --- hosts: no page can rebind its name to a service that asks for no key ---

LOOPBACK = known_hosts(ServiceSettings(), keyed=False)
KNOWN = [
    "localhost",
    "localhost.",
    "LocalHost.:8765",
    "LocalHost:8765",
    "127.0.0.1:8765",
    "127.0.0.1",
    "[::1]:8765",
    "[::1]",
    "10.0.0.5:8765",
    "[fd00::17]:8765",
]
UNKNOWN = [
    "evil.example",
    "evil.example:8765",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "",
    ".",
    "localhost..",
    "host.docker.internal",
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
]


def test_loopbacks_names_and_addresses_are_served_and_others_refused_before_anything_is_read(
    tmp_path: Path,
) -> None:
    with client(tmp_path, allowed_hosts=LOOPBACK) as opened:
        for host in KNOWN:
            assert opened.get("/health", headers={"host": host}).status_code == 200, host
    paths = ("POST /score", "GET /health", "GET /metrics", "GET /nothing", "GET /docs")
    with client(tmp_path / "keys", allowed_hosts=LOOPBACK, api_keys=("sesame",)) as opened:
        for host, request in itertools.product(UNKNOWN, paths):
            refused = opened.request(*request.split(), headers={"host": host})
            message = check_error(refused, 421, code="wrong_host")["message"]
            named = f"another service, {host!r}; the operator can add its name: --allowed-host"
            assert named in message
    with client(tmp_path / "any", allowed_hosts=("*",)) as opened:
        assert opened.get("/health", headers={"host": "evil.example"}).status_code == 200
        for path in HEALTH:
            assert (opened.head(path).status_code, opened.head(path).content) == (200, b"")


# The beginning of a request, and the status without keys and with them.
HEADS = cells(
    r"""
    GET /health/ready HTTP/1.0 | 200 | 200
    HEAD /health/live HTTP/1.0 | 200 | 200
    OPTIONS / HTTP/1.0 | 204 | 204
    OPTIONS / HTTP/1.1\nHost: localhost | 204 | 204
    OPTIONS / HTTP/1.0\nHost: evil.example | 421 | 421
    GET /health/ready HTTP/1.0\nHost: | 421 | 421
    GET /health/ready HTTP/1.1 | 421 | 421
    GET /v1/bundles HTTP/1.0 | 200 | 401
    OPTIONS /score HTTP/1.0 | 405 | 401
    """
)


def test_a_balancers_check_of_http_1_0_names_no_host_and_is_answered(tmp_path: Path) -> None:
    """No browser speaks HTTP/1.0, so that no page can ask so."""
    for column, keys in ((1, ()), (2, ("sesame",))):
        folder = tmp_path / str(column)
        with listening(Served(folder, allowed_hosts=LOOPBACK, api_keys=keys)) as served:

            def status(head: str, served: Served = served) -> str:
                with served.connect(f"{head}\n\n".replace("\n", "\r\n").encode()) as connection:
                    return connection.recv(65536).decode().split(" ", 2)[1]

            for head, *expected in HEADS:
                assert status(head) == expected[column - 1], head
            served.state.lifecycle.leave()
            assert status("OPTIONS / HTTP/1.0") == "503"


@pytest.mark.parametrize(
    ("host", "given", "keyed", "known"),
    values(
        """
        "0.0.0.0" | [] | false | ["localhost", "own"]
        "::" | [] | false | ["localhost", "own"]
        "10.0.0.5" | [] | false | ["localhost", "own"]
        "127.0.0.1" | [] | false | ["localhost"]
        "127.0.0.1" | [] | true | ["localhost"]
        "::1" | [] | true | ["localhost"]
        "localhost" | [] | false | ["localhost"]
        "guard.example" | [] | false | ["localhost", "own", "guard.example"]
        "0.0.0.0" | [] | true | ["*"]
        "0.0.0.0" | ["guard.example"] | false | ["guard.example"]
        "0.0.0.0" | ["guard.example"] | true | ["guard.example"]
        "0.0.0.0" | ["*"] | false | ["*"]
        "127.0.0.1" | ["*"] | false | ["*"]
        """
    ),
)
def test_the_names_follow_from_the_address_and_the_keys(
    host: str, given: list[str], keyed: bool, known: list[str]
) -> None:
    names = {socket.gethostname() if name == "own" else name for name in known}
    settings = ServiceSettings(host=host, allowed_hosts=tuple(given))
    assert set(known_hosts(settings, keyed=keyed)) == names


@pytest.mark.parametrize("name", ["a:8765", "http://a", "a,b", "*.example", "a/b", "[::1]:80", ""])
def test_a_name_that_no_request_could_have_is_refused(name: str) -> None:
    with pytest.raises(HalluTracerError, match="--allowed-host"):
        known_hosts(ServiceSettings(allowed_hosts=("good.example", name)), keyed=True)
