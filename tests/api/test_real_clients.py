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
from tests.kit.api import CHAT, note_of, request_of, whole
from tests.kit.tables import values
from tests.running import App, app_of_module

JSON = {"content-type": "application/json"}


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


PRIVATE = {"private-network": "true"}


@pytest.mark.parametrize(
    ("route", "method", "asked"),
    [
        (CHAT_ROUTE, "POST", {"headers": OPENAIS}),
        (CHAT_ROUTE, "POST", {"headers": ANTHROPICS}),
        (CHAT_ROUTE, "POST", {"headers": "x-session-id"}),
        (CHAT_ROUTE, "POST", {"headers": "traceparent,x-request-id"}),
        (CHAT_ROUTE, "POST", PRIVATE),
        ("/v1/models", "GET", PRIVATE),
        ("/v1/models", "HEAD", PRIVATE),
    ],
)
def test_a_page_of_a_named_origin_may_ask_also_from_the_public_internet(
    named_origin: App, route: str, method: str, asked: dict[str, str]
) -> None:
    """Chrome asks before a public page's request to a private address; an origin that the operator
    named gets the answer, and no other."""
    status, allowed = preflight(named_origin, route, ORIGIN, method, **asked)
    assert (status, allowed["origin"]) == (200, ORIGIN)
    for name, value in asked.items():
        assert set(value.split(",")) <= set(allowed[name].replace(" ", "").split(","))
    status, allowed = preflight(named_origin, route, f"{ORIGIN}.b", method, **asked)
    assert (status, "origin" in allowed) == (400, False)


def test_cors_is_off_unless_an_origin_is_named(app: App, named_origin: App) -> None:
    def headers(app: App, origin: str) -> Any:
        sent = {"origin": origin, "authorization": "Bearer sesame"}
        return app.client.get("/v1/models", headers=sent).headers

    allowed = "access-control-allow-origin"
    assert preflight(app, "/score", ORIGIN, "POST")[0] == 405
    assert allowed not in headers(app, ORIGIN)
    assert allowed not in headers(named_origin, f"{ORIGIN}.b")
    own = headers(named_origin, ORIGIN)
    assert own[allowed] == ORIGIN
    assert "x-hallutracer-risk" in own["access-control-expose-headers"]


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


@pytest.mark.parametrize("names", [(), ("gpt-4o", "org/model"), ("*",)])
def test_a_model_answers_to_its_bundle_s_names_of_it_and_to_those_that_it_is_given(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    """Another bundle's name is none of them: refusals.json."""
    with App(tmp_path, model_names=names).started() as app:
        manifest = app.bundles[0].manifest
        own = {"scripted", manifest.name, manifest.model.name}
        assert manifest.name != manifest.model.name
        for name in own | {"gpt-4o", "org/model", "other"}:
            chat = app.client.post(CHAT_ROUTE, json=request_of(CHAT, model=name))
            score = app.client.post("/score", json={"prompt": "a", "model": name})
            card = app.client.get(f"/v1/models/{name}")
            taken = name in own or name in names or "*" in names
            statuses = [answer.status_code for answer in (chat, score, card)]
            assert statuses == [200 if taken else 404] * 3, name
            if taken:
                answer, root = chat.json(), card.json()["root"]
                assert (answer["model"], root) == ("scripted", "scripted")
                assert note_of(answer)["bundle"]["name"] == "one"
                assert card.json()["id"] == name
            else:
                assert "--served-model-name" in chat.text
                assert "ask for 'scripted'" in card.text
        for path in ("/v1/models", "/v1/models/"):
            listed = [model["id"] for model in app.client.get(path).json()["data"]]
            assert listed == ["scripted", *(name for name in names if name != "*")]


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
    for body in ({"prompt": "a" * 600}, {"prompt": 3}, {"prompt": "a", "model": "other"}):
        assert "retry-after" not in app.client.post("/score", json=body).headers


# --- guards that observe ---

# Texts, or the turns of a conversation.
UNREADABLE = {
    name: whole(items)
    for name, items in values(
        r"""
        "too long" | [{"times": ["a", 600]}]
        "one of two" | ["a", {"times": ["a", 600]}]
        "far too long" | [{"times": ["a", 120000]}]
        "empty" | [""]
        "blank" | ["  "]
        "no Unicode" | ["hi \ud83d"]
        "too many" | {"times": [["a"], 1000]}
        "a long chat" | [{"role": "user", "content": {"times": ["a", 600]}}]
        "a refused chat" | [{"role": "system", "content": "B"}, {"role": "user", "content": "a"}]
        "a chat that is no Unicode" | [{"role": "user", "content": "hi \ud83d"}]
        "an empty chat" | []
        """
    )
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_cannot_be_read_passes_an_observing_guard_and_no_other(
    app: App, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    template, items, is_chat = app.engine._template, UNREADABLE[case], "chat" in case

    def refusing(messages: Any, tools: Any) -> str:
        if messages[0]["role"] == "system":
            raise RequestError("the chat template refuses these messages", param="messages")
        return template(messages, tools)

    def guard(route: str, parameters: str, policy: str, **body: Any) -> tuple[int, Any]:
        content = json.dumps(body | {parameters: {"policy": policy}})
        answer = app.client.post(route, content=content, headers=JSON)
        return answer.status_code, answer.json()

    monkeypatch.setattr(app.engine, "_template", refusing)
    of_litellm: dict[str, Any] = {"texts": [], "structured_messages": items} if is_chat else {}
    of_litellm = {"input_type": "request", "texts": items} | of_litellm
    asked = LITELLM_ROUTE, "additional_provider_specific_params"
    status, answer = guard(*asked, "observe", **of_litellm)
    assert (status, answer["action"]) == (200, "NONE")
    assert "cannot be read" in answer["hallutracer"]["error"]
    status, answer = guard(*asked, "gate", **of_litellm)
    assert status in (413, 422) or answer["action"] == "BLOCKED"

    detector = {"messages" if is_chat else "contents": items}
    asked = MESSAGES_DETECTOR if is_chat else CONTENTS_DETECTOR, "detector_params"
    passed = guard(*asked, "observe", **detector)
    assert passed == (200, [] if is_chat else [[]] * len(items))
    status, answer = guard(*asked, "gate", **detector)
    assert status in (413, 422) or answer[0]["detection"] == "unreadable"
