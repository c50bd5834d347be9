"""When a monitor compares, where each limit lies, and that what has voided a promise is taken back late or never."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from service.drift import DriftLimits, Reference
from service.serving.monitor import Monitor

WINDOW = 100
LIMITS = DriftLimits(window=WINDOW, every=50, ks=0.2, psi=10.0, outside=0.05)
EVEN = (np.arange(1000) + 0.5) / 1000


def monitor(monkeypatch: pytest.MonkeyPatch, limits: DriftLimits = LIMITS) -> tuple[Monitor, list[Monitor]]:
    """Its reference: risks spread evenly, 5 % of the rows outside."""
    reference = Reference(EVEN, np.arange(1, 10) / 10, 0.05, modelled=False)
    monkeypatch.setattr("service.serving.monitor.reference_of", lambda bundle: reference)
    manifest = SimpleNamespace(guarantee=SimpleNamespace(alpha=0.1))
    scorer: Any = SimpleNamespace(bundle=SimpleNamespace(reference="a:1", manifest=manifest))
    told: list[Monitor] = []
    return Monitor(scorer, limits, told.append), told


def prompts(count: int, *, top: float = 0.0, outside: float = 0.0) -> Any:
    """``count`` reports: the share ``top`` has a risk of 1, which is also the distance to the reference."""
    risks = (np.arange(count) + 0.5) / count
    risks[: round(top * count)] = 1.0
    others = np.linspace(0, 1, count - round(top * count), endpoint=False)
    risks[round(top * count) :] = others
    return [SimpleNamespace(risk=float(risk), uncertain=SimpleNamespace(outside=number < round(outside * count)))
            for number, risk in enumerate(risks)]  # fmt: skip


def test_a_full_window_is_compared_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, told = monitor(monkeypatch, replace(LIMITS, ks=1.0))
    for count, compared in ((99, 0), (1, 1), (49, 1), (1, 2), (50, 3), (10, 3)):
        watched.observe(prompts(count))
        assert len(told) == compared


@pytest.mark.parametrize(
    ("limits", "top"), [(LIMITS, 0.25), (replace(LIMITS, ks=1.0, psi=0.2), 0.25)], ids=["distance", "stability"]
)
def test_either_of_the_two_numbers_is_enough(monkeypatch: pytest.MonkeyPatch, limits: DriftLimits, top: float) -> None:
    watched, _ = monitor(monkeypatch, limits)
    watched.observe(prompts(WINDOW))
    assert not watched.void
    watched.observe(prompts(WINDOW, top=top))
    assert list(watched.void) == ["drift"]


def test_a_limit_is_no_longer_exceeded_well_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, _ = monitor(monkeypatch)
    for top, void in ((0.18, False), (0.25, True), (0.18, True), (0.1, False), (0.18, False)):
        watched.observe(prompts(WINDOW, top=top))
        assert bool(watched.void) is void, top


def test_the_share_outside_is_held_against_the_bundles_own(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, _ = monitor(monkeypatch)
    for share, void in ((0.09, False), (0.12, True), (0.0, False)):
        watched.observe(prompts(WINDOW, outside=share))
        assert list(watched.void) == ["outside"] * void, share


def test_labels_void_it_for_good_and_right_answers_never_do(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, _ = monitor(monkeypatch)
    for _ in range(500):
        watched.label(False)
    assert not watched.void
    while not watched.void:
        watched.label(True)
    wrong = watched.state.wrong
    for _ in range(5000):
        watched.label(False)
    labels = 5500 + wrong
    assert watched.void == {"labels": f"{wrong} of {labels} labelled answers are wrong, alpha 0.1"}
