"""Prompts without a template, names of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from service.policies.guard import Action, Policy
from tests.engine_kinds import KINDS
from tests.kit.api import CHAT, QUESTION, TEXT, note_of, request_of, send_to
from tests.running import App, app_of_module, running

POLICIES = {
    "gate": Policy("gate", Action.ABSTAIN, message="I am not sure."),
    "warn": Policy("warn", Action.ANNOTATE, 0.0, "Take care."),
    "fetch": Policy("fetch", Action.RETRIEVE, 0.0, "Fetch a passage."),
}
NOTHING = {"threshold": 1.0}


app = app_of_module(policies=POLICIES)


def test_text_completions_go_through_no_template(app: App) -> None:
    texts = ["one", "two"]
    ids = [app.engine.tokenize(text) for text in texts]
    score = app.ask(input_ids=ids, threshold=1.0)["data"]
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
def test_an_answer_without_a_length_ends_before_the_deadline(
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
