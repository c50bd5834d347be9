"""The request of OpenAI's Responses API.  Nothing is kept here and no tool is run: what asks for it
is refused."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr, model_validator

from probes_store.records import TemplateArgument
from service.api.formats_schema import asked_format, check_alone, checked_format, taken_by
from service.api.request_schema import (
    OPENAI_IGNORED,
    VLLM_NEUTRAL,
    AnswerRequest,
    CacheOptions,
    Effort,
    ForeignModel,
    Part,
    TemplateArguments,
    at_fault,
    joined,
    of_effort,
)
from service.api.tools_schema import (
    MOST_TOOLS,
    CallId,
    FewArguments,
    Function,
    Name,
    ToolChoice,
    arguments_of,
    called,
    check_results,
    offered,
)
from service.engines.formats import Format
from service.tool_calls import Tools


class InputPart(Part):
    """A part of a message."""

    ignored = frozenset(
        ("annotations", "cache_control", "id", "index", "logprobs", "prompt_cache_breakpoint")
    )

    type: Literal["input_text", "output_text", "refusal"]


Parts = Annotated[list[InputPart], Field(fail_fast=True, min_length=1, max_length=1024)]
# Type of an item -> what it has; all of it, and nothing else.
_HAS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


class InputItem(ForeignModel):
    """A message as people write it, an answer as it came, a call of a tool, the result of one, or
    what an earlier answer was thought with, of which a chat template is given nothing."""

    # as the openai package dumps a call
    neutral = {"namespace": (), "async": (False,), "async_": (False,)}
    ignored = frozenset(
        (
            "id",
            "status",
            "phase",
            "caller",
            "index",
            "annotations",
            "cache_control",
            "reasoning_content",
            "parsed_arguments",
        )
    )

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = Field(
        None, description="of a message"
    )
    content: StrictStr | Parts | None = Field(None, description="of a message")
    call_id: CallId | None = None
    name: Name | None = None
    arguments: StrictStr | None = None
    output: StrictStr | Parts | None = Field(None, description="of a function_call_output")

    @model_validator(mode="before")
    @classmethod
    def _without_thoughts(cls, data: Any) -> Any:
        return (
            {"type": "reasoning"}
            if isinstance(data, dict) and data.get("type") == "reasoning"
            else data
        )

    @model_validator(mode="after")
    def _is_what_it_says(self) -> InputItem:
        present = {name for name, value in self if name != "type" and value is not None}
        if self.type == "function_call_output":
            present -= {"name"}  # of the tool, beside the call's id
        if missing := [name for name in _HAS[self.type] if name not in present]:
            raise ValueError(f"an item of type {self.type!r} needs {missing[0]!r}")
        if unknown := present.difference(_HAS[self.type]):
            raise ValueError(f"an item of type {self.type!r} has no {min(unknown)!r}")
        if self.arguments is not None:
            arguments_of(self.arguments)
        return self

    def rendered(self) -> dict[str, Any]:
        """Return it for the chat template; a call is a turn of its own."""
        if self.type == "function_call":
            call = called(self.call_id or "", self.name or "", arguments_of(self.arguments))
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        if self.type == "function_call_output":
            return {
                "role": "tool",
                "content": joined(self.output or ""),
                "tool_call_id": self.call_id,
            }
        return {
            "role": "system" if self.role == "developer" else self.role,
            "content": joined(self.content or ""),
        }


class ResponsesTool(Function, ForeignModel):
    """A tool on offer, flat."""

    neutral = {
        "defer_loading": (False,),
        "allowed_callers": (["direct"],),
        "async": (False,),
        "output_schema": (),
    }

    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, data: Any) -> Any:
        """Refuse another type by its name, rather than for what a function has and it has not."""
        if (
            isinstance(data, dict)
            and isinstance(kind := data.get("type"), str)
            and kind != "function"
        ):
            raise ValueError(
                f"no tool of type {kind[:64]!r} is here, only functions, which the client runs"
            )
        return data

    def repeated(self) -> dict[str, Any]:
        """Return it as a response repeats it."""
        return {
            name: getattr(self, name)
            for name in ("type", "name", "description", "parameters", "strict")
        }


class TextConfig(ForeignModel):
    """How the answer is to be written."""

    ignored = frozenset(("verbosity",))

    format: Annotated[dict[str, Any], taken_by(asked_format, "text.format")] | None = Field(
        None,
        description="of type text, json_object or json_schema, that with name, schema and strict",
    )


class Reasoning(ForeignModel):
    """How the model is to reason, which is its own affair here."""

    # There are no thoughts to summarize.
    ignored = frozenset(("context", "summary", "generate_summary"))

    effort: Effort | None = None


class ResponsesStreamOptions(ForeignModel):
    """What a stream has besides."""

    ignored = frozenset(("include_obfuscation",))


class ResponsesRequest(AnswerRequest):
    """POST /v1/responses."""

    neutral = {
        "previous_response_id": (),
        "conversation": (),
        "prompt": (),
        "background": (False,),
        "background_options": ({},),
        "include": ([], ["reasoning.encrypted_content"]),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
        "context_management": ([],),
        "moderation": (),
        "access_programs": (),
        "image": ({},),
        "stop": ([],),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "logit_bias": ({},),
        **VLLM_NEUTRAL,
    }
    ignored = frozenset(("max_tool_calls", *OPENAI_IGNORED))

    input: Annotated[
        StrictStr
        | Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=1024)],
        FewArguments,
    ]
    instructions: StrictStr | None = Field(
        None, description="a system message in front of the input"
    )
    max_output_tokens: StrictInt | None = Field(None, ge=1)
    text: TextConfig | None = None
    tools: Annotated[list[ResponsesTool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = (
        None
    )
    tool_choice: ToolChoice | None = Field(
        None, description="none: the model is not told of the tools"
    )
    parallel_tool_calls: StrictBool | None = Field(
        None, description="false: of an answer's calls the first is given"
    )
    reasoning: Reasoning | None = None
    chat_template_kwargs: TemplateArguments = None
    prompt_cache_options: CacheOptions | None = None
    stream_options: ResponsesStreamOptions | None = None

    @model_validator(mode="after")
    def _tools_belong_together(self) -> ResponsesRequest:
        items = () if isinstance(self.input, str) else self.input
        if items and all(item.type == "reasoning" for item in items):
            raise at_fault("input", "'input' has a message beside its thoughts, which are not read")
        check_results(
            (f"input.{number}" if item.type == "function_call_output" else None, item.call_id)
            for number, item in enumerate(items)
            if item.call_id is not None
        )
        check_alone(self.format, self.offered)
        return self

    @cached_property
    def format(self) -> Format | None:
        """Return the format of the answer; None: a text."""
        return checked_format(None if self.text is None else self.text.format, "text.format")

    def of_template(self) -> dict[str, Mapping[str, TemplateArgument]]:
        """Return the arguments of the chat template that the request asks for, by the field that
        does."""
        effort = of_effort(None if self.reasoning is None else self.reasoning.effort)
        return {"chat_template_kwargs": self.chat_template_kwargs or {}, "reasoning.effort": effort}

    @cached_property
    def offered(self) -> Tools | None:
        """Return the tools that the model is told of."""
        visible, parallel = self.tool_choice != "none", self.parallel_tool_calls is not False
        return offered(self.tools or [], visible=visible, parallel=parallel)

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages for the chat template: a call belongs to the turn of the assistant
        that it follows."""
        turns: list[dict[str, Any]] = []
        if self.instructions is not None:
            turns.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*turns, {"role": "user", "content": self.input}]
        for turn in (item.rendered() for item in self.input if item.type != "reasoning"):
            if "tool_calls" in turn and turns and turns[-1]["role"] == "assistant":
                turns[-1] = turns[-1] | {
                    "tool_calls": [*turns[-1].get("tool_calls", ()), *turn["tool_calls"]]
                }
            else:
                turns.append(turn)
        return turns
