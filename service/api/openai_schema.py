"""The requests of OpenAI's routes for chats and text completions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, StrictBool, StrictInt, StrictStr, model_validator

from probes_store.records import TemplateArgument
from service.api.formats_schema import asked_format, check_alone, checked_format
from service.api.request_schema import (
    OPENAI_IGNORED,
    VLLM_NEUTRAL,
    AnswerRequest,
    Batches,
    CacheOptions,
    Effort,
    ForeignModel,
    Ids,
    Part,
    Reference,
    StopText,
    StopTexts,
    TemplateArguments,
    Texts,
    at_fault,
    joined,
    of_effort,
)
from service.api.tools_schema import (
    MOST_TOOLS,
    Call,
    CallId,
    FewArguments,
    Tool,
    ToolChoice,
    check_results,
    offered,
)
from service.engines.formats import Format
from service.tool_calls import Tools

TEXT_MAX_TOKENS = 16  # of a request on TEXT_ROUTE that names none, as OpenAI and vLLM have it
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "moderation": (),
    "web_search_options": (),
    "audio": (),
    "prediction": (),
    **VLLM_NEUTRAL,
}
"""Parameters that no engine here has -> the values that change nothing; null changes nothing
either."""
IGNORED = frozenset(
    (
        "parallel_tool_calls",
        "verbosity",
        *OPENAI_IGNORED,
    )
)
# Of an earlier answer, as clients keep it: no chat template is given any of it.
OF_HISTORY = frozenset(
    (
        "id",
        "index",
        "annotations",
        "cache_control",
        "reasoning",
        "reasoning_content",
        "reasoning_details",
        "thinking_blocks",
        "parsed",
    )
)


class TextPart(Part):
    """A part of a message."""

    ignored = frozenset(("annotations", "cache_control", "id", "index", "prompt_cache_breakpoint"))

    type: Literal["text", "refusal"]


class ChatMessage(ForeignModel):
    """One turn.  ``developer`` is OpenAI's newer name of ``system``; ``tool`` is the result of a
    call."""

    neutral = {"audio": (), "function_call": ()}
    ignored = OF_HISTORY

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        StrictStr | Annotated[list[TextPart], Field(fail_fast=True, max_length=1024)] | None
    ) = None
    refusal: StrictStr | None = Field(
        None, description="of an earlier answer that was withheld; read as its text"
    )
    name: Reference | None = Field(None, description="ignored: chat templates have no place for it")
    tool_calls: Annotated[list[Call], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    tool_call_id: CallId | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, data: Any) -> Any:
        """An answer of ours that comes back in a conversation has all of OpenAI's keys, most of
        them null.

        LiteLLM puts what it does not know of an answer, its refusal too, under
        ``provider_specific_fields``."""
        if not isinstance(data, dict):
            return data
        moved = data.get("provider_specific_fields") if data.get("role") == "assistant" else None
        if isinstance(moved, dict):
            data = {"refusal": moved.get("refusal")} | data
            del data["provider_specific_fields"]
        return {key: value for key, value in data.items() if value is not None and value != []}

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        if self.content is None and (
            self.role != "assistant" or (self.refusal is None and not self.tool_calls)
        ):
            raise ValueError(
                "'content' is missing; only a withheld answer has a 'refusal', or a turn"
                " 'tool_calls', instead"
            )
        parts = self.content if isinstance(self.content, list) else []
        if self.role != "assistant" and any(part.refusal is not None for part in parts):
            raise ValueError("only an assistant's turn has a part of type 'refusal'")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant's turn has 'tool_calls'")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError(
                "'tool_call_id' names the call that a message of role 'tool' answers; no other"
                " has it"
            )
        return self

    def rendered(self) -> dict[str, Any]:
        """Return it for the chat template."""
        text = self.refusal or "" if self.content is None else joined(self.content)
        role = "system" if self.role == "developer" else self.role
        turn: dict[str, Any] = {"role": role, "content": text}
        if self.tool_calls:
            turn["tool_calls"] = [call.rendered() for call in self.tool_calls]
        return turn | ({} if self.tool_call_id is None else {"tool_call_id": self.tool_call_id})


class StreamOptions(ForeignModel):
    """What a stream has besides."""

    neutral = {"continuous_usage_stats": (False,)}  # vLLM's

    include_usage: StrictBool | None = None
    include_obfuscation: StrictBool | None = Field(None, description="ignored")


class OpenAIRequest(AnswerRequest):
    """What both routes take."""

    neutral = NEUTRAL
    ignored = IGNORED

    max_tokens: StrictInt | None = Field(None, ge=1)
    stop: StopText | StopTexts | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> OpenAIRequest:
        if self.stream_options is not None and not self.stream:
            raise at_fault("stream_options", "'stream_options' needs 'stream'")
        return self

    def stops(self) -> tuple[str, ...]:
        """Return the texts that end the answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def with_usage(self) -> bool:
        """Return whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def _known_format(fields: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if asked_format(fields, "response_format", "json_schema") is None else fields


class ChatRequest(OpenAIRequest):
    """POST /v1/chat/completions."""

    chat_template_kwargs: TemplateArguments = None
    reasoning_effort: Effort | None = None
    prompt_cache_options: CacheOptions | None = Field(None, description="ignored")

    neutral = NEUTRAL | {"add_special_tokens": (False,)}

    messages: Annotated[
        list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=1024), FewArguments
    ]
    max_completion_tokens: StrictInt | None = Field(
        None, ge=1, description="OpenAI's newer name of max_tokens"
    )
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = Field(
        None, description="none: the model is not told of the tools"
    )
    parallel_tool_calls: StrictBool | None = Field(
        None, description="false: of an answer's calls the first is given"
    )
    response_format: Annotated[dict[str, Any] | None, AfterValidator(_known_format)] = Field(
        None,
        description=(
            "of type text, json_object or json_schema, with json_schema: name, schema, strict"
        ),
    )

    @model_validator(mode="after")
    def _tools_belong_together(self) -> ChatRequest:
        seen = list[tuple[str | None, str]]()
        for number, message in enumerate(self.messages):
            seen += [(None, call.id) for call in message.tool_calls or ()]
            if message.tool_call_id is not None:
                seen.append((f"messages.{number}", message.tool_call_id))
        check_results(seen)
        check_alone(self.format, self.offered)
        # Another server, which a policy may ask instead, refuses what belongs to no tools.
        if not self.tools:
            self.tools = self.tool_choice = self.parallel_tool_calls = None
        return self

    @cached_property
    def format(self) -> Format | None:
        """Return the format of the answer; None: a text."""
        return checked_format(self.response_format, "response_format", "json_schema")

    def of_template(self) -> dict[str, Mapping[str, TemplateArgument]]:
        """Return the arguments of the chat template that the request asks for, by the field that
        does."""
        effort = of_effort(self.reasoning_effort)
        return {"chat_template_kwargs": self.chat_template_kwargs or {}, "reasoning_effort": effort}

    @cached_property
    def offered(self) -> Tools | None:
        """Return the tools that the model is told of."""
        functions = [tool.function for tool in self.tools or ()]
        return offered(
            functions,
            visible=self.tool_choice != "none",
            parallel=self.parallel_tool_calls is not False,
        )

    @property
    def length(self) -> int | None:
        """Return how long an answer may be; None where the request does not say."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def length_field(self) -> str:
        """Return the field that says so."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


class TextRequest(OpenAIRequest):
    """POST /v1/completions: each prompt as it is, without the chat template."""

    offered: ClassVar[Tools | None] = None
    format: ClassVar[Format | None] = None
    ignored = IGNORED | {"reasoning_effort"}
    neutral = NEUTRAL | {"add_special_tokens": (True,)}

    prompt: StrictStr | Texts | Ids | Batches

    @property
    def length(self) -> int | None:
        """Return how long an answer may be; None where the request does not say."""
        return self.max_tokens

    @property
    def length_field(self) -> str:
        """Return the field that says so."""
        return "max_tokens"

    def prompts(self) -> list[Any]:
        """Return texts, or lists of token ids."""
        single = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        return [self.prompt] if single else self.prompt  # type: ignore[return-value]
