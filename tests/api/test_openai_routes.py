"""Prompts without a template, names of the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.policies.guard import Action, Policy
from tests.kit.api import CHAT, TEXT, note_of, request_of, send_to
from tests.running import App, app_of_module

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
