"""Two measurements side by side: the largest difference of each number, and what else has to be equal.

python -m tests.parity.compare REFERENCE.npz MEASURED.npz
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.readout import Site

NUMBERS = ("truth logits", "depth mean", "later bundles", "first token", "rows")
Array = NDArray[Any]


def load(path: Path) -> dict[str, Array]:
    """What ``measure`` wrote."""
    with np.load(path) as arrays:
        return dict(arrays)


def differences(reference: dict[str, Array], measured: dict[str, Array]) -> dict[str, float]:
    """The largest absolute difference of each kind of number, over both sites, all prompts and all bundles."""
    here, there = reference["trajectories"], measured["trajectories"]
    assert np.array_equal(np.isnan(here), np.isnan(there)), "a bundle's numbers came for a prompt that it does not read"
    pairs = {
        "truth logits": [(here, there)],
        "depth mean": [(here.mean(-1), there.mean(-1))],
        "later bundles": [(reference["later"], measured["later"])],
        "first token": [(reference[name], measured[name]) for name in ("log_max_prob", "entropy")],
        "rows": [(reference[name], measured[name]) for name in map("rows_{}".format, Site) if name in measured],
    }
    return {
        name: max((float(np.nanmax(np.abs(a - b))) for a, b in found), default=0.0) for name, found in pairs.items()
    }


def unequal(reference: dict[str, Array], measured: dict[str, Array]) -> list[str]:
    """What must be equal and is not: greedy tokens and answers."""
    found = []
    for name in ("token", "generated", "answers"):
        apart = np.flatnonzero(reference[name] != measured[name])
        if apart.size:
            found.append(f"{name}: {apart.size} of {reference[name].size} differ, the first at {apart[0]}")
    return found


def line(name: str, found: dict[str, float]) -> str:
    """A row of the table."""
    return f"| {name} | " + " | ".join(f"{found[number]:.1e}" if found[number] else "-" for number in NUMBERS) + " |"


def heading() -> str:
    """The table's first two lines."""
    return "| model | " + " | ".join(NUMBERS) + " |\n|---|" + "---|" * len(NUMBERS)


if __name__ == "__main__":
    one, other = (load(Path(path)) for path in sys.argv[1:3])
    print(line(sys.argv[2], differences(one, other)))
    print(*unequal(one, other), sep="\n")
    print({name: other[name].tolist() for name in ("preemptions", "open", "cancelled_after") if name in other})
    if "cached_tokens" in other:
        print("cached", int((other["cached_tokens"] > 0).sum()))
