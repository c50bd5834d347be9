"""Replicas of the service behind the shipped balancer (started, drained, killed, stopped, reloaded;
Linux only), and clients that know what they asked: every answer is kept with its bundle's digest,
and replayed with the library."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks import harness
from benchmarks.harness import (
    Check,
    Pool,
    Reply,
    ServiceProcess,
    Unexpected,
    events,
    percentile,
    post,
    require,
)
from probes_store.bundle import BundleDraft
from probes_store.store import SHIPPED, Store
from service.access.routes import RELOAD_ROUTE
from service.annexes.feedback import FEEDBACK_ROUTE
from service.audit.file import verify
from service.feedback.rows import LABELS
from tests.kit.balancer import Balancer, balancing
from tests.kit.local_server import free_port

NAME = "mine"
SOURCES = ("demo", "demo-fused")  # what the two versions are: their risks differ


def two_versions(place: Path | str, cache: Path | None = None) -> tuple[Store, dict[str, str]]:
    """Return a store with two versions of one bundle, production at the first, and digest ->
    reference."""
    store, digests = Store(place, fallbacks=[SHIPPED], cache=cache), {}
    for source in SOURCES:
        made = store.publish(draft(source))
        digests[made.manifest.digest] = made.reference
    store.set_alias(NAME, "production", 1)
    return store, digests


def draft(source: str) -> BundleDraft:
    one = Store(SHIPPED).load(source)
    manifest = replace(one.manifest, name=NAME)
    return BundleDraft(
        manifest, one.probes, one.golden, one.evaluation(), one.card(), answer=one.answer
    )


class Replica:
    """One address; the process behind it is another one after each start."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self.port = free_port()
        self.arguments, self.variables = arguments, variables
        self.process: ServiceProcess | None = None
        self.starts = 0

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start a process and wait until it is ready.  Raises RuntimeError as ServeProcess does."""
        process = ServiceProcess("--port", str(self.port), *self.arguments, **self.variables)
        process.__enter__()
        self.process, self.starts = process, self.starts + 1

    def drain(self) -> int:
        process = self._take()
        process.__exit__()
        return int(process.process.returncode)

    def kill(self) -> None:
        process = self._take()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.__exit__()

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None:
            os.kill(self.process.pid, number)

    def _take(self) -> ServiceProcess:
        process, self.process = self.process, None
        if process is None:
            raise RuntimeError(f"no process behind {self.name}")
        return process

    def asked(self, method: str, route: str, timeout_s: float = 60.0) -> int:
        """Return the status of a request to this replica alone; 0 where there was no answer."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        with closing(connection), suppress(OSError, HTTPException):
            connection.request(method, route, headers={"Content-Length": "0"})
            return connection.getresponse().status
        return 0

    def reload(self) -> int:
        return self.asked("POST", RELOAD_ROUTE)

    async def ready_within(self, seconds: float) -> float | None:
        """Return the seconds until /health/ready says 200; None: not in that time."""
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            if await asyncio.to_thread(self.asked, "GET", "/health/ready", 5.0) == 200:
                return time.monotonic() - start
            await asyncio.sleep(0.1)
        return None


@dataclass(frozen=True)
class Fleet:
    replicas: tuple[Replica, ...]
    balancer: Balancer

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = urlsplit(self.balancer.url).netloc.rpartition(":")
        return host, int(port)

    def complaints(self) -> str:
        """Return what nginx wrote to its error log, counted."""
        lines = (self.balancer.log.parent / "errors").read_text(errors="replace").splitlines()
        found = Counter(
            re.sub(r"^.*?\*\d+ |, client: .*$", "", line)
            for line in lines
            if " [notice] " not in line
        )
        return "; ".join(f"{count} x {words}" for words, count in found.most_common(6))


@contextmanager
def fleet(folder: Path, count: int, *arguments: str, **variables: str) -> Iterator[Fleet]:
    """Yield ready replicas on one thread each behind nginx; whatever still runs at the end is
    stopped."""
    with ExitStack() as stack:
        replicas = tuple(
            Replica(*arguments, **{"HALLUTRACER_THREADS": "1"} | variables) for _ in range(count)
        )
        for replica in replicas:
            stack.callback(lambda replica=replica: replica.process and replica.drain())
            replica.start()
        folder.mkdir(parents=True, exist_ok=True)
        yield Fleet(
            replicas, stack.enter_context(balancing(folder, [replica.name for replica in replicas]))
        )


TOLERANCE = 1e-5  # of a risk in float32, whatever stands beside it in a batch (docs/serving.md)
AUDITED = 6  # places of a risk in the audit log
TIMEOUT_S = 90.0
# Requests under way: fewer than would be refused while one of two replicas starts on a machine that
# others use, too.
AT_ONCE = 128
KEPT = 50_000  # latencies
GENERATE, STREAM = 0.1, 0.05  # shares of the requests
TOKENS = 8
# from an answer to its label: another replica knows of an answer once it is written, 0.05 s later
SEEN_S = 0.25


def questions(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return distinct contents of requests: texts and conversations."""
    draw = random.Random(seed)
    found: dict[str, dict[str, Any]] = {}
    while len(found) < count:
        text = " ".join(harness.question(draw) for _ in range(draw.randint(1, 4)))
        chat = {"messages": [{"role": "user", "content": text}]}
        found.setdefault(text, chat if draw.random() < 0.3 else {"prompt": text})
    return list(found.values())


@dataclass
class Range:
    """The risks that one prompt got from one bundle."""

    low: float = 1.0
    high: float = 0.0
    count: int = 0

    def add(self, risk: float) -> None:
        self.low = min(self.low, risk)
        self.high = max(self.high, risk)
        self.count = self.count + 1


@dataclass
class Witness:
    """What clients asked at ``address`` and what they were told.  ``labels``: the share of answers
    they label."""

    address: tuple[str, int]
    contents: list[dict[str, Any]]
    labels: float = 0.0
    seen: dict[tuple[int, str], Range] = field(default_factory=dict)  # (content, digest)
    sent: int = 0
    answered: int = 0
    held_back: int = 0  # requests that had to wait for others before they were sent
    failures: Counter[str] = field(default_factory=Counter)  # of requests that read a prompt
    streams_failed: int = 0  # of these
    unlabelled: Counter[str] = field(
        default_factory=Counter
    )  # labels that were not acknowledged, and why
    acknowledged: dict[tuple[str, int], str] = field(
        default_factory=dict
    )  # (answer's id, index) -> label
    told: dict[str, tuple[str, float]] = field(default_factory=dict)  # request's id -> digest, risk
    latencies: list[float] = field(default_factory=list)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    seed: int = 0

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        self._pool = Pool(*self.address)

    async def open_loop(self, rate: float) -> None:
        """Send ``rate`` requests a second until ``stopped``, ``AT_ONCE`` of them at a time; wait
        for all answers."""
        tasks: set[asyncio.Task[None]] = set()
        due = time.perf_counter()
        while not self.stopped.is_set():
            due += self._draw.expovariate(rate)
            if (ahead := due - time.perf_counter()) > 0:
                await asyncio.sleep(ahead)
            if len(tasks) >= AT_ONCE:
                self.held_back += 1
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            tasks.add(task := asyncio.create_task(self._ask(due)))
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    async def for_seconds(self, seconds: float, clients: int) -> float:
        """Return the answers a second of a closed loop for so long."""

        async def client() -> None:
            while not self.stopped.is_set():
                await self._ask(time.perf_counter())

        start = time.perf_counter()
        loops = [asyncio.create_task(client()) for _ in range(clients)]
        await asyncio.sleep(seconds)
        rate = self.answered / (time.perf_counter() - start)
        self.stopped.set()
        await asyncio.gather(*loops)
        return rate

    async def _ask(self, due: float) -> None:
        number = self._draw.randrange(len(self.contents))
        body = dict(self.contents[number])
        kind = self._draw.random()
        if streams := kind < STREAM:
            body["stream"] = True
        if kind < STREAM + GENERATE:
            body["generate"] = {"max_tokens": TOKENS}
        self.sent += 1
        try:
            reply = await self._pool.exchange(post("/score", json.dumps(body).encode()), TIMEOUT_S)
            answer = self._read(reply, streams)
        except (OSError, Unexpected, ValueError, LookupError) as error:
            self.failures[
                f"{'stream, ' if streams else ''}{type(error).__name__}: {str(error)[:160]}"
            ] += 1
            self.streams_failed += streams
            return
        self.answered += 1
        self._keep(time.perf_counter() - due)
        (one,) = answer["data"]
        self.told[reply.header("x-request-id") or ""] = (
            answer["bundle"]["digest"],
            round(one["risk"], AUDITED),
        )
        self.seen.setdefault((number, answer["bundle"]["digest"]), Range()).add(one["risk"])
        if self._draw.random() < self.labels:
            await self._label(answer["id"])

    def _read(self, reply: Reply, streams: bool) -> dict[str, Any]:
        require(reply.status == 200, f"status {reply.status}: {reply.body[:120]!r}")
        answer: dict[str, Any] = events(reply.body)[0] if streams else json.loads(reply.body)
        require(len(answer["data"]) == 1, answer)
        return answer

    def _keep(self, latency: float) -> None:
        if len(self.latencies) < KEPT:
            self.latencies.append(latency)
        elif (place := self._draw.randrange(self.answered)) < KEPT:  # a uniform sample of all
            self.latencies[place] = latency

    async def _label(self, id: str) -> None:
        await asyncio.sleep(SEEN_S)
        label = self._draw.choice(LABELS)
        body = json.dumps({"id": id, "label": label}).encode()
        try:
            reply = await self._pool.exchange(post(FEEDBACK_ROUTE, body), TIMEOUT_S)
        except OSError as error:
            self.unlabelled[type(error).__name__] += 1
            return
        if reply.status == 200:
            self.acknowledged[id.removeprefix("risk-"), 0] = label
        else:
            self.unlabelled[str(reply.status)] += 1

    def held(self) -> str:
        return (
            f"{self.held_back / max(1, self.sent):.1%} waited to be sent, because {AT_ONCE} were"
            " under way"
        )

    def latency(self) -> str:
        if not self.latencies:
            return "no answers"
        return ", ".join(
            f"{name} {percentile(self.latencies, share) * 1e3:.0f} ms"
            for name, share in (("p50", 0.5), ("p99", 0.99), ("worst", 1.0))
        )

    def failed(self, allowed: int = 0) -> Check:
        """Check that of the requests that read a prompt at most ``allowed`` were not answered."""
        count = sum(self.failures.values())
        note = "; ".join(f"{number} x {name}" for name, number in self.failures.most_common(4))
        return Check(
            "failed requests",
            f"{count} of {self.sent}",
            f"<= {allowed}" if allowed else "0",
            count <= allowed and self.answered > 0,
            note or self.latency(),
        )


def replay(witness: Witness, digests: Mapping[str, str], store: Path, model: str = "demo") -> Check:
    """Score every distinct (prompt, digest) with the library: the service's risks are those of the
    named bundle."""
    import hallutracer as ht

    wrong: list[str] = [
        f"digest {digest}, which was never published"
        for _, digest in witness.seen
        if digest not in digests
    ]
    worst = 0.0
    for digest, reference in digests.items():
        numbers = sorted(number for number, named in witness.seen if named == digest)
        if not numbers:
            continue
        contents = [witness.contents[number] for number in numbers]
        prompts = [content.get("prompt") or content["messages"] for content in contents]
        with ht.load(model, bundle=reference, store=store) as detector:
            risks = [found.risk for found in detector.score(prompts)]
        for number, risk in zip(numbers, risks, strict=True):
            found = witness.seen[number, digest]
            off = max(abs(found.low - risk), abs(found.high - risk))
            worst = max(worst, off)
            if not off <= TOLERANCE:
                wrong.append(
                    f"{witness.contents[number]}: {found.low} to {found.high} by {reference},"
                    f" replayed {risk}"
                )
    answers = sum(found.count for found in witness.seen.values())
    return Check(
        "risks unlike their digest's on replay",
        f"{len(wrong)} of {len(witness.seen)}",
        "0",
        not wrong and bool(witness.seen),
        "; ".join(wrong[:3])
        or f"{answers} answers by {len({name for _, name in witness.seen})} bundles, off by at "
        f"most {worst:.1g} (tolerance {TOLERANCE:g})",
    )


def kept(witness: Witness, stored: Callable[[], Mapping[tuple[str, int], str]]) -> Check:
    """Check that labels that were acknowledged are in the database."""
    there = stored()
    lost = [key for key, label in witness.acknowledged.items() if there.get(key) != label]
    note = ", ".join(f"{count} x {why}" for why, count in witness.unlabelled.items())
    return Check(
        "acknowledged labels that are lost",
        f"{len(lost)} of {len(witness.acknowledged)}",
        "0",
        not lost and bool(witness.acknowledged),
        f"not acknowledged: {note or 'none'}",
    )


def recorded(witness: Witness, log: Path) -> Check:
    """Check that answers that were given are in an audit log without which none may be given; its
    chain is whole."""
    chain = verify([log])
    there: set[tuple[str, str, float]] = (
        set()
    )  # one request has two where a replica died before it could answer
    for line in log.read_bytes().splitlines():
        with suppress(ValueError, LookupError):  # torn, or no decision
            event = json.loads(line)
            there.add((event["request_id"], event["digest"], event["prompts"][0]["risk"]))
    lost = [id for id, told in witness.told.items() if (id, *told) not in there]
    wrong = [f"{len(lost)} answers have no line of their own"] * bool(lost) + chain.problems
    return Check(
        "answers without their line in the audit log, faults of its chain",
        f"{len(lost)} of {len(witness.told)}, {len(chain.problems)}",
        "0, 0",
        not wrong and bool(witness.told),
        "; ".join(wrong[:3])
        or f"{chain.lines} lines, {chain.torn} cut short, {chain.missed} missed",
    )
