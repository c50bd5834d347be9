"""The request of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StrictBool, StrictInt, StrictStr, field_validator, model_validator

from probes_store.records import TemplateArgument
from service.api.formats_schema import asked_schema, check_alone, checked_format, taken_by
from service.api.request_schema import (
    OWN_TEMPERATURE,
    UNTHINKING,
    VLLM_IGNORED,
    VLLM_NEUTRAL,
    AnswerRequest,
    ForeignModel,
    Reference,
    StopTexts,
    TemplateArguments,
    at_fault,
)
from service.api.tools_schema import (
    MOST_TOOLS,
    CallId,
    Name,
    Parameters,
    Values,
    called,
    check_results,
    defined,
    offered,
)
from service.engines.formats import Format
from service.json_limits import size_within
from service.tool_calls import MOST_DEPTH, Tools


class TextBlock(ForeignModel):
    """A block of a message; only text can be read."""

    ignored = frozenset(("cache_control", "citations", "annotations", "index"))

    type: Literal["text"]
    text: StrictStr


Texts = StrictStr | Annotated[list[TextBlock], Field(fail_fast=True, max_length=1024)]


def joined(content: str | list[TextBlock]) -> str:
    """Return the whole text."""
    return content if isinstance(content, str) else "".join(block.text for block in content)


# of earlier turns: no chat template is given any
THOUGHTS = frozenset(("thinking", "redacted_thinking"))


class Block(ForeignModel):
    """A block of a turn: a text, a call of a tool, the result of one, or what an earlier answer was
    thought with."""

    neutral = {"toolset_name": ()}
    ignored = frozenset(
        (
            "cache_control",
            "citations",
            "caller",
            "is_error",
            "annotations",
            "index",
            "thinking",
            "signature",
            "data",
        )
    )

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: StrictStr | None = None
    id: CallId | None = None
    name: Name | None = None
    input: Values | None = None
    tool_use_id: CallId | None = None
    content: Texts | None = Field(None, description="of a tool_result")

    @model_validator(mode="after")
    def _is_what_it_says(self) -> Block:
        of_kind = {
            "text": {"text"},
            "tool_use": {"id", "name", "input"},
            "tool_result": {"tool_use_id"},
        }
        needed = of_kind.get(self.type, set())
        present = {name for name, value in self if name != "type" and value is not None}
        if missing := needed - present:
            raise ValueError(f"a block of type {self.type!r} needs {min(missing)!r}")
        allowed = needed | ({"content"} if self.type == "tool_result" else set())
        if unknown := present - allowed:
            raise ValueError(f"a block of type {self.type!r} has no {min(unknown)!r}")
        return self


class AnthropicMessage(ForeignModel):
    """One turn; an answer may come back with all that it had besides."""

    ignored = frozenset(
        (
            "id",
            "type",
            "index",
            "model",
            "stop_reason",
            "stop_sequence",
            "stop_details",
            "usage",
            "container",
            "annotations",
            "cache_control",
            "reasoning_content",
            "hallutracer",
        )
    )

    role: Literal["user", "assistant", "system"]
    content: (
        StrictStr | Annotated[list[Block], Field(fail_fast=True, min_length=1, max_length=1024)]
    )

    @model_validator(mode="after")
    def _calls_are_the_models(self) -> AnthropicMessage:
        by = {"tool_use": "assistant", "tool_result": "user"} | dict.fromkeys(THOUGHTS, "assistant")
        for block in self.blocks:
            if by.get(block.type, self.role) != self.role:
                raise ValueError(
                    f"a block of type {block.type!r} belongs into a turn of role {by[block.type]!r}"
                )
        if self.blocks and all(block.type in THOUGHTS for block in self.blocks):
            raise ValueError(
                "a turn has a text, a call or a result beside its thoughts, which are not read"
            )
        return self

    @property
    def blocks(self) -> Sequence[Block]:
        """Return its blocks; none of a plain text."""
        return () if isinstance(self.content, str) else self.content

    def rendered(self) -> list[dict[str, Any]]:
        """Return it for the chat template: each result of a tool is a message of its own, in its
        place."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        turns = list[dict[str, Any]]()
        texts = list[str]()
        calls = list[dict[str, Any]]()
        for block in self.content:
            if block.type == "text":
                texts.append(block.text or "")
            elif block.type == "tool_use":
                calls.append(called(block.id or "", block.name or "", block.input or {}))
            elif block.type == "tool_result":
                turns += [{"role": self.role, "content": "".join(texts)}] if texts else []
                texts = []
                result = joined(block.content or "")
                turns.append({"role": "tool", "content": result, "tool_call_id": block.tool_use_id})
        if texts or calls:
            turns.append(
                {"role": self.role, "content": "".join(texts)}
                | ({"tool_calls": calls} if calls else {})
            )
        return turns


class MessagesTool(ForeignModel):
    """A tool on offer."""

    ignored = frozenset(("cache_control", "strict", "input_examples", "eager_input_streaming"))
    neutral = {"defer_loading": (False,), "allowed_callers": (["direct"],)}

    type: Literal["custom"] | None = None
    name: Name
    description: StrictStr | None = None
    input_schema: Parameters

    def definition(self) -> dict[str, Any]:
        """Return what the chat template is given."""
        return defined(self.name, self.description, self.input_schema)


class ToolChoice(ForeignModel):
    """Whether the model is told of the tools, and how many it may call at once."""

    type: Literal["auto", "none"]
    disable_parallel_tool_use: StrictBool | None = None


class OutputConfig(ForeignModel):
    """How the answer is to be written."""

    ignored = frozenset(("effort",))

    format: Annotated[dict[str, Any], taken_by(asked_schema, "output_config.format")] | None = (
        Field(None, description="of type json_schema, with schema")
    )


class Thinking(ForeignModel):
    """Whether the model thinks first: ``adaptive`` is as much as it sees fit, which may be
    nothing."""

    ignored = frozenset(("display",))

    type: Literal["disabled", "adaptive"]


class Conversation(ForeignModel):
    """What the model is shown: turns, a system message and tools."""

    messages: Annotated[
        list[AnthropicMessage], Field(fail_fast=True, min_length=1, max_length=1024)
    ]
    system: Texts | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[dict[str, Any], taken_by(asked_schema, "output_format")] | None = (
        Field(None, description="the older name of output_config.format")
    )
    thinking: Thinking | None = None
    tools: Annotated[list[MessagesTool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = Field(
        None, description="none: the model is not told of the tools"
    )

    @field_validator("thinking", mode="before")
    @classmethod
    def _no_thoughts_of_a_length(cls, value: Any) -> Any:
        known = isinstance(value, dict) and value.get("type") in ("disabled", "adaptive")
        if value is not None and (not known or value.keys() - {"type", "display"}):
            raise ValueError(
                "'thinking' is {'type': 'adaptive'} or {'type': 'disabled'} here: no thought is"
                " asked for"
            )
        return value

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _not_forced(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") not in ("auto", "none"):
            raise ValueError(
                "'tool_choice' has the type 'auto' or 'none' here: nothing makes the model call a"
                " tool; a schema that the answer is to have goes into 'output_config.format'"
            )
        return value

    @model_validator(mode="after")
    def _tools_belong_together(self) -> Self:
        seen, inputs = list[tuple[str | None, str]](), list[Any]()
        for number, message in enumerate(self.messages):
            inputs += (block.input for block in message.blocks)
            for position, block in enumerate(message.blocks):
                field = f"messages.{number}.content.{position}.type"
                seen += [] if block.id is None else [(None, block.id)]
                seen += [] if block.tool_use_id is None else [(field, block.tool_use_id)]
        check_results(seen)
        try:
            size_within(inputs, levels=MOST_DEPTH + 1)
        except ValueError as error:
            raise at_fault(
                "messages", f"'messages': {error}, in all blocks' 'input' together"
            ) from None
        check_alone(self.format, self.offered)
        return self

    @cached_property
    def format(self) -> Format | None:
        """Return the format of the answer; None: a text."""
        newer = None if self.output_config is None else self.output_config.format
        if newer is not None and self.output_format is not None:
            raise at_fault(
                "output_format",
                "'output_format' and 'output_config.format' are one field; give the latter",
            )
        if newer is not None:
            return checked_format(newer, "output_config.format")
        return checked_format(self.output_format, "output_format")

    @cached_property
    def offered(self) -> Tools | None:
        """Return the tools that the model is told of."""
        choice, tools = self.tool_choice, self.tools or []
        if choice is None:
            return offered(tools)
        parallel = not choice.disable_parallel_tool_use
        return offered(tools, visible=choice.type != "none", parallel=parallel)

    def of_template(self) -> dict[str, Mapping[str, TemplateArgument]]:
        """Return the arguments of the chat template that the request asks for, by the field that
        does."""
        unthinking = self.thinking is not None and self.thinking.type == "disabled"
        return {"thinking": UNTHINKING} if unthinking else {}

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages for the chat template."""
        turns = chain.from_iterable(message.rendered() for message in self.messages)
        if self.system is None or self.system == []:
            return list(turns)
        return [{"role": "system", "content": joined(self.system)}, *turns]


class MessagesRequest(AnswerRequest, Conversation):
    """POST /v1/messages."""

    chat_template_kwargs: TemplateArguments = None

    neutral = {
        **VLLM_NEUTRAL,
        "container": (),
        "mcp_servers": ([],),
        "speed": ("standard",),
        # What is cleared are thoughts, of which none are read.
        "context_management": (
            {"edits": []},
            {"edits": [{"type": "clear_thinking_20251015"}]},
            {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        ),
    }
    ignored = frozenset(
        (
            "metadata",
            "service_tier",
            "cache_control",
            "inference_geo",
            "diagnostics",
            "user_profile_id",
            "workspace_id",
        )
    ).union(VLLM_IGNORED)

    max_tokens: StrictInt = Field(
        ge=1,
        description=(
            "an answer may end earlier: at the service's own limit, or shortly before the deadline"
        ),
    )
    stop_sequences: StopTexts | None = None
    temperature: float | None = Field(
        None, ge=0.0, le=1.0, strict=True, description=OWN_TEMPERATURE
    )

    def of_template(self) -> dict[str, Mapping[str, TemplateArgument]]:
        """Return the arguments of the chat template that the request asks for, by the field that
        does."""
        return Conversation.of_template(self) | {
            "chat_template_kwargs": self.chat_template_kwargs or {}
        }

    def stops(self) -> tuple[str, ...]:
        """Return the texts that end the answer."""
        return tuple(self.stop_sequences or ())


class CountRequest(Conversation):
    """POST /v1/messages/count_tokens."""

    neutral = {
        name: MessagesRequest.neutral[name]
        for name in ("mcp_servers", "context_management", "speed")
    }
    ignored = frozenset(("cache_control", "user_profile_id", "workspace_id", "vllm_xargs"))

    model: Reference = Field(description="must be the loaded model, as GET /v1/models names it")
