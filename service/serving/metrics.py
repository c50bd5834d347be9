"""Prometheus metrics.

Labels are ``model_name``, ``bundle`` and ``shadow`` ("name:version"), ``role``, ``route``, ``flagged``, ``decision``,
``verdict``, ``cause``, ``statistic``, ``status``, ``code``, ``outcome``, of conversations ``turns``, ``passage`` and
``system``, and of feedback ``label`` and ``fate``; no label holds user input, so the number of series is bounded.
Series known in advance exist as 0 from the first scrape, because a rate over a missing series is an empty panel and an
alert that cannot fire.

For several processes on one machine, set ``PROMETHEUS_MULTIPROC_DIR`` to an empty folder before they start: each writes
its values there, and each serves the sum.  The variable belongs to ``prometheus_client``, which reads it on import.
``process_*`` is then left out: it would be of whichever process answers the scrape.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    Summary,
    generate_latest,
    values,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from service import __version__
from service.access.routes import COUNTED, OTHER
from service.audit.auditor import Fate as AuditFate
from service.errors import HalluTracerError
from service.feedback.rows import LABELS, Label
from service.feedback.writer import Fate
from service.judging.conversation import SHAPES, Shape
from service.judging.drift import Drift
from service.policies.guard import Decision
from service.serving.judgement import AnswerEnd, Judgement
from service.serving.monitor import CAUSES, Cause
from service.serving.rollout import Comparison, ShadowVerdict

Outcome = Literal["answered", "failed", "given_up"]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
DIFFERENCES = (0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
TENTHS = tuple(n / 10 for n in range(1, 11))
BATCH_SIZES = tuple(2**n for n in range(11))  # 1 .. 1,024
TOKENS = tuple(2**n for n in range(18))  # 1 .. 131,072
BUNDLE = ("model_name", "bundle")
JUDGED: tuple[Label, ...] = ("factual", "hallucinated")
TIMED = {200, 500, 502, 504}  # statuses in request_seconds: fast refusals would hide slow answers


def _subclasses(root: type[HalluTracerError]) -> Iterator[type[HalluTracerError]]:
    yield root
    for child in root.__subclasses__():
        yield from _subclasses(child)


# Wire code -> HTTP status; a test compares the last line with service/api/error_handlers.py.
STATUS_OF: dict[str, int] = {error.code: error.status for error in _subclasses(HalluTracerError)} | {
    "invalid_json": 400,
    "method_not_allowed": 405,
}


class _Registry(CollectorRegistry):
    """Without the ``*_created`` series that the client library adds."""

    def collect(self) -> Iterator[Metric]:
        for family in super().collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


class Metrics:
    """One process's counters.  Thread-safe; each instance has a registry of its own.

    Raises:
        HalluTracerError: ``PROMETHEUS_MULTIPROC_DIR`` is not a writable folder, or was set or unset after
            ``prometheus_client`` had been imported.
    """

    def __init__(self) -> None:
        self._folder = _shared_folder()
        self.collector = registry = _Registry()
        # Memory, CPU and open files, under every exporter's names.  Apart, because the registry of vLLM, into
        # which its plugin puts ours, has them already and refuses them twice.
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)

        def counter(name: str, text: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(f"hallutracer_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], labels: Iterable[str] = ()) -> Histogram:
            return Histogram(f"hallutracer_{name}", text, labels, buckets=buckets, registry=registry)

        def gauge(name: str, text: str, mode: str, labels: Iterable[str] = ()) -> Gauge:
            return Gauge(f"hallutracer_{name}", text, labels, multiprocess_mode=mode, registry=registry)  # type: ignore[arg-type]

        self._prompts = counter("prompts_total", "Prompts scored, by decision.", (*BUNDLE, "decision"))
        self._flagged = counter("flagged_total", "Prompts whose risk reached the threshold.", BUNDLE)
        text = "Prompts scored, by the route they came by: did the risk reach the threshold?"
        self._by_route = counter("route_prompts_total", text, (*BUNDLE, "route", "flagged"))
        text = "Prompts that the policy did not let the model answer, by the route they came by."
        self._gated_by_route = counter("gated_by_route_total", text, (*BUNDLE, "route"))
        text = "Prompts scored, by the name of the caller's key, where keys are asked for: was the answer withheld?"
        self._by_key = counter("key_prompts_total", text, ("key", "withheld"))
        # A sum and a count: buckets would be ten series more for each of the 17 shapes.
        text = "Risk by a conversation's shape: the assistant's earlier turns, a passage, a system prompt."
        shape = (*BUNDLE, "turns", "passage", "system")
        self._by_shape = Summary("hallutracer_risk_by_conversation", text, shape, registry=registry)
        text = "Prompts that the policy did not let the model answer, by a conversation's shape."
        self._gated_by_shape = counter("gated_by_conversation_total", text, shape)
        text = "Prompts outside what training saw; stays 0 where the bundle cannot tell."
        self._outside = counter("outside_training_total", text, BUNDLE)
        text = "Prompts that ask for no fact, whose risk is not counted; stays 0 where the bundle cannot tell."
        self._no_fact = counter("no_fact_total", text, BUNDLE)
        self._prompt_tokens = counter("prompt_tokens_total", "Prompt tokens of scored prompts.", BUNDLE)
        self._completion_tokens = counter("completion_tokens_total", "Answer tokens decoded.", BUNDLE)
        self._errors = counter("errors_total", "Requests that ended in an error, by wire code.", ("code",))
        self._requests = counter("http_requests_total", "Scoring requests, by HTTP status.", ("status",))

        text = "Withheld answers sent to a policy's upstream: answered, failed, or given up by us."
        self._upstream = counter("upstream_requests_total", text, ("outcome",))
        self._by_outcome: dict[Outcome, Counter] = {name: self._upstream.labels(name) for name in get_args(Outcome)}

        text = "Labels of answers that callers gave, repeats and changes included, by label."
        self._labels = counter("feedback_labels_total", text, (*BUNDLE, "label"))
        text = "First labels, factual or hallucinated, of answers that were given: was the prompt flagged?"
        self._agreement = counter("feedback_agreement_total", text, (*BUNDLE, "flagged", "label"))
        text = "Scored prompts kept for feedback: stored, or dropped because the database did not keep up."
        answers = counter("feedback_answers_total", text, ("fate",))
        self._by_fate: dict[Fate, Counter] = {name: answers.labels(name) for name in get_args(Fate)}
        text = "Lines of the audit log: written, or missed; broken: written after lines that somebody had changed."
        lines = counter("audit_lines_total", text, ("fate",))
        self._by_audit: dict[AuditFate, Counter] = {name: lines.labels(name) for name in get_args(AuditFate)}

        self._risk = histogram("risk", "Risk of each scored prompt.", TENTHS, BUNDLE)
        text = "A whole scoring request that was worked on: answered, failed or late, not refused."
        self._request_s = histogram("request_seconds", text, SECONDS)
        self._queue_s = histogram("queue_seconds", "A prompt's wait for a forward pass.", SECONDS)
        self._prefill_s = histogram("prefill_seconds", "The forward pass that a prompt was in.", SECONDS)
        text = "One prompt's truth logits to a verdict; the readout itself is inside the prefill."
        self._probe_s = histogram("probe_seconds", text, SECONDS)
        text = "A prompt's arrival in the queue to its verdict: what the guard adds before an answer begins."
        self._risk_s = histogram("risk_seconds", text, SECONDS)
        self._decode_s = histogram("decode_seconds", "Decoding one prompt's answer.", SECONDS)
        text = "Prompts in one forward pass; 1 where the engine makes its own batches."
        self._batch_prompts = histogram("batch_prompts", text, BATCH_SIZES)
        self._batch_tokens = histogram("batch_tokens", "Prompt tokens in one forward pass, or of one prompt.", TOKENS)
        self._length = histogram("prompt_length_tokens", "Tokens of one prompt.", TOKENS)

        # Over live processes: livesum adds up, livemin is 1 only if all are ready.
        self._waiting = gauge("queue_depth", "Prompts waiting for a forward pass.", "livesum")
        self._decoding = gauge("running_decodes", "Answers being decoded.", "livesum")
        self._in_flight = gauge("requests_in_flight", "Scoring requests being served.", "livesum")
        self._ready = gauge("ready", "1 once scores can be served, else 0.", "livemin")
        text = "1 while the file of named keys has changed and could not be read again, else 0."
        self._keys_stale = gauge("keys_stale", text, "livemax")
        self._info = gauge("bundle_info", "Always 1: a loaded bundle.", "livemax", (*BUNDLE, "digest"))
        text = "Always 1: a loaded bundle whose threshold is guaranteed, with alpha and delta."
        self._guarantee = gauge("guarantee_info", text, "livemax", (*BUNDLE, "alpha", "delta"))
        gauge("build_info", "Always 1: the version.", "livemax", ("version",)).labels(__version__).set(1)
        for current in (self._waiting, self._decoding, self._in_flight, self._ready, self._keys_stale):
            current.set(0)  # a shared folder may hold values of an earlier process with this id

        text = "Always 1: what a loaded bundle does: default, canary or shadow."
        self._role = gauge("bundle_role_info", text, "livemax", (*BUNDLE, "role"))
        text = "The newest window of prompts beside training: ks, psi, shift of the mean risk, outside training."
        self._drift = gauge("drift", text, "livemax", (*BUNDLE, "statistic"))
        text = "1 where a bundle's promise does not hold, by cause: drift, outside, labels, golden."
        self._void = gauge("void", text, "livemax", (*BUNDLE, "cause"))
        text = "Reloads of the bundles: done, or failed and nothing changed."
        reloads = counter("reloads_total", text, ("outcome",))
        text = "1 where the newest reload of the bundles went well, or none was asked for; 0 where it changed nothing."
        self._reload_ok = gauge("last_reload_successful", text, "livemin")
        self._reload_ok.set(1)
        self._by_reload = {done: reloads.labels("done" if done else "failed") for done in (True, False)}
        text = (
            "Prompts that a shadow read too: agrees, stricter (it alone flags), looser (it alone does not), or failed."
        )
        self._shadow = counter("shadow_prompts_total", text, (*BUNDLE, "shadow", "verdict"))
        text = "How far a shadow's risk is from that of the bundle that judged."
        self._shadow_apart = histogram("shadow_risk_difference", text, DIFFERENCES, (*BUNDLE, "shadow"))

        self.compared: dict[str, Comparison] = {}  # by the shadow, "name:version"
        self._roles: set[tuple[str, str, str]] = set()
        self._loaded: set[tuple[str, str, str]] = set()
        self._guaranteed: set[tuple[str, str, str, str]] = set()
        self._by_bundle: dict[tuple[str, str], _PerBundle] = {}
        self._by_code = {code: self._errors.labels(code) for code in STATUS_OF}
        self._by_status = {status: self._requests.labels(str(status)) for status in {200, *STATUS_OF.values()}}

    def batch(self, prompts: int, tokens: int) -> None:
        """One forward pass over ``prompts`` prompts with ``tokens`` tokens in total."""
        self._batch_prompts.observe(prompts)
        self._batch_tokens.observe(tokens)

    def queue(self, waiting: int, decoding: int) -> None:
        """Number of prompts that wait, and that decode, at this moment."""
        self._waiting.set(waiting)
        self._decoding.set(decoding)

    def judged(self, judgement: Judgement, answers: Sequence[AnswerEnd]) -> None:
        """Count the prompts that were scored, with the end of each one's answer."""
        model_name, bundle, key = judgement.model, judgement.bundle, judgement.who.key
        own = self._of(model_name, bundle)
        place = judgement.route if judgement.route in own.gated_by_route else OTHER
        for one, answer in zip(judgement.prompts, answers, strict=True):
            report, timings = one.report, one.timings
            own.routes[place, report.verdict.flagged].inc()
            own.prompts[report.decision.value].inc()
            if report.verdict.flagged:
                own.flagged.inc()
            if report.uncertain is not None and report.uncertain.outside:
                own.outside.inc()
            for shadow in report.shadows:
                verdict = self.compared.setdefault(shadow.bundle, Comparison()).add(shadow, report)
                self._shadow.labels(model_name, bundle, shadow.bundle, verdict).inc()
                if shadow.risk is not None:
                    apart = self._shadow_apart.labels(model_name, bundle, shadow.bundle)
                    apart.observe(abs(shadow.risk - report.risk))
            if report.context.applies:
                own.risk.observe(report.risk)
                own.by_shape[one.shape].observe(report.risk)
            else:
                own.no_fact.inc()
            if withheld := report.decision is not Decision.CONTINUE:
                own.gated_by_shape[one.shape].inc()
                own.gated_by_route[place].inc()
            if key is not None:
                self.key(key, withheld=withheld)
            own.prompt_tokens.inc(report.prompt_tokens)
            own.completion_tokens.inc(answer.tokens)
            self._length.observe(report.prompt_tokens)
            self._queue_s.observe(timings.queue)
            self._prefill_s.observe(timings.prefill)
            self._probe_s.observe(timings.probe)
            self._risk_s.observe(timings.queue + timings.prefill + timings.probe)
            if answer.decode_s is not None:
                self._decode_s.observe(answer.decode_s)

    def key(self, name: str, *, withheld: bool) -> None:
        """One prompt of the key of this name is done."""
        self._by_key.labels(name, _yes(withheld)).inc()

    def rollout(self, model_name: str, default: str, canary: str | None, shadows: Sequence[str]) -> None:
        """What each loaded bundle ("name:version") does from now on."""
        judging = [("default", default), *(() if canary is None else (("canary", canary),))]
        now = {(model_name, bundle, role) for role, bundle in (*judging, *(("shadow", one) for one in shadows))}
        for gone in self._roles - now:
            self._role.labels(*gone).set(0)
            self._role.remove(*gone)
        for labels in now:
            self._role.labels(*labels).set(1)
        if {labels for labels in self._roles if labels[2] != "shadow"} != {one for one in now if one[2] != "shadow"}:
            self.compared.clear()  # they were compared with what judged until now
        self._roles = now
        for _, bundle in judging:
            for shadow in shadows:
                self._shadow_apart.labels(model_name, bundle, shadow)
                for name in get_args(ShadowVerdict):
                    self._shadow.labels(model_name, bundle, shadow, name)

    def watched(self, model_name: str, bundle: str, drift: Drift | None, void: Collection[Cause]) -> None:
        """What a loaded bundle's monitor has found."""
        for cause in CAUSES:
            self._void.labels(model_name, bundle, cause).set(int(cause in void))
        if drift is not None:
            found = {"ks": drift.ks, "psi": drift.psi, "shift": drift.shift, "outside": drift.outside}
            for name, value in found.items():
                if value is not None:
                    self._drift.labels(model_name, bundle, name).set(value)

    def reloaded(self, done: bool) -> None:
        """The bundles were loaded again, or were not and stay."""
        self._by_reload[done].inc()
        self._reload_ok.set(int(done))

    def upstream(self, outcome: Outcome) -> None:
        """A prompt that was sent to a policy's upstream is done."""
        self._by_outcome[outcome].inc()

    def feedback_answers(self, fate: Fate, count: int) -> None:
        """So many scored prompts were kept for feedback, or were not."""
        self._by_fate[fate].inc(count)

    def audit_lines(self, fate: AuditFate, count: int) -> None:
        """So many lines of the audit log were written, or were not."""
        self._by_audit[fate].inc(count)

    def keys_stale(self, value: bool) -> None:
        """Whether the file of named keys is another than the one in force."""
        self._keys_stale.set(int(value))

    def feedback(self, model_name: str, bundle: str, label: Label, flagged: bool | None) -> None:
        """A label is on disk; ``flagged`` where it is the first of its caller, and about an answer that was given."""
        self._labels.labels(model_name, bundle, label).inc()
        if flagged is not None and label in JUDGED:
            self._agreement.labels(model_name, bundle, _yes(flagged), label).inc()

    def request_started(self) -> None:
        """A scoring request arrived; ``request_ended`` must follow in every case."""
        self._in_flight.inc()

    def request_ended(self, status: int, code: str | None, seconds: float) -> None:
        """A scoring request ended with an HTTP ``status`` and, on errors, a wire ``code``."""
        self._in_flight.dec()
        if status in TIMED:
            self._request_s.observe(seconds)
        (self._by_status.get(status) or self._requests.labels(str(status))).inc()
        if code is not None:
            (self._by_code.get(code) or self._errors.labels(code)).inc()

    def ready(self, value: bool) -> None:
        """Whether scores can be served."""
        self._ready.set(int(value))

    def bundles(self, loaded: Iterable[tuple[str, str, str]]) -> None:
        """These (model, "name:version", digest) are loaded, and no others: create their series, all 0."""
        now = set(loaded)
        for gone in self._loaded - now:
            self._info.labels(*gone).set(0)  # processes that share a folder keep the series
            self._info.remove(*gone)
            for cause in CAUSES:
                self._void.labels(*gone[:2], cause).set(0)
        for model_name, bundle, digest in now:
            self._of(model_name, bundle)
            self._info.labels(model_name, bundle, digest).set(1)
            for cause in CAUSES:
                self._void.labels(model_name, bundle, cause)
        self._loaded = now

    def guarantees(self, loaded: Iterable[tuple[str, str, float, float]]) -> None:
        """These (model, "name:version", alpha, delta) are the guarantees of the loaded bundles, and no others."""
        now = {(model_name, bundle, f"{alpha:g}", f"{delta:g}") for model_name, bundle, alpha, delta in loaded}
        for gone in self._guaranteed - now:
            self._guarantee.labels(*gone).set(0)
            self._guarantee.remove(*gone)
        for labels in now:
            self._guarantee.labels(*labels).set(1)
        self._guaranteed = now

    def render(self) -> tuple[bytes, str]:
        """Body and content type of ``GET /metrics``; with a shared folder, over all its processes."""
        if self._folder is None:
            return generate_latest(self.collector) + generate_latest(self._process), CONTENT_TYPE
        _remove_dead_processes(self._folder)
        all_processes = CollectorRegistry()
        MultiProcessCollector(all_processes, path=str(self._folder))  # type: ignore[no-untyped-call]
        return generate_latest(all_processes), CONTENT_TYPE

    def close(self) -> None:
        """Remove this process's gauges from a shared folder; its counters stay, so sums do not fall."""
        if self._folder is not None:
            mark_process_dead(os.getpid(), str(self._folder))  # type: ignore[no-untyped-call]

    def _of(self, model_name: str, bundle: str) -> _PerBundle:
        if (model_name, bundle) not in self._by_bundle:
            self._by_bundle[model_name, bundle] = _PerBundle(self, model_name, bundle)
        return self._by_bundle[model_name, bundle]


class _PerBundle:
    """The series of one bundle, looked up once."""

    def __init__(self, metrics: Metrics, model_name: str, bundle: str) -> None:
        self.flagged = metrics._flagged.labels(model_name, bundle)
        self.outside = metrics._outside.labels(model_name, bundle)
        self.no_fact = metrics._no_fact.labels(model_name, bundle)
        self.risk = metrics._risk.labels(model_name, bundle)
        self.prompt_tokens = metrics._prompt_tokens.labels(model_name, bundle)
        self.completion_tokens = metrics._completion_tokens.labels(model_name, bundle)
        for label in LABELS:
            metrics._labels.labels(model_name, bundle, label)
        for flagged in (True, False):
            for label in JUDGED:
                metrics._agreement.labels(model_name, bundle, _yes(flagged), label)
        self.prompts = {str(d): metrics._prompts.labels(model_name, bundle, str(d)) for d in Decision}
        self.routes = {
            (route, flagged): metrics._by_route.labels(model_name, bundle, route, _yes(flagged))
            for route in COUNTED
            for flagged in (True, False)
        }
        self.gated_by_route = {route: metrics._gated_by_route.labels(model_name, bundle, route) for route in COUNTED}
        shapes = {shape: _shape_labels(shape) for shape in (*SHAPES, None)}
        self.by_shape = {shape: metrics._by_shape.labels(model_name, bundle, *own) for shape, own in shapes.items()}
        self.gated_by_shape = {
            shape: metrics._gated_by_shape.labels(model_name, bundle, *own) for shape, own in shapes.items()
        }


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _shape_labels(shape: Shape | None) -> tuple[str, str, str]:
    if shape is None:
        return ("unknown",) * 3
    return shape.turns, _yes(shape.passage), _yes(shape.system)


def _shared_folder() -> Path | None:
    """The processes' shared folder, checked by writing to it; None for a single process."""
    name = os.environ.get(FOLDER_VARIABLE)
    # prometheus_client decides between memory and files once, on import.
    if (name is not None) == (values.ValueClass is values.MutexValue):
        change = "set" if name is not None else "unset"
        raise HalluTracerError(
            f"{FOLDER_VARIABLE} was {change} after prometheus_client was imported; {change} it before Python starts"
        )
    if name is None:
        return None
    cure = f"create an empty, writable folder before the service starts, or unset {FOLDER_VARIABLE}"
    if not name:
        raise HalluTracerError(f"{FOLDER_VARIABLE} is empty: {cure}")
    try:
        with tempfile.TemporaryFile(dir=name):
            return Path(name)
    except OSError as error:
        reason = error.strerror or error
        raise HalluTracerError(f"{FOLDER_VARIABLE}={name}: cannot write there ({reason}); {cure}") from None


def _remove_dead_processes(folder: Path) -> None:
    """Remove the gauges of processes that ended without ``close``."""
    for pid in {path.stem.rpartition("_")[2] for path in folder.glob("gauge_live*_*.db")}:
        if pid.isdigit() and not _alive(int(pid)):
            mark_process_dead(int(pid), str(folder))  # type: ignore[no-untyped-call]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
