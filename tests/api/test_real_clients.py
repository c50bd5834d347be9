"""What clients send beside a question: a browser's first requests and names of the model; when they
are to come back, and guards that observe.

Their fields and the turns that they keep: test_fields.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from service.access.routes import CHAT_ROUTE
from service.annexes.guardrails import CONTENTS_DETECTOR, LITELLM_ROUTE, MESSAGES_DETECTOR
from service.errors import RequestError
from tests.kit.api import CHAT, request_of
from tests.running import App, app_of_module

JSON = {"content-type": "application/json"}
LONG = "a" * 600


app = app_of_module(policy="observe")


# --- browsers ---

OPENAIS = (
    "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-retry-count,"
    "openai-organization"
)
ANTHROPICS = (
    "anthropic-dangerous-direct-browser-access,anthropic-version,anthropic-beta,content-type,"
    "x-api-key"
)
ORIGIN = "https://a.example"


named_origin = app_of_module(cors_origins=(ORIGIN,), api_keys=("sesame",))


def preflight(app: App, route: str, origin: str, method: str, **asked: str) -> tuple[int, Any]:
    """The status of what a browser asks first, and the headers that allow what it asks for."""
    headers = {f"access-control-request-{name}": value for name, value in asked.items()}
    headers |= {"origin": origin, "access-control-request-method": method}
    answer = app.client.options(route, headers=headers)
    start = "access-control-allow-"
    allowed = {name.removeprefix(start): value for name, value in answer.headers.items()}
    return answer.status_code, allowed


@pytest.mark.parametrize("asked", [OPENAIS, ANTHROPICS, "x-session-id", "traceparent,x-request-id"])
def test_a_browser_s_client_is_allowed_its_headers_where_an_origin_is_named(
    named_origin: App, asked: str
) -> None:
    status, allowed = preflight(named_origin, CHAT_ROUTE, ORIGIN, "POST", headers=asked)
    assert (status, allowed["origin"]) == (200, ORIGIN)
    assert set(asked.split(",")) <= set(allowed["headers"].replace(" ", "").split(","))
    status, allowed = preflight(named_origin, CHAT_ROUTE, f"{ORIGIN}.b", "POST", headers=asked)
    assert (status, "origin" in allowed) == (400, False)


@pytest.mark.parametrize(
    ("route", "method"), [(CHAT_ROUTE, "POST"), ("/v1/models", "GET"), ("/v1/models", "HEAD")]
)
def test_a_page_of_a_named_origin_may_ask_from_the_public_internet(
    named_origin: App, route: str, method: str
) -> None:
    """Chrome asks before a public page's request to a private address; an origin that the operator
    named gets the answer, and no other."""
    private: dict[str, Any] = {"private-network": "true"}
    status, allowed = preflight(named_origin, route, ORIGIN, method, **private)
    assert (status, allowed["private-network"]) == (200, "true")
    status, allowed = preflight(named_origin, route, f"{ORIGIN}.b", method, **private)
    assert (status, "origin" in allowed) == (400, False)


# --- methods ---


def test_head_is_taken_wherever_get_is_with_the_headers_that_get_has(app: App) -> None:
    """As HTTP has it: probes of clients and of monitoring ask so."""
    routes = [route for route in app.app.routes if isinstance(route, Route)]
    reading = [route.path for route in routes if "GET" in (route.methods or ())]
    paths = [path for path in reading if "{" not in path]
    assert {"/v1/models", "/v1/bundles", "/metrics", "/health", "/docs"} <= set(paths)
    for path in [*paths, "/v1/models/scripted", "/v1/models/absent", "/v1/bundles/absent"]:
        full, head = app.client.get(path), app.client.head(path)
        assert (head.status_code, head.content) == (full.status_code, b""), path
        assert head.headers["content-type"] == full.headers["content-type"], path
    assert "head" not in app.client.get("/openapi.json").json()["paths"]["/v1/models"]


# --- names of the model ---


def test_the_bundle_s_names_of_its_model_are_taken(app: App) -> None:
    """Another bundle's name is none of them: refusals.json."""
    manifest = app.bundles[0].manifest
    assert manifest.model.name != manifest.name
    for name in ("scripted", manifest.name, manifest.model.name):
        answer = app.ask(CHAT_ROUTE, **request_of(CHAT, model=name))
        assert (answer["model"], answer["hallutracer"]["bundle"]["name"]) == ("scripted", "one")
        assert app.client.get(f"/v1/models/{name}").json()["root"] == "scripted"
    for path in ("/v1/models", "/v1/models/"):
        assert [card["id"] for card in app.client.get(path).json()["data"]] == ["scripted"]


# --- when to come back ---


def test_retry_after_only_where_trying_again_can_help(app: App, tmp_path: Path) -> None:
    """Before the model is loaded: test_protocols.py."""
    with App(tmp_path).started() as broken:
        broken.state.lifecycle.error = RuntimeError("out of memory")
        asked = (("POST", "/score"), ("GET", "/health/ready"), ("GET", "/health/live"))
        for method, route in asked:
            answer = broken.client.request(method, route, json={"prompt": "a"})
            assert (answer.status_code, "retry-after" in answer.headers) == (503, False)
            why = "restart the service: RuntimeError: out of memory"
            assert why in answer.json()["error"]["message"]
    for body in ({"prompt": LONG}, {"prompt": 3}, {"prompt": "a", "model": "other"}):
        assert "retry-after" not in app.client.post("/score", json=body).headers


# --- guards that observe ---

REFUSED_TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]
# Texts, or the turns of a conversation.
UNREADABLE: dict[str, list[Any]] = {
    "too long": [LONG],
    "one of two": ["a", LONG],
    "far too long": [LONG * 200],
    "empty": [""],
    "blank": ["  "],
    "no Unicode": ["hi \ud83d"],
    "too many": ["a"] * 1000,
    "a long chat": [{"role": "user", "content": LONG}],
    "a chat that the template refuses": REFUSED_TURNS,
    "a chat that is no Unicode": [{"role": "user", "content": "hi \ud83d"}],
    "an empty chat": [],
}


def guard(app: App, route: str, parameters: str, policy: str, **body: Any) -> tuple[int, Any]:
    content = json.dumps(body | {parameters: {"policy": policy}})
    answer = app.client.post(route, content=content, headers=JSON)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_cannot_be_read_passes_an_observing_guard_and_no_other(
    app: App, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    template = app.engine._template
    items = UNREADABLE[case]
    is_chat = "chat" in case

    def refusing(messages: Any, tools: Any) -> str:
        if messages[0]["role"] == "system":
            raise RequestError("the chat template refuses these messages", param="messages")
        return template(messages, tools)

    monkeypatch.setattr(app.engine, "_template", refusing)
    body: dict[str, Any] = {"input_type": "request"}
    body |= {"texts": [], "structured_messages": items} if is_chat else {"texts": items}
    parameters = "additional_provider_specific_params"
    status, answer = guard(app, LITELLM_ROUTE, parameters, "observe", **body)
    assert (status, answer["action"]) == (200, "NONE")
    assert "cannot be read" in answer["hallutracer"]["error"]
    status, answer = guard(app, LITELLM_ROUTE, parameters, "gate", **body)
    assert status in (413, 422) or answer["action"] == "BLOCKED"

    route = MESSAGES_DETECTOR if is_chat else CONTENTS_DETECTOR
    body = {"messages" if is_chat else "contents": items}
    passed = guard(app, route, "detector_params", "observe", **body)
    assert passed == (200, [] if is_chat else [[]] * len(items))
    status, answer = guard(app, route, "detector_params", "gate", **body)
    assert status in (413, 422) or answer[0]["detection"] == "unreadable"
