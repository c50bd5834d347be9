"""What is written of a withheld answer where vLLM itself has made something of it, without vLLM."""

from __future__ import annotations

import json
from typing import Any

import pytest

from service.policies.guard import Decision, Verdict
from service.vllm_plugin.note import Note
from service.vllm_plugin.words import MessagesWords, ResponsesWords

REFUSED = Verdict(Decision.ABSTAIN, True, 0.5, "Not sure.")  # noqa: FBT003


def withheld(monkeypatch: pytest.MonkeyPatch) -> Note:
    monkeypatch.setattr(Note, "refusal", lambda _: REFUSED)
    return Note()


def read(events: bytes) -> list[Any]:
    return [json.loads(event.split("data: ")[1]) for event in events.decode().split("\n\n") if event]


def item(text: str) -> dict[str, Any]:
    return {"id": "msg_1", "type": "message", "content": [{"type": "output_text", "text": text}]}


def response(status: str, *output: Any) -> dict[str, Any]:
    usage = {"output_tokens": 1, "total_tokens": 5}
    return {"id": "resp_1", "object": "response", "status": status, "output": [*output], "usage": usage}


def test_what_vllm_streams_of_a_withheld_response_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ResponsesWords(withheld(monkeypatch), message_in_content=False)
    began = {"type": "response.created", "sequence_number": 0, "response": response("in_progress")}
    assert words.events(began) == b"", "it is held until the verdict"
    call = {"id": "fc_1", "type": "function_call", "name": "f", "arguments": "{}"}
    sent = words.events({"type": "response.output_item.added", "sequence_number": 1, "item": item("")})
    sent += words.events({"type": "response.output_text.delta", "sequence_number": 2, "delta": "Ottawa"})
    done = {"type": "response.completed", "sequence_number": 3, "response": response("completed", call, item("Ottawa"))}
    found = read(sent + words.events(done) + words.rest())
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    assert [one["type"] for one in found] == [f"response.{kind}" for kind in (
        "created", "output_item.added", "content_part.added", "refusal.delta", "refusal.done", "content_part.done",
        "output_item.done", "incomplete",
    )]  # fmt: skip
    last = found[-1]["response"]
    assert (last["incomplete_details"], last["usage"]["output_tokens"]) == ({"reason": "content_filter"}, 0)
    assert [one.get("content", [{}])[0].get("refusal") for one in last["output"]] == [None, "Not sure."]
    assert "Ottawa" not in json.dumps(found)


def test_a_withheld_message_has_the_policys_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    words = MessagesWords(withheld(monkeypatch), message_in_content=False)
    body = {"type": "message", "content": [{"type": "text", "text": "Ottawa"}], "stop_reason": "end_turn", "usage": {}}
    found = words.whole(body)
    assert found is not None
    assert (found["content"], found["stop_reason"]) == ([{"type": "text", "text": "Not sure."}], "refusal")
