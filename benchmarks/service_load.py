"""The service under load, compared with direct calls of the engine, in one run.

    python -m benchmarks.service_load [--shapes qwen2.5-0.5b,demo] [--parts rate,latency,sweep,overload]
                                       [--quick] [--json OUT] [--plot OUT.png]

Three processes: the server, the engine called directly (same model, same threads, same prompts), and this one, which
makes the load.  The server and the direct engine take turns, one idle while the other works.

  rate      /score with 32 clients over engine.score, paired rounds in alternating order; engine.score gets batches
            of 32 or one prompt at a time, whichever is faster; prompts as token ids, and as text rendered on both sides
  latency   one client over one call at a time, in small paired groups
  sweep     1 to 256 clients: p50, p99 and rate
  overload  open loop, Poisson arrivals at three times the capacity measured before and after, default limits

The exit status is 1 where something falls short of its target.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.bench_model import SHAPES, Direct, Prepared, prepare
from benchmarks.harness import (
    MIXES,
    TEXT,
    Check,
    CpuMeter,
    Outcome,
    Pool,
    ServiceProcess,
    bad_refusals,
    closed_loop,
    conclude,
    goodput,
    make_prompts,
    make_texts,
    open_loop,
    parser,
    percentile,
    poisson_arrivals,
    raise_file_limit,
    say,
    score_requests,
    spread,
    statuses,
    steady,
    summarise,
    table,
    write_json,
)

BLUE, RED, GREY = "#1f5a99", "#c0562b", "#666666"


def draw(sweeps: dict[str, Any], path: Path) -> None:
    """Write a PNG.

    ``sweeps``: shape -> {"direct_rate", "direct_way", "levels": [{"clients", "p50_ms", "p99_ms", "rate"}]}.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter

    figure, axes = plt.subplots(2, len(sweeps), figsize=(5.2 * len(sweeps), 6.4), squeeze=False, sharex="col")
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    for column, (shape, sweep) in enumerate(sweeps.items()):
        levels = sweep["levels"]
        clients = [level["clients"] for level in levels]
        above, below = axes[0][column], axes[1][column]
        for key, colour, label, up in (("p50_ms", BLUE, "p50", -4), ("p99_ms", RED, "p99", 4)):
            values = [level[key] for level in levels]
            above.plot(clients, values, "o-", color=colour, markersize=4)
            above.annotate(label, (clients[-1], values[-1]), (6, up), textcoords="offset points", va="center",
                           color=colour, annotation_clip=False)  # fmt: skip
        above.set(title=shape, yscale="log", ylabel="latency, ms" if column == 0 else "")
        rates = [level["rate"] for level in levels]
        below.plot(clients, rates, "o-", color=BLUE, markersize=4)
        direct = sweep["direct_rate"]
        below.axhline(direct, color=GREY, linestyle="--", linewidth=1)
        below.annotate(f"engine called directly, {sweep['direct_way']}", (clients[0], direct), (0, 4),
                       textcoords="offset points", color=GREY, fontsize=9)  # fmt: skip
        below.set(xlabel="clients", xscale="log", ylabel="prompts per second" if column == 0 else "")
        below.set_ylim(0, max([*rates, direct]) * 1.18)
        below.set_xscale("log", base=2)
        below.set_xticks(clients)
        below.xaxis.set_major_formatter(plain)
        above.yaxis.set_major_formatter(plain)
        for axis in (above, below):
            axis.grid(True, which="major", color="#dddddd", linewidth=0.7)
            axis.set_axisbelow(True)
            axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


CLIENTS = [1, 2, 4, 8, 16, 32, 64, 128, 256]
BATCH = 32
RATE_TARGET, LATENCY_TARGET, GOODPUT_TARGET = 0.9, 1.15, 0.9
OVERLOAD = 3.0


class Bench:
    """One shape: its parts, their checks, and the record behind them."""

    def __init__(self, options: argparse.Namespace, prepared: Prepared) -> None:
        self.options = options
        self.prepared = prepared
        self.checks: list[Check] = []
        self.record: dict[str, Any] = {}

    def run(self, parts: list[str]) -> None:
        """The parts in order; the overload gets a new server, without the direct process."""
        threads = self.options.threads
        common = [*self.prepared.arguments, *(["--threads", str(threads)] if threads else [])]
        if set(parts) - {"overload"}:
            with (
                ServiceProcess(*common, *shlex.split(self.options.flags)) as server,
                Direct(self.prepared.shape, self.options.cache, threads) as direct,
            ):
                say(f"server and direct engine are ready, {direct.threads} threads each")
                if "rate" in parts:
                    for mix in (*MIXES, TEXT):
                        self.rate(server, direct, mix)
                if "latency" in parts:
                    for mix in MIXES:
                        asyncio.run(self.latency(server, direct, mix))
                if "sweep" in parts:
                    self.sweep(server, direct)
        if "overload" in parts:
            with ServiceProcess(*common, *shlex.split(self.options.overload_flags)) as server:
                self.overload(server)

    def rate(self, server: ServiceProcess, direct: Direct, mix: str) -> None:
        """Fixed work, both ways; a ratio for each round, over the better way to call the engine."""
        count = self._work(direct, mix)
        prompts = any_prompts(count, mix, seed=1)
        requests = score_requests(prompts)
        some = max(BATCH, count // 3)
        self._closed(server, requests[:some], BATCH)
        by_size = self._direct_rates(direct, prompts[:some])
        size = better(by_size)
        rounds: list[dict[str, float]] = []
        failed: dict[str, int] = {}
        meter = CpuMeter({"server": server.pid, "direct": direct.pid, "load": os.getpid()})
        for number in range(self.options.rounds):
            seconds = {}
            for side in ("direct", "service") if number % 2 == 0 else ("service", "direct"):
                if side == "direct":
                    seconds[side] = sum(direct.score(prompts, size))
                else:
                    outcomes = self._closed(server, requests, BATCH)
                    seconds[side] = max(outcome.done for outcome in outcomes)
                    add(failed, not_answered(outcomes))
                time.sleep(0.1)  # the other side's OpenMP threads stop spinning
            rounds.append({side: count / value for side, value in seconds.items()})
        ratio = spread([one["service"] / one["direct"] for one in rounds])
        medians = {side: statistics.median(one[side] for one in rounds) for side in ("direct", "service")}
        cores = meter.cores()
        tokens = statistics.fmean(direct.lengths(prompts))
        carried = "text, rendered and tokenised on both sides" if mix == TEXT else "token ids, nothing to render"
        note = (
            f"{carried}, {tokens:.0f} tokens on average; service {medians['service']:.4g}/s, direct "
            f"{medians['direct']:.4g}/s {way(size)} (beforehand: {way(BATCH)} {by_size[BATCH]:.4g}/s, {way(1)} "
            f"{by_size[1]:.4g}/s); at most {direct.max_batch_tokens} padded tokens in a forward pass, on both sides "
            f"unless --flags say otherwise; {shown(cores)}"
        )
        self._add(
            f"rate at {BATCH} clients / direct, {mix}", str(ratio), f">= {RATE_TARGET}",
            ratio.median >= RATE_TARGET and not failed, note + (f"; not answered: {failed}" if failed else ""),
        )  # fmt: skip
        self.record[f"rate, {mix}"] = {"prompts": count, "rounds": rounds, "ratio": asdict(ratio), "failed": failed}
        self.record[f"rate, {mix}"] |= {
            "direct_batch": size, "direct_by_batch": by_size, "max_batch_tokens": direct.max_batch_tokens,
            "mean_tokens": tokens, "cores": cores,
        }  # fmt: skip

    async def latency(self, server: ServiceProcess, direct: Direct, mix: str) -> None:
        """One at a time, both ways, in groups of about 0.2 s in alternating order; the first two groups are warm-up."""
        pool = Pool(*server.address)
        once = statistics.median(direct.score(make_prompts(8, mix, seed=2), 1))
        size = max(1, round(0.2 / once))
        meter = CpuMeter({"server": server.pid, "direct": direct.pid, "load": os.getpid()})
        ours: list[float] = []
        theirs: list[float] = []
        failed: dict[str, int] = {}
        end = time.monotonic() + self.options.latency_seconds
        for number in itertools.count():
            if number >= 8 and time.monotonic() > end:
                break
            prompts = make_prompts(size, mix, seed=100 + number)
            seconds: dict[str, list[float]] = {"direct": [], "service": []}
            for side in ("direct", "service") if number % 2 == 0 else ("service", "direct"):
                await asyncio.sleep(0.02)
                if side == "direct":
                    seconds[side] = direct.score(prompts, 1)
                    continue
                for request in score_requests(prompts):
                    begun = time.perf_counter()
                    reply = await pool.exchange(request, 120)
                    seconds[side].append(time.perf_counter() - begun)
                    if reply.status != 200:
                        add(failed, {str(reply.status): 1})
            if number >= 2:
                ours += seconds["service"]
                theirs += seconds["direct"]
        pool.close()
        figures = {side: (statistics.median(values), percentile(values, 0.99)) for side, values in
                   (("service", ours), ("direct", theirs))}  # fmt: skip
        ratio = figures["service"][0] / figures["direct"][0]
        paired = spread([a / b for a, b in zip(ours, theirs, strict=True)])
        words = ", ".join(f"{side} p50 {p50 * 1e3:.2f} p99 {p99 * 1e3:.2f} ms" for side, (p50, p99) in figures.items())
        # The bound was set for the 0.5B shape; on a model of 4 ms the same milliseconds are another share.
        judged = self.prepared.shape == "qwen2.5-0.5b"
        self._add(
            f"median latency at 1 client / direct, {mix}",
            f"{ratio:.3f}",
            f"<= {LATENCY_TARGET}" if judged else "(reported)",
            (ratio <= LATENCY_TARGET and not failed) if judged else (False if failed else None),
            f"{words}; {len(ours)} pairs {paired}; {shown(meter.cores())}"
            + (f"; not answered: {failed}" if failed else ""),
        )
        self.record[f"latency, {mix}"] = {"ratio": ratio, "paired": asdict(paired), "service": ours, "direct": theirs}

    def sweep(self, server: ServiceProcess, direct: Direct) -> None:
        """Closed loop at each number of clients, after as many warm-up answers as there are clients."""
        mix = next(iter(MIXES))
        prompts = make_prompts(512, mix, seed=3)
        requests = score_requests(prompts)
        seconds = self.options.sweep_seconds
        some = prompts[: min(len(prompts), max(BATCH, self._work(direct, mix)))]
        by_size = self._direct_rates(direct, some)
        size = better(by_size)
        record: dict[str, Any] = {"direct_rate": by_size[size], "direct_way": way(size), "levels": []}
        say(f"{'clients':>8} {'rate/s':>9} {'p50 ms':>9} {'p99 ms':>9} {'answers':>8}  not 200, and cores in use")
        failed: dict[str, int] = {}
        for clients in self.options.clients:
            meter = CpuMeter({"server": server.pid, "load": os.getpid()})
            outcomes = asyncio.run(
                closed_loop(
                    server.address,
                    itertools.cycle(requests),
                    clients,
                    lambda sent, elapsed: elapsed < seconds or sent < 2 * clients + 8,  # noqa: B023  (called at once)
                )
            )
            cores = meter.cores()
            kept, took = steady(outcomes, clients)
            summary = summarise(kept, took)
            add(failed, not_answered(outcomes))
            record["levels"].append({"clients": clients, **asdict(summary), "cores": cores})
            say(
                f"{clients:8} {summary.rate:9.2f} {summary.p50_ms:9.1f} {summary.p99_ms:9.1f} {len(kept):8}  "
                f"{not_answered(outcomes) or 'none'}; {shown(cores)}"
            )
        self._add("sweep: requests not answered with 200", str(failed or 0), "0", not failed)
        self.record["sweep"] = record

    def overload(self, server: ServiceProcess) -> None:
        """Capacity, three times of it, capacity again."""
        mix = next(iter(MIXES))
        requests = score_requests(make_prompts(512, mix, seed=4))
        clients, seconds, deadline = (
            self.options.capacity_clients,
            self.options.overload_seconds,
            self.options.deadline_s,
        )

        def capacity() -> float:
            outcomes = asyncio.run(
                closed_loop(
                    server.address,
                    itertools.cycle(requests),
                    clients,
                    lambda sent, elapsed: elapsed < seconds / 4 or sent < 3 * clients,
                )
            )
            kept, took = steady(outcomes, clients)
            return summarise(kept, took).rate

        before = capacity()
        if not before > 0:
            self._add("overload", "no capacity: no request was answered with 200", "", False)
            return
        arrivals = poisson_arrivals(OVERLOAD * before, seconds, seed=5)
        say(f"capacity {before:.2f}/s with {clients} clients; {len(arrivals)} arrivals in {seconds:g} s")
        meter = CpuMeter({"server": server.pid, "load": os.getpid()})
        outcomes = asyncio.run(
            open_loop(server.address, itertools.cycle(requests), arrivals.tolist(), timeout_s=4 * deadline)
        )
        cores = meter.cores()
        after = capacity()
        found = goodput(outcomes, deadline, seconds)
        reference = (before + after) / 2
        bad = bad_refusals(outcomes)
        refused = len(outcomes) - found.good - found.late
        lag = percentile([outcome.sent - outcome.intended for outcome in outcomes], 0.99)
        summary = summarise(outcomes, seconds)
        waits = sorted({outcome.retry_after for outcome in outcomes if outcome.retry_after})
        self._add(
            f"overload {OVERLOAD:g}x: refusals other than 429/503 with Retry-After",
            str(bad or (0 if refused else "nothing was refused")),
            "0",
            not bad and refused > 0,
            f"{statuses(outcomes)}; Retry-After {', '.join(waits[:6]) or '-'}",
        )
        self._add(
            f"overload {OVERLOAD:g}x: goodput / capacity",
            f"{found.overall / reference:.3f}",
            f">= {GOODPUT_TARGET}",
            found.overall >= GOODPUT_TARGET * reference,
            f"{found.overall:.4g}/s, while arriving {found.in_window:.4g}/s ({found.in_window / reference:.3f}); "
            f"capacity {before:.4g}/s before, {after:.4g}/s after; {found.late} later than {deadline:g} s",
        )
        self._add(
            f"overload {OVERLOAD:g}x: latency of answers",
            f"p50 {summary.p50_ms:.0f} ms, p99 {summary.p99_ms:.0f} ms",
            "(reported)",
            None,
            f"from the intended send time; the generator's own lag p99 {lag * 1e3:.1f} ms; {shown(cores)}",
        )
        self.record["overload"] = {
            "capacity": [before, after], "goodput": asdict(found), "summary": asdict(summary), "bad_refusals": bad,
            "generator_lag_p99_s": lag, "cores": cores,
        }  # fmt: skip

    def _direct_rates(self, direct: Direct, prompts: Sequence[list[int] | str]) -> dict[int, float]:
        """Prompts per second by batch size, 32 and 1 (without padding, on a CPU perhaps the better), each twice."""
        seconds = {BATCH: 0.0, 1: 0.0}
        for size in (BATCH, 1, 1, BATCH):
            seconds[size] += sum(direct.score(prompts, size))
        return {size: 2 * len(prompts) / value for size, value in seconds.items()}

    def _work(self, direct: Direct, mix: str) -> int:
        """How many prompts, a multiple of 32, the direct engine scores in about --round-seconds."""
        prompts = any_prompts(BATCH, mix, seed=0)
        direct.score(prompts, BATCH)
        seconds: float = self.options.round_seconds
        least: int = self.options.least_batches
        return BATCH * max(least, round(seconds / direct.score(prompts, BATCH)[0]))

    def _closed(self, server: ServiceProcess, requests: list[bytes], clients: int) -> list[Outcome]:
        return asyncio.run(closed_loop(server.address, iter(requests), clients))

    def _add(self, name: str, figure: str, target: str, passed: bool | None, note: str = "") -> None:
        check = Check(f"{self.prepared.shape}: {name}", figure, target, passed, note)
        self.checks.append(check)
        say(table([check]))


def any_prompts(count: int, mix: str, seed: int) -> Sequence[list[int] | str]:
    return make_texts(count, seed) if mix == TEXT else make_prompts(count, mix, seed)


def better(rates: dict[int, float]) -> int:
    return max(rates, key=lambda size: rates[size])


def way(size: int) -> str:
    return "one by one" if size == 1 else f"in batches of {size}"


def not_answered(outcomes: list[Outcome]) -> dict[str, int]:
    return {name: count for name, count in statuses(outcomes).items() if name != "200"}


def add(into: dict[str, int], more: dict[str, int]) -> None:
    for name, count in more.items():
        into[name] = into.get(name, 0) + count


def shown(cores: dict[str, float]) -> str:
    """Cores in use, with a warning if other processes use more than 0.1."""
    words = "cores: " + ", ".join(f"{name} {value:.2f}" for name, value in cores.items())
    return words + (" (NOT A QUIET MACHINE)" if cores["others"] > 0.1 else "")


def parse() -> argparse.Namespace:
    arguments = parser(__doc__, quick="smoke: short, and no figure to quote")
    arguments.add_argument("--shapes", default="qwen2.5-0.5b,demo", help=", ".join(SHAPES))
    arguments.add_argument("--parts", default="rate,latency,sweep,overload")
    arguments.add_argument("--rounds", type=int, default=7, help="paired rounds of the rate")
    arguments.add_argument("--round-seconds", type=float, default=10.0, help="direct work in one round, about")
    arguments.add_argument("--latency-seconds", type=float, default=40.0)
    arguments.add_argument("--sweep-seconds", type=float, default=12.0, help="per level, at least")
    arguments.add_argument("--overload-seconds", type=float, default=90.0, help="how long requests arrive")
    arguments.add_argument("--clients", type=lambda text: [int(one) for one in text.split(",")], default=CLIENTS)
    arguments.add_argument("--capacity-clients", type=int, default=64)
    arguments.add_argument(
        "--deadline-s", type=float, default=30.0, help="goodput's deadline; the service's default is 30"
    )
    arguments.add_argument("--flags", default="--deadline-s 600", help="of the server, for all parts but the overload")
    arguments.add_argument("--overload-flags", default="", help="of the overload's server; none: its defaults")
    arguments.add_argument("--threads", type=int, help="of the server and of the direct engine; default: all cores")
    arguments.add_argument("--plot", type=Path, help="PNG of the sweep")
    options = arguments.parse_args()
    options.least_batches = 2
    if options.quick:
        options.rounds, options.round_seconds, options.latency_seconds = 2, 1.0, 4.0
        options.sweep_seconds, options.overload_seconds, options.least_batches = 2.0, 10.0, 1
        options.clients = [1, 8, 32]
        options.capacity_clients = 32
    return options


def main() -> int:
    """All shapes; the table; 1 where something falls short."""
    options = parse()
    raise_file_limit()
    say(f"{os.cpu_count()} cores, load average before {os.getloadavg()[0]:.2f}")
    checks: list[Check] = []
    record: dict[str, Any] = {"cores": os.cpu_count(), "load_before": os.getloadavg(), "shapes": {}}
    for shape in options.shapes.split(","):
        bench = Bench(options, prepare(shape, options.cache))
        say(f"\n{shape}")
        try:
            bench.run(options.parts.split(","))
        finally:  # keep the figures of the parts before one that fails
            checks += bench.checks
            record["shapes"][shape] = bench.record
            if options.json:
                write_json(options.json, checks, record)
    sweeps = {shape: found["sweep"] for shape, found in record["shapes"].items() if "sweep" in found}
    if options.plot and sweeps:
        draw(sweeps, options.plot)
        say(f"\nplot: {options.plot}")
    say("")
    return conclude(checks, options.json, record)


if __name__ == "__main__":
    sys.exit(main())
