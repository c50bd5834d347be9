"""``hallutracer serve --engine vllm`` and its readout beside stock vLLM, in one run.

    python -m benchmarks.vllm_service [--shapes qwen2.5-0.5b,demo] [--parts rate,latency] \\
        [--quick] [--json OUT]
    python -m benchmarks.vllm_service --shapes qwen2.5-0.5b --parts overhead [--starts 3] \\
        [--drafts] [--adapter]

Processes with the same engine arguments (float32, compiled, prefix caching off).  Of those that are
there the one whose turn it is runs, the others are stopped.

  rate      POST /score from 32 clients over stock ``LLM.generate(max_tokens=1)`` given all the
            prompts at once; fresh token ids, the same for both, in paired rounds of alternating
            order
  latency   from sending to the whole answer of /score, and to the first piece of a streamed
            /v1/completions of stock vLLM with max_tokens=1; 1 and 32 clients, paired rounds
  overhead  ``LLM.generate`` of the contestants (``vllm_contestant``) in random order: N fresh token
            ids, the same for all, with max_tokens=1, where ours has its directive and its readings
            are checked, and vLLM's own time per token between the first and the last of 17, of one
            answer or (--together 1,32) of so many at once.  Two more contestants are one process
            that may read answers' own tokens: able, not asked to, and reads.  A process keeps a
            bias of its own (where its memory lies) that rounds do not average out, so they are
            shared out among several starts.  again / bare is the noise floor.

Medians of paired ratios with a 95 % bootstrap interval; p50 and p99 over all requests.  The exit
status is 1 where the 0.5B shape misses a target: a rate ratio of 0.95, times to risk no longer than
those to the first token, an overhead of 1 %.  The demo model is so small that HTTP decides; it is
reported only.  Needs 12 GiB (overhead: 20) and 22 minutes."""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.bench_model import SHAPES, Bench, run_shapes
from benchmarks.vllm_contestant import MAX_LENGTH, SAME, Listener, Talker, interval

CLIENTS = 32
RATE_TARGET, OVERHEAD_TARGET = 0.95, 1.01
DECODED = 17
DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
SHORT_S = 0.4  # a measure shorter than this is repeated within a turn
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
GATE = {"HALLUTRACER_POLICY": "gate"}


async def exchange(pool: harness.Pool, request: bytes) -> float:
    """Return seconds to the whole answer or, of a streamed one, to its first piece.  Raises
    RuntimeError unless 200."""
    reply = await pool.exchange(request, 3600)
    streamed = reply.header("transfer-encoding") is not None
    arrived = [at for at, piece in reply.pieces if not streamed or b'"choices"' in piece]
    if reply.status != 200 or not arrived:
        raise RuntimeError(f"{reply.status}: {reply.body[:300]!r}")
    return arrived[0] - reply.sent


async def closed_loop(
    address: tuple[str, int], requests: Sequence[bytes], clients: int
) -> tuple[list[float], float]:
    """Return the seconds of each request, and of all, where each of ``clients`` sends its next when
    it was answered."""
    left: Iterator[bytes] = iter(requests)
    found: list[float] = []
    pools = [harness.Pool(*address) for _ in range(clients)]

    async def work(pool: harness.Pool) -> None:
        for request in left:
            found.append(await exchange(pool, request))

    begun = time.perf_counter()
    try:
        await asyncio.gather(*(work(pool) for pool in pools))
        return found, time.perf_counter() - begun
    finally:
        for pool in pools:
            pool.close()


def stream_requests(prompts: Sequence[list[int]]) -> list[bytes]:
    bodies = (
        {"model": "bench", "prompt": one, "max_tokens": 1, "temperature": 0, "stream": True}
        for one in prompts
    )
    return [
        harness.post("/v1/completions", json.dumps(body, separators=(",", ":")).encode())
        for body in bodies
    ]


class VllmBench(Bench):
    """The three processes, both parts."""

    seed = 1_000

    def run(self, parts: list[str]) -> None:
        """Start those that the parts need; one after the other, since starting takes all cores."""
        logs, name = Path(tempfile.mkdtemp(prefix="hallutracer-bench-")), self.prepared.shape
        harness.say(f"logs in {logs}")
        if "overhead" in parts:
            self.overhead(logs)
        with ExitStack() as stack:
            if not {"rate", "latency"} & set(parts):
                return
            ours = stack.enter_context(
                Listener(self._serve(), logs / f"ours-{name}.log", "/health/ready", GATE)
            )
            if "rate" in parts:
                bare = [
                    "--model",
                    self.prepared.folder,
                    "--kind=bare",
                    "--arguments",
                    json.dumps(self._same()),
                ]
                with Talker(
                    ["benchmarks.vllm_contestant", *bare], logs / f"llm-{name}.log"
                ) as direct:
                    for mix in harness.MIXES:
                        self.rate(ours, direct, mix)
            if "latency" in parts:
                stock = stack.enter_context(
                    Listener(self._stock(), logs / f"stock-{name}.log", "/health", QUIET)
                )
                for clients, count in ((1, self.options.alone), (CLIENTS, 2 * CLIENTS)):
                    self.latency(ours, stock, clients, count)

    def rate(self, ours: Listener, direct: Talker, mix: str) -> None:
        with direct.turn():
            seconds = [
                direct.ask(prompts=self._prompts(CLIENTS, mix), tokens=1)["seconds"]
                for _ in range(2)
            ]
        count = CLIENTS * max(self.options.least, round(self.options.round_seconds / seconds[1]))
        with ours.turn():
            asyncio.run(
                closed_loop(
                    ours.address, harness.score_requests(self._prompts(2 * CLIENTS, mix)), CLIENTS
                )
            )
        rounds: list[dict[str, float]] = []
        for number in range(self.options.rounds):
            prompts = self._prompts(count, mix)
            took: dict[str, float] = {}
            for side in ("llm", "score") if number % 2 == 0 else ("score", "llm"):
                if side == "llm":
                    with direct.turn():
                        direct.ask(prompts=self._prompts(1, mix), tokens=1)  # awake
                        took[side] = float(direct.ask(prompts=prompts, tokens=1)["seconds"])
                else:
                    with ours.turn():
                        asyncio.run(
                            closed_loop(
                                ours.address, harness.score_requests(self._prompts(1, mix)), 1
                            )
                        )
                        took[side] = asyncio.run(
                            closed_loop(ours.address, harness.score_requests(prompts), CLIENTS)
                        )[1]
            rounds.append({side: count / value for side, value in took.items()})
            harness.say(f"rate, {mix}, round {number + 1} of {self.options.rounds}: {rounds[-1]}")
        result = interval([one["score"] / one["llm"] for one in rounds])
        rates = {}
        for side in ("score", "llm"):
            rates[side] = interval([of_round[side] for of_round in rounds]).median
        note = (
            f"/score {rates['score']:.4g}/s, LLM.generate {rates['llm']:.4g}/s; {count} prompts a"
            " round"
        )
        name = f"rate of /score at {CLIENTS} clients over LLM.generate, {mix}"
        self.add(name, str(result), f">= {RATE_TARGET}", result.median >= RATE_TARGET, note)
        self.record[f"rate, {mix}"] = {
            "prompts": count,
            "rounds": rounds,
            "ratio": result._asdict(),
        }

    def latency(self, ours: Listener, stock: Listener, clients: int, count: int) -> None:
        """``count`` requests a round and side, of 32 to 96 tokens; the first round is warm-up."""
        sides = {"risk": (ours, harness.score_requests), "first token": (stock, stream_requests)}
        rounds: list[dict[str, list[float]]] = []
        for number in range(self.options.latency_rounds + 1):
            prompts = self._prompts(count, next(iter(harness.MIXES)))
            found: dict[str, list[float]] = {}
            for side in sides if number % 2 == 0 else reversed(sides):
                server, make = sides[side]
                with server.turn():
                    asyncio.run(
                        closed_loop(
                            server.address, make(self._prompts(1, next(iter(harness.MIXES)))), 1
                        )
                    )  # awake
                    found[side] = asyncio.run(closed_loop(server.address, make(prompts), clients))[
                        0
                    ]
            if number:
                rounds.append(found)
        pooled = {side: list(chain.from_iterable(map(itemgetter(side), rounds))) for side in sides}
        for share, name in ((0.5, "p50"), (0.99, "p99")):
            times = {side: harness.percentile(values, share) for side, values in pooled.items()}
            paired = [
                harness.percentile(one["risk"], share)
                / harness.percentile(one["first token"], share)
                for one in rounds
            ]
            ratio = times["risk"] / times["first token"]
            note = (
                f"{times['risk'] * 1e3:.2f} ms, first token {times['first token'] * 1e3:.2f}"
                " ms, of "
            )
            note += f"{len(pooled['risk'])} requests each; by round {interval(paired)}"
            self.add(
                f"time to risk over time to first token, {clients} clients, {name}",
                f"{ratio:.3f}",
                "<= 1",
                ratio <= 1,
                note,
            )
        self.record[f"latency, {clients} clients"] = {"rounds": rounds}

    def overhead(self, logs: Path) -> None:
        """Time every contestant beside bare vLLM, in rounds of several starts."""
        kinds = self.options.kinds.split(",")
        lengths = [int(one) for one in self.options.tokens.split(",") if one]
        todo = {f"prefill {length}": (length, 1, 1) for length in lengths}
        for answers in map(int, self.options.together.split(",")):
            todo[f"decode {answers}" if answers > 1 else "decode"] = (
                min([64, *lengths]),
                DECODED,
                answers,
            )
        starts: list[
            dict[str, list[dict[str, float]]]
        ] = []  # measure -> rounds -> contestant -> seconds
        cores: list[str] = []
        for number in range(self.options.starts):
            times, busy = self._start(kinds, todo, logs, random.Random(number))
            starts, cores = [*starts, times], [*cores, f"{busy:.2f}"]
        over = [(kind, "bare") for kind in kinds if kind != "bare"]
        over += [("reads", "able")] if "able" in kinds else []
        for name, (kind, base) in ((name, pair) for name in todo for pair in over):
            alone = statistics.median(one[base] for times in starts for one in times[name]) * 1e3
            ratios = []
            for times in starts:
                ratios.append([by_kind[kind] / by_kind[base] for by_kind in times[name]])
            result, judged = interval(np.concatenate(ratios)), kind == "ours"
            by_start = " ".join(f"{statistics.median(of_start):.3f}" for of_start in ratios)
            self.add(
                f"{name}: {kind} / {base}",
                f"{result} ({result.count} rounds)",
                f"<= {OVERHEAD_TARGET}" if judged else "(reported)",
                result.median <= OVERHEAD_TARGET if judged else None,
                f"{base} {alone:.1f} ms; by start {by_start}; cores busy {', '.join(cores)}",
            )
        self.record["overhead"] = {"cpus": os.cpu_count(), "starts": starts}

    def _start(
        self,
        kinds: list[str],
        todo: dict[str, tuple[int, int, int]],
        logs: Path,
        draw: random.Random,
    ) -> tuple[dict[str, list[dict[str, float]]], float]:
        """Start the contestants, warm up and go through the rounds.  Return the times, and the
        cores that were busy."""
        order = draw.sample(kinds, len(kinds))
        rounds = max(2, -(-self.options.overhead_rounds // self.options.starts))
        same: dict[str, Any] = {"enforce_eager": True} if self.options.eager else {}
        adapter: list[str] = []
        if self.options.drafts:
            same["speculative_config"] = DRAFTS
        if self.options.adapter:
            from tests.engines.lora import save_adapter  # with torch

            adapter = ["--adapter", str(save_adapter(Path(self.prepared.folder), logs / "adapter"))]
            same |= {"enable_lora": True, "max_lora_rank": 8}

        def prompt(length: int) -> list[int]:
            return [draw.randrange(10, 4_000) for _ in range(length)]

        def ask(kind: str, name: str, given: list[list[int]]) -> dict[str, Any]:
            return talkers[kind].ask(
                prompts=given, tokens=todo[name][1], read=kind == "reads" and todo[name][1] > 1
            )

        def seconds(kind: str, name: str, prompts: list[list[list[int]]]) -> float:
            with talkers[kind].turn():
                talkers[kind].ask(
                    prompts=[prompt(4)], tokens=1
                )  # awake, and vLLM's queues no longer idle
                answers = [ask(kind, name, given) for given in prompts]
            if todo[name][1] > 1:
                return statistics.median(statistics.median(one["decode"]) for one in answers)
            return statistics.median(one["seconds"] for one in answers)

        def drawn(name: str) -> list[list[int]]:
            return [prompt(todo[name][0]) for _ in range(todo[name][2])]

        with ExitStack() as stack:
            talkers: dict[str, Talker] = {}
            for kind in (one for one in order if one != "able"):
                command = [
                    "--model",
                    self.prepared.folder,
                    "--kind",
                    kind,
                    "--stats",
                    "--arguments",
                    json.dumps(same),
                ]
                talker = Talker(
                    ["benchmarks.vllm_contestant", *command, *adapter], logs / f"{kind}.log"
                )
                talkers[kind] = stack.enter_context(talker)
                harness.say(f"{kind}: started in {talker.hello['start_s']:.0f} s")
            if "able" in order:
                talkers["able"] = talkers["reads"]
            repeats = dict.fromkeys(todo, 1)
            for name, kind in ((name, kind) for name in todo for kind in order):
                with talkers[kind].turn():
                    warm = [float(ask(kind, name, drawn(name))["seconds"]) for _ in range(2)][1]
                if todo[name][1] == 1:
                    repeats[name] = max(repeats[name], min(20, round(SHORT_S / warm)))
            times: dict[str, list[dict[str, float]]] = {name: [] for name in todo}
            begun, busy = time.monotonic(), harness.machine_busy_seconds()
            for number in range(rounds):
                for name in todo:
                    draw.shuffle(order)
                    prompts = [
                        drawn(name) for _ in range(repeats[name])
                    ]  # drafts fit one better than another
                    times[name].append({kind: seconds(kind, name, prompts) for kind in order})
                harness.say(f"overhead, round {number + 1} of {rounds}")
                if time.monotonic() - begun > 60 * self.options.minutes:
                    harness.say("time is up")
                    break
            return times, (harness.machine_busy_seconds() - busy) / (time.monotonic() - begun)

    def _prompts(self, count: int, mix: str) -> list[list[int]]:
        self.seed += 1
        return harness.make_prompts(count, mix, self.seed)

    def _same(self) -> dict[str, Any]:
        more = {"enforce_eager": True} if self.options.eager else {}
        return SAME | {"max_model_len": min(MAX_LENGTH, self.prepared.max_tokens)} | more

    def _serve(self) -> list[str]:
        arguments = [
            *self.prepared.arguments,
            "--engine",
            "vllm",
            "--deadline-s",
            "600",
            "--dtype",
            "float32",
        ]
        arguments += ["--max-batch-tokens", str(MAX_LENGTH), "--callers-may", "threshold"]
        for name, value in self._same().items():
            if name not in ("dtype", "max_num_batched_tokens"):
                arguments += ["--engine-arg", f"{name}={json.dumps(value)}"]
        return ["service.cli", "serve", *arguments]

    def _stock(self) -> list[str]:
        arguments = [
            "--model",
            self.prepared.folder,
            "--served-model-name",
            "bench",
            "--disable-uvicorn-access-log",
        ]
        for name, value in self._same().items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                arguments.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                arguments += [f"--{flag}", str(value)]
        return ["vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", *arguments]

    def add(self, name: str, figure: str, target: str, passed: bool | None, note: str = "") -> None:
        judged = self.prepared.shape == "qwen2.5-0.5b" and not self.options.quick
        super().add(
            name, figure, target if judged else "(reported)", passed if judged else None, note
        )


def main() -> int:
    arguments = harness.parser(__doc__, quick="smoke: demo model, eager, short; nothing judged")
    arguments.add_argument("--shapes", default="qwen2.5-0.5b,demo", help=", ".join(SHAPES))
    arguments.add_argument("--parts", default="rate,latency", help="rate, latency, overhead")
    arguments.add_argument("--rounds", type=int, default=7, help="paired rounds of a rate")
    seconds = (
        "work of a round and side, about; on the 0.5B shape the least work, 96 prompts, takes"
        " longer"
    )
    arguments.add_argument("--round-seconds", type=float, default=5.0, help=seconds)
    arguments.add_argument("--latency-rounds", type=int, default=6)
    arguments.add_argument(
        "--alone", type=int, default=16, help="requests a round and side with one client"
    )
    arguments.add_argument(
        "--kinds", default="bare,again,ours,both", help="contestants; bare must be one of them"
    )
    arguments.add_argument("--tokens", default="64,256,1024", help="prefills of the overhead")
    arguments.add_argument(
        "--together", default="1", help="answers that are decoded at once in the overhead"
    )
    arguments.add_argument("--overhead-rounds", type=int, default=30, help="all starts together")
    arguments.add_argument("--starts", type=int, default=3, help="of the contestants")
    arguments.add_argument(
        "--minutes", type=float, default=14.0, help="of a start's rounds; no new one after this"
    )
    arguments.add_argument(
        "--drafts", action="store_true", help="overhead with speculation from n-grams"
    )
    arguments.add_argument(
        "--adapter", action="store_true", help="overhead with a random LoRA adapter"
    )
    arguments.add_argument(
        "--eager", action="store_true", help="no compiled graphs: starts faster, for a smoke"
    )
    options = arguments.parse_args()
    options.least = 3
    if options.quick:
        options.shapes = "demo"
        options.eager = True
        options.rounds = 2
        options.latency_rounds = 2
        options.round_seconds, options.least = 0.5, 1
        options.tokens = "32,64"
        options.overhead_rounds = 4
        options.starts = 2
    return run_shapes(options, VllmBench)


if __name__ == "__main__":
    sys.exit(main())
