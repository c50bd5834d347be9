"""Does the engine read what the training engine read?  Knows no engine: it compares two tables of numbers.

Before a bundle serves, its golden prompts are replayed.  Hashes prove that the bundle's bytes are right; only the
replay proves that the hook sits at the right place, that the row of t* is the right row, and that the heads are not
permuted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from probes_store.bundle import Bundle
from probes_store.errors import GoldenMismatch


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest deviation that passes: of a risk, and of a truth logit in units of the trajectories' spread."""

    risk: float
    trajectory: float


TOLERANCES = {
    "float32": Tolerance(risk=1e-3, trajectory=1e-3),
    "float16": Tolerance(risk=0.05, trajectory=0.25),
    "bfloat16": Tolerance(risk=0.05, trajectory=0.25),
}


def tolerance_for(*dtypes: str) -> Tolerance:
    """The loosest of the dtypes' tolerances.  Raises ValueError for a dtype that is not in TOLERANCES."""
    unknown = [dtype for dtype in dtypes if dtype not in TOLERANCES]
    if unknown:
        raise ValueError(f"no golden tolerance for dtype {unknown[0]!r}; expected one of {', '.join(TOLERANCES)}")
    return max((TOLERANCES[dtype] for dtype in dtypes), key=lambda tolerance: tolerance.risk)


def spread(trajectory: NDArray[np.floating]) -> float:
    """Standard deviation over all golden logits [G, m]; at least 1 % of their root mean square.

    The second part keeps a constant trajectory (one layer and one prompt, say) from asking for exact equality.
    """
    values = np.asarray(trajectory, np.float64)
    return float(max(values.std(), 0.01 * np.sqrt(np.mean(values**2))))


def check_golden(
    bundle: Bundle, trajectories: NDArray[np.floating], risks: NDArray[np.floating], *, dtype: str
) -> None:
    """Compare a replay with the record: trajectories [G, m] and risks [G] of an engine that computes in ``dtype``.

    The tolerance is that of the looser of the two dtypes, the bundle's and the engine's.  float32: 1e-3, a hundred
    times what two correct engines differ by (about 1e-6) and a thousandth of the spread.  Half types: a bfloat16 keeps
    8 bits, 0.4 % a rounding; over a few dozen blocks that grows to some percent of the spread, so a quarter of it
    passes, and 0.05 of risk.  A wrong row, head or layer gives logits that have nothing to do with the recorded ones:
    their largest deviation over G x m entries is more than one spread.

    Raises GoldenMismatch with the worst deviation; any NaN and any other shape is a mismatch.  ValueError where
    ``dtype`` is none of float32, float16 and bfloat16.
    """
    golden, reference = bundle.golden, bundle.reference
    tolerance = tolerance_for(bundle.manifest.dtype, dtype)
    scale = spread(golden.trajectory)
    for what, found, recorded, limit in (
        ("trajectory", trajectories, golden.trajectory, tolerance.trajectory * scale),
        ("risk", risks, golden.risk, tolerance.risk),
    ):
        replayed, expected = np.asarray(found, np.float64), np.asarray(recorded, np.float64)
        if replayed.shape != expected.shape:
            raise GoldenMismatch(
                f"bundle {reference}: the replay has another shape",
                field=what,
                expected=list(expected.shape),
                found=list(replayed.shape),
            )
        deviation = np.abs(replayed - expected)
        worst = np.unravel_index(int(np.argmax(deviation)), deviation.shape)
        if not deviation[worst] <= limit:  # so written, and as argmax finds NaN first, a NaN never passes
            place = f"golden prompt {worst[0]}" + (f", layer {worst[1]}" if len(worst) > 1 else "")
            raise GoldenMismatch(
                f"bundle {reference}: the engine ({dtype}) does not reproduce {place}, recorded in"
                f" {bundle.manifest.dtype}; the deviation is {deviation[worst]:.3g} and {limit:.3g} would pass",
                field=what,
                expected=f"{expected[worst]:.6g}",
                found=f"{replayed[worst]:.6g}",
            )
