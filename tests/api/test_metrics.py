"""The counters by themselves, in one process and over several that share a folder; no service is
started."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from service import __version__
from service.api import error_handlers as problems
from service.errors import HalluTracerError, Overloaded
from service.judging.guarantee import SHAPES
from service.judging.uncertainty import Uncertain
from service.policies.guard import GATE, Decision, Verdict
from service.scoring import RiskReport
from service.serving.judgement import AnswerEnd, JudgedPrompt, Judgement, PromptTimings
from service.serving.metrics import FOLDER_VARIABLE, STATUS_OF, Metrics
from tests.kit.tables import lines

ROOT = Path(__file__).parent.parent.parent
PASSED = Verdict(Decision.CONTINUE, False, 0.5, None)
FLAGGED = Verdict(Decision.ABSTAIN, True, 0.5, None)
REPORT = RiskReport(0.25, 0.0, np.zeros(1), np.zeros(1), PASSED, 11, Uncertain(0.0, None))
WITHHELD = replace(REPORT, risk=0.75, verdict=FLAGGED, prompt_tokens=10)
TIMINGS = PromptTimings(queue=0.002, prefill=0.02, probe=0.0002)
SCORER: Any = SimpleNamespace(
    engine=SimpleNamespace(identity=SimpleNamespace(model="m")),
    bundle=SimpleNamespace(reference="demo:1"),
)
LOADED = [("m", "demo:1", "sha256:ab")]
OF = 'model_name="m",bundle="demo:1"'
UNKNOWN = 'turns="unknown",passage="unknown",system="unknown"'


def judge(metrics: Metrics, report: RiskReport = REPORT) -> None:
    """Count a prompt without an answer."""
    prompt = JudgedPrompt(0, report, timings=TIMINGS)
    judgement = Judgement(scorer=SCORER, policy=GATE, prompts=(prompt,), route="/v1/risk/score")
    metrics.judged(judgement, [AnswerEnd()])


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


def check(metrics: Metrics, expected: str) -> None:
    """Series have these values: a line each, as a scraper reads it but without our prefix."""
    wanted = samples("".join(f"hallutracer_{line}\n" for line in lines(expected)).encode())
    result = samples(metrics.render()[0])
    assert {series: result.get(series) for series in wanted} == wanted


def test_batches_the_queue_and_requests_in_flight() -> None:
    metrics = Metrics()
    metrics.batch(3, 40)
    metrics.queue(7, 2)
    metrics.queue(4, 1)
    for _ in range(4):
        metrics.request_started()
    metrics.request_ended(200, None, 0.1)
    check(metrics, "requests_in_flight 3")
    metrics.request_ended(429, Overloaded.code, 0.001)
    check(metrics, "request_seconds_count 1")  # a refusal takes no time
    for _ in range(2):  # nobody foresaw them
        metrics.request_ended(418, "teapot", 0.1)
    check(
        metrics,
        """
        batch_prompts_sum 3
        batch_tokens_bucket{le="32.0"} 0
        batch_tokens_bucket{le="64.0"} 1
        queue_depth 4
        running_decodes 1
        requests_in_flight 0
        http_requests_total{status="200"} 1
        http_requests_total{status="429"} 1
        errors_total{code="overloaded"} 1
        http_requests_total{status="418"} 2
        errors_total{code="teapot"} 2
        """,
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
        check(metrics, f"last_reload_successful {successful}")


def test_series_are_there_before_the_first_request() -> None:
    metrics = Metrics()
    metrics.bundles(LOADED)
    check(
        metrics,
        f"""
        risk_bucket{{{OF},le="0.5"}} 0
        flagged_total{{{OF}}} 0
        no_fact_total{{{OF}}} 0
        bundle_info{{{OF},digest="sha256:ab"}} 1
        build_info{{version="{__version__}"}} 1
        ready 0
        http_requests_total{{status="504"}} 0
        """,
    )
    for decision in Decision:
        check(metrics, f'prompts_total{{{OF},decision="{decision}"}} 0')
    metrics.ready(True)
    check(metrics, "ready 1")


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
    check(Metrics(), "\n".join(f'errors_total{{code="{code}"}} 0' for code in wire))


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
    check(metrics, f"prompt_tokens_total{{{OF}}} 11")  # a sum does not fall


@pytest.mark.skipif(sys.platform != "linux", reason="prometheus_client reads /proc")
def test_the_process_is_measured_under_the_names_that_every_exporter_uses() -> None:
    results = {
        name.removeprefix("process_"): value
        for (name, _), value in samples(Metrics().render()[0]).items()
        if name.startswith("process_")
    }
    named = "cpu_seconds_total max_fds open_fds resident_memory_bytes start_time_seconds"
    assert set(results) == {*named.split(), "virtual_memory_bytes"}
    assert 1e7 < results["resident_memory_bytes"] < 1e11
    assert 3 <= results["open_fds"] < results["max_fds"]
    assert 0 < results["start_time_seconds"] < time.time()


def test_names_end_in_their_unit_and_nothing_is_said_twice() -> None:
    metrics = Metrics()
    judge(metrics)
    families = list(text_string_to_metric_families(metrics.render()[0].decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    assert not [name for name in names if name.endswith("_created")]
    by_shape = [name for name, _ in samples(metrics.render()[0]) if "_by_conversation_" in name]
    assert len(by_shape) == 3 * (len(SHAPES) + 1) == 51
    labels = {label for family in families for sample in family.samples for label in sample.labels}
    known = "model_name bundle decision route status code outcome le version label flagged fate"
    assert labels == {*known.split(), "turns", "passage", "system"}


# --- several processes, one folder ---


def write(times: int, told: Any) -> None:
    """What a process does with its metrics, until it is told to close them."""
    metrics = Metrics()
    metrics.bundles(LOADED)
    metrics.ready(True)
    metrics.request_started()
    metrics.queue(5, 2)
    for _ in range(times):
        judge(metrics, WITHHELD)
    told.send("written")
    told.recv()
    metrics.close()


SUMS = f"""
    prompts_total{{{OF},decision="abstain"}} 12
    prompts_total{{{OF},decision="block"}} 0
    risk_bucket{{{OF},le="0.7"}} 0
    risk_bucket{{{OF},le="0.8"}} 12
    risk_count{{{OF}}} 12
    risk_by_conversation_count{{{OF},{UNKNOWN}}} 12
    risk_by_conversation_sum{{{OF},{UNKNOWN}}} 9
    gated_by_conversation_total{{{OF},{UNKNOWN}}} 12
    """
GAUGES = f"""
    queue_depth 15
    running_decodes 6
    requests_in_flight 3
    ready 1
    bundle_info{{{OF},digest="sha256:ab"}} 1
    build_info{{version="{__version__}"}} 1
    """


def check_processes() -> None:
    """Three processes write, and this one reads; all of them share the folder from their start."""
    forking = multiprocessing.get_context("fork")
    writers = []
    for times in (3, 4, 5):
        here, there = forking.Pipe()
        writer = forking.Process(target=write, args=(times, there), daemon=True)
        writer.start()
        assert here.recv() == "written"
        writers.append((writer, here))
    reader = Metrics()
    reader.ready(True)
    check(reader, SUMS + GAUGES)
    reader.ready(False)  # while one process is not
    check(reader, "ready 0")
    reader.ready(True)
    (closed, pipe), (killed, _), _ = writers
    killed.kill()
    pipe.send("close")
    for writer in (killed, closed):
        writer.join(60)
    check(reader, SUMS + "queue_depth 5\nrequests_in_flight 1\nready 1")
    folder = Path(os.environ[FOLDER_VARIABLE])
    for writer in (killed, closed):
        assert not list(folder.glob(f"gauge_live*_{writer.pid}.db"))


def test_processes_that_share_a_folder_add_up_and_a_dead_one_takes_its_gauges(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from tests.api import test_metrics as t; t.check_processes()"],
        cwd=ROOT,
        env=os.environ | {FOLDER_VARIABLE: str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("case", ["missing", "a file", "read-only", "empty", "too late"])
def test_a_folder_that_cannot_be_shared_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str
) -> None:
    names = {
        "missing": str(tmp_path / "no"),
        "a file": str(tmp_path / "file"),
        "read-only": "/proc/self",
        "empty": "",
        "too late": str(tmp_path),
    }
    (tmp_path / "file").touch()
    monkeypatch.setenv(FOLDER_VARIABLE, names[case])
    before = "Python"
    if case != "too late":  # as if it were set before Python started
        monkeypatch.setattr("service.serving.metrics.values.ValueClass", object)
        before = "the service"
    with pytest.raises(HalluTracerError, match=f"before {before} starts"):
        Metrics()
