"""The interval against real refits on fresh training sets; benchmarks/refits.py has the long version."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import refits
from benchmarks.refits import simulated
from service.fitting.calibration import FitOptions


@pytest.mark.long
def test_an_interval_holds_what_other_training_sets_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the width is what the jackknife would give without its factor."""
    monkeypatch.setattr(refits, "FRESH", 500)
    said = list(simulated(4, 200, 1, 3, FitOptions("weights", 3, 0.1, (), 1)))
    pairs = [(one, other) for one in said for other in said if one is not other]

    def held(stretch: float) -> float:
        inside = [np.abs(one.log_odds - other.log_odds) <= stretch * one.half_width for one, other in pairs]
        return float(np.mean(inside))

    assert 0.93 <= held(1.0) <= 0.998
    assert held(0.5) < 0.92
    assert np.mean([one.distance >= 1 for one in said]) < 0.03
    assert np.mean([one.elsewhere >= 1 for one in said]) > 0.3
