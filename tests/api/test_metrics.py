"""The counters by themselves, in one process and over several that share a folder; no service is
started."""

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
from service.judging.uncertainty import Uncertain
from service.policies.guard import GATE, Decision, Verdict
from service.scoring import RiskReport
from service.serving.judgement import AnswerEnd, JudgedPrompt, Judgement, PromptTimings
from service.serving.metrics import FOLDER_VARIABLE, STATUS_OF, Metrics

ROOT = Path(__file__).parent.parent.parent
PASSED = Verdict(Decision.CONTINUE, False, 0.5, None)
FLAGGED = Verdict(Decision.ABSTAIN, True, 0.5, None)
REPORT = RiskReport(0.25, 0.0, np.zeros(1), np.zeros(1), PASSED, 11, Uncertain(0.0, None))
WITHHELD = replace(REPORT, risk=0.75, verdict=FLAGGED, prompt_tokens=10)
ANSWERED, TIMINGS = AnswerEnd(5, 0.3), PromptTimings(queue=0.002, prefill=0.02, probe=0.0002)
SCORER: Any = SimpleNamespace(
    engine=SimpleNamespace(identity=SimpleNamespace(model="m")),
    bundle=SimpleNamespace(reference="demo:1"),
)
LOADED = [("m", "demo:1", "sha256:ab")]
OF = 'model_name="m",bundle="demo:1"'
UNKNOWN = 'turns="unknown",passage="unknown",system="unknown"'


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
    assert FOLDER_VARIABLE not in os.environ, (
        "these tests start their own multi-process folder; unset it"
    )


def samples(body: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def check(metrics: Metrics | bytes, expected: dict[str, float]) -> None:
    """Series, as ``name{label="value"}`` without our prefix, have these values."""
    result = samples(metrics if isinstance(metrics, bytes) else metrics.render()[0])
    text = "".join(f"hallutracer_{series} {value}\n" for series, value in expected.items())
    wanted = samples(text.encode())
    assert {series: result.get(series) for series in wanted} == wanted


def test_a_prompt_moves_every_number_it_should() -> None:
    metrics = Metrics()
    judge(metrics)
    judge(metrics, replace(WITHHELD, risk=1.0, prompt_tokens=11), AnswerEnd(), route="/classify")
    assert metrics.render()[1].startswith("text/plain; version=0.0.4")
    score, classify = 'route="/v1/risk/score"', 'route="/classify"'
    check(
        metrics,
        {
            f'prompts_total{{{OF},decision="continue"}}': 1,
            f'prompts_total{{{OF},decision="abstain"}}': 1,
            f"flagged_total{{{OF}}}": 1,
            f'route_prompts_total{{{OF},{score},flagged="no"}}': 1,
            f'route_prompts_total{{{OF},{classify},flagged="yes"}}': 1,
            f'route_prompts_total{{{OF},{classify},flagged="no"}}': 0,
            f"gated_by_route_total{{{OF},{classify}}}": 1,
            f"gated_by_route_total{{{OF},{score}}}": 0,
            f"prompt_tokens_total{{{OF}}}": 22,
            f"completion_tokens_total{{{OF}}}": 5,
            f"risk_sum{{{OF}}}": 1.25,
            **{
                f'risk_bucket{{{OF},le="{le}"}}': n
                for le, n in ((0.2, 0), (0.3, 1), (0.9, 1), (1.0, 2))
            },
            'prompt_length_tokens_bucket{le="8.0"}': 0,
            'prompt_length_tokens_bucket{le="16.0"}': 2,
            "queue_seconds_count": 2,
            "prefill_seconds_count": 2,
            "probe_seconds_count": 2,
            "decode_seconds_count": 1,
            "decode_seconds_sum": 0.3,
        },
    )


def test_risks_are_counted_by_the_shape_of_the_conversation() -> None:
    metrics, shape = Metrics(), Shape("2-4", passage=True, system=False)
    judge(metrics, shape=shape)
    judge(metrics, WITHHELD, AnswerEnd(), shape=shape)
    judge(metrics, WITHHELD, AnswerEnd())
    for labels, risk, count, gated in (
        ('turns="2-4",passage="yes",system="no"', 1.0, 2, 1),
        (UNKNOWN, 0.75, 1, 1),
        ('turns="2-4",passage="yes",system="yes"', 0, 0, 0),
    ):
        check(
            metrics,
            {
                f"risk_by_conversation_sum{{{OF},{labels}}}": risk,
                f"risk_by_conversation_count{{{OF},{labels}}}": count,
                f"gated_by_conversation_total{{{OF},{labels}}}": gated,
            },
        )
    series = [name for name, _ in samples(metrics.render()[0]) if "_by_conversation_" in name]
    assert len(series) == 3 * (len(SHAPES) + 1) == 51


def test_batches_the_queue_and_requests_in_flight() -> None:
    metrics = Metrics()
    metrics.batch(3, 40)
    metrics.queue(7, 2)
    metrics.queue(4, 1)
    check(
        metrics,
        {
            "batch_prompts_sum": 3,
            'batch_tokens_bucket{le="32.0"}': 0,
            'batch_tokens_bucket{le="64.0"}': 1,
            "queue_depth": 4,
            "running_decodes": 1,
        },
    )
    for _ in range(4):
        metrics.request_started()
    metrics.request_ended(200, None, 0.1)
    check(metrics, {"requests_in_flight": 3})
    metrics.request_ended(429, Overloaded.code, 0.001)
    check(metrics, {"request_seconds_count": 1})  # a refusal takes no time
    for _ in range(2):  # nobody foresaw them
        metrics.request_ended(418, "teapot", 0.1)
    check(
        metrics,
        {
            "requests_in_flight": 0,
            'http_requests_total{status="200"}': 1,
            'http_requests_total{status="429"}': 1,
            'errors_total{code="overloaded"}': 1,
            'http_requests_total{status="418"}': 2,
            'errors_total{code="teapot"}': 2,
        },
    )


def test_a_registry_that_has_the_process_already_takes_ours() -> None:
    """As vLLM's has: its server would not start."""
    theirs = CollectorRegistry()
    ProcessCollector(registry=theirs)
    theirs.register(Metrics().collector)


def test_the_newest_reload_is_told_until_one_goes_well() -> None:
    metrics = Metrics()
    for done, successful in ((None, 1), (False, 0), (False, 0), (True, 1)):
        if done is not None:
            metrics.reloaded(done)
        check(metrics, {"last_reload_successful": successful})


def test_series_are_there_before_the_first_request() -> None:
    metrics = Metrics()
    metrics.bundles(LOADED)
    check(
        metrics,
        {
            **{f'prompts_total{{{OF},decision="{decision}"}}': 0 for decision in Decision},
            f'risk_bucket{{{OF},le="0.5"}}': 0,
            f"flagged_total{{{OF}}}": 0,
            f"no_fact_total{{{OF}}}": 0,
            f'bundle_info{{{OF},digest="sha256:ab"}}': 1,
            f'build_info{{version="{__version__}"}}': 1,
            "ready": 0,
            'http_requests_total{status="504"}': 0,
            f'errors_total{{code="{DeadlineExceeded.code}"}}': 0,
        },
    )
    metrics.ready(True)
    check(metrics, {"ready": 1})


def test_every_code_of_the_wire_starts_at_zero() -> None:
    def tree(root: type[HalluTracerError]) -> Iterator[type[HalluTracerError]]:
        yield root
        for child in root.__subclasses__():
            if child.__module__ == root.__module__:
                yield from tree(child)

    # A code of several classes is listed with the first one's status.
    wire = {error.code: error.status for error in reversed([*tree(HalluTracerError)])}
    wire |= {code: status for status, code in problems.CODES.items()} | {
        "client_closed_request": 499
    }
    assert wire.items() <= STATUS_OF.items()
    check(Metrics(), {f'errors_total{{code="{code}"}}': 0 for code in wire})


def test_a_bundle_that_is_swapped_out_is_no_longer_listed() -> None:
    metrics = Metrics()
    judge(metrics)
    for loaded in (LOADED, [("m", "demo:2", "sha256:cd"), ("m", "other:1", "sha256:ef")]):
        metrics.bundles(loaded)
    listed = [
        dict(labels)["bundle"]
        for name, labels in samples(metrics.render()[0])
        if "bundle_info" in name
    ]
    assert sorted(listed) == ["demo:2", "other:1"]
    check(metrics, {f"prompt_tokens_total{{{OF}}}": 11})  # a sum does not fall


@pytest.mark.skipif(sys.platform != "linux", reason="prometheus_client reads /proc")
def test_the_process_is_measured_under_the_names_that_every_exporter_uses() -> None:
    results = {
        name: value
        for (name, _), value in samples(Metrics().render()[0]).items()
        if name.startswith("process_")
    }
    assert set(results) == {
        "process_cpu_seconds_total",
        "process_max_fds",
        "process_open_fds",
        "process_resident_memory_bytes",
        "process_start_time_seconds",
        "process_virtual_memory_bytes",
    }
    assert 1e7 < results["process_resident_memory_bytes"] < 1e11
    assert 3 <= results["process_open_fds"] < results["process_max_fds"]
    assert 0 < results["process_start_time_seconds"] < time.time()


def test_names_end_in_their_unit_and_nothing_is_said_twice() -> None:
    metrics = Metrics()
    judge(metrics)
    families = list(text_string_to_metric_families(metrics.render()[0].decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    assert not [name for name in names if name.endswith("_created")]
    labels = {label for family in families for sample in family.samples for label in sample.labels}
    assert labels == {
        "model_name",
        "bundle",
        "decision",
        "route",
        "status",
        "code",
        "outcome",
        "le",
        "version",
        "label",
        "flagged",
        "fate",
        "turns",
        "passage",
        "system",
    }


# --- several processes, one folder ---

WRITER = """
import sys
from tests.api.test_metrics import LOADED, WITHHELD, AnswerEnd, Metrics, judge
metrics = Metrics()
metrics.bundles(LOADED)
metrics.ready(True)
metrics.request_started()
metrics.queue(5, 2)
for _ in range({times}):
    judge(metrics, WITHHELD, AnswerEnd())
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
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {FOLDER_VARIABLE: str(folder)},
    )


def read(folder: Path | str, ready: bool = True) -> bytes:
    out, error = process(READER.format(ready=ready), folder).communicate(timeout=60)
    assert not error, error
    return out.encode()


def line(stream: IO[str] | None) -> str:
    return "" if stream is None else stream.readline().strip()


def test_processes_that_share_a_folder_add_up_and_a_dead_one_takes_its_gauges(
    tmp_path: Path,
) -> None:
    writers = [process(WRITER.format(times=times), tmp_path) for times in (3, 4, 5)]
    try:
        for writer in writers:
            assert line(writer.stdout) == "written", writer.communicate(timeout=60)[1]
        check(
            read(tmp_path),
            {
                f'prompts_total{{{OF},decision="abstain"}}': 12,
                f'prompts_total{{{OF},decision="block"}}': 0,
                f'risk_bucket{{{OF},le="0.7"}}': 0,
                f'risk_bucket{{{OF},le="0.8"}}': 12,
                f"risk_count{{{OF}}}": 12,
                f"risk_by_conversation_count{{{OF},{UNKNOWN}}}": 12,
                f"gated_by_conversation_total{{{OF},{UNKNOWN}}}": 12,
                "queue_depth": 15,
                "running_decodes": 6,
                "requests_in_flight": 3,
                "ready": 1,
                f'bundle_info{{{OF},digest="sha256:ab"}}': 1,
                f'build_info{{version="{__version__}"}}': 1,
            },
        )
        check(read(tmp_path, ready=False), {"ready": 0})  # while one process is not
        closed, killed, _ = writers
        killed.kill()
        killed.communicate(timeout=60)
        closed.communicate("close\n", timeout=60)
        check(
            read(tmp_path),
            {
                f'prompts_total{{{OF},decision="abstain"}}': 12,
                "queue_depth": 5,
                "requests_in_flight": 1,
                "ready": 1,
            },
        )
        assert not [
            file
            for writer in (closed, killed)
            for file in tmp_path.glob(f"gauge_live*_{writer.pid}.db")
        ]
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()


@pytest.mark.parametrize("case", ["missing", "a file", "read-only", "empty"])
def test_a_folder_that_cannot_be_shared_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str
) -> None:
    names = {
        "missing": str(tmp_path / "no"),
        "a file": str(tmp_path / "file"),
        "read-only": "/proc/self",
        "empty": "",
    }
    (tmp_path / "file").touch()
    monkeypatch.setenv(FOLDER_VARIABLE, names[case])
    monkeypatch.setattr(
        "service.serving.metrics.values.ValueClass", object
    )  # as if it were set before Python started
    with pytest.raises(HalluTracerError, match="before the service starts"):
        Metrics()


def test_setting_the_folder_too_late_is_an_error_and_not_a_silent_loss(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(HalluTracerError, match="before Python starts"):
        Metrics()
