"""Ways of asking that no bundle is trained on: each route withholds them under a gate, whatever the
risk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from service.policies.guard import GATE, Policy
from tests.api.test_reply import App
from tests.matching import SMALL_TALKS, contextual_bundle

QUESTION = "Who wrote Emma?"
REFUSED = "Ask the help desk."
USER = {"role": "user", "content": QUESTION}
POLICIES = {
    "desk": Policy("desk", GATE.action, threshold=1.0, message=REFUSED),
    "open": Policy("open", GATE.action, threshold=1.0, withhold_outside=False),
}
UNTRAINED: dict[str, list[dict[str, str]]] = {
    "two questions": [{"role": "user", "content": f"{QUESTION} And who wrote Faust?"}],
    "a refusal, go on": [
        USER,
        {"role": "assistant", "content": REFUSED},
        {"role": "user", "content": "go on"},
    ],
    "an offer, yes": [
        USER,
        {"role": "assistant", "content": "Shall I?"},
        {"role": "user", "content": "Yes."},
    ],
    "a second turn": [USER, {"role": "user", "content": "Hi"}],
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    folder = tmp_path_factory.mktemp("asking")
    app = App(folder, policy="desk", policies=POLICIES, callers_may=("policy", "threshold"))
    app.bundles.insert(0, contextual_bundle(app.engine, folder, reach=1e3))
    with app.started():
        yield app


def decided(service: App, messages: list[dict[str, str]], policy: str) -> list[dict[str, Any]]:
    """What each route says of the conversation."""
    rows = []
    arguments = {"hallutracer_policy": policy}
    for path, body in (
        ("/score", {"messages": messages, "policy": policy, "generate": {"max_tokens": 3}}),
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 3, "vllm_xargs": arguments}),
        ("/v1/responses", {"input": messages, "max_output_tokens": 16, "vllm_xargs": arguments}),
        ("/v1/messages", {"messages": messages, "max_tokens": 3, "vllm_xargs": arguments}),
    ):
        answer = service.client.post(
            path, json=body | ({} if path == "/score" else {"model": "scripted"})
        )
        assert answer.status_code == 200, answer.text
        document = answer.json()
        (row,) = (document.get("hallutracer") or document)["data"]
        rows.append(row | {"said": service.engine.answer[:3] in answer.text})
    return rows


@pytest.mark.parametrize("how", UNTRAINED)
def test_nor_does_one_whose_caller_has_rendered_the_conversation(service: App, how: str) -> None:
    """Token ids, as the template writes them, or otherwise behind a beginning and an end of its
    own."""
    ids = service.state.catalogue.scorers[0].render(messages=UNTRAINED[how])
    plain = service.state.catalogue.scorers[0].render(messages=[USER])
    for tokens, untrained in ((ids, True), ([ids[0], *b"Think. ", *ids[1:]], True), (plain, False)):
        for policy, answered in (("desk", not untrained), ("open", True)):
            body = {"input_ids": tokens, "policy": policy, "generate": {"max_tokens": 3}}
            [row] = service.ask(**body)["data"]
            assert (row["decision"], row["outside_training"]) == (
                "continue" if answered else "abstain",
                untrained,
            )
            assert ("completion" in row) is answered


@pytest.mark.parametrize("how", UNTRAINED)
def test_no_route_answers_what_training_had_nothing_like(service: App, how: str) -> None:
    for row in decided(service, UNTRAINED[how], "desk"):
        assert (row["decision"], row["outside_training"], row["said"]) == ("abstain", True, False)
        assert row["outside_because"].endswith(", on which no bundle is trained")
        assert not row["flagged"]
    for row in decided(service, UNTRAINED[how], "open"):  # the operator opened it: its risk decides
        assert (row["decision"], row["outside_training"], row["said"]) == ("continue", True, True)
    for row in decided(service, [USER], "desk"):
        assert (row["decision"], row["outside_training"], row["said"]) == ("continue", False, True)
        assert "outside_because" not in row


def test_small_talk_passes_where_its_conversation_is_known_and_not_as_text_or_ids(
    service: App,
) -> None:
    scorer = service.state.catalogue.scorers[0]
    ids = [scorer.render(prompt=text) for text in SMALL_TALKS]
    reports = scorer.score(ids, standings=[scorer.standing(text) for text in SMALL_TALKS])
    pairs = zip(SMALL_TALKS, ids, reports, strict=True)
    text, rendered = next(
        (text, tokens) for text, tokens, report in pairs if not report.context.applies
    )

    body: dict[str, Any] = {"policy": "gate", "threshold": 0.0}
    for prompt in ({"prompt": text}, {"messages": [{"role": "user", "content": text}]}):
        [row] = service.ask(**(body | prompt))["data"]
        assert (row["applies"], row["decision"]) == (False, "continue")
    asked = [USER, {"role": "assistant", "content": ""}, {"role": "user", "content": text}]
    for prompt in ({"input_ids": rendered}, {"messages": asked}):
        [row] = service.ask(**(body | prompt))["data"]
        assert (row["applies"], row["decision"]) == (True, "abstain")
