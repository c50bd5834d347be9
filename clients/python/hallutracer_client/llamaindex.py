"""LlamaIndex: ``GuardedLLM`` wraps any LLM, so that what a query or chat engine asks it is scored
first.

Needs ``hallutracer-client[llamaindex]``.  The prompt is scored as the engine wrote it, retrieved
passages included."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from hallutracer_client.client import Client
from hallutracer_client.guard import Guard, details, turn

try:
    from llama_index.core.base.llms.types import (
        ChatMessage,
        ChatResponse,
        ChatResponseAsyncGen,
        ChatResponseGen,
        CompletionResponse,
        CompletionResponseAsyncGen,
        CompletionResponseGen,
        LLMMetadata,
        TextBlock,
    )
    from llama_index.core.bridge.pydantic import PrivateAttr
    from llama_index.core.llms import LLM
except ImportError as error:
    raise ImportError(
        f"{error}; pip install 'hallutracer-client[llamaindex]'", name=error.name
    ) from error

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class GuardedLLM(LLM):
    """``llm`` where the risk allows an answer, else a response with the policy's message, or
    ``Withheld``.

    ``policy``, ``threshold`` and ``bundle`` are those of a request; None: the service's own.
    ``raises``: raise ``Withheld`` instead of answering with the message.  A prompt without messages
        is one question of a user."""

    _llm: LLM = PrivateAttr()
    _guard: Guard = PrivateAttr()
    _raises: bool = PrivateAttr()

    def __init__(
        self,
        llm: LLM,
        client: Client,
        *,
        policy: str | None = None,
        threshold: float | None = None,
        bundle: str | None = None,
        raises: bool = False,
    ) -> None:
        super().__init__(callback_manager=llm.callback_manager, system_prompt=llm.system_prompt)
        self._llm = llm
        self._guard = Guard(client, policy, threshold, bundle)
        self._raises = raises

    @classmethod
    def class_name(cls) -> str:
        """The name in LlamaIndex's events."""
        return "GuardedLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """That of the wrapped LLM, but for calls of tools, which cannot be scored."""
        return self._llm.metadata.model_copy(update={"is_function_calling_model": False})

    def _withheld(self, given: Any) -> Any:
        """Return what stands for a withheld answer to messages, or to a prompt; None: the model may
        answer."""
        if isinstance(given, str):
            risk = self._guard.risk(prompt=given, raises=self._raises)
        else:
            turns = [turn(one.role.value, _text(one), ROLES) for one in given]
            risk = self._guard.risk(messages=turns, raises=self._raises)
        if not risk.gated:
            return None
        text, told = risk.message or "", details(risk)
        if isinstance(given, str):
            return CompletionResponse(text=text, delta=text, additional_kwargs=told)
        message = ChatMessage(role="assistant", content=text, additional_kwargs=told)
        return ChatResponse(message=message, delta=text, additional_kwargs=told)

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        return self._withheld(messages) or self._llm.chat(messages, **kwargs)

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a conversation in pieces; the risk is known before the first."""
        instead = self._withheld(messages)
        return iter([instead]) if instead else self._llm.stream_chat(messages, **kwargs)

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt."""
        return self._withheld(prompt) or self._llm.complete(prompt, formatted=formatted, **kwargs)

    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """Answer a prompt in pieces."""
        instead = self._withheld(prompt)
        return (
            iter([instead])
            if instead
            else self._llm.stream_complete(prompt, formatted=formatted, **kwargs)
        )

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Do as ``chat``."""
        return await asyncio.to_thread(self._withheld, messages) or await self._llm.achat(
            messages, **kwargs
        )

    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """Do as ``stream_chat``."""
        instead = await asyncio.to_thread(self._withheld, messages)
        return _one(instead) if instead else await self._llm.astream_chat(messages, **kwargs)

    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """Do as ``complete``."""
        instead = await asyncio.to_thread(self._withheld, prompt)
        return instead or await self._llm.acomplete(prompt, formatted=formatted, **kwargs)

    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """Do as ``stream_complete``."""
        instead = await asyncio.to_thread(self._withheld, prompt)
        return (
            _one(instead)
            if instead
            else await self._llm.astream_complete(prompt, formatted=formatted, **kwargs)
        )


async def _one(response: Any) -> Any:
    yield response


def _text(message: ChatMessage) -> str | None:
    """Return plain text; None where a block is none, and where tools are called."""
    blocks = message.blocks
    if message.additional_kwargs.get("tool_calls") or not all(
        isinstance(block, TextBlock) for block in blocks
    ):
        return None
    return message.content or message.additional_kwargs.get("refusal") or ""
