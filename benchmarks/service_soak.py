"""Ten minutes of mixed traffic: correct answers, constant memory, consistent metrics.

    python -m benchmarks.service_soak [--shape demo] [--seconds 600] [--clients 16] \\
        [--quick] [--json OUT]

Clients send scores, generations, streams, gated ones and bad requests, and check every answer;
others disconnect half-way, by an orderly close or by a reset.  Those use the second bundle, so that
the metrics of the first must match the answers exactly.  Afterwards the gauges must be back at
zero, no token may be prefilled or decoded any more, the process must be idle, and its sockets
closed.  The exit status is 1 where something falls short."""

from __future__ import annotations

import argparse
import asyncio
import random
import shlex
import sys
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.bench_model import SHAPES, Prepared, prepare
from benchmarks.harness import Check, Metrics, ServiceProcess
from benchmarks.traffic import Tally, Traffic

WARM_UP = 0.2  # share of the run whose memory is not judged
# last third over first third, after warm-up; estimate in MiB per minute
MAX_GROWTH, MAX_SLOPE = 1.05, 1.0
KEPT = 20_000  # latencies per kind
WORK = (
    "hallutracer_prompt_tokens_total",
    "hallutracer_completion_tokens_total",
    "hallutracer_batch_prompts_count",
    "hallutracer_prefill_seconds_count",
    "hallutracer_decode_seconds_count",
)


@dataclass
class Soak:
    tally: Tally = field(default_factory=Tally)
    counts: Counter[str] = field(default_factory=Counter)
    latencies: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    failures: list[str] = field(default_factory=list)
    broken: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[float, float]] = field(default_factory=list)  # seconds, MiB


async def client(server: ServiceProcess, traffic: Traffic, soak: Soak, until: float) -> None:
    pool = harness.Pool(*server.address)
    pick = random.Random(id(traffic))
    while time.monotonic() < until and server.alive():
        request = traffic.next()
        begun = time.perf_counter()
        soak.counts[request.kind] += 1
        try:
            reply = await pool.exchange(request.data, 60)
            soak.tally.statuses[reply.status] += 1
            request.verify(reply.status, reply.body, soak.tally)
        except (OSError, harness.Unexpected, ValueError, LookupError) as error:
            soak.failures.append(f"{request.kind}: {type(error).__name__}: {str(error)[:300]}")
        kept = soak.latencies[request.kind]
        if len(kept) < KEPT:
            kept.append(time.perf_counter() - begun)
        elif (place := pick.randrange(soak.counts[request.kind])) < KEPT:  # a uniform sample of all
            kept[place] = time.perf_counter() - begun
    pool.close()


async def hang_up(
    server: ServiceProcess, traffic: Traffic, bundle: str, soak: Soak, until: float
) -> None:
    """Break off all requests of one client."""
    draw = random.Random(0)
    while time.monotonic() < until and server.alive():
        request = traffic.broken_off(bundle)
        moment = draw.choice(["partial body", "right after", "queued", "decoding"])
        moment = "mid-stream" if b'"stream": true' in request else moment
        try:
            happened = await break_off(server.address, request, moment, draw)
        except OSError as error:
            happened = f"{type(error).__name__} on the way"
        soak.broken[happened] += 1
        await asyncio.sleep(draw.uniform(0, 0.2))


async def break_off(
    address: tuple[str, int], request: bytes, moment: str, draw: random.Random
) -> str:
    """Send, wait for the moment, hang up.  Return when it really happened."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(request[: -len(request) // 4] if moment == "partial body" else request)
        await writer.drain()
        if moment == "partial body":
            await asyncio.sleep(draw.uniform(0, 0.015))
        elif moment == "mid-stream":
            async with asyncio.timeout(60):
                status = (await reader.readline())[9:12].decode()
                try:
                    for _ in range(draw.randint(2, 8)):  # the risk comes first
                        await reader.readuntil(b"data: ")
                except asyncio.IncompleteReadError:
                    return f"answered before ({status})"
        elif moment != "right after":
            with suppress(TimeoutError):
                async with asyncio.timeout(draw.uniform(0, 0.06 if moment == "queued" else 0.2)):
                    return f"answered before ({(await reader.readline())[9:12].decode()})"
        return moment
    finally:
        writer.transport.abort() if draw.random() < 0.5 else writer.close()


def left_behind(server: ServiceProcess, files_before: int, within_s: float = 30.0) -> list[Check]:
    """Check that nothing goes on for those who hung up."""
    start = time.monotonic()
    while (
        any(left := [server.metrics().total(gauge) for gauge in harness.GAUGES])
        and time.monotonic() - start < within_s
    ):
        time.sleep(0.05)
    took = time.monotonic() - start
    before = server.metrics()
    cpu = harness.cpu_seconds(server.pid)
    time.sleep(2.0)
    after = server.metrics()
    idle = harness.cpu_seconds(server.pid) - cpu
    files = server.open_files()
    grown = sum(after.total(name) - before.total(name) for name in WORK)
    missing = [gauge for gauge in harness.GAUGES if not after.has(gauge)]
    return [
        Check(
            "gauges afterwards",
            ", ".join(f"{value:g}" for value in left),
            "0, 0, 0",
            not any(left) and not missing,
            f"{', '.join(harness.GAUGES)}; zero after {took:.2f} s; missing:"
            f" {', '.join(missing) or 'none'}",
        ),
        Check("tokens and batches in 2 s afterwards", f"{grown:g}", "0", not grown),
        Check("CPU in 2 s afterwards", f"{idle:.2f} s", "<= 0.10 s", idle <= 0.10),
        Check(
            "open files: before, afterwards",
            f"{files_before}, {files}",
            "<= 4 more",
            files <= files_before + 4,
        ),
    ]


async def watch(server: ServiceProcess, soak: Soak, until: float) -> None:
    """Take the memory each second, and print a line each minute."""
    start = time.monotonic()
    while time.monotonic() < until and server.alive():
        soak.memory.append((time.monotonic() - start, server.rss_mib()))
        if len(soak.memory) % 60 == 0:
            print(
                f"{soak.memory[-1][0]:5.0f} s  {sum(soak.counts.values())} requests,"
                f" {len(soak.failures)} failed, {sum(soak.broken.values())} broken off,"
                f" {soak.memory[-1][1]:.0f} MiB",
                flush=True,
            )
        await asyncio.sleep(1)


async def run(server: ServiceProcess, prepared: Prepared, options: argparse.Namespace) -> Soak:
    soak = Soak()
    until = time.monotonic() + options.seconds
    traffic = partial(Traffic, prepared.bundles[0], prepared.max_tokens)
    await asyncio.gather(
        watch(server, soak, until),
        *(client(server, traffic(seed), soak, until) for seed in range(options.clients)),
        *(hang_up(server, traffic(900 + n), prepared.bundles[1], soak, until) for n in range(2)),
    )
    return soak


def memory_checks(series: list[tuple[float, float]]) -> list[Check]:
    times, values = np.array(series).T
    kept = times >= times[-1] * WARM_UP
    times, values = times[kept], values[kept]
    third = len(values) // 3
    growth = float(values[-third:].mean() / values[:third].mean())
    checks = [
        Check(
            "resident memory: last third / first third, after warm-up",
            f"{growth:.4f}",
            f"<= {MAX_GROWTH}",
            growth <= MAX_GROWTH,
            f"{values[:third].mean():.1f} -> {values[-third:].mean():.1f} MiB, at most "
            f"{values.max():.1f}",
        ),
    ]
    try:
        found = harness.slope(
            times, values, block_s=10.0 if times[-1] > 120 else max(1.0, times[-1] / 10)
        )
    except ValueError as error:
        return [*checks, Check("resident memory: slope", "-", "", None, str(error))]
    judged = times[-1] >= 300  # in a short run the allocator's own warm-up is all there is
    return [
        *checks,
        Check(
            "resident memory: slope, MiB per minute",
            f"{found.per_minute:+.3f} [{found.low:+.3f}, {found.high:+.3f}]",
            f"<= {MAX_SLOPE:g}" if judged else "(reported)",
            found.per_minute <= MAX_SLOPE if judged else None,
            f"least squares, 95 % interval: growth beyond {found.high:+.3f} is ruled out"
            + ("" if found.high <= MAX_SLOPE else f", beyond {MAX_SLOPE:g} is not"),
        ),
    ]


def metric_checks(before: Metrics, after: Metrics, soak: Soak, bundle: str) -> list[Check]:
    """Compare what the metrics grew by with what the clients counted."""

    def grown(name: str, **labels: str) -> int:
        return round(after.total(name, **labels) - before.total(name, **labels))

    reference = next(
        (
            value
            for value in after.by("hallutracer_prompts_total", "bundle")
            if value.split(":")[0] == bundle
        ),
        bundle,
    )
    tally, broken = soak.tally, sum(soak.broken.values())
    mine = {"bundle": reference}
    codes = {
        code for one in (before, after) for code in one.by("hallutracer_errors_total", "code")
    } | {*tally.codes}
    counted: list[tuple[str, dict[str, str], int]] = [
        *(
            ("prompts_total", {"decision": one, **mine}, tally.prompts[one])
            for one in ("continue", "abstain", "block")
        ),
        ("flagged_total", mine, tally.flagged),
        ("prompt_tokens_total", mine, tally.prompt_tokens),
        ("completion_tokens_total", mine, tally.completion_tokens),
        ("risk_count", mine, tally.prompts.total()),
        *(
            ("errors_total", {"code": code}, tally.codes[code])
            for code in sorted(codes - {"client_closed_request"})
        ),
        *(
            ("http_requests_total", {"status": str(status)}, count)
            for status, count in sorted(tally.statuses.items())
            if status != 200
        ),
    ]
    pairs = []
    for name, labels, count in counted:
        others = (value for key, value in labels.items() if key != "bundle")
        pairs.append((" ".join([name, *others]), grown(f"hallutracer_{name}", **labels), count))
    wrong = [
        f"{name}: {theirs}, clients counted {ours}"
        for name, theirs, ours in pairs
        if theirs != ours
    ]
    answered = grown("hallutracer_http_requests_total", status="200") - tally.statuses[200]
    closed = grown("hallutracer_errors_total", code="client_closed_request")
    return [
        Check(
            "metrics of the first bundle unlike the answers",
            str(len(wrong)),
            f"0 of {len(pairs)}",
            not wrong,
            "; ".join(wrong) or ", ".join(f"{name} {ours}" for name, _, ours in pairs if ours),
        ),
        Check(
            "http_requests_total 200 beyond the answers",
            str(answered),
            f"0 to {broken}",
            0 <= answered <= broken,
            "a request that was broken off may have been counted as answered",
        ),
        Check(
            "errors_total client_closed_request",
            str(closed),
            f"1 to {broken}",
            0 < closed <= broken,
            "0: disconnects went unnoticed",
        ),
    ]


def kinds_table(soak: Soak) -> str:
    lines = [f"{'':28} {'requests':>9} {'p50 ms':>8} {'p99 ms':>8}"]
    for kind, values in sorted(soak.latencies.items()):
        lines.append(
            f"{kind:28} {soak.counts[kind]:9} {harness.percentile(values, 0.5) * 1e3:8.1f} "
            f"{harness.percentile(values, 0.99) * 1e3:8.1f}"
        )
    broken = ", ".join(f"{name} {count}" for name, count in sorted(soak.broken.items()))
    return "\n".join([*lines, f"broken off: {broken or 'none'}"])


def main() -> int:
    arguments = harness.parser(__doc__, quick="20 s")
    arguments.add_argument("--shape", choices=SHAPES, default="demo")
    arguments.add_argument("--seconds", type=float, default=600.0)
    arguments.add_argument("--clients", type=int, default=16)
    arguments.add_argument("--flags", default="", help="of the server; none: its defaults")
    options = arguments.parse_args()
    if options.quick:
        options.seconds = 20.0
    harness.raise_file_limit()
    prepared = prepare(options.shape, options.cache)
    checks: list[Check] = []
    record: dict[str, Any] = {"shape": options.shape, "seconds": options.seconds}
    with ServiceProcess(*prepared.arguments, *shlex.split(options.flags)) as server:
        files = server.open_files()
        before = server.metrics()
        meter = harness.CpuMeter({"server": server.pid})
        soak = asyncio.run(run(server, prepared, options))
        cores = meter.cores()
        total = sum(soak.counts.values())
        print(kinds_table(soak))
        checks.append(
            Check(
                "requests without the expected answer",
                f"{len(soak.failures)} of {total}",
                "0",
                not soak.failures and total > 0,
                "; ".join(soak.failures[:5]),
            )
        )
        end = (
            "" if server.alive() else f"exit status {server.process.poll()}; {server.log()[-2000:]}"
        )
        checks.append(
            Check("the server is alive", str(server.alive()), "True", server.alive(), end)
        )
        if server.alive():
            checks += left_behind(server, files)
            checks += metric_checks(before, server.metrics(), soak, prepared.bundles[0])
        checks += memory_checks(soak.memory)
        record |= {
            "tally": vars(soak.tally),
            "counts": dict(soak.counts),
            "failures": soak.failures[:100],
            "broken": dict(soak.broken),
            "memory": soak.memory,
            "cores": cores,
        }
    checks.append(server.end())
    rate = total / options.seconds
    print(f"\n{rate:.1f} requests/s, cores: server {cores['server']:.2f}\n")
    return harness.conclude(checks, options.json, record)


if __name__ == "__main__":
    sys.exit(main())
