"""vLLM's own OpenAI server with the plugin on the demo model; one observes, for all who ask.

It is a fork of a process that has imported vLLM (tests/kit/forks.py), and its processes are forks
of it, as on CUDA.  The one of ``gated`` (test_gated) and those over two nodes are started as by a
user of the CPU build."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from probes_store.bundle import BundleDraft
from probes_store.store import SHIPPED, Store
from service.demo import MODEL_DIR
from tests.kit import forks, vllm_programs
from tests.kit.api import CHAT, WIRES, request_of
from tests.kit.bundles import GUARANTEE, write_bundle
from tests.kit.forks import Program
from tests.kit.local_server import free_port
from tests.kit.vllm_programs import VARIABLES

STARTING_S = 240.0
SERVER = "vllm.entrypoints.openai.api_server"
FORKED = Program(SERVER)
Process = subprocess.Popen[bytes] | forks.Forked
MODEL = "demo"
SURE = "sure"  # the demo's bundle, with a guarantee
POLICIES = """
[calls-too]
action = "abstain"
message = "I am not sure."
tools = "gate"

[open]
action = "abstain"
withhold_outside = false
"""
KNOWN, UNKNOWN = "What is the capital of Italy?", "What is the capital of the Solomon Islands?"


@contextmanager
def serving(
    log: Path, *arguments: str, program: str | Program = FORKED, **environment: str
) -> Iterator[str]:
    """Its address, once it answers and our routes are ready.  ``program``: a module's name, where
    it is not a fork."""
    process, url = _started(log, program, *arguments, **environment)
    try:
        _wait(process, log, f"{url}/health")
        _wait(process, log, f"{url}/health/ready")
        yield url
    finally:
        _stop(process)


def ending(log: Path, *arguments: str, **environment: str) -> int:
    """The status of a server that ends by itself."""
    process, _ = _started(log, FORKED, *arguments, **environment)
    try:
        return process.wait(STARTING_S)
    finally:
        _stop(process)


def _started(
    log: Path, program: str | Program, *arguments: str, **environment: str
) -> tuple[Process, str]:
    port = free_port()
    options = [
        "--model",
        str(MODEL_DIR),
        "--dtype",
        "float32",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--served-model-name",
        MODEL,
        "--enforce-eager",
        *arguments,
    ]
    url, folder = f"http://127.0.0.1:{port}", log.parent
    variables = {"HALLUTRACER_BUNDLE": "demo demo-fused"} | environment
    if isinstance(program, Program):
        return vllm_programs.start(program, options, folder, log, **variables), url
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", program, *options],
            env=VARIABLES | variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=folder,
        )
    return process, url


def _stop(process: Process) -> None:
    with suppress(ProcessLookupError):  # it and its children have ended
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: Process, log: Path, url: str) -> None:
    until = time.monotonic() + STARTING_S
    while time.monotonic() < until:
        assert process.poll() is None, f"the server ended: {log.read_text()[-3000:]}"
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"{url} did not answer 200: {log.read_text()[-3000:]}")


def ask(url: str, route: str, asked: Any, **options: Any) -> httpx.Response:
    """What is answered to a question, or to messages, in any protocol; ``options`` are
    ``request_of``'s."""
    wire = next((wire for wire in WIRES.values() if wire.route == route), CHAT)
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    body = request_of(wire, messages, **{"model": MODEL} | options)
    return httpx.post(f"{url}{route}", json=body, timeout=60)


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
def server_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the server of ``url`` writes."""
    return tmp_path_factory.mktemp("vllm") / "log"


@pytest.fixture(scope="package")
def url(server_log: Path, audit_log: Path, store: Path) -> Iterator[str]:
    """A server under a policy that observes."""
    variables = {"HALLUTRACER_BUNDLE": f"demo demo-fused {SURE}", "HALLUTRACER_STORE": str(store)}
    with serving(
        server_log,
        "--trust-request-chat-template",
        HALLUTRACER_AUDIT_LOG=str(audit_log),
        **variables,
    ) as address:
        yield address


@pytest.fixture(scope="package")
def choosing_url(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Iterator[str]:
    """A server under a gate with tools, whose operator lets callers choose another policy and
    another rendering, and whose answers are what ``vllm_xargs.says`` has."""
    folder = tmp_path_factory.mktemp("choosing")
    (folder / "policies.toml").write_text(POLICIES)
    arguments = (
        "--trust-request-chat-template",
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--logits-processors", "tests.vllm_plugin.forcing:Forcing"),
    )
    variables = {
        "BUNDLE": f"demo {SURE}",
        "STORE": str(store),
        "POLICY": "gate",
        "POLICIES": str(folder / "policies.toml"),
        "CALLERS_MAY": "policy bundle rendering",
    }
    given = {f"HALLUTRACER_{name}": value for name, value in variables.items()}
    with serving(folder / "log", *arguments, **given) as address:
        yield address
