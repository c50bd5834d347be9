"""The record of what was judged of one request, of how its answer ended, and of the request that it names.

It is made once.  The reply and its stream, the log line, metrics, spans, the audit log, feedback, the drift monitor and
the Python API read it; ``observers`` is the list of those that are told of it.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from service.access.callers import Caller
from service.audit.events import Who
from service.engines.base import Completion, Sampling, TokenIds
from service.judging.guarantee import GuaranteeStatus, Shape, guarantee_status
from service.policies.guard import Policy
from service.scoring import RiskReport, Scorer
from service.serving.monitor import Monitor

PREFIX = re.compile(r"^(risk|chatcmpl|cmpl)-")  # of the ids that answers have; behind it is the request's own


@dataclass(frozen=True, slots=True)
class PromptTimings:
    """Where the time of one prompt's risk went, in seconds."""

    queue: float = 0.0  # from submission to the start of its forward pass
    prefill: float = 0.0  # of its batch's forward pass, readouts and truth logits included
    probe: float = 0.0  # from truth logits to a verdict

    @property
    def total(self) -> float:
        """Return the time from submission to the verdict."""
        return self.queue + self.prefill + self.probe


@dataclass(frozen=True, slots=True)
class StoredPrompt:
    """What feedback stores of one prompt's text."""

    mark: str
    prompt: str | None


@dataclass(frozen=True, slots=True)
class JudgedPrompt:
    """One prompt of a request that was scored."""

    index: int
    report: RiskReport
    token_ids: TokenIds = ()
    timings: PromptTimings = PromptTimings()
    submitted_ns: int = 0  # since 1970, for traces
    shape: Shape | None = None  # of its conversation; None: it is not known, as of token ids
    stored: StoredPrompt | None = None  # None: no feedback is kept


@dataclass(frozen=True, slots=True)
class FirstRisk:
    """What a prompt was judged before retrieval."""

    risk: float
    digest: str  # of the bundle that said so
    until: float


@dataclass(frozen=True, slots=True)
class Retrieval:
    """A request that names an earlier one.  ``first`` None: it is not known here, or no longer."""

    of: str
    first: FirstRisk | None


class Retrievals:
    """The risks of prompts that were sent to fetch a passage, until they are asked again with it.

    Each caller's own: an id of another caller tells nothing.  Used on the event loop only.
    """

    def __init__(self, most: int = 10_000, seconds: float = 3600.0) -> None:
        """Remember ``most`` at once, for ``seconds``; the oldest go first."""
        self._most, self._seconds = most, seconds
        self._known: OrderedDict[tuple[str, str], FirstRisk] = OrderedDict()

    def record(self, caller: str, request_id: str, risk: float, digest: str) -> None:
        """Remember a request whose only prompt was sent to fetch a passage."""
        self._known.pop((caller, request_id), None)
        self._known[caller, request_id] = FirstRisk(risk, digest, time.monotonic() + self._seconds)
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def recall(self, caller: str, named: str) -> Retrieval:
        """Return what is known of a request by the ``id`` of its answer."""
        found = self._known.get((caller, PREFIX.sub("", named, count=1)))
        return Retrieval(named, found if found is not None and found.until > time.monotonic() else None)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What one bundle said of a request's prompts under one policy, and what the request was."""

    scorer: Scorer
    policy: Policy
    prompts: tuple[JudgedPrompt, ...]
    request_id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    route: str = ""  # that it came by; of an alias its own
    caller: Caller = Caller()
    who: Who = Who()  # for the audit log
    sampling: Sampling | None = None  # None: scores only
    streams: bool = False
    request_violations: tuple[str, ...] = ()  # of what a guarantee assumes, by the request
    monitor: Monitor | None = None  # of the bundle, as it was when the request came
    bundle_violations: tuple[str, ...] | None = None  # that the monitor had found when the prompts were judged
    retrieval: Retrieval | None = None  # where the request names an earlier one
    unscored: Mapping[int, int] = field(default_factory=dict)  # index of a prompt that failed -> its ``submitted_ns``

    def __post_init__(self) -> None:
        if self.bundle_violations is None:
            object.__setattr__(self, "bundle_violations", () if self.monitor is None else self.monitor.reasons)

    @classmethod
    def of(cls, scorer: Scorer, policy: Policy, reports: Sequence[RiskReport], request_id: str = "") -> Judgement:
        """Return the record of prompts that no server was asked about."""
        prompts = tuple(JudgedPrompt(index, report) for index, report in enumerate(reports))
        return cls(scorer=scorer, policy=policy, prompts=prompts, request_id=request_id)

    @property
    def model(self) -> str:
        """Return the name of the model that read the prompts."""
        return self.scorer.engine.identity.model

    @property
    def bundle(self) -> str:
        """Return the bundle as name:version."""
        return self.scorer.bundle.reference

    @property
    def digest(self) -> str:
        """Return the bundle's digest."""
        return self.scorer.bundle.manifest.digest

    @property
    def threshold(self) -> float:
        """Return the risk from which on a prompt was flagged; call it where one was scored."""
        return self.prompts[0].report.verdict.threshold

    @cached_property
    def reports(self) -> list[RiskReport]:
        """Return the prompts' reports, in their order."""
        return [prompt.report for prompt in self.prompts]

    @property
    def guarantee(self) -> GuaranteeStatus | None:
        """Return the bundle's guarantee as it stands for this request; None where it has none."""
        violations = (*self.request_violations, *(self.bundle_violations or ()))
        return guarantee_status(self.scorer.bundle.manifest, self.policy, self.scorer.engine.identity.dtype, violations)


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """How the answer to one judged prompt ended, if it had one."""

    tokens: int = 0  # decoded; what was decoded before a reader left was decoded all the same
    decode_s: float | None = None  # from the verdict to the last token; None where nothing was decoded to its end
    completion: Completion | None = None
