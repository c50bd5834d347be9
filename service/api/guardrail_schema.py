"""Requests and answers of the guardrail routes: other products' protocols, of which unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictStr

from service.api.request_schema import RequestModel, Risk, Texts

LITELLM_EXAMPLE: Any = {"input_type": "request", "texts": ["What is the capital of France?"], "request_data": {}}


class GuardrailParams(RequestModel):
    """``additional_provider_specific_params``: what ``bundle``, ``policy`` and ``threshold`` are to /v1/risk/score."""

    bundle: StrictStr | None = None
    policy: StrictStr | None = None
    threshold: Annotated[Risk, Field(strict=True)] | None = None


class GuardrailRequest(BaseModel):
    """What LiteLLM sends before a call."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={"example": LITELLM_EXAMPLE})

    input_type: Literal["request", "response"]
    texts: Texts | None = None
    structured_messages: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=1024)] | None = None
    images: list[Any] | None = None
    tools: list[Any] | None = None
    tool_calls: list[Any] | None = None
    additional_provider_specific_params: GuardrailParams | None = None


class GuardrailResponse(BaseModel):
    """NONE lets the call go on."""

    action: Literal["NONE", "BLOCKED"]
    blocked_reason: str | None = None
    hallutracer: dict[str, Any] = Field(description="the risks, as OpenAI's routes have them, or why there are none")


class ClassifyRequest(RequestModel):
    """As the classifiers of text-embeddings-inference take it."""

    inputs: StrictStr | Texts


class LabelScore(BaseModel):
    """One label's probability; those of one text sum to 1."""

    label: Literal["hallucinated", "factual"]
    score: Risk
