"""The requests of /v1/risk/score, and what those of other protocols have in common.  Unknown fields
are refused.

Of another protocol's parameters one that would change the answer and that no engine here has is
refused by name, unless it has the value of its absence; one that only concerns the service that the
protocol is from is ignored.  Arguments of ours stand in ``vllm_xargs``, as for the vLLM plugin."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    model_validator,
)
from pydantic_core import PydanticCustomError

from probes_store.records import TemplateArgument, template_arguments
from service.engines.base import MAX_STOP_CHARACTERS, MAX_STOPS
from service.engines.chat import texts_in
from service.settings import MOST_PROMPTS

Include = Literal["trajectory", "running_mean", "answer_risk"]
# a text's own form is the bundle's; "text": no template
Kind = Literal["prompt", "text", "messages", "input_ids"]
Risk = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Temperature = Annotated[float, Field(ge=0.0, le=2.0, strict=True)]
TopP = Annotated[float, Field(gt=0.0, le=1.0, strict=True)]
Seed = Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]
StrictRisk = Annotated[Risk, Field(strict=True)]
# fail_fast and MAX_FIELDS bound the work: a million wrong elements must not become a million errors
# on the event loop.
Texts = Annotated[list[StrictStr], Field(fail_fast=True, max_length=MOST_PROMPTS)]
Ids = Annotated[list[StrictInt], Field(fail_fast=True)]
Batches = Annotated[list[Ids], Field(fail_fast=True)]
StopText = Annotated[StrictStr, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopTexts = Annotated[list[StopText], Field(fail_fast=True, max_length=MAX_STOPS)]
# what names a model, a bundle or a policy; errors repeat it
Reference = Annotated[StrictStr, Field(max_length=1024)]
MAX_FIELDS = 32
# of OpenAPI
EXAMPLES: dict[str, Any] = json.loads((Path(__file__).parent / "examples.json").read_text("utf-8"))
TEMPLATE_CHARACTERS = 16  # added to a message by a chat template, roughly


AT_FAULT = "field_at_fault"  # type of the validation errors that ``at_fault`` makes


def at_fault(field: str, message: str) -> PydanticCustomError:
    """Return the error that a validator of a whole object raises where one ``field`` of it is at
    fault.

    ``field`` is the path from the object, such as ``tools`` or ``messages.2``.  The response's
    ``param`` names it."""
    return PydanticCustomError(AT_FAULT, "{message}", {"field": field, "message": message})


class Strict(BaseModel):
    """No unknown fields, no NaN."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class RequestModel(Strict):
    """A JSON object of a request, of at most MAX_FIELDS fields."""

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, data: Any) -> Any:
        if isinstance(data, dict) and len(data) > MAX_FIELDS:
            raise ValueError(f"{len(data)} fields; only {len(cls.model_fields)} exist")
        return data


class Message(RequestModel):
    """One chat turn."""

    role: Literal["system", "user", "assistant"]
    content: StrictStr


TEMPERATURE = (
    "0 is greedy; default: as the answers were decoded that the bundle's risk is about, else greedy"
)


class Generate(RequestModel):
    """Continue decoding from the same KV cache if the decision is ``continue``."""

    max_tokens: StrictInt = Field(64, ge=1, description="at most this many answer tokens")
    temperature: Temperature | None = Field(None, description=TEMPERATURE)
    top_p: TopP | None = None
    seed: Seed | None = None
    stop: StopTexts = Field(default_factory=list)


_PROMPTS = ("prompt", "messages", "input_ids")
_NULL, _GIVEN = {"type": "null"}, {"not": {"type": "null"}}
# The validators below, as JSON schema for the OpenAPI document.
RULES: dict[str, Any] = {
    "oneOf": [
        {"required": [name], "properties": dict.fromkeys(_PROMPTS, _NULL) | {name: _GIVEN}}
        for name in _PROMPTS
    ],
    "if": {"required": ["stream"], "properties": {"stream": {"const": True}}},
    "then": {"required": ["generate"], "properties": {"generate": {"type": "object"}}},
}


class ScoreRequest(RequestModel):
    """Exactly one of ``prompt``, ``messages`` and ``input_ids``."""

    model_config = ConfigDict(json_schema_extra=RULES)

    prompt: StrictStr | Texts | None = Field(
        None,
        description=(
            "a question or a list of them, rendered as the bundle's "
            "training prompts were (its prompt_format: one chat turn, or plain text)"
        ),
    )
    messages: Annotated[list[Message], Field(fail_fast=True, max_length=1024)] | None = Field(
        None,
        description="one conversation; goes through the chat template with its generation prompt",
    )
    input_ids: Ids | Batches | None = Field(
        None, description="token ids ending at the answer onset"
    )
    model: Reference | None = Field(None, description="must be the loaded model")
    bundle: Reference | None = Field(
        None,
        description=(
            "name, name@alias or name:version of a loaded bundle, with @sha256:DIGEST to pin it;"
            " under a policy that withholds, another than the service's first needs --callers-may"
            " bundle"
        ),
    )
    threshold: Risk | None = Field(
        None,
        strict=True,
        description=(
            "flag at or above this risk; default: the policy's, else the service's, else the"
            " bundle's.  Under a policy that withholds, a higher one than the service's needs"
            " --callers-may threshold"
        ),
    )
    policy: Reference | None = Field(
        None,
        description=(
            "observe, gate, block or a policy of this service; default: the "
            "service's own.  Where that withholds, observe needs --callers-may policy"
        ),
    )
    retrieval_of: StrictStr | None = Field(
        None,
        max_length=256,
        description=(
            "id of the answer whose decision was retrieve: this is the same question with a passage"
        ),
    )
    include: list[Include] = Field(
        default_factory=list,
        max_length=3,
        description="answer_risk: in each chunk of a stream, the risk of the answer so far",
    )
    generate: Generate | None = Field(
        None, description="also decode the answer, if the decision is continue"
    )
    stream: StrictBool = Field(
        False,
        description=(
            "server-sent events: the risk first, then the answer; needs 'generate' and one prompt"
        ),
    )
    deadline_ms: StrictInt | None = Field(
        None,
        ge=1,
        description=(
            "give up with 504 after this many milliseconds; default and maximum: the service's own"
        ),
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> ScoreRequest:
        names = [name for name in _PROMPTS if getattr(self, name) is not None]
        if len(names) != 1:
            raise ValueError(
                "give exactly one of 'prompt', 'messages', 'input_ids'; found"
                f" {' and '.join(names) or 'none'}"
            )
        if self.stream and self.generate is None:
            raise at_fault("stream", "'stream' needs 'generate'")
        if self.stream and len(self.given()[1]) != 1:
            raise at_fault(
                "stream", "'stream' takes exactly one prompt; send one request per prompt"
            )
        return self

    def given(self) -> tuple[Kind, list[Any]]:
        """Return what the prompts are, and each of them: a conversation is one."""
        if self.messages is not None:
            turns = [{"role": turn.role, "content": turn.content} for turn in self.messages]
            return "messages", [turns]
        if self.prompt is not None:
            return "prompt", [self.prompt] if isinstance(self.prompt, str) else self.prompt
        ids: list[Any] = self.input_ids or []
        return "input_ids", [ids] if ids and not isinstance(ids[0], list) else ids


def size_of(kind: Kind, prompts: Sequence[Any]) -> int:
    """Return characters or token ids of all prompts, templates included, to separate short requests
    from long ones."""
    if kind == "messages":
        texts = list[str]()
        for message in chain.from_iterable(prompts):
            texts += (message["content"], *texts_in(message.get("tool_calls")))
        prompts = texts
    return sum(len(prompt) + TEMPLATE_CHARACTERS for prompt in prompts)


class ForeignModel(RequestModel):
    """An object of a protocol that is not ours, whose further fields are told apart: what changes
    nothing is taken.

    So is a null, also of a field that a newer client writes and nobody here knows."""

    # what is not there -> the values of its absence; null is one
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _without_what_changes_nothing(cls, data: Any) -> Any:
        """Drop what is ignored, and refuse what would change the answer."""
        if not isinstance(data, dict):
            return data
        unset = {name for name, value in data.items() if value is None}
        dropped = (cls.neutral.keys() | cls.ignored | unset) - cls.model_fields.keys()
        for name, value in data.items():
            if name not in dropped or name in cls.ignored or value is None:
                continue
            if not _is_one_of(value, allowed := cls.neutral[name]):
                than = f", except as {' or '.join(map(json.dumps, allowed))}" if allowed else ""
                raise at_fault(name, f"{name!r} is not supported here{than}; leave it out")
        return {name: value for name, value in data.items() if name not in dropped}


class CacheOptions(ForeignModel):
    """Of OpenAI's own prompt cache."""

    neutral = {"prewarm": (False,), "comparison_response_id": ()}
    ignored = frozenset(("mode", "ttl"))


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Return whether a JSON value is one of these; true is not 1, as Python has it, and 1.0 is."""
    alike = [same for same in allowed if isinstance(value, bool) == isinstance(same, bool)]
    return value in alike


class Part(ForeignModel):
    """A part of a turn in OpenAI's protocols; only text can be read.  ``refusal``: of an earlier
    answer that was withheld."""

    type: str
    text: StrictStr | None = None
    refusal: StrictStr | None = None

    @model_validator(mode="after")
    def _says_what_it_is(self) -> Self:
        is_refusal = self.type == "refusal"
        wanted, unwanted = ("refusal", "text") if is_refusal else ("text", "refusal")
        if getattr(self, wanted) is None or getattr(self, unwanted) is not None:
            raise ValueError(f"a part of type {self.type!r} has {wanted!r} and no {unwanted!r}")
        return self


def joined(content: str | Sequence[Part]) -> str:
    """Return the whole text; a refusal is read where there is no text beside it."""
    if isinstance(content, str):
        return content
    texts = [part.text for part in content if part.text is not None]
    return "".join(texts or [part.refusal or "" for part in content])


VLLM_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "min_tokens": (0,),
    "repetition_penalty": (1,),
    "stop_token_ids": ([],),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "ignore_eos": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "prompt_logprobs": (),
    "logprob_token_ids": ([],),
    "logits_processors": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "mm_payload": ({},),
    "prompt_embeds": ([],),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "priority": (0,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    "return_mm_kwargs": (False,),
    "routed_experts_prompt_start": (0,),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "repetition_detection": (),
    "thinking_token_budget": (),
    "watermarking": (False,),
    "enable_response_messages": (False,),
    "previous_input_messages": (),
}
"""vLLM's own parameters -> the values that they have there by default: its clients send them."""
VLLM_IGNORED = frozenset(
    ("include_reasoning", "request_id", "session_id", "cache_salt", "stream_interval")
)
OPENAI_IGNORED = VLLM_IGNORED.union(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    )
)


def _template_arguments(value: Any) -> Any:
    try:
        return None if value is None else template_arguments(value)
    except ValueError as error:
        raise ValueError(f"'chat_template_kwargs': {error}") from None


TemplateArguments = Annotated[
    dict[str, Any] | None,
    BeforeValidator(_template_arguments),
    Field(description="taken where the chat template makes the same of the messages without it"),
]
Effort = Annotated[
    StrictStr,
    Field(max_length=64, description="taken where the chat template makes the same of it"),
]
UNTHINKING: Mapping[str, TemplateArgument] = {"enable_thinking": False, "thinking": False}
"""What chat templates call the switch of a model's thoughts."""


def of_effort(effort: str | None) -> dict[str, TemplateArgument]:
    """Return the arguments of the chat template that an effort to reason stands for, as vLLM has
    it."""
    if effort is None:
        return {}
    thinking = UNTHINKING if effort == "none" else {"enable_thinking": True}
    return {"reasoning_effort": effort, **thinking}


class Arguments(RequestModel):
    """``vllm_xargs``: what a request may choose, as ``bundle``, ``policy`` and ``threshold`` of
    /v1/risk/score."""

    hallutracer_bundle: Reference | None = None
    hallutracer_policy: Reference | None = None
    hallutracer_threshold: StrictRisk | None = None
    hallutracer_retrieval_of: Annotated[StrictStr, Field(max_length=256)] | None = None
    hallutracer_include: Annotated[list[Literal["answer_risk"]], Field(max_length=1)] | None = None


OWN_TEMPERATURE = (
    f"{TEMPERATURE}; or 1, where the operator wants it as OpenAI has it (--decoding openai)"
)


class AnswerRequest(ForeignModel):
    """What every protocol's request for an answer takes."""

    model: Reference = Field(description="must be the loaded model, as GET /v1/models names it")
    temperature: Temperature | None = Field(None, description=OWN_TEMPERATURE)
    top_p: TopP | None = None
    seed: Seed | None = None
    stream: StrictBool | None = None
    vllm_xargs: Arguments | None = Field(
        None, description="hallutracer_policy, hallutracer_threshold, hallutracer_bundle"
    )

    def stops(self) -> tuple[str, ...]:
        """Return the texts that end the answer."""
        return ()

    def of_template(self) -> dict[str, Mapping[str, TemplateArgument]]:
        """Return the arguments of the chat template that the request asks for, by the field that
        does."""
        return {}
