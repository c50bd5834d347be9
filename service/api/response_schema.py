"""The service's responses, with the examples of the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from service.api.request_schema import Risk, Strict


class BundleRef(Strict):
    """The bundle whose probes gave the risk."""

    name: str
    version: int
    digest: str


class CompletionOut(Strict):
    """The answer, decoded from the same KV cache as the risk."""

    text: str
    finish_reason: Literal["stop", "length"]
    completion_tokens: int


class GuaranteeOut(Strict):
    """The promise of the bundle's threshold, as it stands for this request."""

    alpha: float = Field(description="at most this share of the answered questions is answered with a hallucination")
    delta: float = Field(description="the promise has confidence 1 - delta")
    holds: bool = Field(description="nothing is known here that voids it; GET /v1/bundles has its whole statement")
    void: list[str] = Field(description="why it does not hold for this request")


class RiskOut(Strict):
    """One prompt's risk."""

    index: int
    risk: Risk
    depth_mean: float
    decision: Literal["continue", "abstain", "block", "retrieve", "fallback"]
    flagged: bool = Field(description="the risk reached the threshold, whatever the policy")
    threshold: float
    interval: list[Risk] | None = Field(
        None,
        min_length=2,
        max_length=2,
        description="where 95 % of refits on other training rows would put the risk; not where the truth lies",
    )
    outside_training: bool | None = Field(None, description="the trajectory lies outside what training saw")
    distance: float | None = Field(None, description="of the trajectory to training's; outside from 1 on")
    message: str | None = Field(None, description="to show instead of an answer; before it, if that is given")
    trajectory: list[float] | None = Field(None, description="truth logit of each layer")
    running_mean: list[float] | None = Field(None, description="mean of the truth logits up to each layer")
    completion: CompletionOut | None = None


class Usage(Strict):
    """Token counts, as vLLM and OpenAI name them."""

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int


class RetrievalOut(Strict):
    """What fetching a passage changed."""

    of: str = Field(description="id of the earlier answer")
    known: bool = Field(description="this service remembers its risk, and the same bundle says both")
    risk_before: Risk | None = None
    drop: float | None = Field(None, description="risk_before minus the risk now")


class ScoreResponse(Strict):
    """A list of risks, in the order of the prompts."""

    id: str
    object: Literal["risk.list"] = "risk.list"
    created: int
    model: str
    policy: str
    bundle: BundleRef
    guarantee: GuaranteeOut | None = Field(None, description="if the bundle has one")
    retrieval: RetrievalOut | None = Field(None, description="if the request names an earlier one")
    data: list[RiskOut]
    usage: Usage


class Delta(Strict):
    """A piece of an answer."""

    text: str


class CompletionChunk(Strict):
    """One event of a stream, after the risk.  The last one has a ``finish_reason`` and the usage."""

    id: str
    object: Literal["completion.chunk"] = "completion.chunk"
    index: int = 0
    delta: Delta
    finish_reason: Literal["stop", "length"] | None = None
    usage: Usage | None = None


class ModelCard(Strict):
    """The loaded model, as OpenAI lists models."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "hallutracer"
    architecture: str
    revision: str
    dtype: str
    max_model_len: int
    bundles: list[str] = Field(description="references of the loaded bundles, the default first")
    root: str = Field(description="the model's own name; `id` may be one of --served-model-name")


class ModelList(Strict):
    """GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class BundleGuarantee(Strict):
    """What the threshold of a bundle promises; the statement says for whom, and when it is void."""

    alpha: float
    delta: float
    threshold: float
    groups: int
    hallucinated: int
    p_value: float
    answered: float
    risk_control_threshold: float | None
    rows: int
    all_groups: int
    data_digest: str
    labels: str
    judge: str | None
    dtype: str
    seed: int
    statement: str


class BundleInterval(Strict):
    """How wide an interval of the risk is: see the bundle format."""

    level: float
    fits: int
    centre: float
    base: float
    by_log_odds: float
    by_distance: float


class BundleUncertainty(Strict):
    """What a bundle knows of its risks' uncertainty; the statement says what it means."""

    outside_share: float
    outside_rows: int
    interval: BundleInterval | None
    statement: str


Role = Literal["default", "canary", "shadow", "none"]


class GoldenOut(Strict):
    """The golden prompts, replayed when the bundle was loaded: the largest deviation from what was recorded."""

    risk: float
    risk_tolerance: float
    trajectory: float = Field(description="in units of the trajectories' spread")
    trajectory_tolerance: float


class ComparedOut(Strict):
    """A shadow beside the bundles that judged the same prompts, in this process."""

    prompts: int
    stricter: int = Field(description="prompts that it alone flags")
    looser: int = Field(description="prompts that it alone does not flag")
    failed: int = Field(description="prompts of which it gave no number")
    disagreement: float | None = Field(description="share that was not agreed on, failures included")
    mean_difference: float | None = Field(description="of the two risks, absolute")


class DriftOut(Strict):
    """The newest window of prompts that this bundle judged, beside its training rows."""

    prompts: int
    ks: float = Field(description="largest distance of the two distribution functions of the risk")
    psi: float = Field(description="population stability index over the tenths of training")
    shift: float = Field(description="mean risk of the window less that of training")
    outside: float | None = Field(description="share of prompts outside training; null where the bundle cannot tell")


class LeftOut(Strict):
    """A bundle that was asked for and is not used."""

    reference: str
    reason: str


class LoadedOut(Strict):
    """When the bundles were loaded, and what could not be."""

    since: str = Field(description="when the loaded bundles began to serve, UTC")
    left_out: list[LeftOut]
    reload_error: str | None = Field(description="why the newest reload changed nothing")
    reload_failing_since: str | None = Field(description="when the first reload failed since one was done, UTC")


class BundleCard(Strict):
    """A loaded bundle."""

    id: str = Field(description="name:version")
    object: Literal["bundle"] = "bundle"
    name: str
    version: int
    digest: str
    created: str
    model: str
    site: str = Field(description="where each layer is read: attention_head or residual_stream")
    logit_scale: str
    signals: list[str]
    prompt_format: str
    threshold: float
    guarantee: BundleGuarantee | None = None
    uncertainty: BundleUncertainty | None = None
    role: Role = Field(description="what it does for requests that name no bundle; none: nothing")
    share: float | None = Field(None, description="of these requests, that a default or a canary judges")
    compared: ComparedOut | None = Field(None, description="of a shadow, since the service started")
    golden: GoldenOut
    drift: DriftOut | None = Field(None, description="none before the first full window, or without a reference")
    void: list[str] = Field(description="why a guarantee does not hold just now, whatever the request")
    default: bool


class ClassTrajectories(Strict):
    """Where the truth logits of the training rows lie, out of fold, layer by layer."""

    factual: list[float] = Field(description="mean over the rows that the model answered right, one for each layer")
    hallucinated: list[float] = Field(description="the same over the rows that it answered wrong")
    factual_std: list[float]
    hallucinated_std: list[float]


class GateOut(Strict):
    """What answering below one threshold does, as shares of the training rows."""

    threshold: Risk
    answered: Risk
    wrong_among_answered: Risk | None = Field(description="null where nothing is answered")
    right_withheld: Risk = Field(description="of the rows that the model answers right")


class CoverageOut(Strict):
    """What a bundle would answer and get wrong over thresholds, on questions like its training rows."""

    source: Literal["out_of_fold_risks", "normal_model", "own_threshold"] = Field(
        description="counted from the out-of-fold risks of the training rows; modelled by a normal distribution of "
        "each class's depth mean, an approximation; or nothing but the bundle's own threshold is known"
    )
    rows: int
    hallucinated: Risk = Field(description="share of the rows: what is wrong where everything is answered")
    gates: list[GateOut] = Field(description="at the thresholds 0, 0.01 ... 1; may be empty")
    own: GateOut | None = Field(description="measured at the bundle's own threshold, by cross-validation")


class BundleDetail(BundleCard):
    """GET /v1/bundles/{bundle}: the card, and what a picture of a risk needs."""

    trajectories: ClassTrajectories
    coverage: CoverageOut


class BundleList(Strict):
    """GET /v1/bundles."""

    object: Literal["list"] = "list"
    data: list[BundleCard]
    policies: list[str] = Field(description="values of a request's 'policy', the default first")
    status: LoadedOut


class Status(Strict):
    """A health check's answer."""

    status: Literal["live", "ready"]
    model: str | None = None
    bundles: list[str] | None = None
    keys: str | None = None  # why the file of named keys, as it is now, is not in force


class ErrorBody(BaseModel):
    """The cause and the remedy."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str


class ErrorResponse(BaseModel):
    """The error envelope."""

    error: ErrorBody


RISK_EXAMPLE: dict[str, Any] = {
    "id": "risk-c67afd5b1cb64cdeadfda66467e28928",
    "object": "risk.list",
    "created": 1795186131,
    "model": "hallutracer-demo",
    "policy": "gate",
    "bundle": {"name": "demo", "version": 1, "digest": "sha256:" + "b" * 64},
    "data": [
        {
            "index": 0, "risk": 0.0321, "depth_mean": 1.986, "decision": "continue", "flagged": False,
            "threshold": 0.3098,
            "completion": {"text": " It is Rome.", "finish_reason": "stop", "completion_tokens": 5},
        },
        {
            "index": 1, "risk": 0.8138, "depth_mean": -1.422, "decision": "abstain", "flagged": True,
            "threshold": 0.3098, "message": "I am not sure.",
        },
    ],
    "usage": {"prompt_tokens": 22, "cached_tokens": 0, "completion_tokens": 5, "total_tokens": 27},
}  # fmt: skip

STREAM_EXAMPLE = (
    'data: {"id": "risk-1f", "object": "risk.list", "data": [{"index": 0, "risk": 0.0321, "decision": "continue", '
    "...}], ...}\n\n"
    'data: {"id": "risk-1f", "object": "completion.chunk", "index": 0, "delta": {"text": " It"}}\n\n'
    'data: {"id": "risk-1f", "object": "completion.chunk", "index": 0, "delta": {"text": ""}, '
    '"finish_reason": "stop", "usage": {...}}\n\n'
    "data: [DONE]\n\n"
)


def events(data: str) -> dict[str, Any]:
    """Server-sent events, as their readers see each; ``data``: what its JSON may be."""
    return {
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"type": "string", "description": f"JSON: {data}; at last [DONE]"}},
    }


HEADERS: dict[str, Any] = {
    name: {"description": description, "schema": {"type": "string"}}
    for name, description in {
        "x-request-id": "the request's own, or a generated one",
        "x-queue-time": "milliseconds until the forward pass began",
        "x-total-time": "milliseconds until the answer began",
        "x-inference-time": "milliseconds of prefill, probe and decoding",
        "x-hallutracer-bundle": "name:version of the bundle",
        "x-hallutracer-risk": "if there is one prompt",
        "x-hallutracer-decision": "if there is one prompt",
    }.items()
}
_RETRY = {"Retry-After": {"description": "seconds to wait", "schema": {"type": "integer"}}}


def errors(**descriptions: str) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses of the error envelope: ``errors(_404="no such bundle")``."""
    return {
        int(status.removeprefix("_")): {"model": ErrorResponse, "description": description}
        | ({"headers": _RETRY} if status in ("_429", "_503") else {})
        for status, description in descriptions.items()
    }


FAILURES = errors(
    _400="the body is not JSON",
    _401="no bearer key, or an unknown one",
    _403="the request lets more through than its caller may (--callers-may)",
    _404="no such model, bundle or policy is loaded",
    _408="the body did not arrive in time",
    _413="the body or a prompt is too large; prompts are never truncated",
    _422="a field is wrong, or not supported",
    _429="the queue is full",
    _500="the engine failed",
    _502="the server that the policy falls back on failed",
    _503="not ready: loading, or shutting down",
    _504="the deadline passed",
)
"""Of every route that reads a prompt."""

_SCORED: dict[int | str, dict[str, Any]] = {
    200: {
        "model": ScoreResponse,
        "description": "the risks, or with 'stream' the events: the risk first, then the answer",
        "headers": HEADERS,
        "content": {
            "application/json": {"example": RISK_EXAMPLE},
            "text/event-stream": {
                "schema": events("first one risk.list, then completion.chunk objects or an error"),
                "example": STREAM_EXAMPLE,
            },
        },
    }
}
SCORE_RESPONSES = _SCORED | FAILURES
