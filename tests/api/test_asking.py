"""Ways of asking that no bundle is trained on: each route withholds them under a gate, whatever the
risk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from probes_store.bundle import Bundle
from service.policies.guard import GATE, Policy
from tests.kit.api import CHAT, MESSAGES, RESPONSES, SCORE, note_of, send_to
from tests.matching import SMALL_TALKS, contextual_bundle
from tests.running import App, app_of_module
from tests.scripted_engine import ScriptedEngine

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


def knows_outside(engine: ScriptedEngine, folder: Path) -> Bundle:
    return contextual_bundle(engine, folder, reach=1e3)


service = app_of_module(
    names=(),
    add=[knows_outside],
    policy="desk",
    policies=POLICIES,
    callers_may=("policy", "threshold"),
)


def decided(service: App, messages: list[dict[str, str]], policy: str) -> list[dict[str, Any]]:
    """What each protocol of conversations says of this one, and whether it shows an answer."""
    rows = []
    for wire in (SCORE, CHAT, RESPONSES, MESSAGES):
        answer = send_to(service, wire, messages=messages, chosen={"policy": policy})
        [row] = note_of(answer.json())["data"]
        rows.append(row | {"answered": service.engine.answer in answer.text})
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


def outcome(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["decision"], row["outside_training"], row["answered"]


@pytest.mark.parametrize("how", UNTRAINED)
def test_no_route_answers_what_training_had_nothing_like(service: App, how: str) -> None:
    for row in decided(service, UNTRAINED[how], "desk"):
        assert outcome(row) == ("abstain", True, False)
        assert row["outside_because"].endswith(", on which no bundle is trained")
        assert not row["flagged"]
    for row in decided(service, UNTRAINED[how], "open"):  # the operator opened it: its risk decides
        assert outcome(row) == ("continue", True, True)
    for row in decided(service, [USER], "desk"):
        assert outcome(row) == ("continue", False, True)
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
