"""What context probes tell of one prompt."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from probes_store.records import Context, ContextName
from service.engines.base import UNKNOWN, prompt_context, sigmoid
from tests.kit.bundles import APPLICABILITY, ASKS, CONTEXT

PROBES = {probe.name: probe for probe in CONTEXT.probes}


def of(*names: ContextName, threshold: float = 0.3) -> Context:
    applicability = replace(APPLICABILITY, threshold=threshold) if "asks" in names else None
    return Context(tuple(PROBES[name] for name in names), applicability)


def test_without_a_record_nothing_is_known() -> None:
    assert prompt_context(None, [], 9) is UNKNOWN
    assert UNKNOWN.applies
    assert UNKNOWN.asks is UNKNOWN.stated_length is UNKNOWN.said is None


@pytest.mark.parametrize(
    "names", [("asks",), ("passage",), ("passage", "stated"), ("asks", "passage", "stated")]
)
def test_what_has_no_probe_is_none(names: tuple[ContextName, ...]) -> None:
    context = prompt_context(of(*names), [0.2] * len(names), 9)
    assert {name for name in PROBES if getattr(context, name) is not None} == set(names)
    assert (context.stated_length is None) == (context.stated is None)
    assert context.said is (True if "asks" in names else None)
    with pytest.raises(ValueError, match="zip"):
        prompt_context(of(*names), [0.1] * (len(names) + 1), 9)


def test_the_risk_applies_from_the_threshold_on() -> None:
    at = 1 / (1 + math.exp(-ASKS.weight * 0.4 - ASKS.intercept))
    for threshold, applies in (
        (at, True),
        (math.nextafter(at, 0), True),
        (math.nextafter(at, 1), False),
    ):
        context = prompt_context(of("asks", threshold=threshold), [0.4], 9)
        assert context.applies is context.said is applies
    context = prompt_context(of("asks"), [math.nan], 9)
    assert context.applies is context.said is True
    assert math.isnan(context.asks or 0.0)


def test_the_sigmoid_never_overflows() -> None:
    for z in (0.0, 1.0, 30.0, 745.0, 1e6, math.inf):
        assert sigmoid(z) + sigmoid(-z) == pytest.approx(1.0)
        assert sigmoid(z) == pytest.approx(0.5 * (1 + math.tanh(z / 2)), abs=1e-15)
    assert math.isnan(sigmoid(math.nan))
