"""The recalibration of a bundle: a strictly increasing map from the classifier's risk to the one that is served.

Rows keep their order, so AUROC and every decision at a mapped threshold stay what they were.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Method = Literal["prior_shift", "intercept", "platt", "beta", "isotonic"]
Floats = NDArray[np.floating]

EDGE = 1e-12  # risks are kept this far from 0 and 1, whose log odds are infinite


@dataclass(frozen=True, slots=True)
class Recalibration:
    """risk -> sigmoid(a log(risk) - b log(1 - risk) + c), or linear between knots where there are any.

    a = b = 1 moves the log odds by c (prior shift, intercept); a = b stretches them, too (Platt); any other a, b >= 0
    is a beta calibration (Kull, Silva Filho and Flach 2017, AISTATS).
    """

    method: Method  # how it was found
    a: float = 1.0
    b: float = 1.0
    c: float = 0.0
    knots: tuple[float, ...] = ()  # isotonic: risks, increasing strictly from 0 to 1
    values: tuple[float, ...] = ()  # isotonic: what they become, increasing strictly between 0 and 1

    def __call__(self, risk: Floats | float) -> NDArray[np.float64]:
        """risk [...] -> [...]; NaN stays NaN."""
        if self.knots:
            return np.asarray(np.interp(risk, self.knots, self.values), np.float64)
        inside = np.clip(np.asarray(risk, np.float64), EDGE, 1 - EDGE)
        z = self.a * np.log(inside) - self.b * np.log1p(-inside) + self.c
        tail = np.exp(-np.abs(z))
        return np.asarray(np.where(z < 0, tail, 1.0) / (1.0 + tail))


@lru_cache(maxsize=256)  # asked for each request, of the thresholds of a few policies
def least_reaching(recalibration: Recalibration, level: float) -> float:
    """The least risk that becomes ``level`` or more, to a double's last digit; 1 where none does."""
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if recalibration(middle) >= level else (middle, high)
    return high


def check_recalibration(recalibration: Recalibration, require: Callable[[bool, str, object, object], None]) -> None:
    """Check that the map is strictly increasing; ``require`` raises where a check fails."""
    a, b, knots, values = recalibration.a, recalibration.b, recalibration.knots, recalibration.values
    for field, value in (("a", a), ("b", b)):
        require(value >= 0.0, f"recalibration.{field}", "0 or more", value)
    require(a + b > 0.0, "recalibration.a", "above 0 where b is 0", a)
    isotonic = recalibration.method == "isotonic"
    require(bool(knots) == isotonic, "recalibration.knots", "some exactly where the method is isotonic", len(knots))
    require(len(values) == len(knots), "recalibration.values", f"{len(knots)} numbers", len(values))
    if knots:
        require(knots[0] == 0.0 and knots[-1] == 1.0 and _rises(knots), "recalibration.knots",
                "strictly increasing from 0.0 to 1.0", knots)  # fmt: skip
        require(values[0] > 0.0 and values[-1] < 1.0 and _rises(values), "recalibration.values",
                "strictly increasing between 0 and 1", values)  # fmt: skip


def _rises(numbers: tuple[float, ...]) -> bool:
    return all(one < other for one, other in zip(numbers, numbers[1:], strict=False))
