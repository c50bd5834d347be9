"""A real Prometheus with our own configuration: where its binaries are, how to start it, how to ask
it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kit.local_server import free_port

ROOT = Path(__file__).parent.parent.parent
OURS = ROOT / "deploy" / "prometheus"
REQUIRE = "HALLUTRACER_REQUIRE_TOOLS"


def binary(name: str) -> str:
    """``prometheus`` or ``promtool``: on PATH, else in .tools/bin; skips without it, fails where
    tools are required."""
    found = shutil.which(name) or shutil.which(name, path=str(ROOT / ".tools" / "bin"))
    if found is None:
        reason = f"{name} is neither on PATH nor in .tools/bin; get it with deploy/tools.sh"
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(f"{reason} ({REQUIRE}=1)")
        pytest.skip(reason)
    return found


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [binary("promtool"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def configuration(folder: Path, target: str) -> Path:
    """Our folder copied; in prometheus.yml only the target's address and the intervals are
    others."""
    shutil.copytree(OURS, folder)
    path = folder / "prometheus.yml"
    text = path.read_text()
    for old, new in {
        '"hallutracer:8765"': f'"{target}"',
        "scrape_interval: 15s": "scrape_interval: 1s",
        "scrape_timeout: 10s": "scrape_timeout: 1s",
        "evaluation_interval: 15s": "evaluation_interval: 1s",
    }.items():
        assert text.count(old) == 1, f"prometheus.yml should say {old} once"
        text = text.replace(old, new)
    path.write_text(text)
    return path


@dataclass(frozen=True)
class Prometheus:
    """The HTTP API of a running server."""

    url: str

    def get(self, path: str, **parameters: Any) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=20).json()
        assert answer["status"] == "success", f"{parameters}: {answer.get('error')}"
        return answer["data"]

    def query(self, expression: str, at: float) -> dict[str, float]:
        """Labels as text -> value."""
        found = self.get("query", query=expression, time=at)["result"]
        return {str(series["metric"]): float(series["value"][1]) for series in found}


@contextmanager
def started(
    command: Callable[[int], list[str]], log: Path, ready: Callable[[int], bool]
) -> Iterator[int]:
    """Start a server on a free port, which is given once it is ready; on another where it was taken
    meanwhile."""
    for _ in range(5):
        port = free_port()
        with log.open("w") as out:
            process = subprocess.Popen(
                command(port), stdout=out, stderr=out, env=os.environ | {"GOMAXPROCS": "1"}
            )
        try:
            while process.poll() is None and not ready(port):
                time.sleep(0.02)
            if process.poll() is None:
                yield port
                return
            assert "already in use" in log.read_text(), log.read_text()
        finally:
            process.terminate()
            process.wait(timeout=60)
    pytest.fail("no free port in five attempts")


@contextmanager
def running(config: Path, storage: Path) -> Iterator[Prometheus]:
    """Start the server on a configuration."""

    def ready(port: int) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/-/ready", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    options = (f"--config.file={config}", f"--storage.tsdb.path={storage}", "--log.level=info")
    program = binary("prometheus")
    with started(
        lambda port: [program, *options, f"--web.listen-address=127.0.0.1:{port}"],
        storage.with_suffix(".log"),
        ready,
    ) as port:
        yield Prometheus(f"http://127.0.0.1:{port}")
