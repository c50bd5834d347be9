"""vLLM's own OpenAI server with the plugin, as a user starts it, on the demo model."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from service.demo import MODEL_DIR
from tests.serve_process import PATHS

STARTING_S = 240.0
MODEL = "demo"


@contextmanager
def serving(log: Path, *arguments: str, ready: bool = True, **environment: str) -> Iterator[str]:
    """Its address, once it answers (and, with ``ready``, once our routes are ready)."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = os.environ | {
        "PYTHONPATH": PATHS,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HALLUTRACER_BUNDLE": "demo demo-fused",
        **environment,
    }
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL_DIR), "--dtype", "float32",
        "--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL, "--enforce-eager", *arguments,
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=variables, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, cwd=log.parent
        )
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
        except httpx.TransportError:
            time.sleep(0.5)
            continue
        if answer.status_code == status and (status != 503 or "failed" in answer.text):
            return
        time.sleep(0.5)
    raise AssertionError(f"{url} did not answer {status}: {log.read_text()[-3000:]}")
