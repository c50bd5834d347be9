"""vLLM's own OpenAI server with the plugin, as a user starts it, on the demo model; one observes, for all who ask."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from probes_store.bundle import BundleDraft
from probes_store.store import SHIPPED, Store
from service.demo import MODEL_DIR
from tests.local_server import free_port
from tests.probes_store.factory import GUARANTEE, write_bundle
from tests.serve_process import PATHS

STARTING_S = 240.0
MODEL = "demo"
SURE = "sure"  # the demo's bundle, with a guarantee
KNOWN, UNKNOWN = "What is the capital of Italy?", "What is the capital of the Solomon Islands?"
QUIET = {"PYTHONPATH": PATHS, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}


@contextmanager
def serving(log: Path, *arguments: str, ready: bool = True, **environment: str) -> Iterator[str]:
    """Its address, once it answers (and, with ``ready``, once our routes are ready)."""
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL_DIR), "--dtype", "float32",
        "--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL, "--enforce-eager", *arguments,
    ]  # fmt: skip
    variables = os.environ | QUIET | {"HALLUTRACER_BUNDLE": "demo demo-fused"} | environment
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=variables, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, cwd=log.parent
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(process, log, f"{url}/health", 200)
        _wait(process, log, f"{url}/health/ready", 200 if ready else 503)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen[bytes], log: Path, url: str, status: int) -> None:
    until = time.monotonic() + STARTING_S
    while time.monotonic() < until:
        assert process.poll() is None, f"the server ended: {log.read_text()[-3000:]}"
        try:
            answer = httpx.get(url, timeout=5)
            if answer.status_code == status and (status != 503 or "failed" in answer.text):
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"{url} did not answer {status}: {log.read_text()[-3000:]}")


@pytest.fixture(scope="package")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with ``SURE``."""
    folder = tmp_path_factory.mktemp("store")
    shipped = Store(Path("/nonexistent"), fallbacks=[SHIPPED]).load("demo")
    guarantee = dataclasses.replace(GUARANTEE, threshold=shipped.manifest.threshold)
    manifest = dataclasses.replace(shipped.manifest, name=SURE, guarantee=guarantee)
    draft = BundleDraft(manifest, shipped.probes, shipped.golden, shipped.evaluation(), "A test's.")
    write_bundle(draft, folder / SURE / "1")
    return folder


@pytest.fixture(scope="package")
def audit_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "audit.jsonl"


@pytest.fixture(scope="package")
def url(tmp_path_factory: pytest.TempPathFactory, audit_log: Path, store: Path) -> Iterator[str]:
    """A server under a policy that observes."""
    variables = {"HALLUTRACER_BUNDLE": f"demo demo-fused {SURE}", "HALLUTRACER_STORE": str(store)}
    log = tmp_path_factory.mktemp("vllm") / "log"
    with serving(log, "--trust-request-chat-template", HALLUTRACER_AUDIT_LOG=str(audit_log), **variables) as address:
        yield address
