"""Response bodies as validated frozen dataclasses.

Unknown fields are ignored, so an older client can read a newer service; a missing or wrong field is
named in the error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from hallutracer_client.errors import ClientError

T = TypeVar("T")
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=0)]


class Checked:
    """No type coercion ("1" is not 1), no NaN."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Bundle(Checked):
    """The bundle whose probes gave the risk."""

    name: str
    version: int
    digest: str

    @property
    def reference(self) -> str:
        """NAME:VERSION."""
        return f"{self.name}:{self.version}"


@dataclass(frozen=True)
class Guarantee(Checked):
    """The guarantee of the bundle's threshold for this request; ``void`` says why it does not hold.

    Of the question groups that are answered, counted equally whatever their size, at most a share
    ``alpha`` is answered with a hallucination, with confidence 1 - ``delta``."""

    alpha: Share
    delta: Share
    holds: bool
    void: tuple[str, ...] = ()


@dataclass(frozen=True)
class BundleGuarantee(Checked):
    """What a loaded bundle's threshold guarantees; ``statement`` says for whom and when it does not
    hold."""

    alpha: Share
    delta: Share
    threshold: Share
    groups: Count
    hallucinated: Count
    statement: str


@dataclass(frozen=True)
class BundleUncertainty(Checked):
    """What a loaded bundle knows of its risks' uncertainty; ``statement`` says what it means."""

    outside_share: Share
    outside_rows: Count
    statement: str


@dataclass(frozen=True)
class Completion(Checked):
    """The answer, decoded from the same prefill as the risk.  ``finish_reason`` is ``stop`` or
    ``length``."""

    text: str
    finish_reason: str
    completion_tokens: Count


@dataclass(frozen=True)
class Usage(Checked):
    """Tokens of the whole request."""

    prompt_tokens: Count
    cached_tokens: Count
    completion_tokens: Count
    total_tokens: Count


@dataclass(frozen=True)
class Risk(Checked):
    """One prompt.  ``risk`` is P(hallucinated); ``trajectory`` and ``running_mean`` have one number
    per layer."""

    index: Count
    risk: Share
    depth_mean: float
    decision: (
        str  # continue, abstain, block, retrieve or fallback; an unknown decision withholds, too
    )
    flagged: bool  # the risk applies and reached the threshold, whatever the policy
    threshold: Share
    interval: tuple[Share, Share] | None = (
        None  # where 95 % of refits on other training rows would put the risk
    )
    outside_training: bool | None = (
        None  # outside training: unlike all its prompts; None: the bundle cannot tell
    )
    outside_because: str | None = None  # why it is
    distance: float | None = None  # to training's prompts; outside from 1 on
    applies: bool | None = (
        None  # False: the prompt asks for no fact, so the risk says nothing; None: it cannot tell
    )
    asks: Share | None = None  # the probability that it asks for a fact
    message: str | None = None  # the policy's text to show instead of an answer, or before it
    trajectory: tuple[float, ...] | None = None
    running_mean: tuple[float, ...] | None = None
    completion: Completion | None = None
    answer_risk: Share | None = (
        None  # that the answer is wrong, by its own tokens; None: nothing reads answers
    )
    answer_flagged: bool | None = None  # that risk reached the bundle's threshold for answers
    answer_tokens: Count | None = None  # that were read for it
    passage_truth: Share | None = (
        None  # the policy takes only this share of passages for true; ``risk`` is so already
    )
    decoding: str | None = (
        None  # how the answer is decoded otherwise than those were that both risks are about
    )

    @property
    def gated(self) -> bool:
        """The answer is withheld: the decision is not ``continue``."""
        return self.decision != "continue"


class Withheld(ClientError):
    """The answer was read although the decision is not ``continue``; ``risk`` holds the details."""

    def __init__(self, risk: Risk) -> None:
        super().__init__(
            f"the answer was withheld: decision {risk.decision!r} at risk {risk.risk:.3f},"
            f" threshold {risk.threshold:.3f}; check 'gated' before reading the answer"
        )
        self.risk = risk


class OfOneRisk:
    """What is read of the only prompt's ``Risk``."""

    @property
    def only(self) -> Risk:
        """The prompt's risk."""
        raise NotImplementedError

    @property
    def risk(self) -> float:
        """P(hallucinated) of the only prompt, known before the first token."""
        return self.only.risk

    @property
    def decision(self) -> str:
        """The decision on the only prompt."""
        return self.only.decision

    @property
    def gated(self) -> bool:
        """Whether the only prompt's answer is withheld."""
        return self.only.gated


@dataclass(frozen=True)
class Retrieval(Checked):
    """What fetching a passage changed.  ``drop`` is ``risk_before`` minus the risk now; None where
    it is not known."""

    of: str
    known: bool
    risk_before: Share | None = None
    drop: float | None = None


@dataclass(frozen=True)
class ScoreResult(OfOneRisk, Checked):
    """The service's answer to one request; ``data`` has one ``Risk`` per prompt, in order."""

    id: str
    object: Literal["risk.list"] = field(repr=False)
    created: int  # Unix time in seconds
    model: str
    policy: str
    bundle: Bundle
    data: Annotated[tuple[Risk, ...], Field(min_length=1)]
    usage: Usage
    guarantee: Guarantee | None = None
    retrieval: Retrieval | None = None

    @property
    def request_id(self) -> str:
        """The id in the server's log."""
        return self.id.removeprefix("risk-")

    @property
    def only(self) -> Risk:
        """The only prompt's risk.  Raises ValueError if there are several."""
        if len(self.data) != 1:
            raise ValueError(
                f"{len(self.data)} prompts were sent: read 'data', one entry per prompt"
            )
        return self.data[0]

    @property
    def text(self) -> str | None:
        """The only prompt's answer; None without ``generate``.  Raises Withheld."""
        if self.only.gated:
            raise Withheld(self.only)
        return None if self.only.completion is None else self.only.completion.text


@dataclass(frozen=True)
class LoadedModel(Checked):
    """One entry of ``/v1/models``; the first of ``bundles`` (NAME:VERSION) is the default."""

    id: str
    architecture: str
    revision: str
    dtype: str
    max_model_len: Count
    bundles: tuple[str, ...]


@dataclass(frozen=True)
class ModelList(Checked):
    """The loaded model, as a list of one."""

    object: Literal["list"] = field(repr=False)
    data: tuple[LoadedModel, ...]


@dataclass(frozen=True)
class LoadedBundle(Bundle):
    """One entry of ``/v1/bundles``."""

    model: str
    site: str  # attention_head or residual_stream
    logit_scale: str
    signals: tuple[str, ...]
    prompt_format: str
    threshold: Share
    default: bool
    guarantee: BundleGuarantee | None = None
    uncertainty: BundleUncertainty | None = None


@dataclass(frozen=True)
class BundleList(Checked):
    """The loaded bundles, and the names of the policies, the default first."""

    object: Literal["list"] = field(repr=False)
    data: tuple[LoadedBundle, ...]
    policies: tuple[str, ...]


@dataclass(frozen=True)
class Readiness:
    """Whether scores can be served now (also its truth value), and if not, the ``reason``."""

    ready: bool
    model: str | None = None
    bundles: tuple[str, ...] = ()
    reason: str | None = None

    def __bool__(self) -> bool:
        return self.ready


@dataclass(frozen=True)
class ReadyBody(Checked):
    """``/health/ready`` with 200; a service with keys tells the rest to a caller with a key
    only."""

    status: Literal["ready"]
    model: str | None = None
    bundles: tuple[str, ...] = ()


@dataclass(frozen=True)
class ErrorBody(Checked):
    """The content of the error envelope."""

    message: str
    type: str
    code: str
    param: str | None = None


@dataclass(frozen=True)
class ErrorEnvelope(Checked):
    """The body of every failure: ``{"error": {...}}``."""

    error: ErrorBody


@dataclass(frozen=True)
class Delta(Checked):
    """A piece of the answer."""

    text: str


@dataclass(frozen=True)
class Chunk(Checked):
    """One event of a stream after the risk; the last one has ``finish_reason``, ``usage`` and the
    answer's risk.

    Asked for ``answer_risk``, each has the risk of the answer so far, of its first
    ``answer_tokens``."""

    object: Literal["completion.chunk"]
    index: Count
    delta: Delta
    finish_reason: str | None = None
    usage: Usage | None = None
    answer_risk: Share | None = None
    answer_flagged: bool | None = None
    answer_tokens: Count | None = None


class InvalidBody(Exception):
    """The JSON does not have the expected shape; the message names the first wrong field, never its
    value."""


@cache
def _adapter(shape: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(shape)


def parse(shape: type[T], text: str | bytes) -> T:
    """Read JSON ``text`` as ``shape``.  Raises InvalidBody."""
    try:
        adapter: TypeAdapter[T] = _adapter(shape)  # type: ignore[arg-type]
        return adapter.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        path = ".".join(map(str, first["loc"]))
        message = f"field {path!r}: {first['msg']}" if path else str(first["msg"])
    raise InvalidBody(message)
