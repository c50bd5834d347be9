"""The request of OpenAI's Responses API.  Nothing is kept here and no tool is called: what asks for it is refused."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictInt, StrictStr, model_validator

from service.api.request_schema import AnswerRequest, ForeignModel


class InputPart(ForeignModel):
    """A part of a message; only text can be read.  ``refusal``: of an earlier answer that was withheld."""

    ignored = frozenset(("annotations", "logprobs", "prompt_cache_breakpoint"))

    type: Literal["input_text", "output_text", "refusal"]
    text: StrictStr | None = None
    refusal: StrictStr | None = None

    @model_validator(mode="after")
    def _says_what_it_is(self) -> InputPart:
        wanted, other = ("refusal", "text") if self.type == "refusal" else ("text", "refusal")
        if getattr(self, wanted) is None or getattr(self, other) is not None:
            raise ValueError(f"a part of type {self.type!r} has {wanted!r} and no {other!r}")
        return self


class InputMessage(ForeignModel):
    """One turn: a message as people write it, or an answer as it came."""

    ignored = frozenset(("id", "status", "phase"))

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: StrictStr | Annotated[list[InputPart], Field(fail_fast=True, min_length=1, max_length=1024)]

    def rendered(self) -> dict[str, str]:
        """Return it for the chat template; a refusal is read where there is no text beside it."""
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return {"role": role, "content": self.content}
        texts = [part.text for part in self.content if part.text is not None]
        return {"role": role, "content": "".join(texts or [part.refusal or "" for part in self.content])}


class TextConfig(ForeignModel):
    """How the answer is to be written."""

    neutral = {"format": ({"type": "text"},)}
    ignored = frozenset(("verbosity",))


class Reasoning(ForeignModel):
    """How the model is to reason, which is its own affair here."""

    neutral = {"summary": (), "generate_summary": ()}
    ignored = frozenset(("effort", "context"))


class CacheOptions(ForeignModel):
    """Of OpenAI's own prompt cache."""

    neutral = {"prewarm": (False,), "comparison_response_id": ()}
    ignored = frozenset(("mode", "ttl"))


class ResponsesStreamOptions(ForeignModel):
    """What a stream has besides."""

    ignored = frozenset(("include_obfuscation",))


class ResponsesRequest(AnswerRequest):
    """POST /v1/responses."""

    neutral = {
        "previous_response_id": (), "conversation": (), "prompt": (), "background": (False,), "tools": ([],),
        "tool_choice": ("none", "auto"), "include": ([], ["reasoning.encrypted_content"]), "top_logprobs": (0,),
        "truncation": ("disabled",), "context_management": ([],), "moderation": (), "access_programs": (),
        "image": ({},),
    }  # fmt: skip
    ignored = frozenset(
        ("user", "metadata", "store", "service_tier", "parallel_tool_calls", "max_tool_calls", "safety_identifier",
         "prompt_cache_key", "prompt_cache_retention")
    )  # fmt: skip

    input: StrictStr | Annotated[list[InputMessage], Field(fail_fast=True, min_length=1, max_length=1024)]
    instructions: StrictStr | None = Field(None, description="a system message in front of the input")
    max_output_tokens: StrictInt | None = Field(None, ge=1)
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    prompt_cache_options: CacheOptions | None = None
    stream_options: ResponsesStreamOptions | None = None

    @property
    def length(self) -> int | None:
        """Return how many tokens an answer has to be allowed; None where the request does not say."""
        return self.max_output_tokens

    def conversation(self) -> list[dict[str, str]]:
        """Return the messages for the chat template."""
        first = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*first, {"role": "user", "content": self.input}]
        return [*first, *(message.rendered() for message in self.input)]
