"""Prometheus metrics.

Labels are ``model_name``, ``bundle`` and ``shadow`` ("name:version"), ``role``, ``route``,
``flagged``, ``decision``, ``verdict``, ``cause``, ``statistic``, ``status``, ``code``, ``outcome``,
of conversations ``turns``, ``passage`` and ``system``, and of feedback ``label`` and ``fate``; no
label holds user input, so the number of series is bounded. Series known in advance exist as 0 from
the first scrape, because a rate over a missing series is an empty panel and an alert that cannot
fire.

For several processes on one machine, set ``PROMETHEUS_MULTIPROC_DIR`` to an empty folder before
they start: each writes its values there, and each serves the sum.  The variable belongs to
``prometheus_client``, which reads it on import. ``process_*`` is then left out: it would be of
whichever process answers the scrape."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import prometheus_client as prometheus
from prometheus_client import CollectorRegistry, generate_latest, values
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from service import __version__
from service.access.routes import COUNTED, OTHER
from service.audit.auditor import Fate as AuditFate
from service.errors import HalluTracerError
from service.feedback.rows import LABELS, Label
from service.feedback.writer import Fate
from service.judging.drift import Drift
from service.judging.guarantee import SHAPES, Shape
from service.policies.guard import Decision
from service.scoring import RiskReport, ShadowRisk
from service.serving.judgement import CAUSES, AnswerEnd, Cause, Judgement
from service.serving.log_queue import Fate as LogFate
from service.turn import Outcome

# of a prompt that was sent to an upstream
UpstreamOutcome = Literal["answered", "failed", "given_up"]
ShadowVerdict = Literal["agrees", "stricter", "looser", "failed"]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
SECONDS = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)
DIFFERENCES = (0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
TENTHS = tuple(n / 10 for n in range(1, 11))
BATCH_SIZES = tuple(2**n for n in range(11))  # 1 .. 1,024
TOKENS = tuple(2**n for n in range(18))  # 1 .. 131,072
BUNDLE = ("model_name", "bundle")
SHAPE = (*BUNDLE, "turns", "passage", "system")
JUDGED: tuple[Label, ...] = ("factual", "hallucinated")
TIMED = {200, 500, 502, 504}  # statuses in request_seconds: fast refusals would hide slow answers


def _subclasses(root: type[HalluTracerError]) -> Iterator[type[HalluTracerError]]:
    yield root
    for child in root.__subclasses__():
        yield from _subclasses(child)


# Wire code -> HTTP status, of a code with several that of its first class; a test compares the last
# line with service/api/error_handlers.py.
STATUS_OF: dict[str, int] = {
    error.code: error.status for error in reversed([*_subclasses(HalluTracerError)])
} | {
    "invalid_json": 400,
    "method_not_allowed": 405,
}


class _Registry(CollectorRegistry):
    """Without the ``*_created`` series that the client library adds."""

    def collect(self) -> Iterator[Metric]:
        for family in super().collect():
            family.samples = [
                sample for sample in family.samples if not sample.name.endswith("_created")
            ]
            yield family


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _labels(shape: Shape | None) -> tuple[str, str, str]:
    return (
        ("unknown",) * 3
        if shape is None
        else (shape.turns, _yes(shape.passage), _yes(shape.system))
    )


_Series = tuple[str, str, tuple[str, ...], Any, dict[str, Any]]


def _counter(name: str, text: str, *labels: str) -> _Series:
    return name, text, labels, prometheus.Counter, {}


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> _Series:
    return name, text, labels, prometheus.Histogram, {"buckets": buckets}


def _gauge(name: str, text: str, processes: str, *labels: str) -> _Series:
    """``processes``: how those that live add up."""
    return name, text, labels, prometheus.Gauge, {"multiprocess_mode": processes}


_SERIES: tuple[_Series, ...] = (  # in the order of ``/metrics``
    _counter("prompts_total", "Prompts scored, by decision.", *BUNDLE, "decision"),
    _counter("flagged_total", "Prompts whose risk reached the threshold.", *BUNDLE),
    _counter(
        "route_prompts_total",
        "Prompts scored, by the route they came by: did the risk reach the threshold?",
        *BUNDLE,
        "route",
        "flagged",
    ),
    _counter(
        "gated_by_route_total",
        "Prompts whose answer was withheld, by the route they came by.",
        *BUNDLE,
        "route",
    ),
    _counter(
        "key_prompts_total",
        "Prompts scored, by the name of the caller's key, where keys are asked for: was the"
        " answer withheld?",
        "key",
        "withheld",
    ),
    # A sum and a count: buckets would be ten series more for each of the 17 shapes.
    (
        "risk_by_conversation",
        (
            "Risk by a conversation's shape: the assistant's earlier turns, a passage, a system"
            " prompt."
        ),
        SHAPE,
        prometheus.Summary,
        {},
    ),
    _counter(
        "gated_by_conversation_total",
        "Prompts whose answer was withheld, by a conversation's shape.",
        *SHAPE,
    ),
    _counter(
        "outside_training_total",
        "Prompts outside training; stays 0 where the bundle cannot tell.",
        *BUNDLE,
    ),
    _counter(
        "no_fact_total",
        "Prompts that ask for no fact, whose risk is not counted; stays 0 where the bundle"
        " cannot tell.",
        *BUNDLE,
    ),
    _counter(
        "canary_overruled_total",
        "Prompts that a canary lets pass and the default bundle's verdict does not.",
        *BUNDLE,
    ),
    _counter("prompt_tokens_total", "Prompt tokens of scored prompts.", *BUNDLE),
    _counter("completion_tokens_total", "Answer tokens decoded.", *BUNDLE),
    _counter("errors_total", "Requests that ended in an error, by wire code.", "code"),
    _counter("http_requests_total", "Scoring requests, by HTTP status.", "status"),
    _counter(
        "upstream_requests_total",
        "Withheld answers sent to a policy's upstream: answered, failed, or given up by us.",
        "outcome",
    ),
    _counter(
        "feedback_labels_total",
        "Labels of answers that callers gave, repeats and changes included, by label.",
        *BUNDLE,
        "label",
    ),
    _counter(
        "feedback_agreement_total",
        "First labels, factual or hallucinated, of answers that were given: was the prompt"
        " flagged?",
        *BUNDLE,
        "flagged",
        "label",
    ),
    _counter(
        "feedback_answers_total",
        "Scored prompts kept for feedback: stored, or dropped because the database did not"
        " keep up.",
        "fate",
    ),
    _counter(
        "audit_lines_total",
        "Lines of the audit log: written, or missed; broken: written after lines that somebody"
        " had changed.",
        "fate",
    ),
    _counter(
        "log_lines_total",
        "Lines of the log: written, or dropped because nobody read them or they could not be"
        " written.",
        "fate",
    ),
    _histogram("risk", "Risk of each scored prompt.", TENTHS, *BUNDLE),
    _histogram("answer_risk", "Risk of each finished answer, by its own tokens.", TENTHS, *BUNDLE),
    _counter(
        "answers_flagged_total",
        "Answers that the risk before them let through and their own tokens did not.",
        *BUNDLE,
    ),
    _counter(
        "answers_stopped_total",
        "Answers that a policy ended under way, by the risk of their own tokens.",
        *BUNDLE,
    ),
    _counter(
        "tool_calls_let_through_total",
        "Turns of nothing but calls of tools, given although an answer there would have been"
        " withheld.",
        *BUNDLE,
    ),
    _histogram(
        "request_seconds",
        "A whole scoring request that was worked on: answered, failed or late, not refused.",
        SECONDS,
    ),
    _histogram("queue_seconds", "A prompt's wait for a forward pass.", SECONDS),
    _histogram("prefill_seconds", "The forward pass that a prompt was in.", SECONDS),
    _histogram(
        "probe_seconds",
        "One prompt's truth logits to a verdict; the readout itself is inside the prefill.",
        SECONDS,
    ),
    _histogram(
        "risk_seconds",
        "A prompt's arrival in the queue to its verdict: what the guard adds before an answer"
        " begins.",
        SECONDS,
    ),
    _histogram("decode_seconds", "Decoding one prompt's answer.", SECONDS),
    _histogram(
        "batch_prompts",
        "Prompts in one forward pass; 1 where the engine makes its own batches.",
        BATCH_SIZES,
    ),
    _histogram("batch_tokens", "Prompt tokens in one forward pass, or of one prompt.", TOKENS),
    _histogram("prompt_length_tokens", "Tokens of one prompt.", TOKENS),
    _gauge("queue_depth", "Prompts waiting for a forward pass.", "livesum"),
    _gauge("running_decodes", "Answers being decoded.", "livesum"),
    _gauge("requests_in_flight", "Scoring requests being served.", "livesum"),
    _gauge("ready", "1 once scores can be served, else 0.", "livemin"),
    _gauge(
        "gate_configured",
        "1 where the policy of requests that choose none, or a rule's, does not only observe,"
        " else 0.",
        "livemax",
    ),
    _gauge(
        "keys_stale",
        "1 while the file of named keys has changed and could not be read again, else 0.",
        "livemax",
    ),
    _gauge("bundle_info", "Always 1: a loaded bundle.", "livemax", *BUNDLE, "digest"),
    _gauge(
        "guarantee_info",
        "Always 1: a loaded bundle whose threshold is guaranteed, with alpha and delta.",
        "livemax",
        *BUNDLE,
        "alpha",
        "delta",
    ),
    _gauge("build_info", "Always 1: the version.", "livemax", "version"),
    _gauge(
        "bundle_role_info",
        "Always 1: what a loaded bundle does: default, canary or shadow.",
        "livemax",
        *BUNDLE,
        "role",
    ),
    _gauge(
        "drift",
        "The newest window of prompts beside training: ks, psi, shift of the mean risk, outside"
        " training.",
        "livemax",
        *BUNDLE,
        "statistic",
    ),
    _gauge(
        "void",
        "1 where a bundle's promise does not hold, by cause: drift, outside, labels, golden.",
        "livemax",
        *BUNDLE,
        "cause",
    ),
    _counter(
        "reloads_total", "Reloads of the bundles: done, or failed and nothing changed.", "outcome"
    ),
    _gauge(
        "last_reload_successful",
        "1 where the newest reload of the bundles went well, or none was asked for; 0 where it"
        " changed nothing.",
        "livemin",
    ),
    _counter(
        "shadow_prompts_total",
        "Prompts that a shadow read too: agrees, stricter (it alone flags), looser (it alone"
        " does not), or failed.",
        *BUNDLE,
        "shadow",
        "verdict",
    ),
    _histogram(
        "shadow_risk_difference",
        "How far a shadow's risk is from that of the bundle that judged.",
        DIFFERENCES,
        *BUNDLE,
        "shadow",
    ),
)
# Label sets that exist as 0: without a bundle from the first scrape, behind a bundle's own from its
# loading.
_FIRST: dict[str, Iterable[str]] = {
    "errors_total": STATUS_OF,
    "http_requests_total": [str(status) for status in {200, *STATUS_OF.values()}],
    "upstream_requests_total": get_args(UpstreamOutcome),
    "feedback_answers_total": get_args(Fate),
    "audit_lines_total": get_args(AuditFate),
    "log_lines_total": get_args(LogFate),
    "reloads_total": ("done", "failed"),
}
_SHAPES = [_labels(shape) for shape in (*SHAPES, None)]
_OF_BUNDLE: dict[str, Sequence[tuple[str, ...]]] = {
    **{name: [()] for name, _, labels, _, _ in _SERIES if labels == BUNDLE},
    "feedback_labels_total": [(label,) for label in LABELS],
    "feedback_agreement_total": [*product(("yes", "no"), JUDGED)],
    "prompts_total": [(str(decision),) for decision in Decision],
    "route_prompts_total": [*product(COUNTED, ("yes", "no"))],
    "gated_by_route_total": [(route,) for route in COUNTED],
    "risk_by_conversation": _SHAPES,
    "gated_by_conversation_total": _SHAPES,
}


@dataclass
class Comparison:
    """A shadow beside the bundles that judged the same prompts: prompts by verdict, and the risks'
    difference."""

    by_verdict: dict[ShadowVerdict, int] = field(
        default_factory=lambda: dict.fromkeys(get_args(ShadowVerdict), 0)
    )
    difference: float = 0.0  # absolute, summed

    def add(self, shadow: ShadowRisk, report: RiskReport) -> ShadowVerdict:
        """Count one more prompt and return what it was."""
        verdict: ShadowVerdict = "failed"
        if shadow.risk is not None:
            self.difference += abs(shadow.risk - report.risk)
            agrees = shadow.flagged == report.verdict.flagged
            verdict = "agrees" if agrees else "stricter" if shadow.flagged else "looser"
        self.by_verdict[verdict] += 1
        return verdict


class Metrics:
    """One process's counters.  Thread-safe; each instance has a registry of its own.

    Raises HalluTracerError where ``PROMETHEUS_MULTIPROC_DIR`` is no writable folder, or was changed
    since the import.
    """

    def __init__(self) -> None:
        self._folder = _shared_folder()
        self.collector = _Registry()
        # Memory, CPU and open files, under every exporter's names. Apart, because the registry of
        # vLLM, into which its plugin puts ours, has them already and refuses them twice.
        self._process = CollectorRegistry()
        prometheus.ProcessCollector(registry=self._process)
        self._all: dict[str, Any] = {}
        for name, text, labels, kind, options in _SERIES:
            self._all[name] = kind(
                f"hallutracer_{name}", text, labels, registry=self.collector, **options
            )
        self._all["build_info"].labels(__version__).set(1)
        for name in (
            "queue_depth",
            "running_decodes",
            "requests_in_flight",
            "ready",
            "keys_stale",
            "gate_configured",
        ):
            # a shared folder may hold values of an earlier process with this id
            self.gauge(name, 0)
        self.gauge("last_reload_successful", 1)
        for name, first in _FIRST.items():
            for value in first:
                self._all[name].labels(value)
        self.compared: dict[str, Comparison] = {}  # by the shadow, "name:version"
        # labels of the gauges that are 1 for what is loaded
        self._listed: dict[str, set[tuple[str, ...]]] = {}
        self._known: set[tuple[str, str]] = set()  # bundles whose series exist

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        """Add to a counter of ``_SERIES``, named without its prefix."""
        self._all[name].labels(*labels).inc(by)

    def gauge(self, name: str, value: float) -> None:
        """Set a gauge without labels."""
        self._all[name].set(value)

    def batch(self, prompts: int, tokens: int) -> None:
        """Count one forward pass over ``prompts`` prompts with ``tokens`` tokens in total."""
        self._all["batch_prompts"].observe(prompts)
        self._all["batch_tokens"].observe(tokens)

    def queue(self, waiting: int, decoding: int) -> None:
        """Set the number of prompts that wait, and that decode, at this moment."""
        self.gauge("queue_depth", waiting)
        self.gauge("running_decodes", decoding)

    def judged(self, judgement: Judgement, answers: Sequence[AnswerEnd]) -> None:
        """Count the prompts that were scored, with the end of each one's answer."""
        model, bundle = judgement.model, judgement.bundle
        self._create(model, bundle)
        count = partial(self._of, "inc", model, bundle)
        observe = partial(self._of, "observe", model, bundle)
        route = judgement.route if judgement.route in COUNTED else OTHER
        for prompt, answer in zip(judgement.prompts, answers, strict=True):
            report = prompt.report
            timings = prompt.timings
            shape = _labels(prompt.shape)
            withheld = report.decision is not Decision.CONTINUE
            count("route_prompts_total", route, _yes(report.verdict.flagged))
            count("prompts_total", report.decision.value)
            for name, holds in (
                ("flagged_total", report.verdict.flagged),
                ("outside_training_total", report.uncertain.outside),
                ("no_fact_total", not report.context.applies),
                ("canary_overruled_total", report.decided_by is not None),
            ):
                if holds:
                    count(name)
            for shadow in report.shadows:
                verdict = self.compared.setdefault(shadow.bundle, Comparison()).add(shadow, report)
                count("shadow_prompts_total", shadow.bundle, verdict)
                if shadow.risk is not None:
                    observe(
                        "shadow_risk_difference", shadow.bundle, by=abs(shadow.risk - report.risk)
                    )
            if report.context.applies:
                observe("risk", by=report.risk)
                observe("risk_by_conversation", *shape, by=report.risk)
            if withheld:
                count("gated_by_conversation_total", *shape)
                count("gated_by_route_total", route)
            if judgement.who.key is not None:
                self.key(judgement.who.key, withheld=withheld)
            count("prompt_tokens_total", by=report.prompt_tokens)
            count("completion_tokens_total", by=answer.tokens)
            self._all["prompt_length_tokens"].observe(report.prompt_tokens)
            for phase in ("queue", "prefill", "probe"):
                self._all[f"{phase}_seconds"].observe(getattr(timings, phase))
            self._all["risk_seconds"].observe(timings.total)
            if answer.risk is not None:
                observe("answer_risk", by=answer.risk.risk)
                count(
                    "answers_flagged_total",
                    by=int(answer.risk.flagged and not report.verdict.flagged),
                )
            count("answers_stopped_total", by=int(answer.outcome is Outcome.STOPPED))
            count("tool_calls_let_through_total", by=int(report.tool_call))
            if answer.decode_s is not None:
                self._all["decode_seconds"].observe(answer.decode_s)

    def key(self, name: str, *, withheld: bool) -> None:
        """Count one prompt of the key of this name."""
        self.count("key_prompts_total", name, _yes(withheld))

    def rollout(
        self, model_name: str, default: str, canary: str | None, shadows: Sequence[str]
    ) -> None:
        """Set what each loaded bundle ("name:version") does from now on."""
        judging = [("default", default), *(() if canary is None else (("canary", canary),))]
        roles = [*judging, *(("shadow", shadow) for shadow in shadows)]
        now = {(model_name, bundle, role) for role, bundle in roles}
        before = self._listed.get("bundle_role_info", set())
        if any(role != "shadow" for _, _, role in before ^ now):
            self.compared.clear()  # they were compared with what judged until now
        self._list("bundle_role_info", now)
        for (_, bundle), shadow in product(judging, shadows):
            self._all["shadow_risk_difference"].labels(model_name, bundle, shadow)
            for name in get_args(ShadowVerdict):
                self._all["shadow_prompts_total"].labels(model_name, bundle, shadow, name)

    def watched(
        self, model_name: str, bundle: str, drift: Drift | None, violations: Collection[Cause]
    ) -> None:
        """Set what a loaded bundle's monitor has found."""
        for cause in CAUSES:
            self._all["void"].labels(model_name, bundle, cause).set(int(cause in violations))
        for name in () if drift is None else ("ks", "psi", "shift", "outside"):
            if (value := getattr(drift, name)) is not None:
                self._all["drift"].labels(model_name, bundle, name).set(value)

    def reloaded(self, done: bool) -> None:
        """Count one more reload of the bundles."""
        self.count("reloads_total", "done" if done else "failed")
        self.gauge("last_reload_successful", int(done))

    def log_lines(self, fate: LogFate, count: int) -> None:
        """Count lines of the log."""
        self.count("log_lines_total", fate, by=count)

    def audit_lines(self, fate: AuditFate, count: int) -> None:
        """Count so many lines of the audit log that were written, or were not."""
        self.count("audit_lines_total", fate, by=count)

    def feedback(self, model_name: str, bundle: str, label: Label, flagged: bool | None) -> None:
        """Count a label on disk; ``flagged`` where it is its caller's first, and about an answer
        that was given."""
        self.count("feedback_labels_total", model_name, bundle, label)
        if flagged is not None and label in JUDGED:
            self.count("feedback_agreement_total", model_name, bundle, _yes(flagged), label)

    def request_started(self) -> None:
        """Count a scoring request that arrived; ``request_ended`` must follow in every case."""
        self._all["requests_in_flight"].inc()

    def request_ended(self, status: int, code: str | None, seconds: float) -> None:
        """Count a scoring request that ended with an HTTP ``status`` and, on errors, a wire
        ``code``."""
        self._all["requests_in_flight"].dec()
        if status in TIMED:
            self._all["request_seconds"].observe(seconds)
        self.count("http_requests_total", str(status))
        if code is not None:
            self.count("errors_total", code)

    def ready(self, value: bool) -> None:
        """Set whether scores can be served."""
        self.gauge("ready", int(value))

    def bundles(self, loaded: Iterable[tuple[str, str, str]]) -> None:
        """List these (model, "name:version", digest) as loaded, and no others: create their series,
        all 0."""
        now, void = set(loaded), self._all["void"]
        for gone, cause in product(self._listed.get("bundle_info", set()) - now, CAUSES):
            void.labels(*gone[:2], cause).set(0)
        self._list("bundle_info", now)
        for model_name, bundle, _ in now:
            self._create(model_name, bundle)
            for cause in CAUSES:
                void.labels(model_name, bundle, cause)

    def guarantees(self, loaded: Iterable[tuple[str, str, float, float]]) -> None:
        """List these (model, "name:version", alpha, delta) as the loaded bundles' guarantees, and
        no others."""
        self._list(
            "guarantee_info",
            {(*names, f"{alpha:g}", f"{delta:g}") for *names, alpha, delta in loaded},
        )

    def render(self) -> tuple[bytes, str]:
        """Return body and content type of ``GET /metrics``; with a shared folder, over all its
        processes."""
        if self._folder is None:
            return generate_latest(self.collector) + generate_latest(self._process), CONTENT_TYPE
        for pid in {path.stem.rpartition("_")[2] for path in self._folder.glob("gauge_live*_*.db")}:
            if pid.isdigit() and not _alive(int(pid)):  # it ended without ``close``
                mark_process_dead(int(pid), str(self._folder))  # type: ignore[no-untyped-call]
        all_processes = CollectorRegistry()
        MultiProcessCollector(  # type: ignore[no-untyped-call]
            all_processes, path=str(self._folder)
        )
        return generate_latest(all_processes), CONTENT_TYPE

    def close(self) -> None:
        """Remove this process's gauges from a shared folder; its counters stay, so sums do not
        fall."""
        if self._folder is not None:
            mark_process_dead(os.getpid(), str(self._folder))  # type: ignore[no-untyped-call]

    def _of(
        self, what: str, model: str, bundle: str, name: str, *labels: str, by: float = 1
    ) -> None:
        getattr(self._all[name].labels(model, bundle, *labels), what)(by)

    def _create(self, *bundle: str) -> None:
        if bundle not in self._known:
            self._known.add(bundle)  # type: ignore[arg-type]
            for name, every in _OF_BUNDLE.items():
                for labels in every:
                    self._all[name].labels(*bundle, *labels)

    def _list(self, name: str, labels_of: Collection[tuple[str, ...]]) -> None:
        gauge, now = self._all[name], set(labels_of)
        for gone in self._listed.get(name, set()) - now:
            gauge.labels(*gone).set(0)  # processes that share a folder keep the series
            gauge.remove(*gone)
        for labels in now:
            gauge.labels(*labels).set(1)
        self._listed[name] = now


def _shared_folder() -> Path | None:
    """Return the processes' shared folder, checked by writing to it; None for a single process."""
    name = os.environ.get(FOLDER_VARIABLE)
    # prometheus_client decides between memory and files once, on import.
    if (name is not None) == (values.ValueClass is values.MutexValue):
        change = "set" if name is not None else "unset"
        raise HalluTracerError(
            f"{FOLDER_VARIABLE} was {change} after prometheus_client was imported; {change} it"
            " before Python starts"
        )
    if name is None:
        return None
    try:
        with tempfile.TemporaryFile(dir=name or os.devnull):  # an empty name would mean this folder
            return Path(name)
    except OSError as error:
        raise HalluTracerError(
            f"{FOLDER_VARIABLE}={name}: cannot write there ({error.strerror}); create an empty,"
            f" writable folder before the service starts, or unset {FOLDER_VARIABLE}"
        ) from None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
