"""The wire of /v1/risk/score, field by field.  Knows no engine; unknown fields are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, model_validator

Include = Literal["trajectory", "running_mean"]
Risk = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
# One error is enough: a body of a million wrong elements must not become a million error records on the event loop.
Texts = Annotated[list[StrictStr], Field(fail_fast=True)]
Ids = Annotated[list[StrictInt], Field(fail_fast=True)]
Batches = Annotated[list[Ids], Field(fail_fast=True)]
MOST_FIELDS = 32


class Strict(BaseModel):
    """No unknown fields, no NaN."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Message(Strict):
    """One chat turn."""

    role: Literal["system", "user", "assistant"]
    content: StrictStr


class Generate(Strict):
    """Decode on from the same KV cache where the decision is ``continue``."""

    max_tokens: StrictInt = Field(64, ge=1, description="at most this many answer tokens")
    temperature: float = Field(0.0, ge=0.0, le=2.0, strict=True, description="0 is greedy")
    top_p: float = Field(1.0, gt=0.0, le=1.0, strict=True)
    seed: StrictInt | None = Field(None, ge=-(2**63), lt=2**63)
    stop: list[Annotated[StrictStr, Field(min_length=1)]] = Field(default_factory=list, max_length=8)


class ScoreRequest(Strict):
    """Exactly one of ``prompt``, ``messages`` and ``input_ids``."""

    prompt: StrictStr | Texts | None = Field(
        None,
        description="a question or a list of them, rendered as the bundle's training prompts were "
        "(its prompt_format: one chat turn, or plain text)",
    )
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = Field(
        None, description="one conversation; goes through the chat template with its generation prompt"
    )
    input_ids: Ids | Batches | None = Field(None, description="token ids, whose last one is the answer onset")
    model: StrictStr | None = Field(None, description="must be the loaded model, where given")
    bundle: StrictStr | None = Field(None, description="name, name@alias or name:version of a loaded bundle")
    threshold: Risk | None = Field(
        None, strict=True, description="abstain at or above this risk; default: the bundle's own"
    )
    include: list[Include] = Field(default_factory=list, max_length=2)
    generate: Generate | None = None

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"prompt": "What is the capital of France?"},
                {"prompt": ["What is the capital of Italy?", "What is the capital of the Solomon Islands?"]},
                {
                    "messages": [{"role": "user", "content": "What is the capital of France?"}],
                    "generate": {"max_tokens": 16},
                },
            ]
        },
    )

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, data: Any) -> Any:
        if isinstance(data, dict) and len(data) > MOST_FIELDS:
            raise ValueError(f"{len(data)} fields in one request; there are {len(cls.model_fields)}")
        return data

    @model_validator(mode="after")
    def _exactly_one(self) -> ScoreRequest:
        given = [name for name in ("prompt", "messages", "input_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none of them"
            raise ValueError(f"give exactly one of 'prompt', 'messages', 'input_ids'; found {found}")
        return self


class BundleRef(Strict):
    """Which probes gave the risk."""

    name: str
    version: int
    digest: str


class CompletionOut(Strict):
    """The answer, decoded from the same KV cache as the risk."""

    text: str
    finish_reason: str
    completion_tokens: int


class RiskOut(Strict):
    """One prompt's risk."""

    index: int
    risk: Risk
    depth_mean: float
    decision: Literal["continue", "abstain"]
    threshold: float
    trajectory: list[float] | None = None
    running_mean: list[float] | None = None
    completion: CompletionOut | None = None


class Usage(Strict):
    """Token counts, as vLLM and OpenAI name them."""

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int


class ScoreResponse(Strict):
    """A list of risks, in the order of the prompts."""

    id: str
    object: Literal["risk.list"] = "risk.list"
    created: int
    model: str
    bundle: BundleRef
    data: list[RiskOut]
    usage: Usage


class ErrorBody(BaseModel):
    """What went wrong and what to do."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(BaseModel):
    """The one error envelope."""

    error: ErrorBody


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": description}
    for status, description in {
        400: "the body is not JSON",
        404: "no such bundle or model is loaded",
        413: "the body or a prompt is too large; prompts are never truncated",
        422: "a field is wrong",
        500: "the engine failed",
        503: "no bundle has matched its golden prompts yet",
    }.items()
}
