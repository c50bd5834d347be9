"""What the readout costs on vLLM, beside bare compiled vLLM, in one run.

    python -m benchmarks.vllm_overhead [--rounds 30] [--minutes 14] [--shape qwen2.5-0.5b] [--json OUT] [--quick]
                                        [--starts 3] [--kinds bare,again,ours,both]

Each contestant is a vLLM in a process of its own (``vllm_contestant``), alive for all rounds; the one whose turn it is
runs, the others are stopped.  In every round, for every measure, they come in random order.  A process keeps a bias of
its own (where its memory lies) that rounds do not average out, so the rounds are shared out among several starts of all
contestants.  A ratio is of two times of the same round:

  prefill N  wall time of ``LLM.generate`` on N fresh random token ids, max_tokens=1; ours with its directive, so that
             readings are gathered, sent and checked
  decode     vLLM's own time per token between the first and the last of 17, after a prompt of 64

again / bare is the noise floor: two processes that are the same.  Medians over all rounds with a 95 % bootstrap
interval, and each start's median.  The exit status is 1 where ours has a median above 1.01.  Needs 20 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_model import SHAPES, prepare
from benchmarks.harness import Check, conclude, machine_busy_seconds, parser, say
from benchmarks.vllm_contestant import Talker, interval

TARGET = 1.01
DECODED = 17
SHORT_S = 0.4  # a measure shorter than this is repeated within a turn
Times = dict[str, list[dict[str, float]]]  # measure -> rounds -> contestant -> seconds


class Run:
    """The contestants' times of one start after the other."""

    def __init__(self, options: argparse.Namespace) -> None:
        lengths = [int(one) for one in options.tokens.split(",")]
        self.todo = {f"prefill {length}": (length, 1) for length in lengths} | {"decode": (min(64, *lengths), DECODED)}
        self.kinds = options.kinds.split(",")
        self.ids, self.draw = np.random.default_rng(options.seed), random.Random(options.seed)
        self.cores: list[float] = []
        self.starts: list[Times] = []

    def sit(self, options: argparse.Namespace, rounds: int, folder: str, logs: Path) -> None:
        """Start the contestants, warm up, and go through the rounds; all are ended on the way out."""
        order = list(self.kinds)
        self.draw.shuffle(order)
        with ExitStack() as stack:
            talkers: dict[str, Talker] = {}
            for kind in order:
                arguments = ["--model", folder, "--kind", kind, "--stats", "--arguments", json.dumps(options.arguments)]
                talker = Talker(["benchmarks.vllm_contestant", *arguments], logs / f"{kind}.log")
                talkers[kind] = stack.enter_context(talker)
                say(f"{kind}: started in {talker.hello['start_s']:.0f} s")
            times: Times = {name: [] for name in self.todo}
            self.starts.append(times)
            repeats = {name: self._repeats(talkers, name) for name in self.todo}
            begun, busy = time.monotonic(), machine_busy_seconds()
            for number in range(rounds):
                for name in self.todo:
                    self.draw.shuffle(order)
                    times[name].append({kind: self._seconds(talkers[kind], name, repeats[name]) for kind in order})
                say(f"round {number + 1} of {rounds}: {times}" if number == 0 else f"round {number + 1} of {rounds}")
                if time.monotonic() - begun > 60 * options.minutes:
                    say("time is up")
                    break
            self.cores.append((machine_busy_seconds() - busy) / (time.monotonic() - begun))

    def _repeats(self, talkers: dict[str, Talker], name: str) -> int:
        """Warm up, twice on each contestant.  Return how often the measure is repeated within a turn."""
        most = 1
        for talker in talkers.values():
            with talker.turn():
                seconds = [float(self._ask(talker, name)["seconds"]) for _ in range(2)]
            if self.todo[name][1] == 1:
                most = max(most, min(20, round(SHORT_S / seconds[1])))
        return most

    def _seconds(self, talker: Talker, name: str, repeats: int) -> float:
        with talker.turn():
            talker.ask(prompts=[self._prompt(4)], tokens=1)  # awake, and vLLM's queues no longer idle
            answers = [self._ask(talker, name) for _ in range(repeats)]
        return statistics.median(one["decode"][0] if name == "decode" else one["seconds"] for one in answers)

    def _ask(self, talker: Talker, name: str) -> dict[str, Any]:
        length, tokens = self.todo[name]
        return talker.ask(prompts=[self._prompt(length)], tokens=tokens)

    def _prompt(self, length: int) -> list[int]:
        return [int(one) for one in self.ids.integers(10, 4_000, length)]

    def checks(self, judged: bool) -> list[Check]:
        found = []
        cores = ", ".join(f"{one:.2f}" for one in self.cores)
        for name in self.todo:
            bare = statistics.median(one["bare"] for times in self.starts for one in times[name]) * 1e3
            for kind in self.kinds:
                if kind == "bare":
                    continue
                ratios = [[one[kind] / one["bare"] for one in times[name]] for times in self.starts if times[name]]
                result, aimed = interval(np.concatenate(ratios)), judged and kind == "ours"
                starts = " ".join(f"{statistics.median(one):.3f}" for one in ratios)
                found.append(Check(
                    f"{name}: {kind} / bare", f"{result} ({result.count} rounds)",
                    f"<= {TARGET}" if aimed else "(reported)", result.median <= TARGET if aimed else None,
                    f"bare {bare:.1f} ms; by start {starts}; cores busy {cores}",
                ))  # fmt: skip
        return found


def main() -> int:
    arguments = parser(__doc__, quick="smoke: demo model, eager, few rounds, nothing judged")
    arguments.add_argument("--shape", choices=SHAPES, default=SHAPES[0])
    arguments.add_argument("--kinds", default="bare,again,ours,both", help="contestants; bare must be one of them")
    arguments.add_argument("--tokens", default="64,256,1024", help="prefill lengths")
    arguments.add_argument("--rounds", type=int, default=30, help="all starts together")
    arguments.add_argument("--starts", type=int, default=3, help="of the contestants")
    arguments.add_argument("--minutes", type=float, default=14.0, help="of a start's rounds; no new one after this")
    arguments.add_argument("--arguments", type=json.loads, default={}, help="more engine arguments of all, as JSON")
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    if options.quick:
        options.shape, options.tokens, options.rounds, options.starts = "demo", "32,64", 4, 2
        options.arguments = {"enforce_eager": True} | options.arguments
    folder = prepare(options.shape, options.cache).folder
    logs = Path(tempfile.mkdtemp(prefix="hallutracer-bench-"))
    say(f"{options.shape}; {os.cpu_count()} cores, load average {os.getloadavg()[0]:.2f}; logs in {logs}")
    run = Run(options)
    for _ in range(options.starts):
        run.sit(options, max(2, -(-options.rounds // options.starts)), folder, logs)
    record = {"shape": options.shape, "cpus": os.cpu_count(), "seed": options.seed, "starts": run.starts}
    return conclude(run.checks(not options.quick), options.json, record)


if __name__ == "__main__":
    sys.exit(main())
