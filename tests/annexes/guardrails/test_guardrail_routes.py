"""LiteLLM's guardrail and a router's classifier; its own code asks in clients/quickstarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from service.annexes.guardrails import CLASSIFY_ROUTE, LITELLM_ROUTE
from tests.kit.api import POLICIES, QUESTION
from tests.running import App, app_of_module

app = app_of_module(policies=POLICIES)


def guard(app: App, chosen: dict[str, Any] | None = None, status: int = 200, **given: Any) -> Any:
    body = {
        "input_type": "request",
        "request_data": {"user_api_key_alias": "a"},
        "litellm_version": "1",
    }
    params = {} if chosen is None else {"additional_provider_specific_params": chosen}
    return app.ask(LITELLM_ROUTE, status=status, **(body | params | given))


def test_a_guarded_call_is_judged_as_the_other_routes_judge_it(app: App) -> None:
    risk = app.ask(messages=QUESTION)["data"][0]["risk"]
    for threshold, action, reason, decision in (
        (1.0, "NONE", None, "continue"),
        (0.0, "BLOCKED", "I am not sure.", "abstain"),
    ):
        answer = guard(
            app,
            {"threshold": threshold},
            structured_messages=QUESTION,
            texts=["not this"],
        )
        (row,) = answer["hallutracer"]["data"]
        assert (answer["action"], answer.get("blocked_reason")) == (action, reason)
        assert (row["risk"], row["decision"]) == (risk, decision)
    both = [row["risk"] for row in app.ask(prompt=["A", "B"])["data"]]
    answer = guard(
        app,
        {"threshold": max(both)},
        texts=["A", "B"],
    )  # one that is withheld stops the call
    assert (answer["action"], [row["risk"] for row in answer["hallutracer"]["data"]]) == (
        "BLOCKED",
        both,
    )
    assert (
        guard(app, {"threshold": max(both)}, texts=["AB"[both.index(min(both))]])["action"]
        == "NONE"
    )


def test_a_guarded_call_chooses_policy_and_bundle(app: App, tmp_path: Path) -> None:
    blocked = guard(app, {"policy": "block", "threshold": 0.0}, texts=["A"])
    assert (blocked["action"], blocked["blocked_reason"][:14]) == ("BLOCKED", "withheld: risk")
    assert "outside" not in blocked["blocked_reason"]
    both = [
        {
            "role": "user",
            "content": "What is the capital of Italy? Also: what is the capital of Samoa?",
        },
    ]
    reason = guard(app, {"policy": "block", "threshold": 1.0}, structured_messages=both)[
        "blocked_reason"
    ]
    assert reason.endswith(", threshold 1.00, outside training"), (
        "its risk is below the threshold, and it is withheld"
    )
    assert guard(app, {"policy": "fetch"}, texts=["A"])["blocked_reason"] == "Fetch a passage."
    assert guard(app, {"policy": "observe", "threshold": 0.0}, texts=["A"])["action"] == "NONE"
    assert guard(app, {"policy": "warn"}, 422, texts=["A"])["error"]["param"] == "policy"
    assert guard(app, {"bundle": "two"}, texts=["A"])["hallutracer"]["bundle"]["name"] == "two"
    assert guard(app, {"bundle": "three"}, 404, texts=["A"])["error"]["param"] == "bundle"
    with App(tmp_path, callers_may=()).started() as strict:
        for chosen in ({"policy": "observe"}, {"threshold": 1.0}, {"bundle": "two"}):
            assert guard(strict, chosen, 403, texts=["A"])["error"]["code"] == "not_allowed"


@pytest.mark.parametrize(
    "given",
    [
        *(
            {"structured_messages": QUESTION, name: [{"id": "a"}]}
            for name in ("images", "tools", "tool_calls")
        ),
        {"structured_messages": [{"role": "tool", "content": "12", "tool_call_id": "a"}]},
        {
            "structured_messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]},
            ],
        },
        {"structured_messages": [{"role": "user", "content": None}]},
        {"structured_messages": [{"content": "a"}], "texts": ["a"]},
    ],
)
def test_what_cannot_be_read_does_not_pass(app: App, given: dict[str, Any]) -> None:
    answer = guard(app, {"threshold": 1.0}, **given)
    observed = guard(app, {"policy": "observe"}, **given)
    assert (answer["action"], "read" in answer["blocked_reason"]) == ("BLOCKED", True)
    assert (observed["action"], "read" in observed["hallutracer"]["error"]) == ("NONE", True)


def test_a_classifier_gives_the_risk_as_a_probability(app: App) -> None:
    both = [row["risk"] for row in app.ask(prompt=["A", "B"])["data"]]
    two, one = (
        app.client.post(CLASSIFY_ROUTE, json={"inputs": inputs}) for inputs in (["A", "B"], "A")
    )
    for risk, rows in zip(both, two.json(), strict=True):
        scores = {row["label"]: row["score"] for row in rows}
        assert scores == {"hallucinated": risk, "factual": pytest.approx(1 - risk)}
    assert (one.json(), one.headers["x-hallutracer-bundle"]) == (two.json()[0], "one:1")
    for wrong in ({"inputs": []}, {"inputs": 1}, {}, {"inputs": "A", "truncate": True}):
        app.ask(CLASSIFY_ROUTE, status=422, **wrong)
