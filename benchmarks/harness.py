"""The load tests' harness: arrivals, percentiles, intervals, checks; an HTTP client; a served
process; load.

The client is HTTP/1.1 keep-alive on asyncio streams, cheap enough to load a server from the machine
it runs on.  The served model is a process of its own, watched through /proc and /metrics (Linux
only).  Closed loop: each client sends its next request when its last one is answered.  Open loop:
requests are sent at the times given, and latencies count from those, which avoids coordinated
omission."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import re
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import ArrayLike, NDArray
from prometheus_client.parser import text_string_to_metric_families

from tests.serve_process import MAY_CHOOSE, ServeProcess

Floats = NDArray[np.float64]
CACHE = Path(tempfile.gettempdir()) / "hallutracer-bench"


def poisson_arrivals(rate: float, seconds: float, seed: int) -> Floats:
    """Return arrival times in [0, ``seconds``) of a Poisson process with ``rate`` per second,
    ascending."""
    if not (rate > 0 and seconds > 0):
        raise ValueError(f"rate and seconds must be positive, not {rate} and {seconds}")
    generator = np.random.default_rng(seed)
    times = np.empty(0)
    while times.size == 0 or times[-1] < seconds:
        gaps = generator.exponential(1 / rate, max(16, math.ceil(rate * seconds * 1.1)))
        times = np.concatenate([times, (times[-1] if times.size else 0.0) + np.cumsum(gaps)])
    return times[times < seconds]


def percentile(values: ArrayLike, share: float) -> float:
    """Return the smallest observed value that at least ``share`` of all values do not exceed (no
    interpolation)."""
    ordered = np.sort(np.asarray(values, np.float64))
    if ordered.size == 0 or not 0.0 < share <= 1.0:
        raise ValueError(
            f"a percentile needs values and a share in (0, 1], not {ordered.size} values and"
            f" {share}"
        )
    # 0.99 * 100 is slightly more than 99 in binary; without the correction it would select the
    # 100th value.
    return float(ordered[max(1, math.ceil(share * ordered.size - 1e-9)) - 1])


@dataclass(frozen=True)
class Outcome:
    """One request.  Times in seconds since the run's start; ``status`` 0: no answer (``error`` says
    why)."""

    intended: float  # when it should have been sent; in a closed loop, when it was
    sent: float
    done: float
    status: int
    retry_after: str | None = None
    error: str | None = None

    @property
    def name(self) -> str:
        """The status, or the error of a request without an answer."""
        return str(self.status) if self.status else (self.error or "no answer")

    @property
    def latency(self) -> float:
        """From the intended send time, so that a stalled generator cannot hide a slow server."""
        return self.done - self.intended


@dataclass(frozen=True)
class Summary:
    """Requests of one run.  Latencies (ms) are of the answers with status 200; NaN without any."""

    requests: int
    statuses: dict[str, int]
    seconds: float
    rate: float  # answers with status 200 per second
    p50_ms: float
    p99_ms: float
    worst_ms: float


def summarise(outcomes: Sequence[Outcome], seconds: float) -> Summary:
    good = [outcome.latency * 1e3 for outcome in outcomes if outcome.status == 200]
    shares = [percentile(good, share) for share in (0.5, 0.99, 1.0)] if good else [math.nan] * 3
    return Summary(len(outcomes), statuses(outcomes), seconds, len(good) / seconds, *shares)


def statuses(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Return how many of each status; a request without an answer counts under its error."""
    return dict(sorted(Counter(outcome.name for outcome in outcomes).items()))


def steady(outcomes: Sequence[Outcome], warm: int) -> tuple[list[Outcome], float]:
    """Return the outcomes after the first ``warm`` answers, and the seconds from that answer to the
    last one."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.done)
    if len(ordered) <= warm:
        raise ValueError(f"{len(ordered)} answers, and the first {warm} are warm-up; run longer")
    start = ordered[warm - 1].done if warm else 0.0
    return ordered[warm:], ordered[-1].done - start


@dataclass(frozen=True)
class Goodput:
    """Answers with status 200 within the deadline, per second."""

    good: int
    late: int  # answered with 200, but after the deadline
    in_window: float  # answered while requests were still arriving, over that time
    overall: float  # all of them, over the time until the last answer of any kind


def goodput(outcomes: Sequence[Outcome], deadline_s: float, window_s: float) -> Goodput:
    """Return the goodput of an open-loop run whose arrivals lasted ``window_s``, which may cut a
    batch in half."""
    good = [
        outcome for outcome in outcomes if outcome.status == 200 and outcome.latency <= deadline_s
    ]
    late = sum(outcome.status == 200 for outcome in outcomes) - len(good)
    inside = sum(outcome.done <= window_s for outcome in good)
    overall = len(good) / max(window_s, *(outcome.done for outcome in outcomes))
    return Goodput(len(good), late, inside / window_s, overall)


def bad_refusals(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Return responses other than 200, and 429 or 503 with Retry-After in seconds."""
    bad: Counter[str] = Counter()
    for outcome in outcomes:
        wait = outcome.retry_after
        if outcome.status in (429, 503):
            bad[f"{outcome.name} with Retry-After {wait}"] += not (
                wait and wait.isdigit() and int(wait) > 0
            )
        else:
            bad[outcome.name] += outcome.status != 200
    return dict(+bad)


@dataclass(frozen=True)
class Spread:
    """Median of some rounds and the middle 90 %."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def spread(values: ArrayLike) -> Spread:
    low, middle, high = np.quantile(np.asarray(values, np.float64), [0.05, 0.5, 0.95])
    return Spread(float(middle), float(low), float(high))


class Slope(NamedTuple):
    """Growth in units per minute, with a 95 % interval."""

    per_minute: float
    low: float
    high: float


def slope(seconds: ArrayLike, values: ArrayLike, block_s: float = 10.0) -> Slope:
    """Return the least squares through means of blocks of ``block_s``, which are nearly
    independent. Raises ValueError where fewer than four blocks hold samples."""
    from scipy import stats

    times, series = np.asarray(seconds, np.float64), np.asarray(values, np.float64)
    block = np.floor((times - times.min()) / block_s).astype(int)
    kept = np.unique(block)
    if kept.size < 4:
        raise ValueError(f"a slope needs four blocks of {block_s:g} s; found {kept.size}")
    x = np.array([times[block == index].mean() for index in kept]) / 60
    y = np.array([series[block == index].mean() for index in kept])
    line = stats.linregress(x, y)
    half = float(stats.t.ppf(0.975, kept.size - 2) * line.stderr)
    return Slope(float(line.slope), float(line.slope) - half, float(line.slope) + half)


@dataclass(frozen=True)
class Check:
    """One figure beside its target.  ``passed`` None: reported, not judged."""

    name: str
    figure: str
    target: str
    passed: bool | None
    note: str = ""


def parser(description: str | None, *, quick: str, cache: bool = True) -> argparse.ArgumentParser:
    """Return a bench's: --json and --quick, which do as ``quick`` says, and --cache."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument("--json", type=Path, help="write the checks and everything behind them there")
    if cache:
        made.add_argument(
            "--cache", type=Path, default=CACHE, help="model folders (2 GB), kept between runs"
        )
    return made


def say(line: str = "") -> None:
    """Print a line with the time, unbuffered: a run takes minutes."""
    print(f"{time.strftime('%H:%M:%S')} {line}" if line else "", flush=True)


def table(checks: Sequence[Check]) -> str:
    """Return the checks as aligned text, each note on a line of its own."""
    words = {True: "pass", False: "FALLS SHORT", None: "-"}
    rows = [
        (check.name, check.figure, check.target, words[check.passed], check.note)
        for check in checks
    ]
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:4]]
    lines = []
    for row in rows:
        lines.append(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        )
        if row[4]:
            lines.append(f"    {row[4]}")
    return "\n".join(lines)


def conclude(checks: Sequence[Check], path: Path | None, record: dict[str, Any]) -> int:
    """Print the table and write everything to ``path`` if given.  Return the exit status, 1 if a
    check failed."""
    print(table(checks), flush=True)
    if path is not None:
        write_json(path, checks, record)
    return int(any(check.passed is False for check in checks))


def write_json(path: Path, checks: Sequence[Check], record: dict[str, Any]) -> None:
    content = {"checks": [asdict(check) for check in checks], **record}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


IDLE_LIMIT_S = (
    2.0  # below any server's keep-alive timeout, so that no request meets the server's close
)
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole response.  ``sent``: when its request was; ``pieces``: the body's chunks, each with
    its arrival."""

    status: int
    head: bytes
    pieces: list[tuple[float, bytes]]
    sent: float

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    def header(self, name: str) -> str | None:
        found = re.search(
            rb"\r\n" + re.escape(name.encode()) + rb":[ \t]*([^\r]*)", self.head, re.IGNORECASE
        )
        return found and found[1].decode("latin-1").strip()


def post(path: str, body: bytes, host: str = "localhost") -> bytes:
    lines = (
        f"POST {path} HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join((*lines, "", "")).encode() + body


class Unexpected(Exception):
    """Not the expected answer."""


def require(condition: bool, found: object) -> None:
    """Raise Unexpected with what was found, unless ``condition``."""
    if not condition:
        raise Unexpected(str(found))


def events(body: bytes) -> list[dict[str, Any]]:
    """Return the events of a whole stream; raise Unexpected where it does not end with [DONE] or
    holds an error."""
    parts = body.decode().split("\n\n")
    require(parts[-2:] == ["data: [DONE]", ""], body[-200:])
    found = [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]
    require(not any("error" in event for event in found), found)
    require(found[0]["object"] == "risk.list", found[0])
    return found


class Pool:
    """Keep-alive connections: the most recently used idle one first, else a new one."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.opened = 0
        self._idle: list[tuple[float, Streams]] = []

    async def exchange(self, request: bytes, timeout_s: float) -> Reply:
        """One request.  Raises OSError (ConnectionError, TimeoutError)."""
        reader, writer = await self._take()
        try:
            async with asyncio.timeout(timeout_s):
                sent = time.perf_counter()
                writer.write(request)
                reply = await _read(reader, sent)
        except BaseException as error:
            writer.transport.abort()
            if isinstance(error, EOFError | ValueError | asyncio.LimitOverrunError):
                raise ConnectionResetError(f"no whole HTTP/1.1 answer: {error}") from error
            raise
        if b"connection: close" in reply.head.lower():
            writer.close()
        else:
            self._idle.append((time.perf_counter(), (reader, writer)))
        return reply

    async def _take(self) -> Streams:
        while self._idle:
            last_used, (reader, writer) = self._idle.pop()
            if (
                not reader.at_eof()
                and not writer.is_closing()
                and time.perf_counter() - last_used < IDLE_LIMIT_S
            ):
                return reader, writer
            writer.close()
        self.opened += 1
        return await asyncio.open_connection(self.host, self.port)

    def close(self) -> None:
        for _, (_, writer) in self._idle:
            writer.close()
        self._idle.clear()


async def _read(reader: asyncio.StreamReader, sent: float) -> Reply:
    head = await reader.readuntil(b"\r\n\r\n")
    reply = Reply(int(head[9:12]), head, [], sent)
    if length := reply.header("content-length"):
        body = await reader.readexactly(int(length))
        reply.pieces.append((time.perf_counter(), body))
        return reply
    if reply.header("transfer-encoding") != "chunked":
        raise ValueError("neither Content-Length nor chunked")
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        piece = (await reader.readexactly(size + 2))[:-2]
        reply.pieces.append((time.perf_counter(), piece))
    await reader.readexactly(2)
    return reply


GAUGES = (
    "hallutracer_queue_depth",
    "hallutracer_running_decodes",
    "hallutracer_requests_in_flight",
)
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Metrics:
    def __init__(self, text: str) -> None:
        families = text_string_to_metric_families(text)
        self.samples = [
            (sample.name, sample.labels, sample.value)
            for family in families
            for sample in family.samples
        ]

    def total(self, name: str, **labels: str) -> float:
        """Return the sum over all series of ``name`` with ``labels``; 0 without any."""
        return sum(
            value
            for series, own, value in self.samples
            if series == name and labels.items() <= own.items()
        )

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        values = {
            own[label]
            for series, own, _ in self.samples
            if series == name and label in own and labels.items() <= own.items()
        }
        return {value: self.total(name, **{label: value}, **labels) for value in sorted(values)}

    def has(self, name: str) -> bool:
        return any(series == name for series, _, _ in self.samples)


class ServiceProcess(ServeProcess):
    """``hallutracer serve`` with ``arguments``, in a process of its own as users start it, watched;
    its clients may choose what they like."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        program = (sys.executable, "-m", "service.cli")
        super().__init__(*arguments, program=program, **MAY_CHOOSE | variables)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def alive(self) -> bool:
        return self.process.poll() is None

    def metrics(self) -> Metrics:
        with closing(HTTPConnection(*self.address, timeout=30)) as connection:
            connection.request("GET", "/metrics")
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"GET /metrics answered {response.status}")
            return Metrics(response.read().decode())

    def rss_mib(self) -> float:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * _PAGE / 2**20

    def open_files(self) -> int:
        """Return the number of open file descriptors, sockets among them."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def end(self) -> Check:
        """Return, after exit, whether it stopped as it should."""
        status = self.process.returncode
        return Check("exit status after SIGTERM", str(status), "0", status == 0)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far, user and system; NaN where it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return math.nan
    return (int(fields[11]) + int(fields[12])) / _TICKS


def machine_busy_seconds() -> float:
    """Return the CPU time that all processes of this machine have used, over all cores; stolen time
    included."""
    user, nice, system, _, _, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / _TICKS


class CpuMeter:
    """CPU use in cores since the meter started: our processes and all others."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self._start = (
            time.monotonic(),
            machine_busy_seconds(),
            {name: cpu_seconds(pid) for name, pid in pids.items()},
        )

    def cores(self) -> dict[str, float]:
        """Return the mean cores in use, by name; ``others`` are all other processes."""
        since, busy, used = self._start
        seconds = time.monotonic() - since
        own = {name: (cpu_seconds(pid) - used[name]) / seconds for name, pid in self._pids.items()}
        return own | {
            "others": max(0.0, (machine_busy_seconds() - busy) / seconds - sum(own.values()))
        }


CITIES = [
    "Rome",
    "Oslo",
    "Lima",
    "Accra",
    "Hanoi",
    "Quito",
    "Riga",
    "Dakar",
    "Turin",
    "Osaka",
    "Perth",
    "Leeds",
]
FORMS = [
    "Which country is {} in?",
    "What continent is {} on?",
    "Where is {}?",
    "In which region does {} lie?",
]
MIXES = {"mixed 32-96": (32, 96), "fixed 64": (64, 64)}  # token ids, neither rendered nor tokenised
TEXT = "text"  # strings, which the service or the direct engine's process must render first
QUESTIONS = (4, 13)  # in a text; about as long as the token ids
MAX_CONNECTIONS = (
    4096  # of an open loop; further requests wait here, which counts into their latency
)

KeepGoing = Callable[
    [int, float], bool
]  # requests sent, seconds since the start -> send another one?


def make_prompts(count: int, mix: str, seed: int) -> list[list[int]]:
    """Return random token ids in every shape's vocabulary; lengths uniform over the mix's range."""
    draw = np.random.default_rng(seed)
    return [
        draw.integers(10, 4_000, size).tolist()
        for size in draw.integers(*MIXES[mix], count, endpoint=True)
    ]


def make_texts(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [make_text(draw) for _ in range(count)]


def make_text(draw: random.Random) -> str:
    return " ".join(question(draw) for _ in range(draw.randint(*QUESTIONS)))


def question(draw: random.Random) -> str:
    return draw.choice(FORMS).format(draw.choice(CITIES))


def score_requests(prompts: Iterable[list[int] | str]) -> list[bytes]:
    """Return a POST /score for each prompt: ``prompt`` for a string, ``input_ids`` for ids."""
    bodies = ({"prompt" if isinstance(prompt, str) else "input_ids": prompt} for prompt in prompts)
    return [post("/score", json.dumps(body, separators=(",", ":")).encode()) for body in bodies]


def raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def closed_loop(
    address: tuple[str, int],
    requests: Iterator[bytes],
    clients: int,
    keep_going: KeepGoing = lambda sent, elapsed: True,
    timeout_s: float = 900.0,
) -> list[Outcome]:
    """Send from ``clients`` at once, each on its own connection, until ``requests`` ends or
    ``keep_going`` says no."""
    outcomes: list[Outcome] = []
    pools = [Pool(*address) for _ in range(clients)]
    sent = 0
    start = time.perf_counter()

    async def client(pool: Pool) -> None:
        nonlocal sent
        while keep_going(sent, time.perf_counter() - start):
            if (request := next(requests, None)) is None:
                return
            sent += 1
            outcomes.append(
                await _exchange(pool, request, time.perf_counter() - start, start, timeout_s)
            )

    try:
        await asyncio.gather(*(client(pool) for pool in pools))
    finally:
        for pool in pools:
            pool.close()
    return outcomes


async def open_loop(
    address: tuple[str, int],
    requests: Iterator[bytes],
    arrivals: Sequence[float],
    timeout_s: float = 120.0,
) -> list[Outcome]:
    """Send a request at each of ``arrivals`` (seconds, ascending); end when all are answered."""
    pool = Pool(*address)
    sockets = asyncio.Semaphore(MAX_CONNECTIONS)
    tasks: list[asyncio.Task[Outcome]] = []
    start = time.perf_counter()

    async def send(request: bytes, intended: float) -> Outcome:
        async with sockets:
            return await _exchange(pool, request, intended, start, timeout_s)

    try:
        for number, intended in enumerate(arrivals):
            ahead = intended - (time.perf_counter() - start)
            if ahead > 0:
                await asyncio.sleep(ahead)
            elif number % 16 == 0:
                await asyncio.sleep(0)  # behind: let answers in between
            tasks.append(asyncio.create_task(send(next(requests), float(intended))))
        return list(await asyncio.gather(*tasks))
    finally:
        pool.close()


async def exchange(pool: Pool, request: bytes, start: float, timeout_s: float) -> Outcome:
    """Send one request now; ``start``: the run's, by ``time.perf_counter``."""
    return await _exchange(pool, request, time.perf_counter() - start, start, timeout_s)


async def _exchange(
    pool: Pool, request: bytes, intended: float, start: float, timeout_s: float
) -> Outcome:
    sent = time.perf_counter() - start
    try:
        reply = await pool.exchange(request, timeout_s)
    except OSError as error:
        name = "timeout" if isinstance(error, TimeoutError) else type(error).__name__
        return Outcome(intended, sent, time.perf_counter() - start, 0, error=name)
    wait = reply.header("retry-after") if reply.status != 200 else None
    return Outcome(intended, sent, time.perf_counter() - start, reply.status, wait)
