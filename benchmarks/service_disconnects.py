"""A thousand clients that disconnect: does any work for them continue?

    python -m benchmarks.service_disconnects [--shape demo] [--count 1000] [--quick] [--json OUT]

Score, generate and stream requests are broken off at several moments, half by an orderly close, half by a reset, beside
honest clients, which must be answered.  Afterwards the gauges of /metrics must be back at zero, no token may be
prefilled or decoded any more, the process must be idle, and its sockets closed; else the exit status is 1.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from benchmarks.bench_model import SHAPES, prepare
from benchmarks.harness import (
    GAUGES,
    Check,
    Outcome,
    ServiceProcess,
    closed_loop,
    conclude,
    cpu_seconds,
    make_prompts,
    parser,
    post,
    raise_file_limit,
    score_requests,
    server_arguments,
    statuses,
    with_server,
)

MIX = "mixed 32-96"
WORK = (
    "hallutracer_prompt_tokens_total", "hallutracer_completion_tokens_total", "hallutracer_batch_prompts_count",
    "hallutracer_prefill_seconds_count", "hallutracer_decode_seconds_count",
)  # fmt: skip
# What a request carries, and the moments at which it may be broken off.
KINDS: dict[str, tuple[str, ...]] = {
    "score": ("partial body", "right after", "queued"),
    "generate": ("partial body", "right after", "queued", "decoding"),
    "stream": ("partial body", "right after", "queued", "mid-stream"),
}


@dataclass(frozen=True)
class Plan:
    kind: str
    moment: str
    reset: bool
    request: bytes
    pieces: int = 1  # of the answer, read before hanging up mid-stream
    patience: float = 1.0  # times the pause, before hanging up on a decode


def plans(count: int, max_tokens: int, patience: float, seed: int = 0) -> list[Plan]:
    """Return all kinds and moments in turn, shuffled.  Answers are long enough to be noticed if they continue."""
    cases = [(kind, moment) for kind, moments in KINDS.items() for moment in moments]
    made = []
    for number, prompt in enumerate(make_prompts(count, MIX, seed)):
        kind, moment = cases[number % len(cases)]
        content: dict[str, Any] = {"input_ids": prompt}
        if kind != "score":  # threshold 1 lets every prompt decode
            content |= {"threshold": 1.0, "generate": {"max_tokens": max_tokens}}
        if kind == "stream":
            content["stream"] = True
        request = post("/score", json.dumps(content).encode())
        made.append(Plan(kind, moment, number // len(cases) % 2 == 0, request, 1 + number % 7, patience))
    random.Random(seed).shuffle(made)
    return made


async def break_off(address: tuple[str, int], plan: Plan, pause: float) -> str:
    """Send, wait for the moment (``pause`` seconds where it waits), hang up.  Return when it really happened."""
    reader, writer = await asyncio.open_connection(*address)
    happened = plan.moment
    try:
        if plan.moment == "partial body":
            writer.write(plan.request[: -len(plan.request) // 4])
            await writer.drain()
            await asyncio.sleep(pause / 4)
            return happened
        writer.write(plan.request)
        await writer.drain()
        if plan.moment == "mid-stream":
            async with asyncio.timeout(60):
                status = (await reader.readline())[9:12].decode()
                try:
                    for _ in range(1 + plan.pieces):  # the risk comes first
                        await reader.readuntil(b"data: ")
                except asyncio.IncompleteReadError:
                    happened = f"answered before ({status})"
        elif plan.moment in ("queued", "decoding"):
            with suppress(TimeoutError):
                async with asyncio.timeout(pause * (plan.patience if plan.moment == "decoding" else 1.0)):
                    happened = f"answered before ({(await reader.readline())[9:12].decode()})"
        return happened
    finally:
        if plan.reset:
            writer.transport.abort()
        else:
            writer.close()


async def run(
    server: ServiceProcess, everything: list[Plan], at_once: int, honest_clients: int, pause: float
) -> tuple[Counter[str], list[Outcome], dict[str, float]]:
    """Play all plans, ``at_once`` at a time, beside honest clients.  Return what happened, their outcomes, the gauges'
    peaks."""
    moments: Counter[str] = Counter()
    peaks = dict.fromkeys(GAUGES, 0.0)
    waiting = iter(everything)
    draw = random.Random(1)
    finished = False

    async def clients() -> None:
        for plan in waiting:
            try:
                happened = await break_off(server.address, plan, pause * draw.uniform(0.2, 1.8))
            except OSError as error:
                happened = f"{type(error).__name__} on the way"
            moments[f"{plan.kind}, {happened}"] += 1

    async def watch() -> None:
        while not finished:
            metrics = await asyncio.to_thread(server.metrics)
            peaks.update({gauge: max(peak, metrics.total(gauge)) for gauge, peak in peaks.items()})
            await asyncio.sleep(0.02)

    async def all_clients() -> None:
        nonlocal finished
        try:
            await asyncio.gather(*(clients() for _ in range(at_once)))
        finally:
            finished = True

    requests = itertools.cycle(score_requests(make_prompts(64, MIX, seed=9)))
    honest = closed_loop(server.address, requests, honest_clients, lambda sent, elapsed: not finished, timeout_s=300)
    outcomes, _, _ = await asyncio.gather(honest, watch(), all_clients())
    return moments, outcomes, peaks


def settle(server: ServiceProcess, within_s: float) -> tuple[float, dict[str, float]]:
    """Return the seconds until all gauges are zero, and what they were last."""
    start = time.monotonic()
    while True:
        metrics = server.metrics()
        left = {gauge: metrics.total(gauge) for gauge in GAUGES}
        if not any(left.values()) or time.monotonic() - start > within_s:
            return time.monotonic() - start, left
        time.sleep(0.05)


def judge(
    server: ServiceProcess, count: int, found: tuple[Counter[str], list[Outcome], dict[str, float]], files_before: int,
    within_s: float,
) -> tuple[list[Check], dict[str, Any]]:  # fmt: skip
    moments, honest, peaks = found
    took, left = settle(server, within_s)
    before, cpu = server.metrics(), cpu_seconds(server.pid)
    time.sleep(2.0)
    after, idle = server.metrics(), cpu_seconds(server.pid) - cpu
    grown = {name: after.total(name) - before.total(name) for name in WORK}
    files = server.open_files()
    broken = sum(count for name, count in moments.items() if "answered" not in name and "on the way" not in name)
    missing = [gauge for gauge in GAUGES if not after.has(gauge)]
    canary = asyncio.run(closed_loop(server.address, iter(score_requests(make_prompts(4, MIX, seed=8))), 1))
    queued, decodes = peaks["hallutracer_queue_depth"], peaks["hallutracer_running_decodes"]
    closed = after.total("hallutracer_errors_total", code="client_closed_request")
    checks = [
        Check("requests broken off", f"{broken} of {count}", f">= {0.9 * count:.0f}", broken >= 0.9 * count,
              ", ".join(f"{name}: {number}" for name, number in sorted(moments.items()))),
        Check("while it ran: prompts in the queue, running decodes, at most", f"{queued:g}, {decodes:g}",
              "> 0, > 0", queued > 0 and decodes > 0, "otherwise nothing was there to be left behind"),
        Check("gauges afterwards", ", ".join(f"{value:g}" for value in left.values()), "0, 0, 0",
              not any(left.values()) and not missing, f"{', '.join(GAUGES)}; zero after {took:.2f} s"
              + (f"; MISSING: {', '.join(missing)}" if missing else "")),
        Check("tokens and batches in 2 s afterwards", f"{sum(grown.values()):g}", "0", not any(grown.values())),
        Check("CPU in 2 s afterwards", f"{idle:.2f} s", "<= 0.10 s", idle <= 0.10),
        Check("open files: before, afterwards", f"{files_before}, {files}", "<= 4 more", files <= files_before + 4),
        Check("honest clients beside them", f"{len(honest)} requests, {statuses(honest)}", "all 200",
              bool(honest) and set(statuses(honest)) == {"200"}),
        Check("requests afterwards", str(statuses(canary)), "all 200", set(statuses(canary)) == {"200"}),
        Check("errors_total client_closed_request", f"{closed:g}", f"1 to {count}", 0 < closed <= count,
              "0: disconnects went unnoticed"),
    ]  # fmt: skip
    record = {"moments": dict(moments), "peaks": peaks, "left": left, "seconds_to_zero": took, "grown": grown,
              "idle_cpu_s": idle}  # fmt: skip
    return checks, record


def main() -> int:
    arguments = parser(__doc__, quick="100 disconnects")
    arguments.add_argument("--shape", choices=SHAPES, default="demo")
    arguments.add_argument("--count", type=int, default=1000)
    arguments.add_argument("--at-once", type=int, default=48)
    arguments.add_argument("--honest", type=int, default=4, help="clients that wait for their answers")
    with_server(arguments, "--deadline-s 600", "a long deadline, so that none is refused")
    options = arguments.parse_args()
    raise_file_limit()
    count = 100 if options.quick else options.count
    prepared = prepare(options.shape, options.cache)
    # The demo model's answers are over after some twenty milliseconds; the other's take seconds.
    pause, patience = (0.05, 1.0) if options.shape == "demo" else (0.5, 6.0)
    with ServiceProcess(*server_arguments(options, prepared.arguments)) as server:
        asyncio.run(closed_loop(server.address, iter(score_requests(make_prompts(8, MIX, seed=7))), 2))
        files, rss = server.open_files(), server.rss_mib()
        start = time.monotonic()
        found = asyncio.run(run(server, plans(count, 120, patience), options.at_once, options.honest, pause))
        print(f"{found[0].total()} clients in {time.monotonic() - start:.1f} s", flush=True)
        checks, record = judge(server, count, found, files, 60.0)
        checks.append(Check("resident memory: before, afterwards", f"{rss:.0f}, {server.rss_mib():.0f} MiB",
                            "(reported)", None))  # fmt: skip
    checks.append(server.end())
    return conclude(checks, options.json, {"shape": options.shape, **record})


if __name__ == "__main__":
    sys.exit(main())
