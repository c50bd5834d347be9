"""Prompts that went through no chat template, on the demo model, whose probes learnt from chats:
their risk says little, and a policy that withholds withholds those that lie outside training,
unless the operator says otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from hallutracer_research.demo.train import render
from probes_store.store import SHIPPED, Store
from service.demo import MODEL_DIR
from service.demo.questions import questions
from service.engines.base import EngineOptions
from service.engines.scheduler import Scheduled
from service.engines.transformers.engine import TransformersEngine
from service.policies.guard import Action, Policy
from service.policies.policy import built_in
from service.scoring import Scorer
from service.serving.catalogue import untemplated
from tests.running import in_process

UNKNOWN = "What is the capital of the Solomon Islands?"
OPEN = Policy("open", Action.ABSTAIN, message="No.", withhold_outside=False)


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    engine = Scheduled(TransformersEngine.load(EngineOptions(str(MODEL_DIR))))
    return Scorer(engine, Store(Path("/nonexistent"), fallbacks=[SHIPPED]).load("demo"))


@pytest.fixture(scope="module")
def client(scorer: Scorer) -> Iterator[TestClient]:
    settings: dict[str, Any] = {"policy": "gate", "callers_may": ("policy",)}
    with in_process(lambda: {"demo": scorer}, {"open": OPEN}, **settings) as client:
        yield client


def scored(client: TestClient, policy: str, **body: Any) -> list[dict[str, Any]]:
    """What /score says of prompts; with ``text`` what /v1/completions says of them."""
    if "text" in body:
        (model,) = client.get("/v1/models").json()["data"]
        body = {"model": model["id"], "prompt": body["text"], "max_tokens": 4}
        answer = client.post(
            "/v1/completions", json=body | {"vllm_xargs": {"hallutracer_policy": policy}}
        )
    else:
        answer = client.post(
            "/score", json={"policy": policy, "generate": {"max_tokens": 4}} | body
        )
    assert answer.status_code == 200, answer.text
    document = answer.json()
    return list(document.get("hallutracer", document)["data"])


def withheld(rows: list[dict[str, Any]]) -> list[bool]:
    return [row["decision"] == "abstain" for row in rows]


@pytest.mark.parametrize("form", ["Q: {0}\nA:", "{1} The capital is"])
def test_no_prompt_that_is_withheld_comes_free_outside_training(
    client: TestClient, scorer: Scorer, form: str
) -> None:
    texts = [row["prompt"] for row in questions("test")[:60]]
    stopped = [
        text
        for text, row in zip(texts, scored(client, "gate", prompt=texts), strict=True)
        if row["flagged"]
    ]
    prompts = [form.format(text, render(text)) for text in stopped]
    tokens = [scorer.engine.tokenize(prompt) for prompt in prompts]
    for body in ({"text": prompts}, {"input_ids": tokens}):
        rows = scored(client, "gate", **body)
        assert (
            sum(row["outside_training"] and not row["flagged"] for row in rows) > len(stopped) / 4
        )
        assert withheld(rows) == [row["flagged"] or row["outside_training"] for row in rows]
        assert not any("completion" in row for row in rows if row["decision"] == "abstain")
        freed = scored(client, "open", **body)
        assert withheld(freed) == [row["flagged"] for row in freed]
    assert not any(withheld(scored(client, "observe", input_ids=tokens)))


def test_a_question_goes_through_the_template_and_is_judged_by_its_risk(client: TestClient) -> None:
    texts = [row["prompt"] for row in questions("test")[:120]]
    for body in (
        {"prompt": texts},
        {"messages": [{"role": "user", "content": f"Q: {UNKNOWN}\nA:"}]},
    ):
        rows = scored(client, "gate", **body)
        assert withheld(rows) == [row["flagged"] for row in rows]


@pytest.mark.parametrize("route", ["/score", "/v1/chat/completions"])
def test_a_chat_that_ends_with_an_answer_is_no_question(
    client: TestClient, scorer: Scorer, route: str
) -> None:
    results = []
    more = {} if route == "/score" else {"model": scorer.engine.identity.model, "max_tokens": 1}
    for row in questions("test")[:30]:
        messages = [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": "The capital is"},
        ]
        answer = client.post(route, json={"messages": messages} | more).json()
        results += answer.get("hallutracer", answer)["data"]
    assert any(row["outside_training"] and not row["flagged"] for row in results)
    assert withheld(results) == [row["flagged"] or row["outside_training"] for row in results]


def test_probes_that_learnt_from_texts_know_texts(
    scorer: Scorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = built_in()["gate"]
    assert untemplated(scorer, gate).withhold_outside is True
    for policy in (OPEN, built_in()["observe"], Policy("warn", Action.ANNOTATE)):
        assert untemplated(scorer, policy) is policy
    monkeypatch.setattr(scorer, "prompt_format", "text")
    assert untemplated(scorer, gate) is gate
