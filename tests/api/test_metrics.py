"""The counters by themselves, in one process and over several that share a folder; no service is started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from service import __version__
from service.api import error_handlers as problems
from service.errors import DeadlineExceeded, HalluTracerError, Overloaded
from service.judging.guarantee import SHAPES, Shape
from service.policies.guard import GATE, Decision, Verdict
from service.scoring import RiskReport
from service.serving.judgement import AnswerEnd, JudgedPrompt, Judgement, PromptTimings
from service.serving.metrics import FOLDER_VARIABLE, STATUS_OF, Metrics

ROOT = Path(__file__).parent.parent.parent
LABELS = {"model_name": "m", "bundle": "demo:1"}
PASSED, FLAGGED = Verdict(Decision.CONTINUE, False, 0.5, None), Verdict(Decision.ABSTAIN, True, 0.5, None)
REPORT = RiskReport(0.25, 0.0, np.zeros(1), np.zeros(1), PASSED, prompt_tokens=11)
ANSWERED, TIMINGS = AnswerEnd(5, 0.3), PromptTimings(queue=0.002, prefill=0.02, probe=0.0002)
SCORER: Any = SimpleNamespace(
    engine=SimpleNamespace(identity=SimpleNamespace(model="m")), bundle=SimpleNamespace(reference="demo:1")
)


def judge(
    metrics: Metrics,
    report: RiskReport = REPORT,
    answer: AnswerEnd = ANSWERED,
    route: str = "/v1/risk/score",
    shape: Shape | None = None,
) -> None:
    prompt = JudgedPrompt(0, report, timings=TIMINGS, shape=shape)
    metrics.judged(Judgement(scorer=SCORER, policy=GATE, prompts=(prompt,), route=route), [answer])


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FOLDER_VARIABLE not in os.environ, "these tests start their own multi-process folder; unset it"


def samples(body: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def value(body: bytes, name: str, **labels: str) -> float | None:
    return samples(body).get((f"hallutracer_{name}", frozenset(labels.items())))


def test_a_prompt_moves_every_number_it_should() -> None:
    metrics = Metrics()
    judge(metrics)
    withheld = replace(REPORT, risk=1.0, verdict=FLAGGED)
    judge(metrics, withheld, AnswerEnd(), route="/classify")
    body, kind = metrics.render()
    assert kind.startswith("text/plain; version=0.0.4")
    assert value(body, "prompts_total", **LABELS, decision="continue") == 1
    assert value(body, "prompts_total", **LABELS, decision="abstain") == 1
    assert value(body, "flagged_total", **LABELS) == 1
    assert value(body, "route_prompts_total", **LABELS, route="/v1/risk/score", flagged="no") == 1  # of its alias
    assert value(body, "route_prompts_total", **LABELS, route="/classify", flagged="yes") == 1
    assert value(body, "route_prompts_total", **LABELS, route="/classify", flagged="no") == 0
    assert value(body, "gated_by_route_total", **LABELS, route="/classify") == 1
    assert value(body, "gated_by_route_total", **LABELS, route="/v1/risk/score") == 0
    assert value(body, "prompt_tokens_total", **LABELS) == 22
    assert value(body, "completion_tokens_total", **LABELS) == 5
    assert value(body, "risk_sum", **LABELS) == 1.25
    assert [value(body, "risk_bucket", **LABELS, le=f"{n / 10}") for n in (2, 3, 9, 10)] == [0, 1, 1, 2]
    assert value(body, "prompt_length_tokens_bucket", le="8.0") == 0
    assert value(body, "prompt_length_tokens_bucket", le="16.0") == 2
    for phase, times in {"queue": 2, "prefill": 2, "probe": 2, "decode": 1}.items():
        assert value(body, f"{phase}_seconds_count") == times
    assert value(body, "decode_seconds_sum") == 0.3


def test_risks_are_counted_by_the_shape_of_the_conversation() -> None:
    metrics = Metrics()
    withheld, shape = replace(REPORT, risk=0.75, verdict=FLAGGED), Shape("2-4", passage=True, system=False)
    judge(metrics, shape=shape)
    judge(metrics, withheld, AnswerEnd(), shape=shape)
    judge(metrics, withheld, AnswerEnd())
    body, _ = metrics.render()
    for (turns, passage, system), (risk, count, gated) in {
        ("2-4", "yes", "no"): (1.0, 2, 1),
        ("unknown",) * 3: (0.75, 1, 1),
        ("2-4", "yes", "yes"): (0, 0, 0),
    }.items():
        labels = LABELS | {"turns": turns, "passage": passage, "system": system}
        assert value(body, "risk_by_conversation_sum", **labels) == risk
        assert value(body, "risk_by_conversation_count", **labels) == count
        assert value(body, "gated_by_conversation_total", **labels) == gated
    series = [name for name, _ in samples(body) if "_by_conversation_" in name]
    assert len(series) == 3 * (len(SHAPES) + 1) == 51


def test_batches_and_the_queue() -> None:
    metrics = Metrics()
    metrics.batch(3, 40)
    metrics.queue(7, 2)
    metrics.queue(4, 1)
    body, _ = metrics.render()
    assert value(body, "batch_prompts_sum") == 3
    assert value(body, "batch_tokens_bucket", le="32.0") == 0
    assert value(body, "batch_tokens_bucket", le="64.0") == 1
    assert (value(body, "queue_depth"), value(body, "running_decodes")) == (4, 1)


def test_requests_are_in_flight_until_they_end() -> None:
    metrics = Metrics()
    metrics.request_started()
    metrics.request_started()
    metrics.request_ended(200, None, 0.1)
    assert value(metrics.render()[0], "requests_in_flight") == 1
    metrics.request_ended(429, Overloaded.code, 0.001)
    body, _ = metrics.render()
    assert value(body, "requests_in_flight") == 0
    assert value(body, "http_requests_total", status="200") == 1
    assert value(body, "http_requests_total", status="429") == 1
    assert value(body, "errors_total", code="overloaded") == 1
    assert value(body, "request_seconds_count") == 1  # a refusal takes no time


def test_a_status_and_a_code_that_nobody_foresaw_are_counted_too() -> None:
    metrics = Metrics()
    for _ in range(2):
        metrics.request_started()
        metrics.request_ended(418, "teapot", 0.1)
    body, _ = metrics.render()
    assert (value(body, "http_requests_total", status="418"), value(body, "errors_total", code="teapot")) == (2, 2)


def test_a_registry_that_has_the_process_already_takes_ours() -> None:
    """As vLLM's has: its server would not start."""
    theirs = CollectorRegistry()
    ProcessCollector(registry=theirs)
    theirs.register(Metrics().collector)


def test_a_route_that_is_none_of_ours_is_no_label() -> None:
    metrics = Metrics()
    judge(metrics, route="/v1/whatever-a-caller-wrote")
    judge(metrics, route="")
    body, _ = metrics.render()
    assert value(body, "route_prompts_total", **LABELS, route="other", flagged="no") == 2
    assert b"whatever" not in body


def test_the_newest_reload_is_told_until_one_goes_well() -> None:
    metrics = Metrics()
    told = []
    for done in (None, False, False, True):
        if done is not None:
            metrics.reloaded(done)
        told.append(value(metrics.render()[0], "last_reload_successful"))
    assert told == [1, 0, 0, 1]


def test_series_are_there_before_the_first_request() -> None:
    metrics = Metrics()
    metrics.bundles([("m", "demo:1", "sha256:ab")])
    body, _ = metrics.render()
    for decision in Decision:
        assert value(body, "prompts_total", **LABELS, decision=decision) == 0
    assert value(body, "risk_bucket", **LABELS, le="0.5") == 0
    assert value(body, "flagged_total", **LABELS) == 0
    assert value(body, "bundle_info", **LABELS, digest="sha256:ab") == 1
    assert value(body, "build_info", version=__version__) == 1
    assert value(body, "ready") == 0
    assert value(body, "http_requests_total", status="504") == 0
    assert value(body, "errors_total", code=DeadlineExceeded.code) == 0
    metrics.ready(True)
    assert value(metrics.render()[0], "ready") == 1


def test_every_code_of_the_wire_starts_at_zero() -> None:
    def tree(root: type[HalluTracerError]) -> Iterator[type[HalluTracerError]]:
        yield root
        for child in root.__subclasses__():
            if child.__module__ == root.__module__:
                yield from tree(child)

    wire = {error.code: error.status for error in tree(HalluTracerError)}
    wire |= {code: status for status, code in problems.CODES.items()}
    wire["client_closed_request"] = 499
    assert wire.items() <= STATUS_OF.items()
    body, _ = Metrics().render()
    assert all(value(body, "errors_total", code=code) == 0 for code in wire)


def test_a_bundle_that_is_swapped_out_is_no_longer_listed() -> None:
    metrics = Metrics()
    judge(metrics)
    for loaded in ([("m", "demo:1", "sha256:ab")], [("m", "demo:2", "sha256:cd"), ("m", "other:1", "sha256:ef")]):
        metrics.bundles(loaded)
    body, _ = metrics.render()
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    listed = {(sample.labels["bundle"], sample.value) for sample in families["hallutracer_bundle_info"].samples}
    assert listed == {("demo:2", 1.0), ("other:1", 1.0)}
    assert value(body, "prompt_tokens_total", **LABELS) == 11  # a sum does not fall


@pytest.mark.skipif(sys.platform != "linux", reason="prometheus_client reads /proc")
def test_the_process_is_measured_under_the_names_that_every_exporter_uses() -> None:
    found = {name: value for (name, _), value in samples(Metrics().render()[0]).items() if name.startswith("process_")}
    assert set(found) == {
        "process_cpu_seconds_total", "process_max_fds", "process_open_fds", "process_resident_memory_bytes",
        "process_start_time_seconds", "process_virtual_memory_bytes",
    }  # fmt: skip
    assert 1e7 < found["process_resident_memory_bytes"] < 1e11
    assert 3 <= found["process_open_fds"] < found["process_max_fds"]
    assert 0 < found["process_start_time_seconds"] < time.time()


def test_instances_share_nothing() -> None:
    one, other = Metrics(), Metrics()
    judge(one)
    other.bundles([("m", "demo:1", "sha256:ab")])
    assert value(other.render()[0], "prompt_tokens_total", **LABELS) == 0
    one.close()
    assert value(one.render()[0], "prompt_tokens_total", **LABELS) == 11


def test_names_end_in_their_unit_and_nothing_is_said_twice() -> None:
    metrics = Metrics()
    judge(metrics)
    families = list(text_string_to_metric_families(metrics.render()[0].decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    assert not [name for name in names if name.endswith("_created")]
    labels = {label for family in families for sample in family.samples for label in sample.labels}
    feedback = {"label", "flagged", "fate"}
    shape = {"turns", "passage", "system"}
    own = {"model_name", "bundle", "decision", "route", "status", "code", "outcome", "le", "version"}
    assert labels == own | feedback | shape


# --- several processes, one folder ---

WRITER = """
import sys
import numpy as np
from service.policies.guard import Decision, Verdict
from tests.api.test_metrics import AnswerEnd, Metrics, RiskReport, judge
metrics = Metrics()
metrics.bundles([("m", "demo:1", "sha256:ab")])
metrics.ready(True)
metrics.request_started()
metrics.queue(5, 2)
for _ in range({times}):
    verdict = Verdict(Decision.ABSTAIN, True, 0.5, None)
    report = RiskReport(0.75, 0.0, np.zeros(1), np.zeros(1), verdict, prompt_tokens=10)
    judge(metrics, report, AnswerEnd())
print("written", flush=True)
if sys.stdin.readline().strip() == "close":
    metrics.close()
"""
READER = """
import sys
from service.serving.metrics import Metrics
metrics = Metrics()
metrics.ready({ready})
sys.stdout.buffer.write(metrics.render()[0])
metrics.close()
"""


def process(code: str, folder: Path | str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd=ROOT, env=os.environ | {FOLDER_VARIABLE: str(folder)},
    )  # fmt: skip


def read(folder: Path | str, ready: bool = True) -> bytes:
    out, error = process(READER.format(ready=ready), folder).communicate(timeout=60)
    assert not error, error
    return out.encode()


def line(stream: IO[str] | None) -> str:
    return stream.readline().strip()


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[tuple[Path, list[subprocess.Popen[str]]]]:
    started = [process(WRITER.format(times=times), tmp_path) for times in (3, 4)]
    for one in started:
        if line(one.stdout) != "written":
            pytest.fail(one.communicate(timeout=60)[1])
    yield tmp_path, started
    for one in started:
        one.kill()
        one.communicate()


def test_processes_that_share_a_folder_add_up(writers: tuple[Path, list[subprocess.Popen[str]]]) -> None:
    folder, _ = writers
    body = read(folder)
    assert value(body, "prompts_total", **LABELS, decision="abstain") == 7
    assert value(body, "prompts_total", **LABELS, decision="block") == 0
    assert value(body, "risk_bucket", **LABELS, le="0.7") == 0
    assert value(body, "risk_bucket", **LABELS, le="0.8") == 7
    assert value(body, "risk_count", **LABELS) == 7
    unknown = dict.fromkeys(("turns", "passage", "system"), "unknown")
    assert value(body, "risk_by_conversation_count", **LABELS, **unknown) == 7
    assert value(body, "gated_by_conversation_total", **LABELS, **unknown) == 7
    assert (value(body, "queue_depth"), value(body, "running_decodes")) == (10, 4)
    assert value(body, "requests_in_flight") == 2
    assert value(body, "ready") == 1
    assert value(body, "bundle_info", **LABELS, digest="sha256:ab") == 1
    assert value(body, "build_info", version=__version__) == 1
    assert value(read(folder, ready=False), "ready") == 0, "not ready while one process is not"


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_a_dead_process_leaves_its_counts_and_takes_its_gauges(
    writers: tuple[Path, list[subprocess.Popen[str]]], how: str
) -> None:
    folder, (dead, _) = writers
    if how == "killed":
        dead.kill()
    dead.communicate("close\n" if how == "closed" else None, timeout=60)
    body = read(folder)
    assert value(body, "prompts_total", **LABELS, decision="abstain") == 7
    assert value(body, "queue_depth") == 5
    assert value(body, "requests_in_flight") == 1
    assert value(body, "ready") == 1
    assert not list(folder.glob(f"gauge_live*_{dead.pid}.db"))


@pytest.mark.parametrize("case", ["missing", "a file", "read-only", "empty"])
def test_a_folder_that_cannot_be_shared_is_said_at_start(tmp_path: Path, case: str) -> None:
    name = {"missing": str(tmp_path / "no"), "a file": str(tmp_path / "file"), "read-only": "/proc/self", "empty": ""}[
        case
    ]
    if case == "read-only" and not Path(name).is_dir():
        pytest.skip("no folder here that even root cannot write to")
    (tmp_path / "file").touch()
    child = process("from service.serving.metrics import Metrics\nMetrics()", name)
    _, error = child.communicate(timeout=60)
    assert child.returncode == 1
    last = error.strip().splitlines()[-1]
    assert last.startswith("service.errors.HalluTracerError:")
    assert FOLDER_VARIABLE in last
    assert name in last
    assert "before the service starts" in last
    assert not list(ROOT.glob("*.db"))


def test_setting_the_folder_too_late_is_an_error_and_not_a_silent_loss(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(HalluTracerError, match="set it before Python starts"):
        Metrics()
