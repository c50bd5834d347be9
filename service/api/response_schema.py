"""What the scoring routes answer: risks, answers, a stream's chunks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

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

    alpha: float = Field(
        description="of the question groups that are answered, counted equally, at most this share is answered with a "
        "hallucination"
    )
    delta: float = Field(description="the promise has confidence 1 - delta")
    holds: bool = Field(description="nothing is known here that voids it; GET /v1/bundles has its whole statement")
    void: list[str] = Field(description="why it does not hold for this request")


class RiskOut(Strict):
    """One prompt's risk."""

    index: int
    risk: Risk
    depth_mean: float
    decision: Literal["continue", "abstain", "block", "retrieve", "fallback"]
    flagged: bool = Field(description="the risk applies and reached the threshold, whatever the policy's action")
    threshold: float
    interval: list[Risk] | None = Field(
        None,
        min_length=2,
        max_length=2,
        description="where 95 % of refits on other training rows would put the risk; not where the truth lies",
    )
    outside_training: bool | None = Field(None, description="the prompt lies outside what training saw")
    distance: float | None = Field(None, description="of the prompt's logits to training's; outside from 1 on")
    applies: bool | None = Field(
        None,
        description="false: the prompt asks for no fact, so the risk says nothing of it; null: the bundle cannot tell",
    )
    asks: Risk | None = Field(None, description="the probability that the prompt asks for a fact")
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
