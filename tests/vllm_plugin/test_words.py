"""What is written of a withheld answer where vLLM itself has made something of it, without vLLM."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from service.engines.base import Completion
from service.policies.guard import Decision, Verdict
from service.turn import Outcome
from service.vllm_plugin.note import Note
from service.vllm_plugin.words import ChatWords, MessagesWords, ResponsesWords

REFUSED = Verdict(Decision.ABSTAIN, flagged=True, threshold=0.5, message="Not sure.")
PASSED = Verdict(Decision.CONTINUE, flagged=False, threshold=0.5, message=None)


def ended(outcome: Outcome, shown: int | None = None) -> Note:
    """The note of an answer that ended so; ``shown``: tokens."""
    completion = None if shown is None else Completion("x" * shown, (), "content_filter", shown)
    verdict = REFUSED if outcome is Outcome.WITHHELD else PASSED
    note, report = Note(), SimpleNamespace(outcome=outcome, verdict=verdict, completion=completion)
    judgement: Any = SimpleNamespace(reports=[report])
    note.judgements.append(judgement)
    return note


@pytest.fixture(autouse=True)
def without_risks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Note, "body", lambda _: None)
    monkeypatch.setattr(Note, "answer_note", lambda _, number: {})


def read(events: bytes) -> list[Any]:
    return [
        json.loads(event.split("data: ")[1]) for event in events.decode().split("\n\n") if event
    ]


def item(text: str) -> dict[str, Any]:
    return {"id": "msg_1", "type": "message", "content": [{"type": "output_text", "text": text}]}


def response(status: str, *output: Any) -> dict[str, Any]:
    usage = {"output_tokens": 1, "total_tokens": 5}
    return {
        "id": "resp_1",
        "object": "response",
        "status": status,
        "output": [*output],
        "usage": usage,
    }


def test_what_vllm_streams_of_a_withheld_response_is_dropped() -> None:
    words = ResponsesWords(ended(Outcome.WITHHELD), message_in_content=False)
    began = {"type": "response.created", "sequence_number": 0, "response": response("in_progress")}
    assert words.events(began) == b"", "it is held until the verdict"
    call = {"id": "fc_1", "type": "function_call", "name": "f", "arguments": "{}"}
    sent = words.events(
        {"type": "response.output_item.added", "sequence_number": 1, "item": item("")}
    )
    sent += words.events(
        {"type": "response.output_text.delta", "sequence_number": 2, "delta": "Ottawa"}
    )
    done = {
        "type": "response.completed",
        "sequence_number": 3,
        "response": response("completed", call, item("Ottawa")),
    }
    sent_events = read(sent + words.events(done) + words.rest())
    assert [event["sequence_number"] for event in sent_events] == list(range(len(sent_events)))
    assert [event["type"] for event in sent_events] == [
        f"response.{kind}"
        for kind in (
            "created",
            "output_item.added",
            "content_part.added",
            "refusal.delta",
            "refusal.done",
            "content_part.done",
            "output_item.done",
            "incomplete",
        )
    ]
    last = sent_events[-1]["response"]
    assert (last["incomplete_details"], last["usage"]["output_tokens"]) == (
        {"reason": "content_filter"},
        0,
    )
    assert [event.get("content", [{}])[0].get("refusal") for event in last["output"]] == [
        None,
        "Not sure.",
    ]
    assert "Ottawa" not in json.dumps(sent_events)


def test_a_withheld_message_has_the_policys_text_alone() -> None:
    words = MessagesWords(ended(Outcome.WITHHELD), message_in_content=False)
    body = {
        "type": "message",
        "content": [{"type": "text", "text": "Ottawa"}],
        "stop_reason": "end_turn",
        "usage": {},
    }
    message = words.whole(body)
    assert message is not None
    assert (message["content"], message["stop_reason"]) == (
        [{"type": "text", "text": "Not sure."}],
        "refusal",
    )


@pytest.mark.parametrize(
    ("outcome", "shown", "counted"),
    [
        (Outcome.WITHHELD, None, 0),
        (Outcome.STOPPED, 0, 0),
        (Outcome.STOPPED, 4, 1),
        (Outcome.ANSWERED, 1, 1),
    ],
)
def test_an_end_token_that_stands_for_an_answer_is_billed_in_no_protocol(
    outcome: Outcome, shown: int | None, counted: int
) -> None:
    """Each body has one token; it is billed unless nothing of the answer was shown."""
    note = ended(outcome, shown)
    chat = {"choices": [{"index": 0, "message": {}, "finish_reason": "stop"}]}
    chat |= {"usage": {"completion_tokens": 1, "total_tokens": 5}}  # type: ignore[dict-item]
    body = ChatWords(note, message_in_content=False).whole(chat)
    assert body is not None
    assert body["usage"] == {"completion_tokens": counted, "total_tokens": 4 + counted}
    message = {
        "type": "message",
        "content": [],
        "stop_reason": "end_turn",
        "usage": {"output_tokens": 1},
    }
    body = MessagesWords(note, message_in_content=False).whole(message)
    assert body is not None
    assert body["usage"] == {"output_tokens": counted}
    assert body["stop_reason"] == ("end_turn" if outcome is Outcome.ANSWERED else "refusal")
    body = ResponsesWords(note, message_in_content=False).whole(response("completed", item("Ott")))
    assert body is not None
    assert body["usage"] == {"output_tokens": counted, "total_tokens": 4 + counted}
    assert body["status"] == ("completed" if outcome is Outcome.ANSWERED else "incomplete")


def test_a_response_that_is_withheld_without_a_message_keeps_what_is_no_message() -> None:
    note = ended(Outcome.WITHHELD)
    report: Any = note._report(0)
    report.verdict = replace(REFUSED, message=None)
    thought = {"id": "rs_1", "type": "reasoning", "summary": []}
    done = {"type": "response.completed", "response": response("completed", thought, item("Ott"))}
    [last] = read(ResponsesWords(note, message_in_content=False).events(done))
    assert last["type"] == "response.incomplete"
    assert last["response"]["output"] == [thought]
