"""A note in the words of each protocol that vLLM's server speaks: its bodies, rewritten with what
our own wires write.

A withheld answer has no text and no counted token; how it is told, each wire says."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any

from service.api.chat_wire import WITHHELD
from service.api.messages_wire import REFUSED, Blocks, refusal
from service.api.messages_wire import event as message_event
from service.api.reply import event, risk_field
from service.api.responses_wire import Items, refusal_parts
from service.vllm_plugin.note import Note

Body = dict[str, Any]
_NUMBERED = ("type", "sequence_number")  # what ``Items.event`` writes itself


class Words(ABC):
    """How one protocol tells a note, in one response."""

    complete = False  # whether nothing is left to write into the events to come

    def __init__(self, note: Note, message_in_content: bool) -> None:
        """``message_in_content``: the policy's message also stands where a text would."""
        self._note, self._message_in_content = note, message_in_content

    @abstractmethod
    def whole(self, content: Body) -> Body | None:
        """Return the only body; None leaves it as it is."""

    @abstractmethod
    def events(self, content: Body) -> bytes:
        """Return what is sent instead of an event."""

    def rest(self) -> bytes:
        """Return what is left to send at a stream's end."""
        return b""

    def _risk_field(self) -> Body:
        return risk_field(self._note.body() or {})


class ChatWords(Words):
    """Of /v1/chat/completions and /v1/completions: one choice, or several, to each prompt."""

    def __init__(self, note: Note, message_in_content: bool) -> None:
        super().__init__(note, message_in_content)
        self._noted = set[int]()  # the prompts whose risk was sent

    def whole(self, content: Body) -> Body | None:
        """Return the body with each prompt's item."""
        if not isinstance(content.get("choices"), list):
            return None
        self._end_choices(content)
        self._uncount(content, range(len(self._note.judgements)), self._note.choices)
        if content["choices"]:
            content |= risk_field(self._risks_to_send())
        return content

    def events(self, content: Body) -> bytes:
        """Return a chunk with the items of the prompts that were prefilled since the last."""
        if isinstance(content.get("choices"), list):
            self._rewrite_chunk(content)
        return event(json.dumps(content, ensure_ascii=False))

    def _rewrite_chunk(self, content: Body) -> None:
        note, choices = self._note, content["choices"]
        self._end_choices(content)
        if not choices:  # the usage of the whole stream
            self._uncount(content, range(len(note.judgements)), note.choices)
            return
        self._uncount(content, {choice["index"] // note.choices for choice in choices}, 1)
        risks = self._risks_to_send()
        if not risks.get("data", True):
            risks = {}
        ended = [choice["index"] for choice in choices if choice.get("finish_reason")]
        if ended:
            risks |= note.answer_note(ended[0] // note.choices)
        content |= risk_field(risks)

    def _end_choices(self, content: Body) -> None:
        """Write the policy's refusal into the choices that end."""
        for choice in content["choices"]:
            verdict = self._note.withheld(int(choice.get("index", 0)) // self._note.choices)
            if verdict is None or choice.get("finish_reason") is None:
                continue
            choice["finish_reason"] = WITHHELD
            chat = choice.get("message") or choice.get("delta")
            if verdict.message is not None and chat is not None:
                chat["refusal"] = verdict.message  # a text completion has none
            if verdict.message is not None and self._message_in_content:
                shown, name = (choice, "text") if chat is None else (chat, "content")
                shown[name] = verdict.message

    def _risks_to_send(self) -> Body:
        """Return the note with the risks that were not sent yet; empty where there is none."""
        note = self._note
        body = note.body()
        if body is None or "data" not in body:
            return body or {}
        body["data"] = [row for row in body["data"] if row["index"] not in self._noted]
        self._noted |= {row["index"] for row in body["data"]}
        prompts = range(len(note.judgements))
        withheld = any(map(note.withheld, prompts))
        sent = self._noted.issuperset(prompts)
        self.complete = sent and not withheld and not note.reads_answers
        return body

    def _uncount(self, content: Body, prompts: Collection[int], choices: int) -> None:
        """Take the end tokens that stand for answers of which nothing is shown out of the usage."""
        usage = content.get("usage")
        if usage and usage.get("completion_tokens"):
            counted = self._note.end_tokens(prompts) * choices
            usage["completion_tokens"] -= counted
            usage["total_tokens"] -= counted


class MessagesWords(Words):
    """Of Anthropic's /v1/messages, where the policy's message is the text in any case."""

    _blocks = 0  # of the answer, that a stream has begun

    def whole(self, content: Body) -> Body | None:
        """Return the message with its risk."""
        if content.get("type") != "message":
            return None
        if (verdict := self._note.refusal()) is not None:
            content["content"] = refusal(verdict.message)
        return self._end(content, content) | self._risk_field()

    def events(self, content: Body) -> bytes:
        """Return the event; before the end of a withheld answer, which has no block, the policy's
        message as one."""
        before = b""
        kind = content.pop("type", "")
        verdict = self._note.refusal()
        if kind == "message_start":
            content["message"] |= self._risk_field()
        elif kind == "content_block_start":
            self._blocks += 1
        elif kind == "message_delta":
            content = self._end(content, content["delta"])
            content |= risk_field(self._note.answer_note(0))
            if verdict is not None and verdict.message is not None:
                blocks = Blocks(self._blocks)
                before = blocks.text(verdict.message) + blocks.end()
        return before + message_event(kind, **content)

    def _end(self, counted: Body, end: Body) -> Body:
        note = self._note
        if note.refusal() is not None or note.stopped:
            end |= REFUSED
        if (usage := counted.get("usage")) and usage.get("output_tokens"):
            usage["output_tokens"] -= note.end_tokens()
        return counted


class ResponsesWords(Words):
    """Of OpenAI's /v1/responses.  vLLM begins its stream before it generates: what that says first
    is held."""

    def __init__(self, note: Note, message_in_content: bool) -> None:
        super().__init__(note, message_in_content)
        self._items = Items("")
        self._first: list[Body] | None = []  # events that are held

    def whole(self, content: Body) -> Body | None:
        """Return the response with its risk."""
        if content.get("object") != "response":
            return None
        self._refuse(content)
        return self._end(content)

    def events(self, content: Body) -> bytes:
        """Return the event; of a withheld answer its refusal at the end, and nothing of what vLLM
        made of it."""
        kind = str(content.get("type"))
        begins = kind in ("response.created", "response.queued", "response.in_progress")
        if begins and self._first is not None:
            self._first.append(content)
            return b""
        events = self.rest()
        if kind in ("response.completed", "response.incomplete"):
            events += self._refuse(content["response"])
            response = self._end(content["response"])
            return events + self._items.event(f"response.{response['status']}", response=response)
        return events if self._note.refusal() is not None else events + self._numbered(content)

    def rest(self) -> bytes:
        """Return what was held, with the risk."""
        events, self._first = self._first or (), None
        for content in events:
            content["response"] |= self._note.decoded | self._risk_field()
        return b"".join(map(self._numbered, events))

    def _numbered(self, content: Body) -> bytes:
        """Return an event of vLLM's, numbered anew."""
        fields = {name: value for name, value in content.items() if name not in _NUMBERED}
        return self._items.event(content["type"], **fields)

    def _refuse(self, response: Body) -> bytes:
        """Put the refusal in the place of a withheld answer's messages; return its events."""
        if (verdict := self._note.refusal()) is None:
            return b""
        items = self._items
        output = [item for item in response["output"] if item.get("type") != "message"]
        items.request_id, items.index = response["id"], len(output) - 1
        parts = refusal_parts(verdict.message, self._message_in_content)
        events = items.message(parts, "incomplete")
        response["output"] = output + items.complete
        return events

    def _end(self, response: Body) -> Body:
        note = self._note
        if (usage := response.get("usage")) and usage["output_tokens"]:
            usage["output_tokens"] -= note.end_tokens()
            usage["total_tokens"] -= note.end_tokens()
        if note.refusal() is not None or note.stopped:
            response |= {"status": "incomplete", "incomplete_details": {"reason": WITHHELD}}
        return response | note.decoded | self._risk_field()
