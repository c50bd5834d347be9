"""What OpenAI's and Anthropic's own clients read of an answer."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic
from openai import OpenAI


def in_openais_client(
    url: str, model: str, text: str, stream: bool, **xargs: Any
) -> tuple[str, str | None, str | None, int, Any]:
    """The text of a response, its refusal, why it is incomplete, its tokens, the risk."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    more: dict[str, Any] = {"extra_body": {"vllm_xargs": xargs}}
    asked = more | {"model": model, "input": text, "max_output_tokens": 40, "temperature": 0.0}
    if stream:
        with client.responses.stream(**asked) as events:
            seen = list(events)
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        found = seen[-1].response  # type: ignore[union-attr]
        pieces = "".join(
            event.delta for event in seen if event.type == "response.output_text.delta"
        )
        assert pieces == found.output_text
        refused = "".join(event.delta for event in seen if event.type == "response.refusal.delta")
        assert seen[0].response.model_extra["hallutracer"]["data"]  # type: ignore[union-attr,index]
    else:
        found, refused = client.responses.create(**asked), ""
    parts = [part for item in found.output if item.type == "message" for part in item.content]
    refusal = next((part.refusal for part in parts if part.type == "refusal"), None)
    assert not stream or refused == (refusal or "")
    why = None if found.incomplete_details is None else found.incomplete_details.reason
    assert found.usage is not None
    assert found.model_extra is not None
    note, tokens = found.model_extra["hallutracer"], found.usage.output_tokens
    return found.output_text, refusal, why, tokens, note


def in_anthropics_client(
    url: str, model: str, text: str, stream: bool, **xargs: Any
) -> tuple[str, str | None, int, Any]:
    """The text of a message, its stop reason, its tokens, the risk (of a stream: with what its last
    events say of the answer)."""
    client = Anthropic(base_url=url, api_key="none", max_retries=0)
    more = {"temperature": 0.0, "vllm_xargs": xargs}
    asked: dict[str, Any] = {"model": model, "max_tokens": 40, "extra_body": more}
    asked["messages"] = [{"role": "user", "content": text}]
    answer_note: dict[str, Any] = {}
    if stream:
        with client.messages.stream(**asked) as stream_events:
            events = list(stream_events)
            message = stream_events.get_final_message()
        pieces = "".join(event.text for event in events if event.type == "text")
        assert pieces == "".join(block.text for block in message.content if block.type == "text")
        for event in events:
            if event.type == "message_delta":
                answer_note |= (event.model_extra or {}).get("hallutracer", {})
    else:
        message = client.messages.create(**asked)
    text_shown = "".join(block.text for block in message.content if block.type == "text")
    assert message.model_extra is not None
    note = message.model_extra["hallutracer"] | answer_note
    return text_shown, message.stop_reason, message.usage.output_tokens, note
