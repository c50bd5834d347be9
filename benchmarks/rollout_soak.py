"""Half an hour of rollout under load: two replicas behind the shipped nginx, at 80 % of their
measured capacity.

    python -m benchmarks.rollout_soak [--seconds 1800] [--share 0.8] [--swap-s 10] [--quick] \\
        [--json OUT]

Every ten seconds the aliases production and canary move and both replicas reload, by SIGHUP or by
the route; the canary comes, changes and goes.  Each replica is stopped once by SIGTERM and started
again.  No request may fail, each answer is replayed with the bundle that it names, and no replica's
memory may grow by 2 %; else the exit status is 1."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.fleet import NAME, Fleet, Replica, Witness, fleet, questions, replay, two_versions
from benchmarks.harness import Check, conclude, parser, raise_file_limit, say, slope
from probes_store.store import Store

MAX_GROWTH = 1.02  # last third over first third of a process's life after its warm-up
WARM_UP = 0.2  # share of that life which is not judged
RESTARTS = (
    0.1,
    0.2,
)  # when, as shares of the run: early, so that most of it is one life of each process
MEASURE_S = 10.0
CLIENTS = 16
DISTINCT = 300
FLAGS = (
    "--canary",
    f"{NAME}@canary",
    "--canary-share",
    "0.3",
    "--deadline-s",
    "58",
    "--bundle",
    f"{NAME}@production",
)


@dataclass
class Events:
    swaps: int = 0
    roles: set[tuple[int, int | None]] = field(
        default_factory=set
    )  # versions of production and canary
    refused: list[str] = field(default_factory=list)
    exits: list[int] = field(default_factory=list)
    memory: dict[tuple[int, int], list[tuple[float, float]]] = field(
        default_factory=dict
    )  # (replica, start): s, MiB


async def swap(store: Store, replicas: Sequence[Replica], events: Events) -> None:
    """Move to the next pair of production and canary, on every replica that runs."""
    turn = events.swaps
    production = 1 + (turn + 1) % 2
    canary = None if turn % 3 == 2 else 3 - production  # gone: it is what judges already
    store.set_alias(NAME, "production", production)
    store.set_alias(NAME, "canary", canary or production)
    events.swaps += 1
    events.roles.add((production, canary))
    for replica in replicas:
        if (process := replica.process) is None:
            continue
        if turn % 4 == 3:
            replica.signal(signal.SIGHUP)
        elif (
            status := await asyncio.to_thread(replica.reload)
        ) != 200 and process is replica.process:
            events.refused.append(f"{replica.name}: {status}")  # unless it is being restarted


async def run(
    stage: Fleet, store: Store, witness: Witness, rate: float, options: argparse.Namespace
) -> Events:
    """Run load, swaps, restarts and the memory's watch, until the time is over."""
    events, start = Events(), time.monotonic()

    async def swaps() -> None:
        while True:
            await asyncio.sleep(options.swap_s)
            await swap(store, stage.replicas, events)

    async def restarts() -> None:
        for moment, replica in zip(RESTARTS, stage.replicas, strict=True):
            await asyncio.sleep(max(0.0, moment * options.seconds - (time.monotonic() - start)))
            events.exits.append(await asyncio.to_thread(replica.drain))
            await asyncio.to_thread(replica.start)

    async def watch() -> None:
        told = start
        while True:
            for number, replica in enumerate(stage.replicas):
                if (process := replica.process) is not None and process.alive():
                    life = events.memory.setdefault((number, replica.starts), [])
                    life.append((time.monotonic() - start, process.rss_mib()))
            if time.monotonic() - told >= 60:
                told = time.monotonic()
                say(
                    f"{told - start:.0f} s: {witness.answered} answered,"
                    f" {sum(witness.failures.values())} failed, {events.swaps} swaps;"
                    f" {', '.join(name for name, _ in witness.failures.most_common(1))}"
                )
            await asyncio.sleep(1)

    load = asyncio.create_task(witness.open_loop(rate))
    others = [asyncio.create_task(one()) for one in (swaps, watch)]
    both = asyncio.create_task(restarts())
    await asyncio.sleep(options.seconds)
    await both
    for task in others:
        task.cancel()
    for found in await asyncio.gather(*others, return_exceptions=True):
        if isinstance(found, Exception):
            raise found
    witness.stopped.set()
    await load
    return events


def grown(
    lives: Mapping[tuple[int, int], Sequence[tuple[float, float]]], least_s: float
) -> list[Check]:
    """Check the resident memory of each process's life, if it was long enough to judge."""
    checks = []
    for (replica, starts), series in sorted(lives.items()):
        times, values = np.array(series).T
        judged = times >= times[0] + (times[-1] - times[0]) * WARM_UP
        name = f"resident memory, replica {replica + 1}, start {starts}"
        if judged.sum() < 12 or times[-1] - times[0] < least_s:
            continue
        times, values = times[judged], values[judged]
        third = len(values) // 3
        first, last = float(values[:third].mean()), float(values[-third:].mean())
        found = slope(times, values, block_s=max(1.0, (times[-1] - times[0]) / 24))
        a_percent, lived = first / 100, times[-1] - times[0]
        checks.append(
            Check(
                f"{name}: last third / first third",
                f"{last / first:.4f}",
                f"< {MAX_GROWTH}",
                last / first < MAX_GROWTH,
                f"{first:.1f} -> {last:.1f} MiB in {lived:.0f} s; "
                f"{found.per_minute / a_percent:+.3f} % a minute "
                f"[{found.low / a_percent:+.3f}, {found.high / a_percent:+.3f}]",
            )
        )
    return checks or [
        Check(
            "resident memory", "no life long enough", "judged", None, f"a life of {least_s:.0f} s"
        )
    ]


def judge(
    witness: Witness, digests: Mapping[str, str], store: Path, events: Events, planned: int
) -> list[Check]:
    return [
        witness.failed(),
        replay(witness, digests, store),
        Check(
            "bundles that answered",
            str(len({digest for _, digest in witness.seen})),
            str(len(digests)),
            {digest for _, digest in witness.seen} == set(digests),
        ),
        Check(
            "swaps",
            str(events.swaps),
            f">= {planned}",
            events.swaps >= planned,
            f"production, canary: {sorted(events.roles, key=str)}",
        ),
        Check(
            "reloads refused",
            str(len(events.refused)),
            "0",
            not events.refused,
            "; ".join(events.refused[:5]),
        ),
        Check(
            "exit statuses of the restarted", str(events.exits), "[0, 0]", events.exits == [0, 0]
        ),
    ]


def main() -> int:
    arguments = parser(__doc__, quick="24 s, a swap every 2 s; memory is not judged", cache=False)
    arguments.add_argument("--seconds", type=float, default=1800.0)
    arguments.add_argument("--share", type=float, default=0.8, help="of the measured capacity")
    arguments.add_argument(
        "--rate", type=float, help="requests a second, in place of a share of what is measured"
    )
    arguments.add_argument("--swap-s", type=float, default=10.0)
    options = arguments.parse_args()
    if options.quick:
        options.seconds, options.swap_s = 24.0, 2.0
    raise_file_limit()
    with tempfile.TemporaryDirectory() as folder:
        store, digests = two_versions(Path(folder) / "store")
        contents = questions(DISTINCT)
        with fleet(Path(folder) / "nginx", 2, *FLAGS, HALLUTRACER_STORE=str(store.root)) as stage:
            rate = options.rate
            if rate is None:
                warm = Witness(stage.address, contents, seed=1)
                capacity = asyncio.run(
                    warm.for_seconds(3.0 if options.quick else MEASURE_S, CLIENTS)
                )
                rate = options.share * capacity
                say(f"{capacity:.1f} requests/s at {CLIENTS} clients; the soak sends {rate:.1f}/s")
            witness = Witness(stage.address, contents)
            events = asyncio.run(run(stage, store, witness, rate, options))
            complaints = stage.complaints()
            ends = {replica.name: replica.drain() for replica in stage.replicas}
        planned = int(0.5 * options.seconds / options.swap_s)
        checks = judge(witness, digests, store.root, events, planned)
        checks.append(
            Check(
                "exit statuses in the end",
                str(list(ends.values())),
                "[0, 0]",
                not any(ends.values()),
            )
        )
        checks += grown(events.memory, least_s=240.0)
    memory = {f"{replica}.{start}": series for (replica, start), series in events.memory.items()}
    record = {"rate": rate, "sent": witness.sent, "failures": witness.failures, "memory": memory}
    sent = f"{witness.sent / options.seconds:.1f} requests/s sent of {rate:.1f}"
    print(f"\n{sent}, {witness.latency()}; {witness.held()}")
    print(f"the balancer's log: {complaints or 'empty'}\n")
    return conclude(checks, options.json, record)


if __name__ == "__main__":
    sys.exit(main())
