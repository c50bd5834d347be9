"""The routes for LiteLLM's proxy and for callers of a classifier; LiteLLM's own code asks in clients/quickstarts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.access.routes import CLASSIFY_ROUTE, LITELLM_ROUTE
from service.policies.guard import Action, Policy
from tests.engine_kinds import KINDS
from tests.running import App, Running, running

ASKED = [{"role": "user", "content": "What is the capital of France?"}]
EVERYTHING, NOTHING = {"threshold": 0.0}, {"threshold": 1.0}
POLICIES = {
    "warn": Policy("warn", Action.ANNOTATE, 0.0, "Take care."),
    "fetch": Policy("fetch", Action.RETRIEVE, 0.0, "Fetch a passage."),
}


@pytest.fixture(scope="module", params=KINDS)
def service(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[App]:
    app = App(tmp_path_factory.mktemp("bundles"), request.param, policies=POLICIES)
    with app.started():
        yield app


def ask(service: App, chosen: dict[str, Any] | None = None, status: int = 200, **given: Any) -> Any:
    body = {"input_type": "request", "request_data": {"user_api_key_alias": "a"}, "litellm_version": "1"}
    params = {} if chosen is None else {"additional_provider_specific_params": chosen}
    found = service.client.post(LITELLM_ROUTE, json=body | params | given)
    assert found.status_code == status, found.text
    return found.json()


def test_a_chat_is_judged_as_the_chat_routes_judge_it(service: App) -> None:
    given = {"structured_messages": ASKED, "texts": ["not this"]}
    passed, stopped = ask(service, NOTHING, **given), ask(service, EVERYTHING, **given)
    assert passed["action"] == "NONE"
    assert (stopped["action"], stopped["blocked_reason"]) == ("BLOCKED", "I am not sure.")
    score = service.client.post("/score", json={"messages": ASKED}).json()["data"][0]
    for found in (passed, stopped):
        assert found["hallutracer"]["data"][0]["risk"] == score["risk"]
    assert stopped["hallutracer"]["data"][0]["decision"] == "abstain"


def test_texts_are_prompts_and_one_that_is_withheld_stops_the_call(service: App) -> None:
    risks = [row["risk"] for row in service.client.post("/score", json={"prompt": ["A", "B"]}).json()["data"]]
    between = {"threshold": max(risks)}
    found = ask(service, between, texts=["A", "B"])
    assert [row["risk"] for row in found["hallutracer"]["data"]] == risks
    assert found["action"] == "BLOCKED"
    assert ask(service, between, texts=[["A", "B"][risks.index(min(risks))]])["action"] == "NONE"


def test_other_policies(service: App) -> None:
    blocked = ask(service, {"policy": "block", "threshold": 0.0}, texts=["A"])
    assert (blocked["action"], blocked["blocked_reason"][:14]) == ("BLOCKED", "withheld: risk")
    assert ask(service, {"policy": "fetch"}, texts=["A"])["blocked_reason"] == "Fetch a passage."
    assert ask(service, {"policy": "observe", "threshold": 0.0}, texts=["A"])["action"] == "NONE"
    assert "this route sees none" in ask(service, {"policy": "warn"}, 422, texts=["A"])["error"]["message"]
    assert ask(service, {"bundle": "two"}, texts=["A"])["hallutracer"]["bundle"]["name"] == "two"
    assert ask(service, {"bundle": "three"}, 404, texts=["A"])["error"]["param"] == "bundle"


UNREADABLE: list[dict[str, Any]] = [
    {"structured_messages": ASKED, "images": ["data:image/png;base64,AA"]},
    {"structured_messages": ASKED, "tools": [{"type": "function"}]},
    {"structured_messages": ASKED, "tool_calls": [{"id": "a"}]},
    {"structured_messages": [{"role": "tool", "content": "12", "tool_call_id": "a"}]},
    {"structured_messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]},
    {"structured_messages": [{"role": "user", "content": None}]},
    {"structured_messages": [{"content": "a"}], "texts": ["a"]},
]


@pytest.mark.parametrize("given", UNREADABLE)
def test_what_cannot_be_read_does_not_pass(service: App, given: dict[str, Any]) -> None:
    found = ask(service, **given)
    assert found["action"] == "BLOCKED"
    assert "read" in found["blocked_reason"]
    observed = ask(service, {"policy": "observe"}, **given)
    assert (observed["action"], "read" in observed["hallutracer"]["error"]) == ("NONE", True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"texts": ["A"], "input_type": "response"}, "pre_call"),
        ({"texts": ["A"], "input_type": "both"}, "input_type"),
        ({}, "texts"),
        ({"texts": []}, "texts"),
        ({"structured_messages": []}, "structured_messages"),
        ({"texts": ["A"], "additional_provider_specific_params": {"treshold": 0.4}}, "treshold"),
        ({"texts": ["A"], "additional_provider_specific_params": {"threshold": "0.4"}}, "threshold"),
        ({"texts": ["A"] * 1000}, "prompts in one request"),
    ],
)
def test_bad_requests_are_refused(service: App, given: dict[str, Any], said: str) -> None:
    assert said in str(ask(service, status=422, **given)["error"])


def test_a_caller_may_not_loosen_the_gate(tmp_path: Path) -> None:
    app = App(tmp_path, callers_may=())
    with app.started():
        for chosen in ({"policy": "observe"}, NOTHING, {"bundle": "two"}):
            assert ask(app, chosen, 403, texts=["A"])["error"]["code"] == "not_allowed"


def test_a_classifier_gives_the_risk_as_a_probability(service: App) -> None:
    risks = [row["risk"] for row in service.client.post("/score", json={"prompt": ["A", "B"]}).json()["data"]]
    both = service.client.post(CLASSIFY_ROUTE, json={"inputs": ["A", "B"]})
    one = service.client.post(CLASSIFY_ROUTE, json={"inputs": "A"})
    assert [{row["label"]: row["score"] for row in of_text} for of_text in both.json()] == [
        {"hallucinated": risk, "factual": pytest.approx(1 - risk)} for risk in risks
    ]
    assert one.json() == both.json()[0]
    assert one.headers["x-hallutracer-bundle"] == "one:1"
    for wrong in ({"inputs": []}, {"inputs": 1}, {}, {"inputs": "A", "truncate": True}):
        assert service.client.post(CLASSIFY_ROUTE, json=wrong).status_code == 422


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_may_come_as_litellm_sends_it(tmp_path: Path, kind: str) -> None:
    with running(tmp_path, kind, api_keys=["sesame"]) as service:

        def status(service: Running, **headers: str) -> int:
            return httpx.post(service.url + CLASSIFY_ROUTE, json={"inputs": "A"}, headers=headers).status_code

        assert status(service, **{"x-api-key": "sesame"}) == 200
        assert status(service, authorization="Bearer sesame") == 200
        assert status(service) == 401
        assert status(service, **{"x-api-key": ""}) == 401
        assert status(service, **{"x-api-key": "Bearer sesame"}) == 401
        assert status(service, **{"x-api-key": "sesame", "authorization": "Bearer other"}) == 401
