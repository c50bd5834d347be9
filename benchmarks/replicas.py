"""One, two and four replicas on this machine behind the shipped nginx: what they answer, and what their faults cost.

    python -m benchmarks.replicas [--counts 1 2 4] [--rounds 5] [--only throughput] [--quick] [--json OUT]

    throughput   closed loop, side by side in rounds: requests a second over those of one replica behind nginx
    faults       one of two replicas killed, drained and started again, reloaded, under load: what clients saw

Replicas of one machine share its cores: two of them with one thread each are compared with one of one thread, and on
two cores the clients and nginx take their part of the second.  The exit status is 1 where something falls short.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.fleet import Fleet, Replica, Witness, fleet, questions, replay, running, two_versions
from benchmarks.harness import Check, CpuMeter, conclude, parser, raise_file_limit, say, spread
from benchmarks.traffic import require
from tests.deploy.balancer import balancing

CLIENTS, DISTINCT = 16, 200


def throughput(options: argparse.Namespace) -> list[Check]:
    """Rates by the number of replicas, each over one replica's in the same round."""
    contents, rates = questions(DISTINCT), dict[int, list[float]]()
    direct: list[float] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        store, digests = two_versions(Path(folder) / "store")
        replicas = running(stack, max(options.counts), "--bundle=mine", HALLUTRACER_STORE=str(store.root))
        fleets = {}
        for count in options.counts:
            (own := Path(folder) / f"nginx-{count}").mkdir()
            some = replicas[:count]
            fleets[count] = Fleet(some, stack.enter_context(balancing(own, [replica.name for replica in some])))
        meter = CpuMeter({})
        for number in range(options.rounds + 1):  # the first one warms up
            turns: list[tuple[int, tuple[str, int]]] = [(0, ("127.0.0.1", replicas[0].port))]
            turns += [(count, one.address) for count, one in fleets.items()]
            random.Random(number).shuffle(turns)
            for count, address in turns:
                witness = Witness(address, contents, seed=number)
                rate = asyncio.run(witness.for_seconds(options.seconds, CLIENTS))
                if number:
                    (rates.setdefault(count, []) if count else direct).append(rate)
                require(not witness.failures, witness.failures)
        busy = meter.cores()["others"]
    one = rates[min(rates)]
    checks = [Check(f"{count} replicas over {min(rates)}, requests a second", str(spread(
                  [own / base for own, base in zip(found, one, strict=True)])), "(reported)", None,
                  f"{spread(found)}/s at {CLIENTS} clients") for count, found in sorted(rates.items())]  # fmt: skip
    behind = [own / base for own, base in zip(one, direct, strict=True)]
    checks.append(Check("one replica behind nginx over the same without", str(spread(behind)), "(reported)", None,
                        f"{spread(direct)}/s; the machine's cores in use: {busy:.2f}"))  # fmt: skip
    return checks


def faults(options: argparse.Namespace) -> list[Check]:
    """What clients see of one of two replicas that is killed, drained, reloaded."""
    pause = 1.0 if options.quick else 4.0

    async def killed(replica: Replica) -> None:
        await asyncio.to_thread(replica.kill)
        await asyncio.sleep(pause)
        await asyncio.to_thread(replica.start)

    async def drained(replica: Replica) -> None:
        require(await asyncio.to_thread(replica.drain) == 0, "an exit status other than 0")
        await asyncio.to_thread(replica.start)

    async def reloaded(replica: Replica) -> None:
        for _ in range(5):
            require(await asyncio.to_thread(replica.reload) == 200, "a reload that was refused")
            await asyncio.sleep(pause / 4)

    acts: dict[str, Callable[[Replica], Awaitable[None]]] = {
        "none": lambda _: asyncio.sleep(pause),
        "killed": killed,
        "drained and started": drained,
        "reloaded 5 times": reloaded,
    }
    checks = []
    with tempfile.TemporaryDirectory() as folder:
        store, digests = two_versions(Path(folder) / "store")
        flags = ("--bundle=mine",)
        with fleet(Path(folder) / "nginx", 2, *flags, HALLUTRACER_STORE=str(store.root)) as stage:
            for name, act in acts.items():
                witness = Witness(stage.address, questions(DISTINCT))

                async def play(act: Callable[[Replica], Awaitable[None]], witness: Witness) -> None:
                    load = asyncio.create_task(witness.open_loop(options.rate))
                    await asyncio.sleep(1.0)
                    await act(stage.replicas[0])
                    await asyncio.sleep(1.0)
                    witness.stopped.set()
                    await load

                asyncio.run(play(act, witness))
                failed = witness.failed(witness.streams_failed if name == "killed" else 0)
                checks += [Check(f"{name}: {failed.name}", failed.figure, failed.target, failed.passed,
                                 f"{failed.note}; {witness.latency()}")]  # fmt: skip
                checks.append(replay(witness, digests, store.root))
    return checks


PARTS = {"throughput": throughput, "faults": faults}


def main() -> int:
    arguments = parser(__doc__, quick="one short round each, 1 and 2 replicas", cache=False)
    arguments.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4])
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--seconds", type=float, default=6.0, help="of one measurement")
    arguments.add_argument("--rate", type=float, default=20.0, help="requests a second while replicas fail")
    arguments.add_argument("--only", choices=PARTS, action="append", help="this part, repeatable")
    options = arguments.parse_args()
    if options.quick:
        options.counts, options.rounds, options.seconds = [1, 2], 1, 1.5
        options.rate = min(options.rate, 5.0)  # a fault's test, not a load's: no queue on a machine with other work
    raise_file_limit()
    checks: list[Check] = []
    for name in options.only or PARTS:
        say(name)
        checks += PARTS[name](options)
    return conclude(checks, options.json, {})


if __name__ == "__main__":
    sys.exit(main())
