"""The service beside other work: answers and risks while busy processes take the same cores.

    python -m benchmarks.neighbours [--model smollm2] [--rounds 5] [--neighbours 0 1 2] [--also "--threads 2"]

Two services with the same model take turns on the same cores: one as ``serve`` starts it, one with the options
``--also`` (by default all cores for every forward pass).  In each round and for each number of busy processes both
answer five questions together (24 tokens each, every answer let through) and give risks of single questions, in
random order; the first request of each turn is not counted.  Prints medians and, over the quiet turns of the same
service, the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx

from benchmarks.harness import ServiceProcess

QUESTIONS = [
    "Which city is the capital of Yemen?", "Do you know the capital of American Samoa?", "Who wrote Hamlet?",
    "What is the capital of Italy?", "What is the symbol of gold?",
]  # fmt: skip
BUSY = "while True: pass"
RISKS = 10  # single questions in a turn


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def turn(client: httpx.Client) -> tuple[float, list[float]]:
    """Seconds of five answers together, and of single risks."""
    answers = {"prompt": QUESTIONS, "policy": "observe", "generate": {"max_tokens": 24}}

    def post(body: dict[str, object]) -> float:
        begun = time.perf_counter()
        client.post("/score", json=body).raise_for_status()
        return time.perf_counter() - begun

    post(answers)
    together = post(answers)
    return together, [post({"prompt": random.choice(QUESTIONS)}) for _ in range(RISKS)]


def main() -> None:
    """Run it and print the table.  OMP_NUM_THREADS is taken out of the environment, because it would decide."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--also", default=f"--threads {len(os.sched_getaffinity(0))}", help="options of the other one")
    options = parser.parse_args()
    os.environ.pop("OMP_NUM_THREADS", None)
    random.seed(0)
    seconds: dict[tuple[str, int], list[float]] = {}
    risks: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as stack:
        clients = {}
        for name, more in (("as it starts", ""), (options.also, options.also)):
            arguments = ("--model", options.model, "--deadline-s", "300", *more.split())
            service = stack.enter_context(ServiceProcess(*arguments, HALLUTRACER_MODEL=""))
            clients[name] = stack.enter_context(httpx.Client(base_url=service.url, timeout=300))
        for _ in range(options.rounds):
            for count in options.neighbours:
                for name in random.sample(list(clients), len(clients)):
                    with neighbours(count):
                        together, single = turn(clients[name])
                    seconds.setdefault((name, count), []).append(together)
                    risks.setdefault((name, count), []).extend(single)
                    print(f"{name}, {count} busy: {together:.2f} s", file=sys.stderr, flush=True)
    print(f"{os.cpu_count()} CPUs, {options.model}, {options.rounds} rounds")
    print(
        f"{'service':<16} {'busy':>4} {'5 x 24 tokens s':>16} {'over quiet':>10} {'risk p50 ms':>12} {'over quiet':>10}"
    )
    for (name, count), found in seconds.items():
        together, single = statistics.median(found), statistics.median(risks[name, count])
        quiet = min(options.neighbours)
        over = together / statistics.median(seconds[name, quiet]), single / statistics.median(risks[name, quiet])
        print(f"{name:<16} {count:>4} {together:>16.2f} {over[0]:>10.2f} {single * 1e3:>12.0f} {over[1]:>10.2f}")
    print(json.dumps({f"{name}, {count} busy": found for (name, count), found in seconds.items()}))


if __name__ == "__main__":
    main()
