"""The environment of clients/requirements.txt: the client libraries of others."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.serve_process import CLIENT, ROOT, inherited

PYTHON = ROOT / ".venv-clients" / "bin" / "python"


def needed() -> Path:
    """Its interpreter.  Skips the test without it; fails under HALLUTRACER_REQUIRE_CLIENTS=1, as ``make test`` sets."""
    if not (PYTHON.parent.parent / ".installed").exists():
        reason = "the client libraries are not installed: make clients"
        (pytest.fail if os.environ.get("HALLUTRACER_REQUIRE_CLIENTS") == "1" else pytest.skip)(reason)
    return PYTHON


def run(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Its Python, with our client on the path and without what these libraries look up on the internet."""
    quiet = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HAYSTACK_TELEMETRY_ENABLED": "False",
        "LANGSMITH_TRACING": "false",
    }
    environment = inherited() | quiet | {"PYTHONPATH": str(CLIENT)} | variables
    return subprocess.run([PYTHON, *arguments], capture_output=True, text=True, timeout=300, env=environment)
