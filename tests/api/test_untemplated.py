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
from tests.kit.api import TEXT, note_of, request_of
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
    route, asked = "/score", {"policy": policy, "generate": {"max_tokens": 4}} | body
    if "text" in body:
        chosen = {"policy": policy}
        route, asked = (
            TEXT.route,
            request_of(TEXT, chosen=chosen, model="demo", prompt=body["text"]),
        )
    answer = client.post(route, json=asked)
    assert answer.status_code == 200, answer.text
    return list(note_of(answer.json())["data"])


def withheld(rows: list[dict[str, Any]]) -> list[bool]:
    return [row["decision"] == "abstain" for row in rows]


@pytest.mark.parametrize("form", ["Q: {0}\nA:", "{1} The capital is"])
def test_no_prompt_that_is_withheld_comes_free_outside_training(
    client: TestClient, scorer: Scorer, form: str
) -> None:
    texts = [row["prompt"] for row in questions("test")[:60]]
    rows = scored(client, "gate", prompt=texts)
    stopped = [text for text, row in zip(texts, rows, strict=True) if row["flagged"]]
    prompts = [form.format(text, render(text)) for text in stopped]
    tokens = [scorer.engine.tokenize(prompt) for prompt in prompts]
    for body in ({"text": prompts}, {"input_ids": tokens}):
        rows = scored(client, "gate", **body)
        passing = [row for row in rows if row["outside_training"] and not row["flagged"]]
        assert len(passing) > len(stopped) / 4
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


def test_a_chat_that_ends_with_an_answer_is_no_question(client: TestClient) -> None:
    begun = {"role": "assistant", "content": "The capital is"}
    rows = []
    for row in questions("test")[:30]:
        messages = [{"role": "user", "content": row["prompt"]}, begun]
        rows += scored(client, "gate", messages=messages)
    assert any(row["outside_training"] and not row["flagged"] for row in rows)
    assert withheld(rows) == [row["flagged"] or row["outside_training"] for row in rows]


def test_probes_that_learnt_from_texts_know_texts(
    scorer: Scorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = built_in()["gate"]
    assert untemplated(scorer, gate).withhold_outside is True
    for policy in (OPEN, built_in()["observe"], Policy("warn", Action.ANNOTATE)):
        assert untemplated(scorer, policy) is policy
    monkeypatch.setattr(scorer, "prompt_format", "text")
    assert untemplated(scorer, gate) is gate
