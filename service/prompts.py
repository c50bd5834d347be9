"""From a prompt or messages to token ids ending at the answer onset t*.

Training and serving both render through this module: a probe fitted on chat-rendered prompts must
not be served on raw ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, takewhile
from typing import Literal, cast

from service.engines.base import Engine
from service.engines.chat import Message, ToolDefinition
from service.errors import EmptyPrompt, RequestError

PromptFormat = Literal["chat", "text"]


def default_prompt_format(engine: Engine) -> PromptFormat:
    """Return ``chat`` if the tokenizer has a chat template, else ``text``."""
    return "chat" if engine.identity.chat_template is not None else "text"


def as_prompt_format(value: str) -> PromptFormat:
    """Return a manifest's or an option's string, checked.  Raises ValueError."""
    if value not in ("chat", "text"):
        raise ValueError(f"prompt format must be 'chat' or 'text', not {value!r}")
    return cast(PromptFormat, value)


def chat_ending(engine: Engine) -> tuple[int, ...]:
    """Return the last token ids, two at most, that the chat template puts behind every question,
    whatever it is."""
    first, second = (engine.render_chat([{"role": "user", "content": text}]) for text in ("a", "1"))
    pairs = takewhile(
        lambda pair: pair[0] == pair[1], zip(reversed(first), reversed(second), strict=False)
    )
    return tuple(token for token, _ in islice(pairs, 2))[::-1]


def continuation(engine: Engine, text: str) -> list[int]:
    """Return the text's tokens without those that the tokenizer puts before any text, as behind
    other tokens."""
    ids, begin = engine.tokenize(text), engine.tokenize("")
    return ids[len(begin) :] if ids[: len(begin)] == begin else ids


def render(
    engine: Engine,
    prompt: str | None,
    messages: Sequence[Message] | None,
    prompt_format: PromptFormat,
    tools: Sequence[ToolDefinition] = (),
) -> list[int]:
    """Return token ids of one prompt, ending at t*.

    Under ``chat``, ``prompt`` is rendered as one user turn by the chat template; under ``text`` it
    is plain text. ``messages`` are always rendered by the template, with its generation prompt;
    ``tools`` are offered beside them.

    Raises:
        RequestError: not exactly one of ``prompt`` and ``messages``, or no template for messages.
        EmptyPrompt: blank prompt or empty messages."""
    if (prompt is None) == (messages is None):
        raise RequestError("give exactly one of 'prompt' and 'messages'", param="prompt")
    if messages is not None:
        if not messages:
            raise EmptyPrompt(
                "'messages' is empty: at least one message is needed", param="messages"
            )
        return engine.render_chat(messages, tools)
    if not (prompt := prompt or "").strip():
        raise EmptyPrompt("the prompt is empty", param="prompt")
    if prompt_format == "chat":
        return engine.render_chat([{"role": "user", "content": prompt}])
    return engine.tokenize(prompt)
