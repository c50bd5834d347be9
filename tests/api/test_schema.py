"""Requests made from the OpenAPI document: no 5xx, and every answer is one the document
describes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from service.annexes.feedback.store import Feedback
from service.feedback.databases import location
from tests.running import Running, running

HERE = Path(__file__).parent


def run(
    service: Running, folder: Path, *options: str, phases: str = "examples,coverage,fuzzing"
) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "schemathesis.cli",
        "--config-file",
        str(HERE / "schemathesis.toml"),
    ]
    command += ["run", f"{service.url}/openapi.json", "--no-color", "--phases", phases, *options]
    return subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"HALLUTRACER_URL": service.url},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )


@pytest.mark.parametrize(
    ("examples", "phases", "least"),
    [
        (15, "examples,fuzzing", 150),
        pytest.param(100, "examples,coverage,fuzzing", 4_000, marks=pytest.mark.long),
    ],
)
def test_generated_requests(tmp_path: Path, examples: int, phases: str, least: int) -> None:
    """``examples`` at most for each route, ``least`` requests in all; every value of every field is
    in the long run."""
    where = location(str(tmp_path / "feedback.db"))
    with running(tmp_path, feedback=lambda metrics: Feedback(where, metrics)) as service:
        done = run(service, tmp_path, "--max-examples", str(examples), "--seed", "1", phases=phases)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        generated = re.search(r"([\d,]+) generated", done.stdout)
        assert generated, done.stdout[-2000:]
        assert int(generated.group(1).replace(",", "")) >= least
        assert service.metric("hallutracer_requests_in_flight") == 0
        assert service.engine.counters.open_continuations == 0


@pytest.mark.long
def test_the_checks_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path) as service:
        service.engine.fail = RuntimeError("broken")
        done = run(service, tmp_path, "--max-examples", "10", "--include-path", "/score")
    assert done.returncode == 1
    assert "Server error" in done.stdout
