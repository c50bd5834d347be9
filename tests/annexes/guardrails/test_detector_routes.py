"""FMS Guardrails' detector API; LiteLLM's own code for it asks in
tests/client/frameworks/guardrail.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.annexes.guardrails import CONTENTS_DETECTOR, DETECTOR_ROUTES, MESSAGES_DETECTOR
from service.policies.guard import GATE, Action
from service.settings import MOST_PROMPTS
from tests.api.test_reply import known
from tests.kit.api import POLICIES
from tests.running import App, app_of_module

ASKED = [{"role": "user", "content": "A"}]
SENT = {CONTENTS_DETECTOR: {"contents": ["A"]}, MESSAGES_DETECTOR: {"messages": ASKED}}


app = app_of_module(policies=POLICIES)


def detect(
    app: App, route: str, params: dict[str, Any] | None = None, status: int = 200, **given: Any
) -> Any:
    detector = {"detector-id": given.pop("detector")} if "detector" in given else {}
    body = (given or SENT[route]) | ({} if params is None else {"detector_params": params})
    return app.ask(route, status=status, headers=detector, **body)


def test_a_withheld_text_is_one_detection_and_another_none(app: App) -> None:
    texts = ["A", "Bé\U0001f600"]
    risks = [row["risk"] for row in app.ask(prompt=texts)["data"]]
    both = detect(app, CONTENTS_DETECTOR, {"threshold": 0.0}, contents=texts)
    for text, risk, (found,) in zip(texts, risks, both, strict=True):
        assert (found["start"], found["end"], found["text"], found["score"]) == (
            0,
            len(text),
            text,
            risk,
        )
        assert (found["detection"], found["detection_type"]) == ("abstain", "hallucination_risk")
        assert (found["metadata"]["risk"], found["metadata"]["bundle"]["name"]) == (risk, "one")
    highest = risks.index(max(risks))
    found = detect(app, CONTENTS_DETECTOR, {"threshold": max(risks)}, contents=texts)
    assert [len(of_text) for of_text in found] == [int(index == highest) for index in range(2)]


def test_a_chat_is_judged_as_a_conversation(app: App) -> None:
    turns = [*ASKED, {"role": "assistant", "content": "B"}, {"role": "user", "content": "C"}]
    risk = app.ask(messages=turns)["data"][0]["risk"]
    (found,) = detect(app, MESSAGES_DETECTOR, {"threshold": 0.0, "policy": "block"}, messages=turns)
    assert (found["detection"], found["score"]) == ("block", risk)
    assert detect(app, MESSAGES_DETECTOR, {"threshold": 1.0}, messages=turns) == []
    assert "text" not in found


@pytest.mark.parametrize("route", DETECTOR_ROUTES)
def test_what_a_call_may_choose(app: App, tmp_path: Path, route: str) -> None:
    def bundles(detector: str) -> Any:
        result = detect(app, route, {"threshold": 0.0}, detector=detector, **SENT[route])
        (one,) = result[0] if route == CONTENTS_DETECTOR else result
        return one["metadata"]["bundle"]["name"]

    assert [bundles(name) for name in ("hallutracer", "one", "two")] == ["one", "one", "two"]
    missing = detect(app, route, status=404, detector="three", **SENT[route])
    assert (missing["code"], "three" in missing["message"]) == (404, True)
    assert not any(detect(app, route, {"policy": "observe", "threshold": 0.0}))
    with App(tmp_path, callers_may=()).started() as strict:
        for chosen in ({"policy": "observe"}, {"threshold": 1.0}):
            assert detect(strict, route, chosen, 403)["code"] == 403
        assert detect(strict, route, status=403, detector="two", **SENT[route])["code"] == 403


@pytest.mark.parametrize("route", DETECTOR_ROUTES)
@pytest.mark.parametrize("does", [{"action": "annotate"}, {"recheck": True}, {"stop_at": 0.5}])
def test_a_policy_that_sees_answers_is_refused(
    app: App, monkeypatch: Any, route: str, does: dict[str, Any]
) -> None:
    fields = {name: Action(value) if name == "action" else value for name, value in does.items()}
    named = app.app.state.service.catalogue.policies.named
    monkeypatch.setitem(named, "looks", replace(GATE, name="looks", **fields))
    assert "sees none" in detect(app, route, {"policy": "looks"}, 422)["message"]


def test_what_is_withheld_for_no_risk_has_the_highest_score(tmp_path: Path) -> None:
    """A caller that drops detections below a threshold of its own must not let these pass."""
    careful = replace(GATE, name="careful", threshold=1.0, withhold_outside=True)
    with App(
        tmp_path, policies={"careful": careful}, add=[known], callers_may=("bundle", "threshold")
    ).started() as app:
        for chosen in (
            {"policy": "careful"},
            {"policy": "careful", "threshold": 0.0},
        ):  # flagged, too, by the second
            ((found,),) = detect(app, CONTENTS_DETECTOR, chosen, detector="known", contents=["B"])
            assert (found["score"], found["metadata"]["risk"] < 1.0) == (1.0, True)


@pytest.mark.parametrize(
    "given",
    [
        {"messages": ASKED, "tools": [{"type": "function"}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}
            ]
        },
        {"messages": [{"content": "a"}]},
        {"messages": [*ASKED, {"role": "tool", "content": "12", "tool_call_id": "a"}]},
    ],
)
def test_what_cannot_be_read_is_detected(app: App, given: dict[str, Any]) -> None:
    (found,) = detect(app, MESSAGES_DETECTOR, {"threshold": 1.0}, **given)
    assert (found["detection"], found["score"], "read" in found["metadata"]["error"]) == (
        "unreadable",
        1.0,
        True,
    )
    assert detect(app, MESSAGES_DETECTOR, {"policy": "observe"}, **given) == []


def test_texts_are_counted_before_anything_is_made_of_each(app: App) -> None:
    """An observing policy lets pass what it cannot read, with an empty list for each text."""
    observe, most = {"policy": "observe"}, ["A"] * MOST_PROMPTS
    assert detect(app, CONTENTS_DETECTOR, observe, contents=most) == [[]] * MOST_PROMPTS
    for chosen in (observe, None):
        refused = detect(app, CONTENTS_DETECTOR, chosen, 422, contents=[*most, "A"])
        assert f"at most {MOST_PROMPTS}" in refused["message"]
