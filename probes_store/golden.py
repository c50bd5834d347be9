"""Compares a replay of the golden prompts with what was recorded in training.

Hashes show that a bundle's bytes are right.  Only the replay shows that the engine reads the right layer, position and
heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from probes_store.bundle import Bundle
from probes_store.errors import GoldenMismatch


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest accepted deviation of a risk, and of a truth logit in units of the trajectories' spread."""

    risk: float
    trajectory: float


TOLERANCES = {
    "float32": Tolerance(risk=1e-3, trajectory=1e-3),
    "float16": Tolerance(risk=0.05, trajectory=0.25),
    "bfloat16": Tolerance(risk=0.05, trajectory=0.25),
}


def tolerance_for(*dtypes: str) -> Tolerance:
    """The loosest tolerance among the dtypes.  Raises ValueError for a dtype that is not in TOLERANCES."""
    unknown = [dtype for dtype in dtypes if dtype not in TOLERANCES]
    if unknown:
        raise ValueError(f"no golden tolerance for dtype {unknown[0]!r}; expected one of {', '.join(TOLERANCES)}")
    return max((TOLERANCES[dtype] for dtype in dtypes), key=lambda tolerance: tolerance.risk)


def spread(trajectory: NDArray[np.floating]) -> float:
    """Standard deviation over all golden logits of a probe [G, m]; at least 1 % of their root mean square.

    The lower bound keeps a constant trajectory (one layer and one prompt) from requiring exact equality.
    """
    values = np.asarray(trajectory, np.float64)
    return float(max(values.std(), 0.01 * np.sqrt(np.mean(values**2))))


def spreads(trajectory: NDArray[np.floating], layers: int) -> NDArray[np.float64]:
    """The spread of each logit's own probe, [(1 + A) m], of golden logits [G, (1 + A) m] with m ``layers``."""
    probes = np.split(trajectory, trajectory.shape[1] // layers, axis=1)
    return np.repeat([spread(of_probe) for of_probe in probes], layers)


@dataclass(frozen=True, slots=True)
class Deviation:
    """Largest deviation of a replay that passed, and what would have passed; units as in ``Tolerance``."""

    found: Tolerance
    allowed: Tolerance


def check_golden(
    bundle: Bundle, trajectories: NDArray[np.floating], risks: NDArray[np.floating], *, dtype: str
) -> Deviation:
    """Compare a replay's logits [G, (1 + A) m] and risks [G], computed in ``dtype``, with the recorded ones.

    The logits of each probe are compared in units of their own spread.

    The tolerance is that of the looser dtype, the bundle's or the engine's.  float32: 1e-3; two correct engines differ
    by about 1e-6.  Half types: a bfloat16 rounding is 0.4 %, which over a few dozen blocks grows to some percent of the
    spread, so a quarter of the spread and 0.05 of risk are accepted.  A wrong position, head or layer gives unrelated
    logits, whose largest deviation over G x m entries exceeds one spread.

    Raises GoldenMismatch with the worst deviation, for any NaN and for another shape; ValueError for an unknown dtype.
    """
    golden, reference = bundle.golden, bundle.reference
    tolerance = tolerance_for(bundle.manifest.dtype, dtype)
    layers, context = bundle.manifest.model.num_layers, bundle.manifest.context
    scale = spreads(golden.trajectory, layers)
    worst_of: dict[str, float] = {}
    for what, found, recorded, unit, limit in (
        ("trajectory", trajectories, golden.trajectory, scale, tolerance.trajectory),
        ("risk", risks, golden.risk, np.ones(()), tolerance.risk),
    ):
        replayed, expected = np.asarray(found, np.float64), np.asarray(recorded, np.float64)
        if replayed.shape != expected.shape:
            raise GoldenMismatch(
                f"bundle {reference}: the replay has another shape",
                field=what,
                expected=list(expected.shape),
                found=list(replayed.shape),
            )
        deviation = np.abs(replayed - expected) / unit
        worst_of[what] = float(deviation.max())
        worst = np.unravel_index(int(np.argmax(deviation)), deviation.shape)
        if not deviation[worst] <= limit:  # argmax finds NaN first, and this comparison rejects it
            place = f"golden prompt {worst[0]}"
            if len(worst) > 1:
                probe, layer = divmod(int(worst[1]), layers)
                place += f", layer {layer}"
                place += f" of context probe {context.probes[probe - 1].name}" if probe and context is not None else ""
            size = float(np.broadcast_to(unit, deviation.shape)[worst])
            raise GoldenMismatch(
                f"bundle {reference}: the engine ({dtype}) does not reproduce {place}, recorded in"
                f" {bundle.manifest.dtype}; the deviation is {deviation[worst] * size:.3g} and"
                f" {limit * size:.3g} would pass",
                field=what,
                expected=f"{expected[worst]:.6g}",
                found=f"{replayed[worst]:.6g}",
            )
    return Deviation(Tolerance(worst_of["risk"], worst_of["trajectory"]), tolerance)
