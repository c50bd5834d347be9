"""Whether vLLM rendered a chat as training's were: by the chat template, with no argument but the
messages and tools.

vLLM gives a template whatever a request says besides, under names that grow with every release.
The token ids tell: they are compared with those that the tokenizer's own template makes, and what
cannot be compared counts as other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from service.engines.chat import Message, ToolDefinition
from service.errors import RequestError

# vLLM takes any text, and templates write it
ROLES = ("system", "developer", "user", "assistant", "tool")


class EncodesChats(Protocol):
    """What an engine's tokenizer does with a chat."""

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[ToolDefinition] = ()
    ) -> list[int]:
        """Return its token ids.  Raises RequestError where the template refuses it."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat as vLLM parsed it, and the token ids of the prompt that it made of it."""

    messages: Sequence[Any]
    tools: Sequence[ToolDefinition]
    token_ids: Sequence[int]


def is_rendering(engine: EncodesChats, chat: Chat | None) -> bool:
    """Return whether a prompt is what the chat template makes of its messages, the generation
    prompt behind them.

    It takes as long as vLLM's own rendering: not for an event loop's thread."""
    turns = None if chat is None else _turns(chat.messages)
    if chat is None or not turns:
        return False
    ids, variants = list(chat.token_ids), (turns, *_without_developers(turns))
    return any(_encoded(engine, variant, chat.tools) == ids for variant in variants)


def conversation(messages: Sequence[Any]) -> list[dict[str, str]] | None:
    """Return the role and text of each message; None where one has something else than text."""
    turns = _turns(messages)
    if turns is None:
        return None
    return [{"role": turn["role"], "content": turn["content"]} for turn in turns]


def _encoded(
    engine: EncodesChats, turns: Sequence[Message], tools: Sequence[ToolDefinition]
) -> list[int] | None:
    try:
        return engine.encode_chat(turns, tools)
    except RequestError:  # the template refuses it, or it is no Unicode
        return None


def _turns(messages: Sequence[Any]) -> list[dict[str, Any]] | None:
    """Return the messages with what any of training's could have had; None where one cannot be
    such.

    Of a turn with tools their calls and results go along: training had none, which ``TOOLS``
    says."""
    turns = []
    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else None
        text = _text(message.get("content")) if role in ROLES else None
        if text is None:
            return None
        turn: dict[str, Any] = {"role": role, "content": text}
        for of, name in (("assistant", "tool_calls"), ("tool", "tool_call_id"), ("tool", "name")):
            if role == of and message.get(name):
                turn[name] = message[name]
        turns.append(turn)
    return turns


def _text(content: Any) -> str | None:
    """Return a message's text: its parts follow each other, as templates that take parts write
    them."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    spoken = [text for text in texts if isinstance(text, str)]
    return "".join(spoken) if len(spoken) == len(texts) else None


def _without_developers(turns: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return what vLLM makes of turns for a template that knows no developer: one system prompt, at
    the beginning."""
    if all(turn["role"] != "developer" for turn in turns):
        return []
    ruled = [turn["content"] for turn in turns if turn["role"] in ("developer", "system")]
    dialogue = [turn for turn in turns if turn["role"] not in ("developer", "system")]
    return [[{"role": "system", "content": "\n\n".join(filter(None, ruled))}, *dialogue]]
