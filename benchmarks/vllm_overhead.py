"""What the readout costs on vLLM, beside bare compiled vLLM and beside the peers' way, in one run.

    python -m benchmarks.vllm_overhead [--rounds 30] [--minutes 14] [--shape qwen2.5-0.5b] [--json OUT] [--quick]
                                        [--starts 3] [--sittings "bare,again,ours,hooks;bare,both,eager"]

Each contestant is a vLLM in a process of its own (``vllm_contestant``: which, and with what), alive for the whole
sitting; the one whose turn it is runs, the others are stopped.  In every round, for every measure, they come in random
order.  A process keeps a bias of its own (where its memory lies) that rounds do not average out, so the rounds are
shared out among several starts of all contestants, in random order.  A ratio is of two times of the same round:

  prefill N  wall time of ``LLM.generate`` on N fresh random token ids, max_tokens=1; ours with its directive, so that
             readings are gathered, sent and checked
  decode     vLLM's own time per token between the first and the last of 17, after a prompt of 64

again / bare is the noise floor: two processes that are the same.  Later sittings have half the rounds, in one start.
Medians over all rounds with a 95 % bootstrap interval, and each start's median.  The exit status is 1 where ours misses
a target: a median above 1.01.  Needs 20 GiB (5 for each of a sitting); about 35 minutes
on two idle cores.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_model import SHAPES, prepare
from benchmarks.harness import Check, machine_busy_seconds, parser, say, table, write_json
from benchmarks.vllm_turns import Talker, group_memory_gib, interval

SITTINGS = "bare,again,ours,hooks;bare,both,eager"
RATIOS = [(kind, "bare") for kind in ("again", "ours", "both", "hooks", "eager")]
DECODED = 17
SHORT_S = 0.4  # a measure shorter than this is repeated within a turn


@dataclass(frozen=True)
class Measure:
    name: str
    prompt: int
    tokens: int
    target: float

    def seconds(self, answer: dict[str, Any]) -> float:
        return float(answer["seconds"] if self.tokens == 1 else answer["decode"][0])


def measures(lengths: list[int]) -> list[Measure]:
    return [Measure(f"prefill {length}", length, 1, 1.01) for length in lengths] + [
        Measure("decode", min(64, *lengths), DECODED, 1.01)
    ]


class Run:
    """The contestants, and their times by round."""

    def __init__(self, kinds: list[str], todo: list[Measure], seed: int) -> None:
        self.kinds, self.todo = kinds, todo
        self.ids = np.random.default_rng(seed)
        self.draw = random.Random(seed)
        self.talkers: dict[str, Talker] = {}
        self.repeats: dict[str, int] = {}
        self.cores: list[float] = []
        self.starts: list[dict[str, list[dict[str, float]]]] = []

    def begin(self, talkers: dict[str, Talker]) -> None:
        """Another start.  Each measure twice on each contestant; how often a short one is repeated."""
        self.talkers = talkers
        self.starts.append({one.name: [] for one in self.todo})
        for kind, talker in self.talkers.items():
            for measure in self.todo:
                with talker.turn():
                    seconds = [float(self._ask(talker, measure)["seconds"]) for _ in range(2)]
                repeats = max(1, min(20, round(SHORT_S / seconds[1]))) if measure.tokens == 1 else 1
                self.repeats[measure.name] = max(repeats, self.repeats.get(measure.name, 1))
            say(f"{kind}: {group_memory_gib(talker.pid):.1f} GiB")

    def round(self) -> None:
        """All measures; for each, all contestants in random order."""
        order = list(self.talkers)
        for measure in self.todo:
            self.draw.shuffle(order)
            found: dict[str, float] = {}
            for kind in order:
                talker = self.talkers[kind]
                with talker.turn():
                    talker.ask(prompts=[self._prompt(4)], tokens=1)  # awake, and vLLM's queues no longer idle
                    answers = [self._ask(talker, measure) for _ in range(self.repeats[measure.name])]
                found[kind] = statistics.median(measure.seconds(answer) for answer in answers)
            self.starts[-1][measure.name].append(found)

    def ratios(self, name: str, ours: str, theirs: str) -> list[list[float]]:
        """Of the rounds in which both took part, by start; empty where one of them never does."""
        if not {ours, theirs} <= set(self.kinds):
            return []
        return [[one[ours] / one[theirs] for one in times[name]] for times in self.starts if times[name]]

    def cell(self, name: str, ours: str, theirs: str) -> str:
        """Median and interval of all rounds; each start's median."""
        by_start = self.ratios(name, ours, theirs)
        result = interval(np.concatenate(by_start))
        starts = " ".join(f"{statistics.median(one):.3f}" for one in by_start)
        return f"{result.median:.3f} [{result.low:.3f}, {result.high:.3f}]" + f"; {starts}" * (len(by_start) > 1)

    def _ask(self, talker: Talker, measure: Measure) -> dict[str, Any]:
        return talker.ask(prompts=[self._prompt(measure.prompt)], tokens=measure.tokens)

    def _prompt(self, length: int) -> list[int]:
        return [int(one) for one in self.ids.integers(10, 4_000, length)]


def checks_of(run: Run, judged: bool) -> list[Check]:
    found = []
    for measure in run.todo:
        for ours, theirs in RATIOS:
            ratios = run.ratios(measure.name, ours, theirs)
            if not ratios:
                continue
            result = interval(np.concatenate(ratios))
            aimed = judged and (ours, theirs) == ("ours", "bare")
            found.append(
                Check(
                    f"{measure.name}: {ours} / {theirs}",
                    f"{run.cell(measure.name, ours, theirs)} ({result.count} rounds)",
                    f"<= {measure.target}" if aimed else "(reported)",
                    result.median <= measure.target if aimed else None,
                )
            )
    return found


def markdown(run: Run) -> str:
    """The table for LOG.md: a row for each measure."""
    pairs = [pair for pair in RATIOS if set(pair) <= set(run.kinds)]
    lines = ["| | bare ms | " + " | ".join(f"{ours} / {theirs}" for ours, theirs in pairs) + " |",
             "| --- " * (2 + len(pairs)) + "|"]  # fmt: skip
    for measure in run.todo:
        bare = statistics.median(one["bare"] for times in run.starts for one in times[measure.name]) * 1e3
        cells = [run.cell(measure.name, *pair) for pair in pairs]
        lines.append(f"| {measure.name} | {bare:.1f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def sit(options: argparse.Namespace, run: Run, rounds: int, folder: str, logs: Path) -> None:
    """Start the contestants, warm up, and go through the rounds; all are ended on the way out."""
    order = list(run.kinds)
    run.draw.shuffle(order)
    with ExitStack() as stack:
        talkers: dict[str, Talker] = {}
        for kind in order:
            arguments = ["--model", folder, "--kind", kind, "--stats", "--arguments", json.dumps(options.arguments)]
            talker = Talker(["benchmarks.vllm_contestant", *arguments], logs / f"{kind}.log")
            talkers[kind] = stack.enter_context(talker)
            say(f"{kind}: started in {talker.hello['start_s']:.0f} s")
        run.begin(talkers)
        begun, busy = time.monotonic(), machine_busy_seconds()
        for number in range(rounds):
            run.round()
            minutes = (time.monotonic() - begun) / 60
            left = minutes / (number + 1) * (rounds - number - 1)
            state = "; ".join(
                f"{measure.name} " + ", ".join(f"{kind} {statistics.median(found[-1]):.3f}" for kind, other in RATIOS
                                               if (found := run.ratios(measure.name, kind, other)))
                for measure in run.todo
            )  # fmt: skip
            say(f"round {number + 1} of {rounds}, {left:.0f} min left; over bare, this start: {state}")
            if minutes > options.minutes:
                say("time is up")
                break
        run.cores.append((machine_busy_seconds() - busy) / (time.monotonic() - begun))


def parse() -> argparse.Namespace:
    arguments = parser(__doc__, quick="smoke: demo model, eager, few rounds, nothing judged")
    arguments.add_argument("--shape", choices=SHAPES, default=SHAPES[0])
    arguments.add_argument("--sittings", default=SITTINGS, help="contestants; those before and after a ; sit apart")
    arguments.add_argument("--tokens", default="64,256,1024", help="prefill lengths")
    arguments.add_argument("--rounds", type=int, default=30, help="of the first sitting, all starts together")
    arguments.add_argument("--starts", type=int, default=3, help="of the first sitting's contestants")
    arguments.add_argument("--minutes", type=float, default=14.0, help="of a start's rounds; no new one after this")
    arguments.add_argument("--arguments", type=json.loads, default={}, help="more engine arguments of all, as JSON")
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    if options.quick:
        options.shape, options.tokens, options.rounds, options.starts = "demo", "32,64", 4, 2
        options.arguments = {"enforce_eager": True} | options.arguments
    return options


def main() -> int:
    """All sittings; the table; 1 where a target is missed."""
    options = parse()
    folder = prepare(options.shape, options.cache).folder
    logs = Path(tempfile.mkdtemp(prefix="hallutracer-bench-"))
    say(f"{options.shape}; {os.cpu_count()} cores, load average {os.getloadavg()[0]:.2f}; logs in {logs}")
    checks: list[Check] = []
    record: dict[str, Any] = {"shape": options.shape, "cpus": os.cpu_count(), "seed": options.seed, "sittings": []}
    printed = []
    for place, sitting in enumerate(options.sittings.split(";")):
        run = Run(sitting.split(","), measures([int(one) for one in options.tokens.split(",")]), options.seed + place)
        starts, rounds = (options.starts, options.rounds) if place == 0 else (1, options.rounds // 2)
        for _ in range(starts):
            sit(options, run, max(2, -(-rounds // starts)), folder, logs)
            record["sittings"][place:] = [{"kinds": sitting, "cores_busy": run.cores, "starts": run.starts}]
            if options.json:
                write_json(options.json, checks + checks_of(run, not options.quick), record)
        checks += checks_of(run, not options.quick)
        cores = ", ".join(f"{one:.2f}" for one in run.cores)
        printed.append(f"{markdown(run)}\n\n{sitting}; cores busy, everybody's, by start: {cores}")
    say()
    print(table(checks), *printed, sep="\n\n", flush=True)
    return int(any(check.passed is False for check in checks))


if __name__ == "__main__":
    sys.exit(main())
