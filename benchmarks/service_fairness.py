"""Short scores beside long work: does one request, or one caller, hold up the others?

    python -m benchmarks.service_fairness [--model smollm2] [--long-tokens 5600] \\
        [--seconds 60] [--quick] [--json OUT]

The service runs on one thread, with a key for each of two callers.  Short scores arrive at random
(Poisson) for so many seconds, alone and then beside each of

  a long prompt   one score of --long-tokens after another
  answers         --answers clients, each of which has one answer after another decoded
  both

sent with the key of the short scores (one caller) and with another key (two callers).  Latencies
count from the moment when a request should have been sent; readiness and liveness are asked for ten
times a second meanwhile.  The service's deadline is long enough for the long prompt (--flags).  The
exit status is 1 where something falls short."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Check, Outcome, Summary

# of a service that only this script reaches
SHORT, OTHER = "bench-short-scores-key", "bench-other-work-key"
LONG, ANSWERS = "a long prompt", "answers"
WORK = ((LONG,), (ANSWERS,), (LONG, ANSWERS))
# Targets for another caller's short scores.  Beside answers: p50 over quiet.  Beside a long prompt
# alone, whose passes are what a score waits for: p99, beyond so many of these passes.
SLOWER = 3.0
BEYOND_PASSES_MS, PASSES = 1000.0, 2
SHORT_TOKENS = (24, 64)
TIMEOUT_S = 120.0
PAUSE_S = 0.1  # between two looks at readiness; after a refusal of the work


@dataclass
class Looks:
    """What a health check of the service found, several times a second."""

    asked: int = 0
    failed: int = 0  # not a 200
    worst_ms: float = 0.0

    def add(self, status: int, seconds: float) -> None:
        self.asked += 1
        self.failed += status != 200
        self.worst_ms = max(self.worst_ms, seconds * 1e3)


@dataclass
class Run:
    """One measurement: the short scores, the work beside them, and the health checks meanwhile."""

    short: list[Outcome] = field(default_factory=list)
    beside: list[Outcome] = field(default_factory=list)
    looks: dict[str, Looks] = field(default_factory=lambda: {"ready": Looks(), "live": Looks()})


def signed(path: str, body: dict[str, Any], key: str) -> bytes:
    """Return a POST with a bearer key."""
    request = harness.post(path, json.dumps(body, separators=(",", ":")).encode())
    return request.replace(b"\r\n", f"\r\nAuthorization: Bearer {key}\r\n".encode(), 1)


def scores(lengths: tuple[int, int], key: str, seed: int, generate: int = 0) -> Iterator[bytes]:
    """Yield scores of random token ids without end, no two alike; ``generate``: with so many tokens
    of an answer."""
    draw = np.random.default_rng(seed)
    more = {"generate": {"max_tokens": generate}} if generate else {}
    while True:
        ids = draw.integers(10, 4_000, draw.integers(*lengths, endpoint=True)).tolist()
        yield signed("/score", {"input_ids": ids, **more}, key)


async def measure(
    server: harness.ServiceProcess, options: Any, work: tuple[str, ...], key: str, seed: int
) -> Run:
    """Send short scores, beside ``work`` sent with ``key``."""
    run, going = Run(), asyncio.Event()
    going.set()
    clients = [scores((options.long_tokens,) * 2, key, seed)] if LONG in work else []
    if ANSWERS in work:
        clients += [
            scores(SHORT_TOKENS, key, seed + 1 + n, options.answer_tokens)
            for n in range(options.answers)
        ]
    beside = [asyncio.create_task(work_on(server, client, going.is_set, run)) for client in clients]
    beside += [
        asyncio.create_task(look(server, name, going.is_set, run.looks[name])) for name in run.looks
    ]
    try:
        if clients:
            await asyncio.sleep(
                options.lead_s
            )  # the work has the engine when the first short score comes
        arrivals = harness.poisson_arrivals(options.rate, options.seconds, seed).tolist()
        run.short = await harness.open_loop(
            server.address, scores(SHORT_TOKENS, SHORT, seed + 100), arrivals, timeout_s=TIMEOUT_S
        )
    finally:
        going.clear()
        await asyncio.gather(
            *beside
        )  # what was begun is answered: the next measurement begins in quiet
    return run


async def work_on(
    server: harness.ServiceProcess, requests: Iterator[bytes], going: Callable[[], bool], run: Run
) -> None:
    """Send one request after another while ``going``; pause after one that was refused."""
    pool, start = harness.Pool(*server.address), time.perf_counter()
    while going():
        run.beside.append(outcome := await harness.exchange(pool, next(requests), start, TIMEOUT_S))
        if outcome.status != 200:
            await asyncio.sleep(PAUSE_S)
    pool.close()


async def look(
    server: harness.ServiceProcess, name: str, going: Callable[[], bool], looks: Looks
) -> None:
    """Ask for the service's health while ``going``, each time on a connection of its own, as
    balancers do."""
    request = (
        f"GET /health/{name} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    )
    while going():
        pool = harness.Pool(*server.address)
        begun = time.perf_counter()
        status = 0
        with suppress(OSError):
            status = (await pool.exchange(request, TIMEOUT_S)).status
        looks.add(status, time.perf_counter() - begun)
        pool.close()
        await asyncio.sleep(PAUSE_S)


async def pass_ms(server: harness.ServiceProcess, options: Any) -> float:
    """Return how long one pass of a long prompt takes that nothing else runs beside."""
    prompts, pool = scores((options.long_tokens,) * 2, OTHER, seed=3), harness.Pool(*server.address)
    before = server.metrics().total("hallutracer_batch_prompts_count")
    outcome = await harness.exchange(pool, next(prompts), time.perf_counter(), TIMEOUT_S)
    pool.close()
    passes = server.metrics().total("hallutracer_batch_prompts_count") - before
    return (outcome.done - outcome.sent) * 1e3 / passes


def checks_of(
    name: str, run: Run, quiet: Summary, *, limit_ms: float | None, judged: bool
) -> list[Check]:
    """Return the figures of one measurement beside ``quiet``.

    ``judged``: whether times are, which they are beside another caller's work: by ``limit_ms`` for
    the p99, or, where that is None, by ``SLOWER`` for the p50."""
    latency = harness.summarise(run.short, max(outcome.done for outcome in run.short))
    lost = {status: count for status, count in latency.statuses.items() if status != "200"}
    ready, live = run.looks["ready"], run.looks["live"]
    work = harness.statuses(run.beside)
    alone = f"quiet: p50 {quiet.p50_ms:.0f}, p99 {quiet.p99_ms:.0f}, max {quiet.worst_ms:.0f} ms"
    ratio = latency.p50_ms / quiet.p50_ms if quiet.p50_ms > 0 else math.nan
    p99_in_limit = p50_in_limit = None
    if judged and limit_ms is not None:
        p99_in_limit = latency.p99_ms <= limit_ms
    elif judged:
        p50_in_limit = ratio <= SLOWER
    return [
        Check(
            f"{name}: latency",
            f"p50 {latency.p50_ms:.0f}, p99 {latency.p99_ms:.0f}, max {latency.worst_ms:.0f} ms",
            "(reported)" if p99_in_limit is None else f"p99 <= {limit_ms:.0f}",
            p99_in_limit,
            f"{alone}; {latency.requests} short scores",
        ),
        Check(
            f"{name}: p50 over quiet",
            f"{ratio:.2f}",
            "(reported)" if p50_in_limit is None else f"<= {SLOWER:g}",
            p50_in_limit,
        ),
        Check(f"{name}: short scores refused or late", str(lost or 0), "0", not lost),
        Check(
            f"{name}: not ready",
            f"{ready.failed} of {ready.asked}",
            "0",
            ready.asked > 0 and not ready.failed,
            f"longest answer: ready {ready.worst_ms:.0f} ms, live {live.worst_ms:.0f} ms, "
            f"not live {live.failed} of {live.asked}",
        ),
        Check(f"{name}: answers of the work", str(work or 0), "some", work.get("200", 0) > 0),
    ]


def main() -> int:
    arguments = harness.parser(
        __doc__, quick="smoke: the demo model for seconds, and no time is judged", cache=False
    )
    arguments.add_argument("--model", default="smollm2")
    arguments.add_argument("--long-tokens", type=int, default=5600)
    arguments.add_argument(
        "--answers", type=int, default=8, help="clients that have answers decoded"
    )
    arguments.add_argument("--answer-tokens", type=int, default=64)
    arguments.add_argument("--rate", type=float, default=2.0, help="short scores a second")
    arguments.add_argument(
        "--seconds", type=float, default=60.0, help="how long short scores arrive, each time"
    )
    arguments.add_argument(
        "--lead-s", type=float, default=1.0, help="from the work's begin to the first short score"
    )
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument(
        "--flags", default="--deadline-s 120", help="further options of the service"
    )
    options = arguments.parse_args()
    if options.quick:
        options.model = "demo"
        options.long_tokens = 160
        options.answers = 2
        options.answer_tokens = 8
        options.rate, options.seconds, options.lead_s = 10.0, 2.0, 0.2
    checks: list[Check] = []
    record: dict[str, Any] = {
        "options": {name: str(value) for name, value in vars(options).items()},
        "runs": {},
    }
    with tempfile.NamedTemporaryFile("w", suffix=".keys") as keys:
        keys.write(f"{SHORT} name=short\n{OTHER} name=other\n")
        keys.flush()
        chosen = (
            "--model",
            options.model,
            "--threads",
            str(options.threads),
            "--api-key-file",
            keys.name,
        )
        with harness.ServiceProcess(
            *chosen, *shlex.split(options.flags), HALLUTRACER_POLICY="observe"
        ) as server:
            asyncio.run(measure(server, options, (), SHORT, seed=1))  # warm-up
            quiet_run = asyncio.run(measure(server, options, (), SHORT, seed=2))
            quiet = harness.summarise(
                quiet_run.short, max(outcome.done for outcome in quiet_run.short)
            )
            harness.say(f"quiet: p50 {quiet.p50_ms:.0f}, p99 {quiet.p99_ms:.0f} ms")
            record["runs"]["quiet"] = asdict(quiet_run)
            record["pass_ms"] = asyncio.run(pass_ms(server, options))
            harness.say(f"one pass of a long prompt: {record['pass_ms']:.0f} ms")
            beside_passes_ms = BEYOND_PASSES_MS + PASSES * record["pass_ms"]
            seeds = itertools.count(10, 1000)
            for work, other in itertools.product(WORK, (False, True)):
                name = f"beside {' and '.join(work)}, {'two callers' if other else 'one caller'}"
                run = asyncio.run(
                    measure(server, options, work, OTHER if other else SHORT, next(seeds))
                )
                limit_ms = beside_passes_ms if work == (LONG,) else None
                judged = other and not options.quick
                own = checks_of(name, run, quiet, limit_ms=limit_ms, judged=judged)
                harness.say(
                    f"{name}: {own[0].figure}; refused or late {own[2].figure}; not ready"
                    f" {own[3].figure}"
                )
                checks += own
                record["runs"][name] = asdict(run)
            checks.append(
                Check(
                    "the process", "alive" if server.alive() else "ended", "alive", server.alive()
                )
            )
        checks.append(server.end())
    return harness.conclude(checks, options.json, record)


if __name__ == "__main__":
    sys.exit(main())
