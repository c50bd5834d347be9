"""What a recalibration shows: the table of candidates, the card's section, and the picture before and after."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from probes_store.manifest import Manifest
from probes_store.records import Recalibration
from service.fitting.group_statistics import share_interval
from service.fitting.jackknife import Interval
from service.fitting.map_choice import Choice
from service.fitting.markdown import markdown_table
from service.fitting.plotting import BLUE, GREY, ORANGE, legend_below
from service.fitting.scores import equal_mass_bins, reliability
from service.trainer.feedback_card import feedback_lines, selection
from service.trainer.plots import png
from service.trainer.statement import SECTION as GUARANTEE

Floats = NDArray[np.floating]
Labels = NDArray[np.integer]

NAMES = {
    "identity": "the risk as it is",
    "prior_shift": "prior shift, by traffic and labels",
    "intercept": "intercept, by labels",
    "platt": "Platt: slope and intercept",
    "beta": "beta calibration",
    "isotonic": "isotonic",
}
_BINS, _ROWS = 10, 15  # at most so many bins, of so many rows or more


def table(choice: Choice) -> str:
    """Every candidate on the labelled rows that it was not fitted on, in Markdown; the chosen one is bold."""
    rows = []
    for one in choice.candidates:
        name = f"**{NAMES[one.name]}**" if one is choice.chosen else NAMES[one.name]
        gain = "" if one is choice.before else _cell(one.gain, one.gain_interval, "+.4f")
        loss, error = _cell(one.log_loss, one.log_loss_interval), _cell(one.error, one.error_interval)
        rows.append([name, loss, gain, error])
    return markdown_table(["held-out", "log loss", "less by", "calibration error, debiased"], rows)


def _cell(value: float, ends: Interval, form: str = ".4f") -> str:
    return f"{value:{form}} [{ends.low:{form}}, {ends.high:{form}}]"


def recalibrated_card(card: str, manifest: Manifest, record: Mapping[str, Any], candidates: str) -> str:
    """The card with this recalibration's section before the limits, and without a guarantee."""
    assert manifest.recalibration is not None
    data, before, after = record["data"], *(record["candidates"][name] for name in ("identity", record["chosen"]))
    share = data["hallucinated"] / (data["factual"] + data["hallucinated"])
    thresholds, gate = record["thresholds"], record["at_threshold"]["after"]
    rules = {"map": "carried along, so that the same prompts are flagged", "keep": "the same number, other decisions"}
    rows = {
        "map": f"{NAMES[record['chosen']]}: {formula(manifest.recalibration)}",
        "labelled rows": f"`{data['file']}`, `{data['digest']}`: {data['factual'] + data['hallucinated']} in "
        f"{data['groups']} groups, {share:.1%} hallucinated (training: {record['prior']:.1%})",
        **({"traffic": _traffic(record["traffic"])} if "traffic" in record else {}),
        **(feedback_lines(record["feedback"]) if "feedback" in record else {}),
        "held-out log loss": f"{_of(before['log_loss'])} before, {_of(after['log_loss'])} after",
        "calibration error, debiased": f"{_of(before['calibration_debiased'])} before, "
        f"{_of(after['calibration_debiased'])} after",
        "threshold": f"{thresholds['before']:.4f} before, {thresholds['after']:.4f} after: {rules[thresholds['rule']]}",
        "gate on the labelled rows": f"{gate['answered']:.0%} answered, {gate['wrong_among_answered']:.0%} of them "
        f"wrong, {gate['right_withheld']:.0%} of the right answers withheld",
    }
    labelled_by = selection(record["feedback"]) if "feedback" in record else ""
    lines = ["## Recalibration\n", "| | |", "| --- | --- |", *(f"| {key} | {text} |" for key, text in rows.items())]
    guarantee = (
        f" The guarantee of {record['from']} was not carried over: it is about other questions and another scale."
        if record["had_guarantee"]
        else ""
    )
    section = "\n".join(lines) + (
        f"\n\nThe risk that is served is the classifier's, recalibrated from {record['from']} for rows like these. "
        "AUROC and every other figure of ranking above stay; figures of calibration and the threshold above are of the "
        "classifier's own risk and of training's share. In the limits below, read these rows for the training "
        f"rows.{guarantee}\n\nThe candidates, on labelled rows that they were not fitted on; the simplest within one "
        f"standard error of the best is served:\n\n{candidates}\n\n{labelled_by}"
        "![Reliability before and after](plots/recalibration.png)\n\n"
    )
    card = GUARANTEE.sub("", card)
    before_limits, limits, rest = card.partition("## Limits\n")
    return before_limits + section + limits + rest if limits else f"{card.rstrip()}\n\n{section}"


def formula(recalibration: Recalibration) -> str:
    """The map, for people."""
    if recalibration.knots:
        return f"linear between {len(recalibration.knots)} points"
    a, b, c = recalibration.a, recalibration.b, recalibration.c
    if a == b == 1:
        return f"log odds {c:+.4f}"
    if a == b:
        return f"{a:.4f} x log odds {c:+.4f}"
    return f"log odds of it = {a:.4f} log(risk) - {b:.4f} log(1 - risk) {c:+.4f}"


def _traffic(traffic: Mapping[str, Any]) -> str:
    share, test = traffic["share_with_labels"], traffic["test"]
    text = (
        f"`{traffic['file']}`: {traffic['rows']} unlabelled rows in {traffic['groups']} groups; with the labels "
        f"{share['value']:.1%} [{share['low']:.1%}, {share['high']:.1%}] hallucinated, by prior shift"
    )
    if test is None:
        return text + ". **Whether prior shift alone explains the traffic was not tested: someone insisted**"
    text += f"; distance from a mixture of training's classes {test['distance']:.3f}, {test['limit']:.3f} would pass"
    return text if traffic["explained"] else text + ". **Prior shift does not explain the traffic: someone insisted**"


def _of(cell: Mapping[str, float]) -> str:
    return f"{cell['mean']:.4f} [{cell['low']:.4f}, {cell['high']:.4f}]"


def draw_before_after(label: Labels, group: NDArray[np.integer], before: Floats, after: Floats) -> bytes:
    """PNG of both reliability curves with the bands of their bins: label, group, held-out risks [n]."""
    return png(partial(_before_after, label=label, group=group), {"before": before, "after": after})


def _before_after(axes: Axes, risks: Mapping[str, Floats], label: Labels, group: NDArray[np.integer]) -> None:
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, label="perfect calibration")
    looks = (ORANGE, "--", "s"), (BLUE, "-", "o")
    count = min(_BINS, max(3, len(label) // _ROWS))
    for (name, risk), (colour, line, marker) in zip(risks.items(), looks, strict=True):
        predicted, observed, size = reliability(label, risk, count)
        bins = equal_mass_bins(risk, count)
        ends = np.array([share_interval(float(share), group[bins == place]) for place, share in enumerate(observed)]).T
        axes.errorbar(predicted, observed, np.abs(ends - observed), linestyle=line, color=colour, zorder=3,
                      label=f"{name}, 95 % bands", linewidth=1.4, elinewidth=1.0, capsize=2.5)  # fmt: skip
        axes.scatter(predicted, observed, 22.0 * size / size.mean(), color=colour, marker=marker, zorder=3)
    axes.set(title=f"Recalibration: {len(label)} rows that it was not fitted on",
             xlabel="mean risk of the bin (probability)", ylabel="hallucinated in the bin (share)",
             xlim=(-0.01, 1.01), ylim=(-0.01, 1.01))  # fmt: skip
    axes.set_aspect("equal")
    legend_below(axes)
