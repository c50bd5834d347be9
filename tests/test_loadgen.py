"""The pure parts of the load tests: arrivals, percentiles, summaries, verdicts; and the client on a
scripted server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from itertools import cycle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import harness as stats
from benchmarks.harness import (
    Check,
    Metrics,
    Outcome,
    percentile,
    poisson_arrivals,
    slope,
    statuses,
    summarise,
)
from benchmarks.service_load import better
from benchmarks.service_soak import Soak, memory_checks, metric_checks

Exchange = Callable[[tuple[str, int]], Awaitable[None]]


def outcome(
    done: float, status: int = 200, intended: float = 0.0, wait: str | None = None
) -> Outcome:
    return Outcome(intended, intended, done, status, wait, None if status else "timeout")


def test_arrivals_are_a_poisson_process() -> None:
    times = poisson_arrivals(50.0, 400.0, seed=0)
    assert np.all(np.diff(times) > 0)
    assert 0 <= times[0] < times[-1] < 400.0
    assert len(times) == pytest.approx(20_000, rel=0.03)  # four standard deviations
    counts = np.bincount(times.astype(int), minlength=400)
    assert counts.var() / counts.mean() == pytest.approx(
        1.0, abs=0.3
    )  # a constant rate would give 0
    assert np.array_equal(times, poisson_arrivals(50.0, 400.0, seed=0))
    assert not np.array_equal(times[:10], poisson_arrivals(50.0, 400.0, seed=1)[:10])
    # They fill the whole time even where the first draw was too short.
    assert all(poisson_arrivals(1.0, 30.0, seed)[-1] > 15.0 for seed in range(50))
    for rate, seconds in ((0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)):
        with pytest.raises(ValueError, match="positive"):
            poisson_arrivals(rate, seconds, 0)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.001, 1.0))
def test_a_percentile_was_observed_and_covers_its_share(values: list[float], share: float) -> None:
    result = percentile(values, share)
    assert result in values
    assert sum(value <= result for value in values) >= share * len(values) - 1e-6
    assert sum(value < result for value in values) < share * len(values)


def test_figures_by_hand() -> None:
    assert [percentile(range(1, 101), share) for share in (0.5, 0.99, 0.991, 1.0)] == [
        50,
        99,
        100,
        100,
    ]
    with pytest.raises(ValueError, match="0 values"):
        percentile([], 0.5)
    middle = stats.spread(np.arange(101))
    assert (middle.median, middle.low, middle.high, str(middle)) == (
        50,
        5,
        95,
        "50.000 [5.000, 95.000]",
    )
    assert (better({32: 3.3, 1: 2.4}), better({32: 240.0, 1: 250.0})) == (
        32,
        1,
    )  # calls of the engine
    kept, seconds = stats.steady([outcome(done) for done in (4.0, 1.0, 2.0, 3.0)], warm=2)
    assert ([one.done for one in kept], seconds) == ([3.0, 4.0], 2.0)
    with pytest.raises(ValueError, match="longer"):
        stats.steady([outcome(1.0)], warm=1)
    lines = stats.table(
        [
            Check("a", "1", ">= 2", False, "why"),
            Check("b", "22", "", None),
            Check("c", "3", "3", True),
        ]
    )
    first, why, _, last = lines.splitlines()
    assert ("FALLS SHORT" in first, why.strip(), last.endswith("pass")) == (True, "why", True)


def test_summary_with_latency_from_the_intended_time() -> None:
    assert Outcome(intended=1.0, sent=3.0, done=3.5, status=200).latency == 2.5
    result = summarise(
        [outcome(0.1), outcome(0.2), outcome(0.3, 429, wait="1"), outcome(9.0, 0)], seconds=2.0
    )
    assert (result.requests, result.rate, result.statuses) == (
        4,
        1.0,
        {"200": 2, "429": 1, "timeout": 1},
    )
    assert (result.p50_ms, result.p99_ms, result.worst_ms) == pytest.approx((100, 200, 200))
    assert np.isnan(summarise([outcome(1.0, 503)], 1.0).p50_ms)
    late = outcome(5.0, intended=0.5)  # 4.5 s
    after = outcome(12.0, intended=9.0)  # good, after the window
    outcomes = [outcome(1.0), outcome(5.0, intended=1.0), late, after, outcome(2.0, 429, wait="1")]
    good = stats.goodput(outcomes, deadline_s=4.0, window_s=10.0)
    assert (good.good, good.late, good.in_window, good.overall) == (
        3,
        1,
        pytest.approx(0.2),
        pytest.approx(3 / 12),
    )


def test_only_429_and_503_with_a_number_of_seconds_are_refusals() -> None:
    fine = ((200, None), (429, "1"), (503, "30"))
    bad = {
        (429, None): "429 with Retry-After None",
        (503, "soon"): "503 with Retry-After soon",
        (429, "0"): "429 with Retry-After 0",
        (504, "1"): "504",
        (0, None): "timeout",
    }
    result = stats.bad_refusals([outcome(1, status, wait=wait) for status, wait in (*fine, *bad)])
    assert result == dict.fromkeys(bad.values(), 1)


def test_slope_finds_growth_and_its_interval_covers_it() -> None:
    seconds = np.arange(600.0)
    noise = np.random.default_rng(0).normal(size=600)
    flat, growing = slope(seconds, 500 + noise), slope(seconds, 500 + seconds / 60 * 2 + noise)
    assert flat.low < 0 < flat.high < flat.low + 0.2
    assert 1.5 < growing.low < 2.0 < growing.high
    with pytest.raises(ValueError, match="four blocks"):
        slope([0.0, 1.0, 2.0], [1.0, 1.0, 1.0])


def test_a_soaks_memory_is_judged_by_the_best_estimate() -> None:
    seconds = np.arange(600.0)
    noise = 40 * np.random.default_rng(1).normal(size=60).repeat(
        10
    )  # as slow as a block: it does not average out

    def judged(per_minute: float, most: int = 600) -> Check:
        series = 20_000 + seconds / 60 * per_minute + noise
        return memory_checks(list(zip(seconds[:most], series[:most], strict=True)))[-1]

    result = slope(seconds[120:], noise[120:])
    assert (
        result.low + 2 < 0
    )  # so uncertain that the interval's lower end would let 2 MiB per minute pass
    off = result.per_minute
    assert [judged(2.0 - off).passed, judged(0.0 - off).passed, judged(2.0, most=200).passed] == [
        False,
        True,
        None,
    ]
    assert "beyond 1 is not" in judged(0.0 - off).note


def test_a_soak_in_which_nobody_notices_a_hang_up_falls_short() -> None:
    soak = Soak()
    soak.broken["mid-stream"] = 3

    def verdict(closed: int) -> bool | None:
        after = Metrics(f'hallutracer_errors_total{{code="client_closed_request"}} {closed}\n')
        return metric_checks(Metrics(""), after, soak, "demo")[-1].passed

    assert [verdict(closed) for closed in (0, 1, 3, 4)] == [False, True, True, False]


def test_metrics_are_added_up_by_label() -> None:
    metrics = Metrics(
        '# HELP x_total what, "quoted" {braces}\n# TYPE x_total'
        ' counter\nx_total{bundle="a:1",decision="continue"}'
        ' 3.0\nx_total{bundle="a:1",decision="abstain"}'
        ' 2.0\nx_total{bundle="b:1",decision="continue"} 1e1\ny 4\n'
    )
    assert (metrics.total("x_total"), metrics.total("x_total", bundle="a:1")) == (15, 5)
    assert metrics.by("x_total", "decision") == {"abstain": 2, "continue": 13}
    assert metrics.by("x_total", "decision", bundle="a:1") == {"abstain": 2, "continue": 3}
    assert [(metrics.total(name), metrics.has(name)) for name in "yz"] == [(4, True), (0, False)]


def serve(answer: Callable[[bytes], list[bytes]], use: Exchange) -> None:
    """Run ``use`` against a server that answers each request's body with raw writes; no write: hang
    up."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                if not (writes := answer(await reader.readexactly(length))):
                    break
                for part in writes:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    async def main() -> None:
        async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
            await use(server.sockets[0].getsockname()[:2])

    asyncio.run(main())


def plain(body: bytes, status: str = "200 OK", more: str = "") -> list[bytes]:
    return [f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode(), body]


def test_loops_send_everything_and_report_what_came_back() -> None:
    def answer(body: bytes) -> list[bytes]:
        return (
            plain(b"{}", "429 Too Many Requests", "retry-after: 7\r\n")
            if b"[11]" in body
            else plain(b"{}")
        )

    async def use(address: tuple[str, int]) -> None:
        requests = stats.score_requests([[10], [11], [12]])
        closed = await stats.closed_loop(address, iter(requests * 10), clients=4)
        assert statuses(closed) == {"200": 20, "429": 10}
        assert {one.retry_after for one in closed if one.status == 429} == {"7"}
        assert (
            len(
                await stats.closed_loop(address, cycle(requests), 4, lambda sent, elapsed: sent < 9)
            )
            == 9
        )
        arrivals = [0.0, 0.01, 0.02, 0.02, 0.03, 0.05]
        opened = await stats.open_loop(address, cycle(requests), arrivals)
        assert [one.intended for one in opened] == arrivals
        assert all(one.intended <= one.sent <= one.done for one in opened)
        assert statuses(opened) == {"200": 4, "429": 2}

    serve(answer, use)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (one,) = asyncio.run(
            stats.closed_loop(free.getsockname(), iter(stats.score_requests([[1]])), clients=1)
        )
    assert (one.status, one.error) == (0, "ConnectionRefusedError")
