"""How soon does the monitor see a shift, and how often does it cry wolf?

    python -m tests.bench.drift --months 20 --draws 200

Depth means of two classes, as a bundle's classifier reads them; a reference of training rows is drawn anew for each
month and each draw.  A month is 2,592,000 prompts, one a second.  ``sessions``: prompts come five at a time, whose
depth means share 30 % of their variance.
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from service.drift import BINS, DriftLimits, Reference, compare
from service.fitting.jackknife import jeffreys
from service.fitting.markdown import markdown_table

Floats = NDArray[np.float64]
MONTH, ROWS, WRONG = 2_592_000, 4000, 0.35
APART, WEIGHT = 1.2, 1.2  # between the class means, in their deviations; the classifier's
MOST = 20_000  # prompts that a shift may take to be seen
SHIFTS = {
    "depth mean + 0.25 deviations (gate opens)": lambda mean: mean + 0.25,
    "depth mean - 0.25 deviations (gate closes)": lambda mean: mean - 0.25,
    "depth mean + 0.5 deviations": lambda mean: mean + 0.5,
    "depth mean - 0.5 deviations": lambda mean: mean - 0.5,
    "depth mean + 1 deviation": lambda mean: mean + 1.0,
    "a constant (a blind gate)": lambda mean: np.full_like(mean, 1.5),
    "half as wide": lambda mean: 0.5 * mean,
}


def means(draw: np.random.Generator, count: int, *, wrong: float = WRONG, sessions: bool = False) -> Floats:
    """Depth means [count] of prompts of which a share ``wrong`` is answered wrong."""
    shared = 0.0
    if sessions:
        shared = np.sqrt(0.3) * np.repeat(draw.standard_normal(count // 5 + 1), 5)[:count]
    own = draw.standard_normal(count) * (np.sqrt(0.7) if sessions else 1.0)
    hallucinated = draw.random(count) < wrong
    return np.asarray(shared + own + np.where(hallucinated, -APART / 2, APART / 2))


def risks(mean: Floats) -> Floats:
    """As the classifier gives them."""
    return np.asarray(1 / (1 + np.exp(WEIGHT * mean)))


def reference(draw: np.random.Generator) -> Reference:
    """Of ``ROWS`` training rows."""
    found = np.sort(risks(means(draw, ROWS)))
    return Reference(found, np.asarray(np.quantile(found, np.arange(1, BINS) / BINS)), None, modelled=False)


def alarms(served: Floats, known: Reference, limits: DriftLimits) -> int:
    """How often a window passes a limit that the one before did not."""
    count, before = 0, False
    for end in range(limits.window, len(served) + 1, limits.every):
        found = compare(served[end - limits.window : end], None, known)
        apart = found.ks > limits.ks or found.psi > limits.psi
        count, before = count + (apart and not before), apart
    return count


def until_seen(shifted: Floats, before: Floats, known: Reference, limits: DriftLimits) -> int | None:
    """Prompts after the shift until the alarm; the window was full of prompts like training's."""
    served = np.concatenate([before, shifted])
    for end in range(len(before) + limits.every, len(served) + 1, limits.every):
        found = compare(served[end - limits.window : end], None, known)
        if found.ks > limits.ks or found.psi > limits.psi:
            return end - len(before)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--months", type=int, default=20)
    parser.add_argument("--draws", type=int, default=200)
    given = parser.parse_args()
    limits, draw, rows = DriftLimits(), np.random.default_rng(7), []
    for sessions in (False, True):
        found = [
            alarms(risks(means(draw, MONTH, sessions=sessions)), reference(draw), limits)
            for _ in tqdm(range(given.months), desc="months")
        ]
        months = sum(count > 0 for count in found)
        high = jeffreys(months / given.months, given.months).high
        kind = "sessions of five" if sessions else "independent"
        rows.append(
            [
                f"none, {kind}",
                f"{np.mean(found):.2f} a month; {months} of {given.months} months, at most {high:.0%}",
                "",
                "",
            ]
        )
    cases = {name: (change, WRONG) for name, change in SHIFTS.items()}
    cases |= {f"wrong {share:.0%} instead of {WRONG:.0%}": (lambda mean: mean, share) for share in (0.2, 0.5, 0.7)}
    for name, (change, wrong) in cases.items():
        seen = []
        for _ in tqdm(range(given.draws), desc=name):
            before = risks(means(draw, limits.window))
            seen.append(until_seen(risks(change(means(draw, MOST, wrong=wrong))), before, reference(draw), limits))
        prompts = np.array([MOST if one is None else one for one in seen], float)
        low, middle, high = np.quantile(prompts, [0.1, 0.5, 0.9])
        share = np.mean([one is not None for one in seen])
        rows.append([name, "", f"{share:.0%}", f"{middle:,.0f} [{low:,.0f}, {high:,.0f}]"])
    head = ["shift", "false alarms", f"seen within {MOST:,}", "prompts to detection: median [a tenth, nine tenths]"]
    print(markdown_table(head, rows))


if __name__ == "__main__":
    main()
