"""When a monitor compares, where each limit lies, and that what has voided a promise is taken back late or never."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from service.engines.base import UNKNOWN
from service.feedback.rows import Tally
from service.judging.drift import DriftLimits, Reference
from service.serving.monitor import Monitor, digest_of

WINDOW = 1000
LIMITS = DriftLimits(window=WINDOW, every=50, ks=0.2, psi=10.0, outside=0.05)
EVEN = (np.arange(1000) + 0.5) / 1000
NUMBERS = itertools.count()


def monitor(monkeypatch: pytest.MonkeyPatch, limits: DriftLimits = LIMITS) -> tuple[Monitor, list[Monitor]]:
    """Its reference: risks spread evenly, 5 % of the rows outside."""
    reference = Reference(EVEN, np.arange(1, 10) / 10, 0.05)
    monkeypatch.setattr("service.serving.monitor.reference_of", lambda bundle: reference)
    manifest = SimpleNamespace(guarantee=SimpleNamespace(alpha=0.1))
    scorer: Any = SimpleNamespace(bundle=SimpleNamespace(reference="a:1", manifest=manifest))
    told: list[Monitor] = []
    return Monitor(scorer, limits, told.append), told


def prompts(
    count: int, *, top: float = 0.0, outside: float = 0.0, named: Sequence[int] = (), alike: bool = False
) -> tuple[Any, list[bytes]]:
    """``count`` reports: the share ``top`` has a risk of 1, which is also the distance to the reference.

    In no order, or ``alike`` to their neighbours; all of them different prompts, or those that are ``named``.
    """
    risks = (np.arange(count) + 0.5) / count
    risks[: round(top * count)] = 1.0
    others = np.linspace(0, 1, count - round(top * count), endpoint=False)
    risks[round(top * count) :] = others
    reports = [SimpleNamespace(risk=float(risk), context=UNKNOWN,
                               uncertain=SimpleNamespace(outside=number < round(outside * count)))
               for number, risk in enumerate(risks)]  # fmt: skip
    order = np.arange(count) if alike else np.random.default_rng(0).permutation(count)
    names = named or [next(NUMBERS) for _ in range(count)]
    return [reports[place] for place in order], [str(name).encode() for name in names]


def test_a_full_window_is_compared_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, told = monitor(monkeypatch, replace(LIMITS, ks=1.0))
    for count, compared in ((999, 0), (1, 1), (49, 1), (1, 2), (50, 3), (10, 3)):
        watched.observe(*prompts(count))
        assert len(told) == compared


@pytest.mark.parametrize(
    ("limits", "top"), [(LIMITS, 0.25), (replace(LIMITS, ks=1.0, psi=0.2), 0.25)], ids=["distance", "stability"]
)
def test_either_of_the_two_numbers_is_enough(monkeypatch: pytest.MonkeyPatch, limits: DriftLimits, top: float) -> None:
    watched, _ = monitor(monkeypatch, limits)
    watched.observe(*prompts(WINDOW))
    assert not watched.violations
    watched.observe(*prompts(WINDOW, top=top))
    assert list(watched.violations) == ["drift"]


def test_a_limit_is_no_longer_exceeded_well_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, _ = monitor(monkeypatch)
    for top, void in ((0.18, False), (0.25, True), (0.18, True), (0.1, False), (0.18, False)):
        watched.observe(*prompts(WINDOW, top=top))
        assert bool(watched.violations) is void, top


def test_the_share_outside_is_held_against_the_bundles_own(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, _ = monitor(monkeypatch)
    for share, void in ((0.09, False), (0.12, True), (0.0, False)):
        watched.observe(*prompts(WINDOW, outside=share))
        assert list(watched.violations) == ["outside"] * void, share


def test_a_prompt_that_comes_again_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, told = monitor(monkeypatch)
    watched.observe(*prompts(WINDOW))
    watched.observe(*prompts(10_000, top=1.0, named=[-1 - number % 20 for number in range(10_000)]))
    assert not watched.violations
    assert told[-1].drift is not None
    assert told[-1].drift.prompts == WINDOW
    assert told[-1].drift.shift == pytest.approx(20 / WINDOW / 2, abs=0.005)


def test_repeats_do_not_hide_a_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two prompts that drifted one client asks what training knows, twenty questions in a loop."""
    watched, _ = monitor(monkeypatch)
    watched.observe(*prompts(WINDOW))
    drifted, names = prompts(WINDOW, top=0.5)
    calm, _ = prompts(20)
    for number, (report, name) in enumerate(zip(drifted, names, strict=True)):
        watched.observe([report, *[calm[number % 20]] * 20], [name, *[b"%d" % (number % 20)] * 20])
    assert list(watched.violations) == ["drift"]


def test_few_different_prompts_are_compared_as_the_few_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, told = monitor(monkeypatch)
    few = list(range(100))
    watched.observe(*prompts(100, top=0.25, named=few))
    watched.observe(*prompts(899, top=0.25, named=[number % 100 for number in range(899)]))
    assert not told
    watched.observe(*prompts(100, top=0.25, named=few))
    assert told[-1].drift is not None
    assert told[-1].drift.prompts == 100
    assert not watched.violations  # 0.25 of 100 is chance
    watched.observe(*prompts(100, top=0.6, named=few))
    assert list(watched.violations) == ["drift"]


def test_prompts_that_are_alike_void_later_and_never_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, _ = monitor(monkeypatch)
    watched.observe(*prompts(WINDOW, top=0.25, alike=True))
    assert not watched.violations
    watched.observe(*prompts(WINDOW, top=0.6, alike=True))
    assert list(watched.violations) == ["drift"]
    watched.observe(*prompts(WINDOW, top=0.18, alike=True))
    assert list(watched.violations) == ["drift"], "below 0.8 of the wide limit, not of the narrow one"
    watched.observe(*prompts(WINDOW, top=0.1, alike=True))
    assert not watched.violations


def test_one_clients_burst_outside_is_not_everybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, _ = monitor(monkeypatch)
    calm, names = prompts(WINDOW)
    for report in calm[200:320]:
        report.uncertain.outside = True
    watched.observe(calm, names)  # 12 %, as in the test above, but one after the other
    assert watched.drift is not None
    assert watched.drift.outside == 0.12
    assert not watched.violations


def test_a_digest_tells_prompts_apart_and_nothing_else() -> None:
    assert digest_of([1, 2, 3]) == digest_of((1, 2, 3))
    assert len({digest_of(ids) for ids in ([1, 2, 3], [1, 2], [3, 2, 1], [258], [])}) == 5
    code = "from service.serving.monitor import digest_of; print(digest_of([1, 2, 3]).hex())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert len(other) == 16
    assert other != digest_of([1, 2, 3]).hex(), "the key is the process's own"


def test_labels_void_it_for_good_and_right_answers_never_do(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, _ = monitor(monkeypatch)
    watched.count(Tally(500, 500, 0))
    assert not watched.violations
    wrong = 0
    while not watched.violations:
        wrong += 1
        watched.count(Tally(500 + wrong, 500 + wrong, wrong))
    watched.count(Tally(5500 + wrong, 5500, wrong))
    text = f"{wrong} of {5500 + wrong} answers that were drawn at random are wrong"
    assert watched.violations == {"labels": f"{text} (5500 have a label, the others are taken for right), alpha 0.1"}
