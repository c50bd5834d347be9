"""From what a user sends (text, messages, token ids) to token ids whose last one is the answer onset t*.

The one place where a bare prompt string meets a chat template, used by the trainer and by the service alike: a probe
fitted on chat-rendered prompts must not be served on raw ones.  Knows no bundle storage and no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

from service.engines.base import Engine
from service.errors import EmptyPrompt, RequestError

PromptFormat = Literal["chat", "text"]
Message = dict[str, str]


def default_prompt_format(engine: Engine) -> PromptFormat:
    """``chat`` where the tokenizer carries a chat template, else ``text``."""
    return "chat" if engine.identity.chat_template is not None else "text"


def as_prompt_format(value: str) -> PromptFormat:
    """Narrow a manifest's or an option's string; ValueError otherwise."""
    if value not in ("chat", "text"):
        raise ValueError(f"prompt format must be 'chat' or 'text', not {value!r}")
    return cast(PromptFormat, value)


def render(
    engine: Engine,
    prompt: str | None,
    messages: Sequence[Message] | None,
    prompt_format: PromptFormat,
) -> list[int]:
    """Token ids of one prompt, ending at t*.

    ``prompt`` is one user turn through the chat template under ``chat``, and plain text under ``text``; ``messages``
    always go through the template, generation prompt included.

    Raises:
        RequestError: not exactly one of ``prompt`` and ``messages``, or no template for messages.
        EmptyPrompt: nothing to read.
    """
    if (prompt is None) == (messages is None):
        raise RequestError("give exactly one of 'prompt' and 'messages'", param="prompt")
    if messages is not None:
        if not messages:
            raise EmptyPrompt("'messages' is empty: at least one message is needed", param="messages")
        return engine.render_chat(messages)
    assert prompt is not None
    if not prompt.strip():
        raise EmptyPrompt("the prompt is empty: there is no token at which a risk could be read", param="prompt")
    if prompt_format == "chat":
        return engine.render_chat([{"role": "user", "content": prompt}])
    return engine.tokenize(prompt)
