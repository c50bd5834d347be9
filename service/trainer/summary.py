"""What a training run prints at its end: how the signals compare, and options that would have done better."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from service.fitting.nested_cv import CONTEXT_NAMES, NAMES, Evaluation, Inputs
from service.fitting.scores import gain
from service.trainer.cards import SIGNALS, WITHIN, cell, cheaper_and_better, group_warning, rule_in_words
from service.trainer.presentation import aligned_table

OPTIONS = {
    f"{kind}_{scale}": f"--logit-scale {scale} --signals {signals}"
    for kind, signals in (("depth_mean", "depth_mean"), ("fused", "depth_mean,first_token"))
    for scale in ("unit_norm", "standardized", "weighted")
}
"""Signal -> the options of ``hallutracer train`` that publish it."""


def closing_lines(evaluation: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a run says once its bundle is published: how well it works, its threshold, and warnings."""
    crossed, held = evaluation.get("cross_validation"), evaluation.get("held_out")
    if crossed is not None:
        if cheaper := cheaper_and_better(crossed["signals"], evaluation["signal_of_the_bundle"]):
            yield cheaper
        yield "Nested cross-validation, on rows that no fit saw:"
        yield summary_table(crossed["signals"], evaluation["signal_of_the_bundle"])
    if held is not None:
        row = held["signals"]["bundle"]
        yield f"Held-out rows: AUROC {row['auroc']:.3f}, ECE {row['ece']:.3f}, {held['rows']} rows"
    if crossed is None and held is None:
        yield "Not evaluated: how well this bundle works is not known"
    yield rule_in_words(evaluation["threshold"])
    if warning := group_warning(evaluation["data"]):
        yield warning


def summary_table(signals: Mapping[str, Any], own: str) -> str:
    """Return AUROC with its interval, AUROC within a kind where rows have kinds, and calibration; ours is marked."""
    within = [key for key in WITHIN if any(row.get(key) for row in signals.values())]
    header = ["", "AUROC [95 %]", *(WITHIN[key] for key in within), "ECE", "debiased"]
    lines = []
    for name in (name for name in NAMES if name in signals):
        row = signals[name]
        auroc = row["auroc"]
        lines.append(
            [
                ("> " if name == own else "") + SIGNALS[name],
                cell(auroc),
                *(f"{row[key]['mean']:.3f}" if row.get(key) else "-" for key in within),
                f"{row['ece']['mean']:.3f}",
                f"{row['calibration_debiased']['mean']:.3f}",
            ]
        )
    return aligned_table(header, lines)


def better_options(inputs: Inputs, nested: Evaluation, own: str) -> Iterator[str]:
    """Yield a line for each variant whose gain over the bundle's own signal has a 95 % interval above zero.

    The variants were compared on the rows that would also judge the winner: its own figure is a little too good.
    """
    for plain, flags in OPTIONS.items():
        name = plain  # or the signal that also reads what a prompt is, as these flags then do
        if own in CONTEXT_NAMES:
            name = plain.replace("depth_mean", "context").replace("fused", "fused_context")
        if name == own:
            continue
        found = gain(inputs.label, inputs.group, nested.tests[name], nested.tests[own])
        if found.low > 0:
            yield f"{flags} gains {found.difference:.3f} [{found.low:.3f}, {found.high:.3f}] of AUROC"
