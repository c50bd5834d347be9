"""The service under load, compared with direct calls of the engine, in one run.

    python -m benchmarks.service_load [--shapes qwen2.5-0.5b,demo] \\
        [--parts rate,latency,sweep,overload] [--quick] [--json OUT]

Three processes: the server, the engine called directly (same model, same threads, same prompts),
and this one, which makes the load.  The server and the direct engine take turns, one idle while the
other works.

  rate      /score with 32 clients over engine.score, paired rounds in alternating order;
            engine.score gets batches of 32 or one prompt at a time, whichever is faster; prompts as
            token ids, and as text rendered on both sides
  latency   one client over one call at a time, in small paired groups
  sweep     1 to 256 clients: p50, p99 and rate
  overload  open loop, Poisson arrivals at three times the capacity measured before and after,
            default limits

The exit status is 1 where something falls short of its target."""

from __future__ import annotations

import asyncio
import itertools
import os
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from operator import itemgetter
from typing import Any

from benchmarks import harness
from benchmarks.bench_model import SHAPES, Bench, Direct, run_shapes

CLIENTS = [1, 2, 4, 8, 16, 32, 64, 128, 256]
BATCH = 32
SIDES = ["direct", "service"]
RATE_TARGET, LATENCY_TARGET, GOODPUT_TARGET = 0.9, 1.15, 0.9
OVERLOAD = 3.0


class ServiceBench(Bench):
    """The parts on one shape."""

    def run(self, parts: list[str]) -> None:
        """The parts in order; the overload gets a new server, without the direct process."""
        threads = self.options.threads
        common = [*self.prepared.arguments, *(["--threads", str(threads)] if threads else [])]
        if set(parts) - {"overload"}:
            flags = shlex.split(self.options.flags)
            own = Direct(self.prepared.shape, self.options.cache, threads)
            with own as direct, harness.ServiceProcess(*common, *flags) as server:
                harness.say(f"server and direct engine are ready, {direct.threads} threads each")
                if "rate" in parts:
                    for mix in (*harness.MIXES, harness.TEXT):
                        self.rate(server, direct, mix)
                if "latency" in parts:
                    for mix in harness.MIXES:
                        asyncio.run(self.latency(server, direct, mix))
                if "sweep" in parts:
                    self.sweep(server, direct)
        if "overload" in parts:
            with harness.ServiceProcess(
                *common, *shlex.split(self.options.overload_flags)
            ) as server:
                self.overload(server)

    def rate(self, server: harness.ServiceProcess, direct: Direct, mix: str) -> None:
        """Time fixed work, both ways; a ratio for each round, over the better way to call the
        engine."""
        count = self._work(direct, mix)
        prompts = any_prompts(count, mix, seed=1)
        requests = harness.score_requests(prompts)
        some = max(BATCH, count // 3)
        self._closed(server, requests[:some], BATCH)
        by_size = self._direct_rates(direct, prompts[:some])
        size = better(by_size)
        rounds: list[dict[str, float]] = []
        failed: Counter[str] = Counter()
        meter = harness.CpuMeter({"server": server.pid, "direct": direct.pid, "load": os.getpid()})
        for number in range(self.options.rounds):
            seconds = {}
            for side in SIDES[:: 1 if number % 2 == 0 else -1]:
                if side == "direct":
                    seconds[side] = sum(direct.score(prompts, size))
                else:
                    outcomes = self._closed(server, requests, BATCH)
                    seconds[side] = max(outcome.done for outcome in outcomes)
                    failed.update(not_answered(outcomes))
                time.sleep(0.1)  # the server's OpenMP threads stop spinning
            rounds.append({side: count / value for side, value in seconds.items()})
        ratio = harness.spread([one["service"] / one["direct"] for one in rounds])
        medians = {side: statistics.median(map(itemgetter(side), rounds)) for side in SIDES}
        cores = meter.cores()
        carried = (
            "text, rendered and tokenised on both sides"
            if mix == harness.TEXT
            else "token ids, nothing to render"
        )
        note = (
            f"{carried}; service {medians['service']:.4g}/s, direct {medians['direct']:.4g}/s"
            f" {way(size)}; at most {direct.max_batch_tokens} padded tokens in a forward pass on"
            f" both sides; {shown(cores)}"
        )
        self.add(
            f"rate at {BATCH} clients / direct, {mix}",
            str(ratio),
            f">= {RATE_TARGET}",
            ratio.median >= RATE_TARGET and not failed,
            note + (f"; not answered: {failed}" if failed else ""),
        )
        self.record[f"rate, {mix}"] = {
            "prompts": count,
            "rounds": rounds,
            "ratio": asdict(ratio),
            "failed": failed,
        }
        self.record[f"rate, {mix}"] |= {"direct_by_batch": by_size, "cores": cores}

    async def latency(self, server: harness.ServiceProcess, direct: Direct, mix: str) -> None:
        """Time one at a time, both ways, in groups of about 0.2 s in alternating order; the first
        two are warm-up."""
        pool = harness.Pool(*server.address)
        once = statistics.median(direct.score(harness.make_prompts(8, mix, seed=2), 1))
        size = max(1, round(0.2 / once))
        meter = harness.CpuMeter({"server": server.pid, "direct": direct.pid, "load": os.getpid()})
        times: dict[str, list[float]] = {side: [] for side in SIDES}
        failed: Counter[str] = Counter()
        end = time.monotonic() + self.options.latency_seconds
        for number in itertools.count():
            if number >= 8 and time.monotonic() > end:
                break
            prompts = harness.make_prompts(size, mix, seed=100 + number)
            seconds: dict[str, list[float]] = {side: [] for side in SIDES}
            for side in SIDES[:: 1 if number % 2 == 0 else -1]:
                await asyncio.sleep(0.02)
                if side == "direct":
                    seconds[side] = direct.score(prompts, 1)
                    continue
                for request in harness.score_requests(prompts):
                    begun = time.perf_counter()
                    reply = await pool.exchange(request, 120)
                    seconds[side].append(time.perf_counter() - begun)
                    failed[str(reply.status)] += reply.status != 200
            for side in SIDES if number >= 2 else ():
                times[side] += seconds[side]
        pool.close()
        failed = +failed
        figures = {
            side: (statistics.median(values), harness.percentile(values, 0.99))
            for side, values in times.items()
        }
        ratio = figures["service"][0] / figures["direct"][0]
        paired = harness.spread(
            [a / b for a, b in zip(times["service"], times["direct"], strict=True)]
        )
        words = ", ".join(
            f"{side} p50 {p50 * 1e3:.2f} p99 {p99 * 1e3:.2f} ms"
            for side, (p50, p99) in figures.items()
        )
        # The bound was set for the 0.5B shape; on a model of 4 ms the same milliseconds are another
        # share.
        judged = self.prepared.shape == "qwen2.5-0.5b"
        self.add(
            f"median latency at 1 client / direct, {mix}",
            f"{ratio:.3f}",
            f"<= {LATENCY_TARGET}" if judged else "(reported)",
            (ratio <= LATENCY_TARGET and not failed) if judged else (False if failed else None),
            f"{words}; {len(times['direct'])} pairs {paired}; {shown(meter.cores())}; not answered:"
            f" {failed or 'none'}",
        )
        self.record[f"latency, {mix}"] = {"ratio": ratio, "paired": asdict(paired), **times}

    def sweep(self, server: harness.ServiceProcess, direct: Direct) -> None:
        """Run a closed loop at each number of clients, after as many warm-up answers as there are
        clients."""
        mix = next(iter(harness.MIXES))
        prompts = harness.make_prompts(512, mix, seed=3)
        requests = harness.score_requests(prompts)
        seconds = self.options.sweep_seconds
        some = prompts[: min(len(prompts), max(BATCH, self._work(direct, mix)))]
        by_size = self._direct_rates(direct, some)
        size = better(by_size)
        record: dict[str, Any] = {
            "direct_rate": by_size[size],
            "direct_way": way(size),
            "levels": [],
        }
        harness.say(
            f"{'clients':>8} {'rate/s':>9} {'p50 ms':>9} {'p99 ms':>9} {'answers':>8}  not 200, and"
            " cores in use"
        )
        failed: Counter[str] = Counter()
        for clients in self.options.clients:
            meter = harness.CpuMeter({"server": server.pid, "load": os.getpid()})
            outcomes = self._for_seconds(server, requests, clients, seconds, 2 * clients + 8)
            cores = meter.cores()
            kept, took = harness.steady(outcomes, clients)
            summary = harness.summarise(kept, took)
            failed.update(not_answered(outcomes))
            record["levels"].append({"clients": clients, **asdict(summary), "cores": cores})
            harness.say(
                f"{clients:8} {summary.rate:9.2f} {summary.p50_ms:9.1f} {summary.p99_ms:9.1f}"
                f" {len(kept):8}  {not_answered(outcomes) or 'none'}; {shown(cores)}"
            )
        self.add("sweep: requests not answered with 200", str(dict(failed) or 0), "0", not failed)
        self.record["sweep"] = record

    def overload(self, server: harness.ServiceProcess) -> None:
        """Measure the capacity, send three times of it, and measure it again."""
        mix = next(iter(harness.MIXES))
        requests = harness.score_requests(harness.make_prompts(512, mix, seed=4))
        clients, seconds = self.options.capacity_clients, self.options.overload_seconds
        deadline = self.options.deadline_s

        def capacity() -> float:
            outcomes = self._for_seconds(server, requests, clients, seconds / 4, 3 * clients)
            return harness.summarise(*harness.steady(outcomes, clients)).rate

        before = capacity()
        if not before > 0:
            self.add("overload", "no capacity: no request was answered with 200", "", False)
            return
        arrivals = harness.poisson_arrivals(OVERLOAD * before, seconds, seed=5)
        harness.say(
            f"capacity {before:.2f}/s with {clients} clients; {len(arrivals)} arrivals in"
            f" {seconds:g} s"
        )
        meter = harness.CpuMeter({"server": server.pid, "load": os.getpid()})
        sending = harness.open_loop(
            server.address, itertools.cycle(requests), arrivals.tolist(), timeout_s=4 * deadline
        )
        outcomes = asyncio.run(sending)
        cores = meter.cores()
        after = capacity()
        found = harness.goodput(outcomes, deadline, seconds)
        reference = (before + after) / 2
        bad = harness.bad_refusals(outcomes)
        refused = len(outcomes) - found.good - found.late
        lag = harness.percentile([outcome.sent - outcome.intended for outcome in outcomes], 0.99)
        summary = harness.summarise(outcomes, seconds)
        waits = sorted({outcome.retry_after for outcome in outcomes if outcome.retry_after})
        name = f"overload {OVERLOAD:g}x"
        self.add(
            f"{name}: refusals other than 429/503 with Retry-After",
            str(bad or (0 if refused else "nothing was refused")),
            "0",
            not bad and refused > 0,
            f"{harness.statuses(outcomes)}; Retry-After {', '.join(waits[:6]) or '-'}",
        )
        self.add(
            f"{name}: goodput / capacity",
            f"{found.overall / reference:.3f}",
            f">= {GOODPUT_TARGET}",
            found.overall >= GOODPUT_TARGET * reference,
            f"{found.overall:.4g}/s, while arriving {found.in_window:.4g}/s"
            f" ({found.in_window / reference:.3f}); capacity {before:.4g}/s before, {after:.4g}/s"
            f" after; {found.late} later than {deadline:g} s",
        )
        self.add(
            f"{name}: latency of answers",
            f"p50 {summary.p50_ms:.0f} ms, p99 {summary.p99_ms:.0f} ms",
            "(reported)",
            None,
            "from the intended send time; the generator's own lag p99 "
            f"{lag * 1e3:.1f} ms; {shown(cores)}",
        )
        self.record["overload"] = {
            "capacity": [before, after],
            "goodput": asdict(found),
            "summary": asdict(summary),
            "bad_refusals": bad,
            "generator_lag_p99_s": lag,
            "cores": cores,
        }

    def _direct_rates(self, direct: Direct, prompts: Sequence[list[int] | str]) -> dict[int, float]:
        """Return prompts per second by batch size, 32 and 1 (without padding: perhaps the better on
        a CPU)."""
        seconds = {BATCH: 0.0, 1: 0.0}
        for size in (BATCH, 1, 1, BATCH):
            seconds[size] += sum(direct.score(prompts, size))
        return {size: 2 * len(prompts) / value for size, value in seconds.items()}

    def _work(self, direct: Direct, mix: str) -> int:
        """Return how many prompts, a multiple of 32, the direct engine scores in about
        --round-seconds."""
        prompts = any_prompts(BATCH, mix, seed=0)
        direct.score(prompts, BATCH)
        seconds: float = self.options.round_seconds
        least: int = self.options.least_batches
        return BATCH * max(least, round(seconds / direct.score(prompts, BATCH)[0]))

    def _for_seconds(
        self,
        server: harness.ServiceProcess,
        requests: list[bytes],
        clients: int,
        seconds: float,
        least: int,
    ) -> list[harness.Outcome]:
        """Send in a closed loop for so long, and at least so many requests."""
        going = harness.closed_loop(
            server.address,
            itertools.cycle(requests),
            clients,
            lambda sent, elapsed: elapsed < seconds or sent < least,
        )
        return asyncio.run(going)

    def _closed(
        self, server: harness.ServiceProcess, requests: list[bytes], clients: int
    ) -> list[harness.Outcome]:
        return asyncio.run(harness.closed_loop(server.address, iter(requests), clients))


def any_prompts(count: int, mix: str, seed: int) -> Sequence[list[int] | str]:
    return (
        harness.make_texts(count, seed)
        if mix == harness.TEXT
        else harness.make_prompts(count, mix, seed)
    )


def better(rates: dict[int, float]) -> int:
    return max(rates, key=lambda size: rates[size])


def way(size: int) -> str:
    return "one by one" if size == 1 else f"in batches of {size}"


def not_answered(outcomes: list[harness.Outcome]) -> dict[str, int]:
    return {name: count for name, count in harness.statuses(outcomes).items() if name != "200"}


def shown(cores: dict[str, float]) -> str:
    """Return the cores in use, with a warning if other processes use more than 0.1."""
    words = "cores: " + ", ".join(f"{name} {value:.2f}" for name, value in cores.items())
    return words + (" (NOT A QUIET MACHINE)" if cores["others"] > 0.1 else "")


def main() -> int:
    arguments = harness.parser(__doc__, quick="smoke: short, and no figure to quote")
    arguments.add_argument("--shapes", default="qwen2.5-0.5b,demo", help=", ".join(SHAPES))
    arguments.add_argument("--parts", default="rate,latency,sweep,overload")
    arguments.add_argument("--rounds", type=int, default=7, help="paired rounds of the rate")
    arguments.add_argument(
        "--round-seconds", type=float, default=10.0, help="direct work in one round, about"
    )
    arguments.add_argument("--latency-seconds", type=float, default=40.0)
    arguments.add_argument("--sweep-seconds", type=float, default=12.0, help="per level, at least")
    arguments.add_argument(
        "--overload-seconds", type=float, default=90.0, help="how long requests arrive"
    )
    arguments.add_argument(
        "--clients", type=lambda text: [int(one) for one in text.split(",")], default=CLIENTS
    )
    arguments.add_argument("--capacity-clients", type=int, default=64)
    arguments.add_argument(
        "--deadline-s", type=float, default=30.0, help="goodput's; the service's default is 30"
    )
    arguments.add_argument(
        "--flags", default="--deadline-s 600", help="of the server, for all parts but the overload"
    )
    arguments.add_argument(
        "--overload-flags", default="", help="of the overload's server; none: its defaults"
    )
    arguments.add_argument(
        "--threads", type=int, help="of the server and of the direct engine; default: all cores"
    )
    options = arguments.parse_args()
    options.least_batches = 2
    if options.quick:
        options.rounds = 2
        options.round_seconds = 1.0
        options.latency_seconds = 4.0
        options.sweep_seconds = 2.0
        options.overload_seconds = 10.0
        options.least_batches = 1
        options.clients = [1, 8, 32]
        options.capacity_clients = 32
    return run_shapes(options, ServiceBench)


if __name__ == "__main__":
    sys.exit(main())
