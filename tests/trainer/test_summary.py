"""The table at a run's end, and the options it recommends."""

from __future__ import annotations

import numpy as np

from service.fitting.nested_cv import NAMES, Evaluation, Inputs
from service.fitting.scores import auroc_interval, risk_auroc
from service.trainer.cards import better_options, summary_table

OWN, FUSED = "depth_mean_unit_norm", "fused_unit_norm"


class MadeInputs(Inputs):
    """Labels and groups only."""

    def __init__(self, label: np.ndarray, group: np.ndarray) -> None:
        object.__setattr__(self, "made", label)
        object.__setattr__(self, "group", group)

    @property
    def label(self) -> np.ndarray:
        return self.made  # type: ignore[attr-defined,no-any-return]


def made(noise: dict[str, float]) -> tuple[Inputs, Evaluation]:
    """Two test sides of 300 rows in groups of 3; a signal's noise decides how well it ranks."""
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(200), 3)
    label = (rng.normal(size=200)[group] + rng.normal(size=600) > 0).astype(np.int64)
    sides = np.array_split(np.arange(600), 2)
    tests = {}
    signals = {}
    for name in NAMES:
        risk = -label + noise.get(name, 3.0) * rng.normal(size=600)
        tests[name] = [(side, risk[side]) for side in sides]
        low, high = auroc_interval(label, group, tests[name])
        mean = float(np.mean([risk_auroc(label[side], risk[side]) for side in sides]))
        signals[name] = {
            "auroc": {"mean": mean, "low": low, "high": high},
            "ece": {"mean": 0.02},
            "calibration_debiased": {"mean": 0.01},
        }
    signals[OWN]["auroc_within_kind"] = {"mean": 0.678}
    return MadeInputs(label, group), Evaluation({"signals": signals}, {}, tests)


def test_the_table_has_every_signal_and_marks_ours() -> None:
    _, nested = made({OWN: 1.0})
    lines = summary_table(nested.document["signals"], OWN).splitlines()
    assert len(lines) == 2 + len(NAMES)
    [ours] = [line for line in lines if "> depth mean, unit norm" in line]
    assert "0.678" in ours
    assert f"{nested.document['signals'][OWN]['auroc']['mean']:.3f} [" in ours
    assert "within kind" in lines[0]


def test_a_variant_is_recommended_where_its_gain_is_beyond_chance() -> None:
    inputs, nested = made({OWN: 1.5, FUSED: 0.8, "depth_mean_standardized": 1.5, "fused_standardized": 2.5})
    [line] = better_options(inputs, nested, OWN)
    assert line.startswith("--logit-scale unit_norm --signals depth_mean,first_token gains 0.")
    assert list(better_options(inputs, nested, FUSED)) == []


def test_a_bundle_that_reads_the_context_is_compared_with_those_that_do() -> None:
    """The flags choose scale and first token only: what they publish reads the context, too."""
    context, fused = "context_unit_norm", "fused_context_unit_norm"
    inputs, nested = made(dict.fromkeys(NAMES, 3.0) | {context: 1.5, fused: 0.8, FUSED: 0.8, OWN: 0.8})
    [line] = better_options(inputs, nested, context)
    assert line.startswith("--logit-scale unit_norm --signals depth_mean,first_token gains 0.")
    assert list(better_options(inputs, nested, fused)) == []


def test_nothing_is_recommended_among_equals() -> None:
    names = (OWN, FUSED, "depth_mean_standardized", "fused_standardized")
    assert list(better_options(*made(dict.fromkeys(names, 1.5)), OWN)) == []
