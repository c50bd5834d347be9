"""Readouts in memory: noise with planted directions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from service.fitting.probes import ActivationArray, Readouts
from service.readout import Site


def readouts(rows: NDArray[np.floating], label: NDArray[np.integer], site: Site = Site.ATTENTION_HEAD) -> Readouts:
    """rows [n, m, heads, d], or at the residual stream [n, m, d]."""
    values = rows.astype(np.float32).reshape(*rows.shape[:2], -1, rows.shape[-1])
    return Readouts(ActivationArray(values, site), np.arange(len(rows)), np.asarray(label, np.int64))
