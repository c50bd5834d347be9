"""Arrivals, percentiles, intervals and checks of the load tests."""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
CACHE = Path(tempfile.gettempdir()) / "hallutracer-bench"


def poisson_arrivals(rate: float, seconds: float, seed: int) -> Floats:
    """Arrival times in [0, ``seconds``) of a Poisson process with ``rate`` per second, ascending."""
    if not (rate > 0 and seconds > 0):
        raise ValueError(f"rate and seconds must be positive, not {rate} and {seconds}")
    generator = np.random.default_rng(seed)
    times = np.empty(0)
    while times.size == 0 or times[-1] < seconds:
        gaps = generator.exponential(1 / rate, max(16, math.ceil(rate * seconds * 1.1)))
        times = np.concatenate([times, (times[-1] if times.size else 0.0) + np.cumsum(gaps)])
    return times[times < seconds]


def percentile(values: ArrayLike, share: float) -> float:
    """Nearest rank: the smallest observed value that at least ``share`` of all values do not exceed.

    No interpolation, which would report a latency that did not occur.
    """
    ordered = np.sort(np.asarray(values, np.float64))
    if ordered.size == 0 or not 0.0 < share <= 1.0:
        raise ValueError(f"a percentile needs values and a share in (0, 1], not {ordered.size} values and {share}")
    # 0.99 * 100 is slightly more than 99 in binary; without the correction it would select the 100th value.
    return float(ordered[max(1, math.ceil(share * ordered.size - 1e-9)) - 1])


@dataclass(frozen=True)
class Outcome:
    """One request.  Times in seconds since the run's start; ``status`` 0: no answer (``error`` says why)."""

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
    """Counts, rate over ``seconds``, and latencies."""
    good = [outcome.latency * 1e3 for outcome in outcomes if outcome.status == 200]
    shares = [percentile(good, share) for share in (0.5, 0.99, 1.0)] if good else [math.nan] * 3
    return Summary(len(outcomes), statuses(outcomes), seconds, len(good) / seconds, *shares)


def statuses(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many of each status; a request without an answer counts under its error."""
    return dict(sorted(Counter(outcome.name for outcome in outcomes).items()))


def steady(outcomes: Sequence[Outcome], warm: int) -> tuple[list[Outcome], float]:
    """The outcomes after the first ``warm`` answers, and the seconds from that answer to the last one."""
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
    """Goodput of an open-loop run whose arrivals lasted ``window_s``.

    A batch is answered at once: where batches take seconds, the window cuts one in half and ``in_window`` is too low.
    ``overall`` has no such edge, but includes the time in which the queue drains.
    """
    good = [outcome for outcome in outcomes if outcome.status == 200 and outcome.latency <= deadline_s]
    late = sum(outcome.status == 200 for outcome in outcomes) - len(good)
    inside = sum(outcome.done <= window_s for outcome in good)
    return Goodput(
        len(good), late, inside / window_s, len(good) / max(window_s, *(outcome.done for outcome in outcomes))
    )


def bad_refusals(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Responses other than 200, and 429 or 503 with Retry-After in seconds."""
    bad: Counter[str] = Counter()
    for outcome in outcomes:
        wait = outcome.retry_after
        if outcome.status in (429, 503):
            bad[f"{outcome.name} with Retry-After {wait}"] += not (wait and wait.isdigit() and int(wait) > 0)
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
    """Median and the 5 % and 95 % quantiles."""
    low, middle, high = np.quantile(np.asarray(values, np.float64), [0.05, 0.5, 0.95])
    return Spread(float(middle), float(low), float(high))


@dataclass(frozen=True)
class Slope:
    """Growth in units per minute, with a 95 % interval."""

    per_minute: float
    low: float
    high: float


def slope(seconds: ArrayLike, values: ArrayLike, block_s: float = 10.0) -> Slope:
    """Least squares through means of blocks of ``block_s``: neighbouring samples are not independent, blocks nearly.

    Raises ValueError where fewer than four blocks hold samples.
    """
    from scipy.stats import linregress
    from scipy.stats import t as student

    times, series = np.asarray(seconds, np.float64), np.asarray(values, np.float64)
    block = np.floor((times - times.min()) / block_s).astype(int)
    kept = np.unique(block)
    if kept.size < 4:
        raise ValueError(f"a slope needs four blocks of {block_s:g} s; found {kept.size}")
    x = np.array([times[block == index].mean() for index in kept]) / 60
    y = np.array([series[block == index].mean() for index in kept])
    line = linregress(x, y)
    half = float(student.ppf(0.975, kept.size - 2) * line.stderr)
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
    """Of a bench: --json and --quick, which do as ``quick`` says, and --cache."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument("--json", type=Path, help="write the checks and everything behind them there")
    if cache:
        made.add_argument("--cache", type=Path, default=CACHE, help="model folders (2 GB), kept between runs")
    return made


def say(line: str = "") -> None:
    """Print a line with the time, unbuffered: a run takes minutes."""
    print(f"{time.strftime('%H:%M:%S')} {line}" if line else "", flush=True)


def table(checks: Sequence[Check]) -> str:
    """The checks as aligned text, each note on a line of its own."""
    words = {True: "pass", False: "FALLS SHORT", None: "-"}
    rows = [(check.name, check.figure, check.target, words[check.passed], check.note) for check in checks]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    lines = []
    for row in rows:
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip())
        if row[4]:
            lines.append(f"    {row[4]}")
    return "\n".join(lines)


def conclude(checks: Sequence[Check], path: Path | None, record: dict[str, Any]) -> int:
    """Print the table, write everything to ``path`` if given; the exit status, 1 if a check failed."""
    print(table(checks), flush=True)
    if path is not None:
        write_json(path, checks, record)
    return int(any(check.passed is False for check in checks))


def write_json(path: Path, checks: Sequence[Check], record: dict[str, Any]) -> None:
    """The checks and everything behind them."""
    content = {"checks": [asdict(check) for check in checks], **record}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
