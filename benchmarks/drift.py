"""How soon does the monitor see a shift, and labels that the guarantee is broken, and how often do
they cry wolf?

    python -m benchmarks.drift --requests 4000000 --draws 200

Depth means of two classes, as a bundle's classifier reads them, and a monitor as the service has
it; a reference of training rows is drawn anew for every 20,000 requests and each draw.  In a run
prompts come after each other whose depth means share a part of their variance."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from service.engines.base import UNKNOWN
from service.judging.drift import DriftLimits, LabelTest
from service.judging.uncertainty import Uncertain
from service.serving.judgement import Monitor
from service.trainer.presentation import markdown_table

Floats = NDArray[np.float64]
PIECE = 20_000
ROWS = 4000
WRONG = 0.35
APART, WEIGHT = 1.2, 1.2  # between the class means, in their deviations; the classifier's
MOST = 20_000  # prompts that a shift may take to be seen
SHIFTS = {
    "depth mean + 0.25 deviations (gate opens)": lambda mean: mean + 0.25,
    "depth mean - 0.25 deviations (gate closes)": lambda mean: mean - 0.25,
    "depth mean + 0.5 deviations": lambda mean: mean + 0.5,
    "depth mean - 0.5 deviations": lambda mean: mean - 0.5,
    "depth mean + 1 deviation": lambda mean: mean + 1.0,
    "depth mean + 2 deviations": lambda mean: mean + 2.0,
    "a constant (a blind gate)": lambda mean: np.full_like(mean, 1.5),
    "half as wide": lambda mean: 0.5 * mean,
}


def means(
    draw: np.random.Generator,
    count: int,
    *,
    wrong: float = WRONG,
    run: int = 1,
    shared: float = 0.0,
) -> Floats:
    """Depth means [count] of prompts of which a share ``wrong`` is answered wrong."""
    common = np.repeat(draw.standard_normal(count // run + 2), run)[
        (offset := draw.integers(run)) : offset + count
    ]
    own = draw.standard_normal(count)
    hallucinated = draw.random(count) < wrong
    noise = np.sqrt(shared) * common + np.sqrt(1 - shared) * own
    return np.asarray(noise + np.where(hallucinated, -APART / 2, APART / 2))


Traffic = Callable[
    [np.random.Generator, int], tuple[Floats, NDArray[np.int64]]
]  # depth means and prompts [count]


def fresh(**how: Any) -> Traffic:
    return lambda draw, count: (means(draw, count, **how), np.arange(count))


def ten_times(draw: np.random.Generator, count: int) -> tuple[Floats, NDArray[np.int64]]:
    """Each prompt comes ten times, one after the other."""
    return np.repeat(means(draw, count // 10), 10), np.arange(count) // 10


def interleaved(draw: np.random.Generator, count: int) -> tuple[Floats, NDArray[np.int64]]:
    """Each prompt comes ten times, among the others."""
    mixed = draw.permutation(count)
    return tuple(values[mixed] for values in ten_times(draw, count))  # type: ignore[return-value]


def half_a_loop(draw: np.random.Generator, count: int) -> tuple[Floats, NDArray[np.int64]]:
    """Half of the requests are one client's twenty prompts, again and again, all of them risky."""
    mean, prompts = means(draw, count), np.arange(count)
    place = draw.integers(20, size=count)
    client = draw.random(count) < 0.5
    return np.where(client, -1.5 - place / 20, mean), np.where(client, -1 - place, prompts)


TRAFFIC: dict[str, Traffic] = {
    "independent": fresh(),
    "sessions of five, 0.3 shared": fresh(run=5, shared=0.3),
    "runs of 50, 0.5 shared": fresh(run=50, shared=0.5),
    "runs of 200, 0.5 shared": fresh(run=200, shared=0.5),
    "each prompt ten times in a row": ten_times,
    "each prompt ten times, interleaved": interleaved,
    "half of it one client's twenty prompts": half_a_loop,
}


def risks(mean: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(WEIGHT * mean)))


def watching(draw: np.random.Generator, limits: DriftLimits) -> Monitor:
    """A bundle's monitor, new, whose reference are ``ROWS`` training rows."""
    found = " ".join(map(repr, risks(means(draw, ROWS)).tolist()))
    evaluation = {
        "out_of_fold": {"risks": {"risk": found, "hallucinated": " ".join("01" * (ROWS // 2))}}
    }
    record = SimpleNamespace(outside_share=0.0)
    manifest = SimpleNamespace(guarantee=None, uncertainty=record, recalibration=None)
    bundle = SimpleNamespace(reference="a:1", manifest=manifest, evaluation=lambda: evaluation)
    scorer: Any = SimpleNamespace(bundle=bundle)
    made = Monitor(scorer, limits, lambda monitor: None)
    assert made.reference is not None, "nothing would be compared"
    return made


def void_after(monitor: Monitor, served: Floats, prompts: NDArray[np.int64]) -> Iterator[bool]:
    """Whether the monitor cries, after each ``every`` requests."""
    rest: Any = {"uncertain": Uncertain(0.0, None), "context": UNKNOWN}
    reports: list[Any] = [SimpleNamespace(bundle_risk=risk, **rest) for risk in served.tolist()]
    names = [number.to_bytes(8, signed=True) for number in prompts.tolist()]
    step = monitor.limits.every
    for start in range(0, len(reports), step):
        monitor.observe(reports[start : start + step], names[start : start + step])
        yield "drift" in monitor.violations


def alarms(served: Floats, prompts: NDArray[np.int64], monitor: Monitor) -> int:
    cries = np.array([False, *void_after(monitor, served, prompts)])
    return int((cries[1:] & ~cries[:-1]).sum())


def until_seen(shifted: Floats, before: Floats, monitor: Monitor) -> int | None:
    """Requests after the shift until the alarm; the window was full of prompts like training's."""
    assert not any(void_after(monitor, before, np.arange(len(before))))
    prompts = np.arange(len(before), len(before) + len(shifted))
    cries = enumerate(void_after(monitor, shifted, prompts), 1)
    return next((step * monitor.limits.every for step, cry in cries if cry), None)


ALPHA, DRAWN = 0.1, 5000  # of the guarantee; answers that are drawn, at most
LABELS = {  # share of wrong answers, of these that are labelled, of right ones that are
    "none, all are labelled": (ALPHA, 1.0, 1.0),
    "none, wrong ones alone are labelled": (ALPHA, 1.0, 0.0),
    "none, complaints: wrong ones are labelled twice as often": (ALPHA, 0.4, 0.2),
    "twice alpha, all are labelled": (2 * ALPHA, 1.0, 1.0),
    "twice alpha, 80 % are labelled": (2 * ALPHA, 0.8, 0.8),
    "twice alpha, half are labelled": (2 * ALPHA, 0.5, 0.5),
    "three times alpha, all are labelled": (3 * ALPHA, 1.0, 1.0),
}


def void_by_labels(
    draw: np.random.Generator, share: float, wrong: float, right: float
) -> int | None:
    """Answers that were drawn, one for each prompt, until labels void the guarantee; looked at
    after every label."""
    is_wrong = draw.random(DRAWN) < share
    labelled = draw.random(DRAWN) < np.where(is_wrong, wrong, right)
    known, test = np.cumsum(is_wrong & labelled), LabelTest(ALPHA)
    places = np.flatnonzero(labelled).tolist()
    return next((place + 1 for place in places if test.broken(int(known[place]), place + 1)), None)


def labels_table(draw: np.random.Generator, draws: int) -> str:
    """How often labels void a guarantee, and how soon."""
    rows = []
    for name, case in tqdm(LABELS.items(), desc="labels"):
        seen = np.array([void_by_labels(draw, *case) or DRAWN + 1 for _ in range(draws)])
        low, middle, high = np.quantile(seen, [0.1, 0.5, 0.9])
        found = np.mean(seen <= DRAWN)
        rows.append(
            [
                name,
                f"{found:.3f}",
                f"{middle:,.0f} [{low:,.0f}, {high:,.0f}]" if found > 0.9 else "",
            ]
        )
    return markdown_table(
        ["wrong answers", f"void within {DRAWN:,} drawn", "drawn until then"], rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=4_000_000, help="of each kind of traffic")
    parser.add_argument("--draws", type=int, default=200)
    given = parser.parse_args()
    logging.disable()
    limits = DriftLimits()
    draw = np.random.default_rng(7)
    rows = []
    for kind, traffic in TRAFFIC.items():
        pieces = -(-given.requests // PIECE)
        found = 0
        for _ in tqdm(range(pieces), desc=kind):
            mean, prompts = traffic(draw, PIECE)
            found += alarms(risks(mean), prompts, watching(draw, limits))
        rows.append([f"none, {kind}", f"{found / (pieces * PIECE) * 1e4:.3f} ({found})", "", ""])
    cases = {name: (change, WRONG) for name, change in SHIFTS.items()}
    cases |= {
        f"wrong {share:.0%} instead of {WRONG:.0%}": (lambda mean: mean, share)
        for share in (0.2, 0.5, 0.7)
    }
    for name, (change, wrong) in cases.items():
        seen = []
        for _ in tqdm(range(given.draws), desc=name):
            before = risks(means(draw, limits.window))
            seen.append(
                until_seen(
                    risks(change(means(draw, MOST, wrong=wrong))), before, watching(draw, limits)
                )
            )
        prompts = np.array([MOST if one is None else one for one in seen], float)
        low, middle, high = np.quantile(prompts, [0.1, 0.5, 0.9])
        share = np.mean([one is not None for one in seen])
        rows.append([name, "", f"{share:.0%}", f"{middle:,.0f} [{low:,.0f}, {high:,.0f}]"])
    head = [
        "shift",
        "false alarms in 10,000 requests",
        f"seen within {MOST:,}",
        "prompts to detection: median [a tenth, nine tenths]",
    ]
    print(markdown_table(head, rows))
    print(f"\n{labels_table(draw, 5 * given.draws)}")


if __name__ == "__main__":
    main()
