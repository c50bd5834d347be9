"""vLLM behind Ray Serve LLM, its Ray executor over two processes, and its gRPC server; and each
with a broken guard."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path

import pytest
import yaml

from service.demo import MODEL_DIR
from service.engines.vllm.launch import WORKER
from tests.engines.vllm.installed import vllm_or_skip
from tests.serve_process import PATHS, ROOT
from tests.vllm_plugin.test_engine_gate import OFFLINE, SAME, asked, check_answers, run, withheld

vllm_or_skip()

__all__ = ["asked", "withheld"]  # fixtures

pytestmark = pytest.mark.long

PYTHON = ROOT / ".venv-platforms" / "bin" / "python"
# Ray's tests are alone on the machine: beside others, Serve's 60 s for its HTTP process, a
# constant, were too short.
# its processes start one after another, and most import vLLM: three minutes on two idle cores
RAY_S = 1500
GRPC = f"""\
import asyncio
import contextlib
import json
import os
import random
import signal
import socket

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as stubs
from transformers import AutoTokenizer
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers import grpc_server
from vllm.utils.argparse_utils import FlexibleArgumentParser

async def ask(stub, tokenizer, place, question, gather):
    messages = [{{"role": "user", "content": question}}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    how = pb.SamplingParams(max_tokens=6, temperature=0, n=1, **(
        dict(ignore_eos=True, min_tokens=6, logprobs=2) if place % 4 == 0 else {{}}))
    tokens, logprobs = [], False
    async with gather:
        async for answer in stub.Generate(pb.GenerateRequest(
            request_id=str(place), tokenized=pb.TokenizedInput(input_ids=chat), sampling_params=how,
            stream=bool(place % 2),
        )):
            one = getattr(answer, answer.WhichOneof("response"))
            if answer.HasField("chunk"):
                tokens += one.token_ids
            elif place % 2 == 0:
                tokens += one.output_ids
            logprobs |= len(one.output_logprobs.token_logprobs) > 0
    return [[tokens, tokenizer.decode(tokens), None, logprobs]]

async def main(args):
    server = asyncio.create_task(grpc_server.serve_grpc(args))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{{args.port}}") as channel:
        ready = asyncio.create_task(channel.channel_ready())
        await asyncio.wait([server, ready], return_when=asyncio.FIRST_COMPLETED)
        if server.done():
            ready.cancel()
            raise SystemExit(f"the server ended: {{server.exception()!r}}")
        stub, gather = stubs.VllmEngineStub(channel), asyncio.Semaphore(64)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        asked = json.load(open("questions.json"))
        work = [ask(stub, tokenizer, *one, gather) for one in enumerate(asked)]
        for choices in await asyncio.gather(*work):
            print("ANSWER", json.dumps(choices))
    os.kill(os.getpid(), signal.SIGTERM)
    await server

if __name__ == "__main__":
    # It is bound a minute later: below the ports that the kernel gives to others in the meantime.
    for port in random.sample(range(20_000, 32_000), 99):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            break
    parser = FlexibleArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=port)
    same = {SAME}
    args = AsyncEngineArgs.add_cli_args(parser).parse_args([])
    vars(args).update(same)
    asyncio.run(main(args))
"""
# vLLM's CPU build says that Ray cannot place it: as a platform plugin it says that it can, on what
# Ray counts as GPUs.
CAN_BE_PLACED = {
    "placed-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: placed\nVersion: 1\n",
    "placed-1.dist-info/entry_points.txt": "[vllm.platform_plugins]\nplaced = placed:name\n",
    "placed.py": 'def name():\n    return "placed_platform.Placed"\n',
    "placed_platform.py": (
        """\
        from vllm.platforms.cpu import CpuPlatform

        class Placed(CpuPlatform):
            ray_device_key = "GPU"
        """
    ),
}
# The recipe's application, with a model of ours: its configuration is made in a task, its engine in
# a replica, the engine's core in a process of that, and the model's halves in two actors.
RAY = f"""\
import asyncio
import json
import os
import socket

import httpx
import ray
from ray import serve
from ray.serve.llm import build_openai_app

async def ask(client, place, question, gather):
    body = {{"model": "my-model", "messages": [{{"role": "user", "content": question}}],
             "max_tokens": 6, "temperature": 0, "stream": bool(place % 2)}}
    body |= {{"ignore_eos": True, "min_tokens": 6, "logprobs": True}} if place % 4 == 0 else {{}}
    async with gather:
        response = (await client.post("/v1/chat/completions", json=body)).raise_for_status()
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {{")]
    choices = [one for part in lines or [response.text] for one in json.loads(part)["choices"]]
    parts = [choice.get("delta") or choice.get("message") or {{}} for choice in choices]
    text = "".join(part.get("content") or "" for part in parts)
    logprobs = [choice.get("logprobs") or {{}} for choice in choices]
    said = [token for part in logprobs for token in part.get("content") or []]
    reason = next(filter(None, (choice.get("stop_reason") for choice in choices)), None)
    return [[said, text, reason, bool(said)]]

def start_ray(tries=4):
    # It waits 30 s for a process of its own, which is short on a busy machine.
    try:
        ray.init(num_cpus=4, num_gpus=2, include_dashboard=False,
                 object_store_memory=100_000_000, log_to_driver=True)
    except Exception as error:
        if tries == 1 or "timed out during startup" not in str(error):
            raise
        ray.shutdown()
        start_ray(tries - 1)

async def main(url):
    gather, asked = asyncio.Semaphore(64), json.load(open("questions.json"))
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        work = [ask(client, *one, gather) for one in enumerate(asked)]
        for choices in await asyncio.gather(*work):
            print("ANSWER", json.dumps(choices))

if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start_ray()
    (application,) = json.load(open("application.json"))["applications"]
    (llm,) = application["args"]["llm_configs"]
    llm["model_loading_config"]["model_source"] = {str(MODEL_DIR)!r}
    llm["engine_kwargs"] |= {{name: value for name, value in {SAME}.items() if name != "model"}}
    llm["runtime_env"]["env_vars"] |= {{"RAY_ADDRESS": ray.get_runtime_context().gcs_address}}
    llm["runtime_env"]["env_vars"] |= {{
        "HALLUTRACER_BUNDLE": "demo", "HALLUTRACER_STORE": os.getcwd()}}
    llm["deployment_config"] = {{"num_replicas": 1, "max_constructor_retry_count": 1}}
    serve.start(http_options={{"port": port}})
    serve.run(build_openai_app(application["args"]))
    asyncio.run(main(f"http://127.0.0.1:{{port}}"))
    serve.shutdown()
    ray.shutdown()
"""


def python() -> str:
    """Skips the test without its packages; fails under HALLUTRACER_REQUIRE_PLATFORMS=1, as ``make
    test-long`` sets."""
    if not (PYTHON.parent.parent / ".installed").exists():
        reason = "Ray and vLLM's gRPC server are not installed: make platforms"
        (pytest.fail if os.environ.get("HALLUTRACER_REQUIRE_PLATFORMS") == "1" else pytest.skip)(
            reason
        )
    return str(PYTHON)


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))


def prepared(folder: Path, files: dict[str, str] | None = None) -> dict[str, str]:
    """The environment of a program in ``folder``, whose other processes find these files, too."""
    recipe = yaml.safe_load((ROOT / "deploy/platforms/ray-serve.yaml").read_text())
    write(folder, CAN_BE_PLACED | (files or {}) | {"application.json": json.dumps(recipe)})
    first, second = (sorted(os.sched_getaffinity(0)) * 2)[:2]
    return {
        "PYTHONPATH": f"{folder}{os.pathsep}{PATHS}",
        "VLLM_CPU_OMP_THREADS_BIND": f"{first}|{second}",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Of 5 and 10 s, after which Serve kills its HTTP process and starts another.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
    }


def test_no_token_of_a_withheld_answer_through_grpc(
    tmp_path: Path, asked: list[str], withheld: list[bool]
) -> None:
    check_answers(run(tmp_path, GRPC, asked, python()), asked, withheld, tells=())


@pytest.mark.alone
def test_no_token_of_a_withheld_answer_through_ray(
    tmp_path: Path, asked: list[str], withheld: list[bool]
) -> None:
    """The variables are in the replica's environment only.  A stream of vLLM's without a token has
    no last chunk."""
    variables = prepared(tmp_path) | {"HALLUTRACER_BUNDLE": "", "HALLUTRACER_POLICY": ""}
    check_answers(
        run(tmp_path, RAY, asked, python(), RAY_S, **variables), asked, withheld, tells=(0,)
    )


# Part of the guard cannot be imported; or its entry point cannot, which vLLM logs, and goes on
# without it.
BROKEN = {"sitecustomize.py": 'import sys\n\nsys.modules["service.vllm_plugin.front_end"] = None\n'}
UNREACHED = {"hallutracer_start.py": 'raise RuntimeError("broken")\n'}
LOADS_NOT = "the guard cannot be loaded: ModuleNotFoundError"
JUDGES_NOT = f"nothing judges what {WORKER} reads"


@pytest.mark.parametrize(
    ("program", "broken", "words"),
    [
        (GRPC, BROKEN, LOADS_NOT),
        (OFFLINE, UNREACHED, JUDGES_NOT),
    ],
    ids=["grpc", "worker named"],
)
def test_a_broken_guard_starts_no_engine(
    tmp_path: Path, program: str, broken: dict[str, str], words: str
) -> None:
    """The same of other programs, whose engines are not started: test_no_gate.  Ray's recipe names
    the worker (tests/deploy/test_packaging.py), which refuses in whatever process it is made."""
    if program == OFFLINE:
        program = program.replace(repr(SAME), repr(SAME | {"worker_cls": WORKER}))
    ran = run(tmp_path, program, ["x"], python(), **prepared(tmp_path, broken))
    assert ran.returncode != 0
    assert "ANSWER" not in ran.stdout
    assert words in ran.stdout + ran.stderr
