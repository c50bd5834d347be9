"""Ways of asking that no bundle is trained on: each route withholds them under a gate, whatever the
risk."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from probes_store.bundle import Bundle
from service.policies.guard import GATE, Policy
from tests.kit.api import CHAT, MESSAGES, RESPONSES, SCORE, note_of, send_to
from tests.kit.tables import cells
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
# The turns, of the user and of the model in turn; "-" where the model says nothing between.
UNTRAINED = cells(
    f"""
    {QUESTION} And who wrote Faust?
    {QUESTION} | {REFUSED} | go on
    {QUESTION} | Shall I? | Yes.
    {QUESTION} | - | Hi
    """
)


def knows_outside(engine: ScriptedEngine, folder: Path) -> Bundle:
    return contextual_bundle(engine, folder, reach=1e3)


service = app_of_module(
    names=(),
    add=[knows_outside],
    policy="desk",
    policies=POLICIES,
    callers_may=("policy", "threshold"),
)


def conversation(turns: list[str]) -> list[dict[str, str]]:
    both = zip(cycle(("user", "assistant")), turns, strict=False)
    return [{"role": role, "content": text} for role, text in both if text != "-"]


def decided(service: App, turns: list[str], policy: str) -> list[tuple[Any, ...]]:
    """What each protocol of conversations says of this one: the decision, whether it lies outside
    training, whether an answer is shown, why it lies there, whether it is flagged."""
    rows = []
    for wire in (SCORE, CHAT, RESPONSES, MESSAGES):
        answer = send_to(service, wire, messages=conversation(turns), chosen={"policy": policy})
        [row] = note_of(answer.json())["data"]
        answered, why = service.engine.answer in answer.text, row.get("outside_because")
        assert why is None or why.endswith(", on which no bundle is trained")
        rows.append((row["decision"], row["outside_training"], answered, bool(why), row["flagged"]))
    return rows


@pytest.mark.parametrize("turns", UNTRAINED, ids=" ".join)
def test_nor_does_one_whose_caller_has_rendered_the_conversation(
    service: App, turns: list[str]
) -> None:
    """Token ids, as the template writes them, or otherwise behind a beginning and an end of its
    own."""
    ids = service.state.catalogue.scorers[0].render(messages=conversation(turns))
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


@pytest.mark.parametrize("turns", UNTRAINED, ids=" ".join)
def test_no_route_answers_what_training_had_nothing_like(service: App, turns: list[str]) -> None:
    assert decided(service, turns, "desk") == [("abstain", True, False, True, False)] * 4
    # The operator opened it: its risk decides.
    assert decided(service, turns, "open") == [("continue", True, True, True, False)] * 4
    assert decided(service, [QUESTION], "desk") == [("continue", False, True, False, False)] * 4


def test_small_talk_passes_where_its_conversation_is_known_and_not_as_text_or_ids(
    service: App,
) -> None:
    scorer = service.state.catalogue.scorers[0]

    def applies(text: str) -> bool | None:
        [report] = scorer.score([scorer.render(text)], standings=[scorer.standing(text)])
        return report.context.applies

    text = next(text for text in SMALL_TALKS if not applies(text))
    body: dict[str, Any] = {"policy": "gate", "threshold": 0.0}
    for prompt in ({"prompt": text}, {"messages": [{"role": "user", "content": text}]}):
        [row] = service.ask(**(body | prompt))["data"]
        assert (row["applies"], row["decision"]) == (False, "continue")
    asked = [USER, {"role": "assistant", "content": ""}, {"role": "user", "content": text}]
    for prompt in ({"input_ids": scorer.render(text)}, {"messages": asked}):
        [row] = service.ask(**(body | prompt))["data"]
        assert (row["applies"], row["decision"]) == (True, "abstain")
