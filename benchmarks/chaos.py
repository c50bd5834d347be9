"""What a bad day does to the service: nothing acknowledged is lost, no risk is wrong, and it is
ready again by itself.

    python -m benchmarks.chaos [--only NAME ...] [--quick] [--json OUT]

    killed        SIGKILL, 20 times, to one of two replicas behind the shipped nginx, under load
    stopped       SIGSTOP for some seconds to one of two replicas, then SIGCONT
    store         the store cannot be read while an alias moves and the bundles are reloaded
    store-url     the same with a store on S3, whose server gives no answer

The script plays the supervisor only: it starts again what has ended.  In each scenario answers are
replayed with the bundle that they name, labels that were acknowledged are looked for in the
database, and answers in the audit log (--audit-required).  What needs something that is not here is
said to be left out, and fails where --only asks for it. The exit status is 1 where something falls
short."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import fleet as fleets
from benchmarks.harness import Check, conclude, parser, raise_file_limit, say
from probes_store.store import Store
from service.feedback.databases import location
from tests.feedback.test_killed import STORED, a_database
from tests.kit.feedback import rows

DISTINCT, LABELS = 200, 0.3
READY_S = 120.0  # on a machine that others use, too
FLAGS = ("--bundle", f"{fleets.NAME}@production", "--policy", "observe", "--deadline-s", "58")


class LeftOut(Exception):
    """The scenario needs what is not here."""


@dataclass(frozen=True)
class Stage:
    fleet: fleets.Fleet
    witness: fleets.Witness
    store: Store
    digests: Mapping[str, str]
    database: str
    audit: Path
    quick: bool

    @property
    def one(self) -> fleets.Replica:
        return self.fleet.replicas[0]

    def play(self, act: Callable[[], Awaitable[list[Check]]], rate: float) -> list[Check]:
        """Return the checks of ``act`` under load, and of what must hold after each."""

        async def play() -> list[Check]:
            load = asyncio.create_task(self.witness.open_loop(rate))
            try:
                return await act()
            finally:
                self.witness.stopped.set()
                await load

        found = asyncio.run(play())
        say(self.witness.held())
        for replica in self.fleet.replicas:
            took = asyncio.run(replica.ready_within(READY_S))
            found.append(
                Check(
                    f"ready again, {replica.name}",
                    "no" if took is None else f"{took:.1f} s after the end",
                    f"<= {READY_S:.0f} s",
                    took is not None,
                )
            )
        labels = fleets.kept(
            self.witness,
            lambda: {
                (id, index): label for id, index, label in rows(location(self.database), STORED)
            },
        )
        risks = fleets.replay(self.witness, self.digests, self.store.root)
        return [*found, risks, labels, fleets.recorded(self.witness, self.audit)]


@contextmanager
def stage(
    options: argparse.Namespace,
    replicas: int,
    *flags: str,
    place: str | None = None,
    **variables: str,
) -> Iterator[Stage]:
    """Yield replicas behind nginx, a store with two versions at ``place``, a database and an audit
    log they share."""
    with tempfile.TemporaryDirectory() as folder, a_database(replicas > 1) as (database, _):
        own = Path(folder)
        store, digests = fleets.two_versions(place or own / "store", own / "cache of this process")
        audit = own / "audit.jsonl"
        arguments = (
            *FLAGS,
            f"--audit-log={audit}",
            "--audit-required",
            *flags,
            f"--feedback-db={database}",
        )
        variables |= {
            "HALLUTRACER_STORE": store.where,
            "HALLUTRACER_STORE_CACHE": str(own / "cache"),
        }
        with fleets.fleet(own / "nginx", replicas, *arguments, **variables) as made:
            witness = fleets.Witness(made.address, fleets.questions(DISTINCT), labels=LABELS)
            yield Stage(made, witness, store, digests, database, audit, options.quick)


def killed(options: argparse.Namespace) -> list[Check]:
    """Kill a replica again and again; what it was doing is asked of the other one."""
    times = 2 if options.quick else options.kills
    with stage(options, 2) as on:

        async def act() -> list[Check]:
            for turn in range(times):
                replica = on.fleet.replicas[turn % 2]
                await asyncio.sleep(1.0)
                await asyncio.to_thread(replica.kill)
                await asyncio.to_thread(replica.start)
            return [Check("replicas killed", str(times), str(times), True)]

        return [*on.play(act, options.rate), whole_answers(on.witness)]


def whole_answers(witness: fleets.Witness) -> Check:
    """Check that everything is answered but streams, which cannot be begun again."""
    count = sum(witness.failures.values())
    note = "; ".join(f"{number} x {name}" for name, number in witness.failures.most_common(3))
    return Check(
        "failed requests, but for streams",
        f"{count - witness.streams_failed} of {witness.sent}",
        "0",
        count == witness.streams_failed and witness.answered > 0,
        f"streams: {witness.streams_failed}; {note or witness.latency()}",
    )


def stopped(options: argparse.Namespace) -> list[Check]:
    """Stop a replica: others answer, and what it had begun is answered when it goes on."""
    with stage(options, 2) as on:

        async def act() -> list[Check]:
            await asyncio.sleep(2.0)
            before = on.witness.answered
            with silent(on.one.signal):
                await asyncio.sleep(3.0 if on.quick else 15.0)
                meanwhile = on.witness.answered - before
            await asyncio.sleep(3.0)
            return [Check("answered while it stood still", str(meanwhile), "> 0", meanwhile > 0)]

        return [*on.play(act, options.rate), on.witness.failed()]


@contextmanager
def away(store: Store) -> Iterator[None]:
    """Make the store unreadable: its folder is a file."""
    aside = store.root.with_name("aside")
    store.root.rename(aside)
    store.root.write_text("")
    try:
        yield
    finally:
        store.root.unlink()
        aside.rename(store.root)


@contextmanager
def silent(stop: Callable[[signal.Signals], None]) -> Iterator[None]:
    stop(signal.SIGSTOP)
    try:
        yield
    finally:
        stop(signal.SIGCONT)


def unreadable(options: argparse.Namespace) -> list[Check]:
    with stage(options, 1, "--watch-s", "0.5") as on:
        return cut_off(on, options.rate, lambda: away(on.store))


def unreachable(options: argparse.Namespace) -> list[Check]:
    try:
        from tests.kit.s3_server import BUCKET, s3_process, use
    except ImportError as error:
        raise LeftOut(str(error)) from None
    with s3_process() as (address, process):
        use(address)
        with stage(options, 1, "--watch-s", "0.5", place=f"s3://{BUCKET}/probes") as on:
            return cut_off(on, options.rate, lambda: silent(partial(os.kill, process)))


def cut_off(
    on: Stage, rate: float, outage: Callable[[], AbstractContextManager[None]]
) -> list[Check]:
    """Check that what is loaded goes on judging, and the alias that moved takes effect when the
    store is back."""

    def told() -> int:
        return len({digest for _, digest in on.witness.seen})

    async def act() -> list[Check]:
        await asyncio.sleep(2.0)
        await asyncio.to_thread(on.store.set_alias, fleets.NAME, "production", 2)
        with outage():
            # Beside each other: each waits until a server that is silent has had its time.
            status, published = await asyncio.gather(
                asyncio.to_thread(on.one.reload), asyncio.to_thread(publishing, on.store)
            )
            await asyncio.sleep(2.0 if on.quick else 10.0)
            ready = await on.one.ready_within(1.0)
        end = time.monotonic() + READY_S
        while told() < 2 and time.monotonic() < end:
            await asyncio.sleep(0.2)
        return [
            Check(
                "POST /v1/admin/reload while it was away",
                str(status),
                "409 or 200",
                status in (409, 200),
            ),
            Check("publish while it was away", published, "an error", published != "done"),
            Check("ready while it was away", str(ready is not None), "True", ready is not None),
            Check(
                "the moved alias took effect afterwards",
                f"{told()} bundles answered",
                "2",
                told() == 2,
            ),
        ]

    return [*on.play(act, rate), on.witness.failed()]


def publishing(store: Store) -> str:
    try:
        store.publish(fleets.draft(fleets.SOURCES[0]))
    except Exception as error:
        return type(error).__name__
    return "done"


SCENARIOS: dict[str, Callable[[argparse.Namespace], list[Check]]] = {
    "killed": killed,
    "stopped": stopped,
    "store": unreadable,
    "store-url": unreachable,
}


def main() -> int:
    arguments = parser(__doc__, quick="two kills, short pauses", cache=False)
    arguments.add_argument(
        "--only", choices=SCENARIOS, action="append", help="this scenario, repeatable"
    )
    arguments.add_argument("--kills", type=int, default=20)
    arguments.add_argument("--rate", type=float, default=20.0, help="requests a second")
    options = arguments.parse_args()
    raise_file_limit()
    checks: list[Check] = []
    for name in options.only or SCENARIOS:
        start = time.monotonic()
        try:
            found = SCENARIOS[name](options)
        except LeftOut as reason:
            found = [Check("left out", str(reason), "", False if options.only else None)]
        checks += [
            Check(f"{name}: {one.name}", one.figure, one.target, one.passed, one.note)
            for one in found
        ]
        say(f"{name}: {time.monotonic() - start:.0f} s")
    return conclude(checks, options.json, {})


if __name__ == "__main__":
    sys.exit(main())
