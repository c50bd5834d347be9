"""A note in the words of each protocol that vLLM's server speaks.

A withheld answer has no text and no counted token.  A chat's choice has the finish reason
``content_filter`` and the policy's message as its ``refusal``; a message of Anthropic's the stop
reason ``refusal`` and that message as its text; a response is incomplete for the reason
``content_filter``, with the message as its refusal."""

from __future__ import annotations

import json
from typing import Any, Protocol

from service.api import messages_routes as anthropic
from service.api import reply as wire
from service.api.openai_routes import WITHHELD
from service.api.responses_items import ItemEvents, message_item, refusal_parts
from service.vllm_plugin.note import Note

Body = dict[str, Any]


class Words(Protocol):
    """How one protocol tells a note."""

    complete: bool  # whether nothing is left to write into the events to come

    def __init__(self, note: Note, message_in_content: bool) -> None: ...

    def whole(self, content: Body) -> Body | None:
        """Return the only body; None leaves it as it is."""

    def events(self, content: Body) -> bytes:
        """Return what is sent instead of an event."""

    def rest(self) -> bytes:
        """Return what is left to send at a stream's end."""


class ChatWords:
    """Of /v1/chat/completions and /v1/completions: one choice, or several, to each prompt."""

    def __init__(self, note: Note, message_in_content: bool) -> None:
        """For one response."""
        self._note, self._message_in_content = note, message_in_content
        self._annotated: set[int] = set()
        self.complete = False

    def whole(self, content: Body) -> Body | None:
        """Return the body with each prompt's item."""
        return (
            self._noted(content, streams=False)
            if isinstance(content.get("choices"), list)
            else None
        )

    def events(self, content: Body) -> bytes:
        """Return a chunk with the items of the prompts that were prefilled since the last."""
        chunk = isinstance(content.get("choices"), list)
        return wire.event(
            json.dumps(self._noted(content, streams=True) if chunk else content, ensure_ascii=False)
        )

    def rest(self) -> bytes:
        """Return nothing."""
        return b""

    def _noted(self, content: Body, streams: bool) -> Body:
        note = self._note
        for choice in content["choices"]:
            verdict = note.withheld(int(choice.get("index", 0)) // note.choices)
            if verdict is not None and choice.get("finish_reason") is not None:
                choice["finish_reason"] = WITHHELD
                if verdict.message is None:
                    continue
                chat = choice.get("message") or choice.get("delta")
                if chat is not None:
                    chat["refusal"] = verdict.message  # a text completion has none
                if self._message_in_content:
                    (choice if chat is None else chat)["text" if chat is None else "content"] = (
                        verdict.message
                    )
        self._uncount(content, streams)
        found = note.body()
        if found is not None and content["choices"]:
            if "data" in found:
                found["data"] = [
                    item for item in found["data"] if item["index"] not in self._annotated
                ]
                self._annotated |= {item["index"] for item in found["data"]}
                prompts = range(len(note.judgements))
                told = self._annotated.issuperset(prompts) and not any(map(note.withheld, prompts))
                self.complete = told and not note.reads_answers
            if streams:
                ended = [
                    one["index"] // note.choices
                    for one in content["choices"]
                    if one.get("finish_reason")
                ]
                said = [note.answer_note(place) for place in ended]
                found = (found if found.get("data", True) else {}) | (said[0] if said else {})
            if found:
                content["hallutracer"] = found
        return content

    def _uncount(self, content: Body, streams: bool) -> None:
        """Take the end token that stands for an answer of which nothing is shown out of the
        usage."""
        note, usage = self._note, content.get("usage")
        if not usage or not usage.get("completion_tokens"):
            return
        whole = not content["choices"] or not streams  # else a chunk's own, of its choices alone
        places = (
            range(len(note.judgements))
            if whole
            else {one["index"] // note.choices for one in content["choices"]}
        )
        counted = note.end_tokens(places) * (note.choices if whole else 1)
        usage["completion_tokens"] -= counted
        usage["total_tokens"] -= counted


class MessagesWords:
    """Of Anthropic's /v1/messages."""

    complete = False

    def __init__(self, note: Note, message_in_content: bool) -> None:
        """For one response; the policy's message is its text in any case."""
        self._note = note
        self._blocks = 0  # of the answer, that a stream has begun

    def whole(self, content: Body) -> Body | None:
        """Return the message with its risk."""
        if content.get("type") != "message":
            return None
        if (verdict := self._note.refusal()) is not None:
            content["content"] = (
                [] if verdict.message is None else [anthropic.text_block(verdict.message)]
            )
        return self._ended(content, content) | _beside(self._note)

    def events(self, content: Body) -> bytes:
        """Return the event; before the end of a withheld answer, which has no block, the policy's
        message as one."""
        before, kind, verdict = b"", content.pop("type", ""), self._note.refusal()
        if kind == "message_start":
            content["message"] |= _beside(self._note)
        elif kind == "content_block_start":
            self._blocks += 1
        elif kind == "message_delta":
            content = self._ended(content, content["delta"]) | self._note.answer_note(0)
            if verdict is not None and verdict.message is not None:
                blocks = anthropic.Blocks(self._blocks)
                before = blocks.text(verdict.message) + blocks.end()
        return before + anthropic.event(kind, **content)

    def rest(self) -> bytes:
        """Return nothing."""
        return b""

    def _ended(self, counted: Body, end: Body) -> Body:
        note = self._note
        if note.refusal() is not None or note.stopped:
            end |= {"stop_reason": anthropic.REFUSAL, "stop_sequence": None}
        if (usage := counted.get("usage")) and usage.get("output_tokens"):
            usage["output_tokens"] -= note.end_tokens()
        return counted


class ResponsesWords:
    """Of OpenAI's /v1/responses.  vLLM begins its stream before it generates: what that says first
    is held."""

    complete = False

    def __init__(self, note: Note, message_in_content: bool) -> None:
        """For one response."""
        self._note, self._message_in_content = note, message_in_content
        self._told = ItemEvents("")
        self._first: list[Body] | None = []  # events that are held

    def whole(self, content: Body) -> Body | None:
        """Return the response with its risk."""
        return self._ended(content) if content.get("object") == "response" else None

    def events(self, content: Body) -> bytes:
        """Return the event; of a withheld answer its refusal at the end, and nothing of what vLLM
        made of it."""
        kind = str(content.get("type"))
        if (
            kind in ("response.created", "response.queued", "response.in_progress")
            and self._first is not None
        ):
            self._first.append(content)
            return b""
        before = self.rest()
        if kind in ("response.completed", "response.incomplete"):
            response = self._ended(content["response"])
            return (
                before
                + self._refused(response)
                + self._event(f"response.{response['status']}", response=response)
            )
        return before if self._note.refusal() is not None else before + self._event(**content)

    def rest(self) -> bytes:
        """Return what was held, with the risk."""
        first, self._first = self._first or (), None
        for one in first:
            one["response"] |= self._note.decoded | _beside(self._note)
        return b"".join(self._event(**one) for one in first)

    def _refused(self, response: Body) -> bytes:
        """Return the events of a withheld answer's item, which is the last of the output."""
        if self._note.refusal() is None or not response["output"]:
            return b""
        item, told = response["output"][-1], self._told
        told.item, told.index = item["id"], len(response["output"]) - 1
        parts = (told.whole_part(part, index) for index, part in enumerate(item["content"]))
        begins = told.item_begins()  # events are numbered as they are made
        return (
            begins
            + b"".join(parts)
            + told.event("response.output_item.done", output_index=told.index, item=item)
        )

    def _event(self, type: str, **content: Any) -> bytes:
        content.pop("sequence_number", None)  # it is numbered anew
        return self._told.event(type, **content)

    def _ended(self, response: Body) -> Body:
        note = self._note
        if (verdict := note.refusal()) is not None:
            parts = refusal_parts(verdict.message, self._message_in_content)
            item = message_item(f"msg_{response['id']}", "incomplete", parts)
            others = [one for one in response["output"] if one.get("type") != "message"]
            response["output"] = others + ([item] if parts else [])
        if (usage := response.get("usage")) and usage["output_tokens"]:
            usage["output_tokens"] -= note.end_tokens()
            usage["total_tokens"] -= note.end_tokens()
        if verdict is not None or note.stopped:
            response |= {"status": "incomplete", "incomplete_details": {"reason": WITHHELD}}
        return response | note.decoded | _beside(note)


def _beside(note: Note) -> Body:
    found = note.body()
    return {} if found is None else {"hallutracer": found}
