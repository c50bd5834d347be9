"""Closed and open loops of requests, and the prompts they carry.  Runs in a process of its own, beside the server's.

Closed loop: each client sends its next request when its last one is answered; the server sets the pace.
Open loop: requests are sent at the times given, whatever the server does; latencies count from those times, which
avoids coordinated omission.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from benchmarks.http_client import Pool, Reply, post
from benchmarks.load_stats import Outcome
from benchmarks.traffic import CITIES, FORMS

MIXES = {"mixed 32-96": (32, 96), "fixed 64": (64, 64)}  # token ids, neither rendered nor tokenised
TEXT = "text"  # strings, which the service or the direct engine's process must render first
QUESTIONS = (4, 13)  # in a text; about as long as the token ids
MAX_CONNECTIONS = 4096  # of an open loop; further requests wait here, which counts into their latency

KeepGoing = Callable[[int, float], bool]  # requests sent, seconds since the start -> send another one?


def make_prompts(count: int, mix: str, seed: int) -> list[list[int]]:
    """Random token ids in every shape's vocabulary; lengths uniform over the mix's range."""
    generator = np.random.default_rng(seed)
    low, high = MIXES[mix]
    return [
        generator.integers(10, 4_000, size).tolist() for size in generator.integers(low, high, count, endpoint=True)
    ]


def make_texts(count: int, seed: int) -> list[str]:
    """Random questions, several in a text."""
    draw = random.Random(seed)
    return [
        " ".join(draw.choice(FORMS).format(draw.choice(CITIES)) for _ in range(draw.randint(*QUESTIONS)))
        for _ in range(count)
    ]


def score_requests(prompts: Iterable[list[int] | str]) -> list[bytes]:
    """One POST /score for each prompt: ``prompt`` for a string, ``input_ids`` for ids."""
    return [post("/score", json.dumps({_field(prompt): prompt}, separators=(",", ":")).encode()) for prompt in prompts]


def _field(prompt: list[int] | str) -> str:
    return "prompt" if isinstance(prompt, str) else "input_ids"


def raise_file_limit() -> None:
    """As many open files as this process may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def closed_loop(
    address: tuple[str, int],
    requests: Iterator[bytes],
    clients: int,
    keep_going: KeepGoing = lambda sent, elapsed: True,
    timeout_s: float = 900.0,
) -> list[Outcome]:
    """``clients`` at once, each on its own connection, until ``requests`` ends or ``keep_going`` says no."""
    outcomes: list[Outcome] = []
    pools = [Pool(*address) for _ in range(clients)]
    sent = 0
    start = time.perf_counter()

    async def client(pool: Pool) -> None:
        nonlocal sent
        while keep_going(sent, time.perf_counter() - start):
            request = next(requests, None)
            if request is None:
                return
            sent += 1
            begun = time.perf_counter() - start
            outcomes.append(await _exchange(pool, request, begun, start, timeout_s))

    try:
        await asyncio.gather(*(client(pool) for pool in pools))
    finally:
        for pool in pools:
            pool.close()
    return outcomes


async def open_loop(
    address: tuple[str, int], requests: Iterator[bytes], arrivals: Sequence[float], timeout_s: float = 120.0
) -> list[Outcome]:
    """One request at each of ``arrivals`` (seconds, ascending); ends when all are answered."""
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


async def _exchange(pool: Pool, request: bytes, intended: float, start: float, timeout_s: float) -> Outcome:
    sent = time.perf_counter() - start
    try:
        reply: Reply = await pool.exchange(request, timeout_s)
    except OSError as error:
        name = "timeout" if isinstance(error, TimeoutError) else type(error).__name__
        return Outcome(intended, sent, time.perf_counter() - start, 0, error=name)
    done = time.perf_counter() - start
    wait = reply.header("retry-after") if reply.status != 200 else None
    return Outcome(intended, sent, done, reply.status, wait)
