"""The record of what was judged of one request, of how its answer ended, and of the request that it
names.

It is made once.  The reply and its stream, the log line, metrics, spans, the audit log, feedback,
the drift monitor and the Python API read it; ``observers`` is the list of those that are told of
it."""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from probes_store.errors import BundleError
from service.access.callers import Caller
from service.access.routes import CHAT_ROUTE, MESSAGES_ROUTE, RESPONSES_ROUTE, TEXT_ROUTE
from service.audit.auditor import Who
from service.engines.base import Completion, Sampling, TokenIds
from service.feedback.rows import Tally
from service.judging.drift import Drift, DriftLimits, LabelTest, Reference, compare, reference_of
from service.judging.guarantee import NO_FACT, GuaranteeStatus, Shape, guarantee_status
from service.policies.guard import Policy
from service.scoring import RiskReport, Scorer
from service.turn import AnswerRisk, Outcome

log = logging.getLogger("hallutracer")
_KEY = secrets.token_bytes(16)  # this process's own: a digest tells nobody else anything
Cause = Literal["drift", "outside", "labels", "golden"]
CAUSES: tuple[Cause, ...] = get_args(Cause)


def digest_of(token_ids: TokenIds) -> bytes:
    """Return what tells within this process whether the same prompt came before, as
    ``Monitor.observe`` wants it."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=8, key=_KEY).digest()


@dataclass(eq=False)
class Monitor:
    """One bundle's.  ``report`` is called when a window was compared or a cause came or went.
    Event loop only."""

    scorer: Scorer
    limits: DriftLimits
    report: Callable[[Monitor], None]
    violations: dict[Cause, str] = field(default_factory=dict)
    drift: Drift | None = None  # of the newest window
    labels: Tally | None = None  # None: the bundle has no guarantee, or no label was looked at yet
    reference: Reference | None = None  # None: it is not watched for drift

    def __post_init__(self) -> None:
        bundle = self.scorer.bundle
        try:
            self.reference = reference_of(bundle)
        except BundleError as error:
            log.error("bundle %s is not watched for drift: %s", bundle.reference, error)
        guarantee = bundle.manifest.guarantee
        self._label_test = None if guarantee is None else LabelTest(guarantee.alpha)
        # by digest: its newest risk, outside
        self._window: OrderedDict[bytes, tuple[float, bool]] = OrderedDict()
        self._seen = self._new = 0

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return why a guarantee of this bundle does not hold just now."""
        return tuple(f"{cause}: {text}" for cause, text in self.violations.items())

    def observe(self, reports: Sequence[RiskReport], prompts: Sequence[bytes]) -> None:
        """Watch prompts that this bundle judged, with the ``digest_of`` each: one that comes again
        is counted once.

        Those that ask for no fact are none that the bundle's risks were fitted on."""
        if self.reference is None:
            return
        for report, prompt in zip(reports, prompts, strict=True):
            if not report.context.applies:
                continue
            self._window[prompt] = (report.bundle_risk, report.uncertain.outside)
            self._window.move_to_end(prompt)
            if len(self._window) > self.limits.window:
                self._window.popitem(last=False)
            self._seen += 1
            self._new += 1
            every = self.limits.every
            # Where few different prompts are asked they never fill a window, and are compared as
            # the few they are.
            if (
                self._seen >= self.limits.window
                and self._new >= every
                and len(self._window) >= every
            ):
                self._new = 0
                self._compare(self.reference)

    def count(self, labels: Tally) -> None:
        """Take what labels say of the answers that were drawn, all of them."""
        if self._label_test is None:
            return
        self.labels, alpha = labels, self._label_test.alpha
        # What has been shown once is not taken back by more labels.
        if self._label_test.broken(labels.wrong, labels.drawn) or "labels" in self.violations:
            text = f"{labels.wrong} of {labels.drawn} answers that were drawn at random are wrong "
            text += (
                f"({labels.labelled} have a label, the others are taken for right), alpha {alpha:g}"
            )
            self._set("labels", text)

    def golden(self, failure: str | None) -> None:
        """Take what replaying the golden prompts gave; None: the recorded risks."""
        self._set("golden", failure)

    def _compare(self, reference: Reference) -> None:
        limits, rows = self.limits, len(reference.risks)
        risks, away = zip(*self._window.values(), strict=True)
        outside = None if reference.outside is None else np.array(away, np.bool_)
        self.drift = drift = compare(np.array(risks, np.float64), outside, reference)

        def beyond(cause: Cause, value: float, limit: Callable[[float], float]) -> bool:
            # The way back is not widened: prompts that are alike are no sign that a drift has
            # ended.
            back = cause in self.violations
            return value > (
                limits.back * limit(drift.prompts) if back else limit(drift.independent)
            )

        apart = beyond("drift", drift.ks, lambda prompts: limits.of_ks(prompts, rows))
        apart |= beyond("drift", drift.psi, lambda prompts: limits.of_psi(prompts, rows))
        text = (
            f"the last {drift.prompts:,} risks are unlike those of training: KS {drift.ks:.2f}, PSI"
            f" {drift.psi:.2f}, "
        )
        text += f"mean {abs(drift.shift):.2f} {'higher' if drift.shift > 0 else 'lower'}"
        self._set("drift", text if apart else None)
        if (share := drift.outside) is not None and reference.outside is not None:
            more = beyond(
                "outside",
                share - reference.outside,
                lambda prompts: limits.of_outside(prompts, share),
            )
            text = f"{share:.1%} of the last {drift.prompts:,} prompts lie outside training, "
            text += f"as {reference.outside:.1%} of its rows do"
            self._set("outside", text if more else None)
        self.report(self)

    def _set(self, cause: Cause, text: str | None) -> None:
        before = cause in self.violations
        if text is None:
            self.violations.pop(cause, None)
        else:
            self.violations[cause] = text
        if before is not (text is not None):
            log.warning(
                "bundle %s: %s: %s", self.scorer.bundle.reference, cause, text or "no longer"
            )
            self.report(self)


_ANSWERS = {
    CHAT_ROUTE: "chatcmpl-",
    TEXT_ROUTE: "cmpl-",
    RESPONSES_ROUTE: "resp_",
    MESSAGES_ROUTE: "msg_",
}
_RISK = "risk-"  # what other routes answer
# of an answer's id; behind it is the request's own
PREFIX = re.compile(f"^({'|'.join([_RISK, *_ANSWERS.values()])})")


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

    Each caller's own: an id of another caller tells nothing.  Used on the event loop only."""

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
        retrieval = self._known.get((caller, PREFIX.sub("", named, count=1)))
        return Retrieval(
            named,
            retrieval if retrieval is not None and retrieval.until > time.monotonic() else None,
        )


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
    # a question that the bundle carries: no traffic, of which feedback and drift tell
    of_sample: bool = False
    request_violations: tuple[str, ...] = ()  # of what a guarantee assumes, by the request
    monitor: Monitor | None = None  # of the bundle, as it was when the request came
    # that the monitor had found when the prompts were judged
    bundle_violations: tuple[str, ...] | None = None
    retrieval: Retrieval | None = None  # where the request names an earlier one
    # index of a prompt that failed -> its ``submitted_ns``
    unscored: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.bundle_violations is None:
            object.__setattr__(
                self, "bundle_violations", () if self.monitor is None else self.monitor.reasons
            )

    @classmethod
    def of(
        cls, scorer: Scorer, policy: Policy, reports: Sequence[RiskReport], request_id: str = ""
    ) -> Judgement:
        """Return the record of prompts that no server was asked about."""
        prompts = tuple(JudgedPrompt(index, report) for index, report in enumerate(reports))
        return cls(scorer=scorer, policy=policy, prompts=prompts, request_id=request_id)

    @property
    def model(self) -> str:
        """Return the name of the model that read the prompts."""
        return self.scorer.engine.identity.model

    @property
    def answer_id(self) -> str:
        """Return the id that the answer has."""
        return f"{_ANSWERS.get(self.route, _RISK)}{self.request_id}"

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
        unjudged = (
            any(not report.context.applies for report in self.reports)
            and not self.policy.withhold_no_fact
        )
        violations = (
            *self.request_violations,
            *((NO_FACT,) if unjudged else ()),
            *(self.bundle_violations or ()),
        )
        shapes = [prompt.shape for prompt in self.prompts]
        manifest, dtype = self.scorer.bundle.manifest, self.scorer.engine.identity.dtype
        return guarantee_status(manifest, self.policy, dtype, violations, shapes)


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """How the answer to one judged prompt ended, if it had one."""

    tokens: int = 0  # decoded; what was decoded before a reader left was decoded all the same
    # from the verdict to the last token; None where nothing was decoded to its end
    decode_s: float | None = None
    outcome: Outcome = Outcome.SCORED  # of one that has not ended, too
    completion: Completion | None = None  # what was shown
    risk: AnswerRisk | None = None  # of the whole answer

    @classmethod
    def of(cls, report: RiskReport, tokens: int, decode_s: float | None = None) -> AnswerEnd:
        """Return how an answer has ended by its last report, or how far it had come; ``tokens``:
        decoded so far."""
        completion = report.completion
        if report.outcome is Outcome.SCORED:
            return cls(tokens, decode_s)
        counted = tokens if completion is None else completion.tokens
        return cls(counted, decode_s, report.outcome, completion, report.answer)
