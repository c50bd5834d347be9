"""Compares two measurements: the largest difference of each kind of number, and what must be equal.

python -m tests.parity.compare REFERENCE.npz MEASURED.npz
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.readout import Site

NUMBERS = ("truth logits", "depth mean", "later bundles", "first token", "activations")
Array = NDArray[Any]


def load(path: Path) -> dict[str, Array]:
    """What ``measure`` wrote."""
    with np.load(path) as arrays:
        return dict(arrays)


def differences(reference: dict[str, Array], measured: dict[str, Array]) -> dict[str, float]:
    """The largest absolute difference of each kind of number, over both sites, all prompts and all bundles."""
    expected, actual = reference["trajectories"], measured["trajectories"]
    assert np.array_equal(np.isnan(expected), np.isnan(actual)), (
        "a prompt has numbers of a bundle that does not read it"
    )
    pairs = {
        "truth logits": [(expected, actual)],
        "depth mean": [(expected.mean(-1), actual.mean(-1))],
        "later bundles": [(reference["later"], measured["later"])],
        "first token": [(reference[name], measured[name]) for name in ("log_max_prob", "entropy")],
        "activations": [(reference[name], measured[name]) for name in map("rows_{}".format, Site) if name in measured],
    }
    return {
        name: max((float(np.nanmax(np.abs(a - b))) for a, b in arrays), default=0.0) for name, arrays in pairs.items()
    }


def unequal(reference: dict[str, Array], measured: dict[str, Array]) -> list[str]:
    """Greedy tokens and answers that differ."""
    messages = []
    for name in ("token", "generated", "answers"):
        apart = np.flatnonzero(reference[name] != measured[name])
        if apart.size:
            messages.append(f"{name}: {apart.size} of {reference[name].size} differ, the first at {apart[0]}")
    return messages


def line(name: str, largest: dict[str, float]) -> str:
    """A row of the table."""
    return (
        f"| {name} | " + " | ".join(f"{largest[number]:.1e}" if largest[number] else "-" for number in NUMBERS) + " |"
    )


def heading() -> str:
    """The table's first two lines."""
    return "| model | " + " | ".join(NUMBERS) + " |\n|---|" + "---|" * len(NUMBERS)


if __name__ == "__main__":
    reference, measured = (load(Path(path)) for path in sys.argv[1:3])
    print(line(sys.argv[2], differences(reference, measured)))
    print(*unequal(reference, measured), sep="\n")
    print({name: measured[name].tolist() for name in ("preemptions", "open", "cancelled_after") if name in measured})
    if "cached_tokens" in measured:
        print("cached", int((measured["cached_tokens"] > 0).sum()))
