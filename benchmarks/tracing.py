"""What do traces cost?  The service with and without them, in turns.

    python -m benchmarks.tracing --rounds 20 --seconds 2

Two services on the demo model, one of which sends its spans to a receiver of this process that throws them away; eight
clients ask for 8 tokens each.  They work in pairs of rounds in random order, the other idle.  CPU time is what the
service itself used, so that a busy machine disturbs it less than the rate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from http.server import BaseHTTPRequestHandler

import numpy as np

from benchmarks.http_client import Pool, post
from benchmarks.service_process import ServiceProcess, cpu_seconds
from tests.local_server import answer, listening

CLIENTS = 8
BODIES = {
    "score": ("/score", {"prompt": "What is the capital of France?"}),
    "answer": ("/score", {"prompt": "What is the capital of France?", "policy": "observe",
                          "generate": {"max_tokens": 8}}),
}  # fmt: skip


async def load(service: ServiceProcess, request: bytes, seconds: float) -> tuple[float, float]:
    """Requests a second, and the service's CPU milliseconds for each."""
    pool, done = Pool(*service.address), 0
    end = time.perf_counter() + seconds

    async def client() -> None:
        nonlocal done
        while time.perf_counter() < end:
            reply = await pool.exchange(request, 60)
            assert reply.status == 200, reply.body
            done += 1

    used, started = cpu_seconds(service.pid), time.perf_counter()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    rate = done / (time.perf_counter() - started)
    pool.close()
    return rate, (cpu_seconds(service.pid) - used) / done * 1e3


def ratio(pairs: list[tuple[float, float]]) -> str:
    """The median of on over off, with a 95 % bootstrap interval."""
    found = np.array([on / off for off, on in pairs])
    draws = np.random.default_rng(0).choice(found, (2000, len(found)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return f"{np.median(found):.3f} [{low:.3f}, {high:.3f}]"


def main() -> None:
    """Measure, and print a line for each kind of request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each round")
    options = parser.parse_args()
    sent = 0

    def receive(request: BaseHTTPRequestHandler, body: bytes) -> None:
        nonlocal sent
        sent += len(body)
        answer(request, 200, b"", "application/x-protobuf")

    threads = {"HALLUTRACER_THREADS": "1"}
    with (
        listening(receive, "HTTP/1.1") as address,
        ServiceProcess(**threads) as off,
        ServiceProcess("--otlp-traces-endpoint", f"http://{address}/v1/traces", **threads) as on,
    ):
        for name, (path, body) in BODIES.items():
            request = post(path, json.dumps(body).encode())
            rates, cpus = [], []
            for number in range(-1, options.rounds):
                order = random.sample([off, on], 2)
                found = {one: asyncio.run(load(one, request, options.seconds)) for one in order}
                if number >= 0:  # the first warms up
                    rates.append((found[off][0], found[on][0]))
                    cpus.append((found[off][1], found[on][1]))
            (rate, _), (cpu_off, cpu_on) = np.median(rates, axis=0), np.median(cpus, axis=0)
            print(f"{name}: {rate:.0f} requests/s without; rate with over without {ratio(rates)}; CPU {ratio(cpus)} "
                  f"({cpu_off:.2f} and {cpu_on:.2f} ms a request)")  # fmt: skip
    print(f"{sent / 2**20:.1f} MiB of spans")


if __name__ == "__main__":
    main()
