"""vLLM's processes that take turns on one machine, and intervals of their paired times.

    python -m benchmarks.vllm_contestant --model FOLDER --kind ours [--stats] \\
        [--arguments JSON] [--adapter DIR]

vLLM's worker spins for a second after a request, and its sampling threads poll, which would disturb
the next measurement on two cores.  So a process without the turn is stopped (SIGSTOP to its whole
process group).

The command is one ``LLM``, answering JSON lines: a job {"prompts": [[ids]], "tokens": n} is
``LLM.generate`` on all of them at once; with "read": true, of the kind reads, the answers' own
tokens are read, too.  The answer has the wall seconds of the call and, with --stats, what vLLM's
core measured: seconds of each prefill and seconds per decoded token. All kinds get the same engine
arguments; only the worker and its plan differ."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike

from service.readout import Site
from tests.serve_process import ROOT, inherited

WORKER = "service.engines.vllm.worker.Worker"
MAX_LENGTH = 2048
# Prefix caching off, so that a prefill is one; the same small cache for all, so that several fit on
# one machine.
SAME: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_memory_bytes": 256 << 20,
    "enable_prefix_caching": False,
    "max_num_batched_tokens": MAX_LENGTH,
    "max_num_seqs": 64,
}
KINDS: dict[str, tuple[tuple[Site, ...], int]] = {  # sites that are read, slots of each
    "bare": ((), 0),
    "again": ((), 0),  # the same in a second process: the noise
    "ours": ((Site.ATTENTION_HEAD,), 1),
    "both": (tuple(Site), 4),
    "reads": ((Site.ATTENTION_HEAD,), 1),
}
ANSWERS = {"reads"}  # may read answers' own tokens
NO_POLICY = {
    "HALLUTRACER_POLICY": ""
}  # with a policy and without a bundle, the plugin ends a vLLM of its own


class Interval(NamedTuple):
    """A median, and its 95 % bootstrap interval."""

    median: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.median:.4f} [{self.low:.4f}, {self.high:.4f}]"


def interval(values: ArrayLike) -> Interval:
    """Return the median of ``values`` and the middle 95 % of the medians of 4,000 resampled
    ones."""
    found = np.asarray(values, np.float64)
    drawn = np.random.default_rng(0).choice(found, (4_000, found.size))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return Interval(float(np.median(found)), float(low), float(high), int(found.size))


class Group:
    """A process and all that it starts, in a process group of its own; stopped between turns.  A
    context manager."""

    def __init__(
        self, command: Sequence[str], log: Path, environment: dict[str, str] | None = None
    ) -> None:
        self._log = log
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=ROOT,
                env=inherited() | NO_POLICY | (environment or {}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                bufsize=1,
                start_new_session=True,
            )
        try:
            self._until_ready()
        except BaseException:
            self.__exit__()
            raise
        self._signal(signal.SIGSTOP)

    @property
    def pid(self) -> int:
        return self._process.pid

    @contextmanager
    def turn(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _until_ready(self) -> None:
        """Wait until it can take a turn.  Raises RuntimeError where it ends instead."""

    def _ended(self) -> RuntimeError:
        words = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        return RuntimeError(f"{self._process.args!r} ended or took too long:\n{words}")

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._signal(signal.SIGKILL)  # workers of vLLM's that outlived it
        self._process.wait()


class Talker(Group):
    """Prints a JSON line when ready, then answers JSON lines; only the process that has the turn
    may ``ask``."""

    def ask(self, **job: Any) -> dict[str, Any]:
        """Return the answer to one job.  Raises RuntimeError where the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
        except BrokenPipeError:
            raise self._ended() from None
        return self._read()

    def _until_ready(self) -> None:
        self.hello = self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer


class Listener(Group):
    """An HTTP server on a port of this machine; ready when ``health`` answers 200."""

    def __init__(
        self, command: Sequence[str], log: Path, health: str, environment: dict[str, str]
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address: tuple[str, int] = free.getsockname()[:2]
        self._health = health
        super().__init__([*command, "--port", str(self.address[1])], log, environment)

    def _until_ready(self) -> None:
        out = self._process.stdout
        assert out is not None
        threading.Thread(
            target=lambda: [None for _ in out], daemon=True
        ).start()  # so that it never waits for a reader
        limit = time.monotonic() + 400
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > limit:
                raise self._ended()
            time.sleep(0.5)

    def _healthy(self) -> bool:
        with (
            closing(http.client.HTTPConnection(*self.address, timeout=5)) as connection,
            suppress(OSError),
        ):
            connection.request("GET", self._health)
            return connection.getresponse().status == 200
        return False


def start(model: str, kind: str, stats: bool, more: dict[str, Any]) -> Any:
    from service.engines.vllm.launch import ENVIRONMENT
    from service.engines.vllm.wire import GATED, KEY

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm import LLM

    context = json.loads((Path(model) / "config.json").read_text())["max_position_embeddings"]
    arguments = (
        SAME | {"max_model_len": min(MAX_LENGTH, context)} | more | {"disable_log_stats": not stats}
    )
    sites, slots = KINDS[kind]
    if sites:
        plan = {"sites": [*map(str, sites)], "slots": slots, "answers": kind in ANSWERS}
        arguments |= {"worker_cls": WORKER, "additional_config": {KEY: plan, GATED: True}}
    return LLM(model=model, **arguments)


def put_probes(llm: Any, kind: str) -> tuple[Any, Any]:
    """Write random unit probes into every slot.  Return what is read, as a ``wire.Plan``, and the
    last one's place."""
    from service.engines.vllm.wire import Plan, probe_digest
    from service.readout import Geometry

    (sites, slots), last = KINDS[kind], (0, "")
    geometry = Geometry(*llm.collective_rpc("hallutracer_describe")[0]["geometry"])
    draw, layers = np.random.default_rng(0), geometry.num_layers
    for site in sites:
        for slot in range(slots):
            direction = draw.normal(size=(layers, geometry.dim(site)))
            direction /= np.linalg.norm(direction, axis=1, keepdims=True)
            table = np.concatenate([direction, np.zeros((layers, 1)), np.ones((layers, 1))], axis=1)
            head = draw.integers(0, geometry.heads(site), layers).tolist()
            numbers = np.ascontiguousarray(table, np.float32).tobytes()
            llm.collective_rpc("hallutracer_write", args=(slot, str(site), head, numbers))
            last = (sites.index(site) * slots + slot, probe_digest(str(site), head, numbers))
    return Plan(geometry, sites, slots, False, kind in ANSWERS), last


def serve(llm: Any, kind: str, adapter: str | None, answer: Any) -> None:
    """Answer jobs until stdin ends."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    from service.engines.vllm.wire import Directive, Payload, answer_read

    plan, last = put_probes(llm, kind) if KINDS[kind][0] else (None, None)
    lora = None if adapter is None else LoRARequest("adapter", 1, adapter)
    for line in sys.stdin:
        job = json.loads(line)
        read = job.get("read", False)
        directive = Directive(answer=last if job.get("read") else None)
        extra = None if plan is None else directive.encode()
        fixed = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, "extra_args": extra}
        parameters = SamplingParams(max_tokens=job["tokens"], **fixed)
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        begun = time.perf_counter()
        outputs = llm.generate(prompts, parameters, use_tqdm=False, lora_request=lora)
        found: dict[str, Any] = {"seconds": time.perf_counter() - begun}
        if any(len(output.outputs[0].token_ids) != job["tokens"] for output in outputs):
            raise RuntimeError("vLLM gave fewer tokens than were asked for")
        if plan is not None and job["tokens"] == 1:  # with more, only the last output is handed out
            payloads = [
                Payload.decode(output.prompt_token_id_logprobs, plan, directive)
                for output in outputs
            ]
            if not all(abs(payload.trajectories).min() > 0 for payload in payloads):
                raise RuntimeError("a reading is zero: no probe was written")
        if (
            plan is not None and job["tokens"] > 1
        ):  # the last token's: here vLLM keeps what came last
            came = [output.prompt_token_id_logprobs for output in outputs]
            if read and not all(abs(answer_read(one, plan)).min() > 0 for one in came):
                raise RuntimeError("no answer was read")
        if outputs[0].metrics is not None:
            times = [output.metrics for output in outputs]
            found["prefill"] = [one.first_token_ts - one.scheduled_ts for one in times]
            if job["tokens"] > 1:
                found["decode"] = [
                    (one.last_token_ts - one.first_token_ts) / (job["tokens"] - 1) for one in times
                ]
        answer(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--kind", choices=list(KINDS), required=True)
    parser.add_argument("--stats", action="store_true", help="vLLM's own times of each request")
    parser.add_argument(
        "--arguments", type=json.loads, default={}, help="more engine arguments, as JSON"
    )
    parser.add_argument("--adapter", help="folder of a LoRA adapter with which every request runs")
    options = parser.parse_args()
    answers = os.dup(1)  # away from what vLLM itself prints
    os.dup2(2, 1)

    def answer(content: dict[str, Any]) -> None:
        os.write(answers, (json.dumps(content) + "\n").encode())

    begun = time.perf_counter()
    llm = start(options.model, options.kind, options.stats, options.arguments)
    answer({"kind": options.kind, "start_s": time.perf_counter() - begun})
    serve(llm, options.kind, options.adapter, answer)


if __name__ == "__main__":
    main()
