"""Prompts without a template, names of the model; the guardrails' routes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from service.access.routes import CLASSIFY_ROUTE, LITELLM_ROUTE
from service.policies.guard import Action, Policy
from tests.engine_kinds import KINDS
from tests.kit.api import CHAT, QUESTION, TEXT, note_of, request_of, send_to
from tests.running import App, running, until

POLICIES = {
    "gate": Policy("gate", Action.ABSTAIN, message="I am not sure."),
    "warn": Policy("warn", Action.ANNOTATE, 0.0, "Take care."),
    "fetch": Policy("fetch", Action.RETRIEVE, 0.0, "Fetch a passage."),
}
NOTHING = {"threshold": 1.0}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    with App(tmp_path_factory.mktemp("app"), policies=POLICIES).started() as app:
        yield app


def test_text_completions_go_through_no_template(app: App) -> None:
    texts = ["one", "two"]
    ids = [app.engine.tokenize(text) for text in texts]
    score = app.client.post("/score", json={"input_ids": ids, "threshold": 1.0}).json()["data"]
    for prompt in (texts, ids):
        document = send_to(app, TEXT, tokens=4, chosen=NOTHING, prompt=prompt).json()
        choices = [(choice["text"], choice["finish_reason"]) for choice in document["choices"]]
        assert choices == [("It i", "length")] * 2
        assert note_of(document)["data"] == score


@pytest.mark.parametrize("names", [(), ("gpt-4o", "org/model"), ("*",)])
def test_a_model_answers_to_the_names_that_it_has(tmp_path: Path, names: tuple[str, ...]) -> None:
    with App(tmp_path, model_names=names).started() as app:
        for name in ("gpt-4o", "org/model", "other", "scripted"):
            answers = name in names or "*" in names or name == "scripted"
            chat = app.client.post(CHAT.route, json=request_of(CHAT, model=name))
            score = app.client.post("/score", json={"prompt": "a", "model": name})
            card = app.client.get(f"/v1/models/{name}")
            responses = (chat, score, card)
            assert [response.status_code for response in responses] == [200 if answers else 404] * 3
            if answers:
                assert (chat.json()["model"], card.json()["id"], card.json()["root"]) == (
                    "scripted",
                    name,
                    "scripted",
                )
            else:
                assert "--served-model-name" in chat.text
                assert "ask for 'scripted'" in card.text
        listed = [model["id"] for model in app.client.get("/v1/models").json()["data"]]
        assert listed == ["scripted", *(name for name in names if name != "*")]


@pytest.mark.parametrize(("kind", "stream"), zip(KINDS, (False, True), strict=True))
def test_an_answer_without_a_length_ends_before_the_deadline_and_a_reader_that_leaves_ends_it(
    tmp_path: Path,
    kind: str,
    stream: bool,
) -> None:
    with running(tmp_path, kind, deadline_s=3.0) as service:
        service.engine.answer, service.engine.sleep_s = "x" * 800, 0.01
        client = openai.OpenAI(
            base_url=f"{service.url}/v1",
            api_key="none",
            max_retries=0,
            timeout=20,
        )

        def ask(**fields: Any) -> Any:
            body: Any = {"model": "scripted", "messages": QUESTION, "temperature": 0} | fields
            return client.chat.completions.create(
                **body,
                extra_body={"vllm_xargs": {"hallutracer_threshold": 1.0}},
            )

        answer = ask(stream=stream)
        ends = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        pieces = [end.delta.content or "" if stream else end.message.content for end in ends]
        text = "".join(pieces)
        assert (ends[-1].finish_reason, 1 < len(text) < 800) == ("length", True)
        *_, last = ask(stream=True, max_tokens=500)  # it named 500 tokens, and cannot have them
        assert last.choices[0].finish_reason == "length"
        decoded = service.engine.counters.decode_steps
        leaving = ask(stream=True, max_tokens=300)
        next(iter(leaving))
        leaving.close()
        until(lambda: service.engine.counters.open_continuations == 0, 10)
        assert service.engine.counters.decode_steps - decoded < 140


# --- LiteLLM's guardrail and a router's classifier; its own code asks in clients/quickstarts ---


def guard(app: App, chosen: dict[str, Any] | None = None, status: int = 200, **given: Any) -> Any:
    body = {
        "input_type": "request",
        "request_data": {"user_api_key_alias": "a"},
        "litellm_version": "1",
    }
    params = {} if chosen is None else {"additional_provider_specific_params": chosen}
    answer = app.client.post(LITELLM_ROUTE, json=body | params | given)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_a_guarded_call_is_judged_as_the_other_routes_judge_it(app: App) -> None:
    risk = app.client.post("/score", json={"messages": QUESTION}).json()["data"][0]["risk"]
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
    both = [
        row["risk"] for row in app.client.post("/score", json={"prompt": ["A", "B"]}).json()["data"]
    ]
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
    answer, observed = (
        guard(app, {"threshold": 1.0}, **given),
        guard(app, {"policy": "observe"}, **given),
    )
    assert (answer["action"], "read" in answer["blocked_reason"]) == ("BLOCKED", True)
    assert (observed["action"], "read" in observed["hallutracer"]["error"]) == ("NONE", True)


def test_a_classifier_gives_the_risk_as_a_probability(app: App) -> None:
    both = [
        row["risk"] for row in app.client.post("/score", json={"prompt": ["A", "B"]}).json()["data"]
    ]
    two, one = (
        app.client.post(CLASSIFY_ROUTE, json={"inputs": inputs}) for inputs in (["A", "B"], "A")
    )
    assert [{row["label"]: row["score"] for row in of_text} for of_text in two.json()] == [
        {"hallucinated": risk, "factual": pytest.approx(1 - risk)} for risk in both
    ]
    assert (one.json(), one.headers["x-hallutracer-bundle"]) == (two.json()[0], "one:1")
    for wrong in ({"inputs": []}, {"inputs": 1}, {}, {"inputs": "A", "truncate": True}):
        assert app.client.post(CLASSIFY_ROUTE, json=wrong).status_code == 422
