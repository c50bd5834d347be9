"""Draws the card's figures as PNG bytes that depend on the numbers alone: no timestamp, no version,
a fixed style."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image
from sklearn.metrics import precision_recall_curve, roc_curve

from service.fitting import decisions, scores
from service.trainer import presentation as look

Floats = NDArray[np.floating]
Labels = NDArray[np.integer]
Numbers = TypeVar("Numbers")  # the data of a figure

_LINES = ((look.BLUE, "-"), (look.ORANGE, "--"), (look.GREEN, "-."), (look.PURPLE, ":"))
_STYLE = look.STYLE | {
    "font.family": "DejaVu Sans",
    "axes.titlesize": 10.0,
    "grid.color": "#E5E5E5",
}
_MAX_POINTS = 400  # of a curve
_CALIBRATION = ("mean risk of the bin (probability)", "hallucinated in the bin (share)")  # the axes


@dataclass(frozen=True, eq=False)
class PlotData:
    """n labelled rows; trajectories are out of fold, stacked over seeds."""

    label: NDArray[np.integer]  # [n]
    group: NDArray[np.integer]  # [n] rows of a group depend on each other
    risk: Mapping[
        str, Floats
    ]  # shown name -> [n] risk by a fold that never saw the row; empty without an evaluation
    trajectory_mean: Floats  # [2, m] row 0 hallucinated, row 1 factual
    trajectory_std: Floats  # [2, m]
    layer_auroc: Floats  # [seeds, m] of each layer's logit, out of fold
    depth_mean_auroc: Floats  # [seeds]
    logit_unit: str  # of the truth logit: what one step on its axis is
    served: str  # the name in ``risk`` of the signal that the bundle serves
    threshold: float  # the bundle's
    ranking_only: Sequence[
        str
    ] = ()  # names whose risks hardly vary, left out of the reliability plot


def draw(data: PlotData) -> dict[str, bytes]:
    """Return every figure that the data allow: file name -> PNG bytes."""
    pages = {
        "layers.png": png(_layers, data, wide=True),
        "trajectories.png": png(_trajectories, data, wide=True),
    }
    plots = {
        "coverage": _coverage,
        "precision_recall": _precision_recall,
        "reliability": _reliability,
        "roc": _roc,
    }
    return {f"{name}.png": png(plot, data) for name, plot in plots.items() if data.risk} | pages


def draw_before_after(label: Labels, group: Labels, before: Floats, after: Floats) -> bytes:
    """Return a PNG of a recalibration's reliability before and after, with bands: label, group,
    held-out risks [n]."""

    def plot(axes: Axes, risks: Mapping[str, Floats]) -> None:
        axes.plot([0, 1], [0, 1], color=look.GREY, linewidth=0.8, label="perfect calibration")
        looks = ((look.ORANGE, "--", "s"), (look.BLUE, "-", "o"))
        count = min(10, max(3, len(label) // 15))
        for (name, risk), line in zip(risks.items(), looks, strict=True):
            _with_bands(axes, label, group, risk, count, name, line)
        _shares(
            axes,
            f"Recalibration: {len(label)} rows that it was not fitted on",
            *_CALIBRATION,
            square=True,
        )

    return png(plot, {"before": before, "after": after})


def _shares(
    axes: Axes, title: str, x: str, y: str, bottom: float = -0.01, *, square: bool = False
) -> None:
    axes.set(title=title, xlabel=x, ylabel=y, xlim=(-0.01, 1.01), ylim=(bottom, 1.01))
    if square:
        axes.set_aspect("equal")
    look.legend_below(axes)


def _roc(axes: Axes, data: PlotData) -> None:
    for name, (colour, line) in zip(data.risk, _LINES, strict=False):
        wrong, caught, _ = roc_curve(1 - data.label, data.risk[name])
        thin = look.thinned(len(wrong), _MAX_POINTS)
        axes.plot(wrong[thin], caught[thin], line, color=colour, label=name, linewidth=1.6)
    axes.plot([0, 1], [0, 1], color=look.GREY, linewidth=0.8, label="chance")
    _shares(
        axes,
        "ROC, hallucinated is the positive class",
        "factual prompts flagged (share)",
        "hallucinated prompts flagged (share)",
        square=True,
    )


def _precision_recall(axes: Axes, data: PlotData) -> None:
    for name, (colour, line) in zip(data.risk, _LINES, strict=False):
        precision, recall, _ = precision_recall_curve(1 - data.label, data.risk[name])
        thin = look.thinned(len(recall), _MAX_POINTS)
        axes.step(
            recall[thin],
            precision[thin],
            line,
            where="post",
            color=colour,
            label=name,
            linewidth=1.4,
        )
    share = float(np.mean(data.label == 0))
    axes.axhline(
        share, color=look.GREY, linewidth=0.8, label=f"share of hallucinated rows ({share:.2f})"
    )
    _shares(
        axes,
        "Precision and recall, hallucinated is the positive class",
        "recall: hallucinated prompts flagged (share)",
        "precision: flagged prompts that are\nhallucinated (share)",
        0,
    )


def _reliability(axes: Axes, data: PlotData) -> None:
    axes.plot([0, 1], [0, 1], color=look.GREY, linewidth=0.8, label="perfect calibration")
    sizes, count = np.zeros(1, np.int64), scores.shown_bins(len(data.label))
    for (name, risk), (colour, line), marker in zip(
        data.risk.items(), _LINES, "osD^", strict=False
    ):
        if name == data.served and name not in data.ranking_only:
            sizes = _with_bands(
                axes, data.label, data.group, risk, count, name, (colour, line, marker)
            )
        elif name not in data.ranking_only:
            predicted, observed, _ = scores.reliability(data.label, risk, count)
            axes.plot(predicted, observed, line, color=colour, label=name, linewidth=1.2)
    rows = f"{sizes.min()}" if sizes.min() == sizes.max() else f"{sizes.min()} to {sizes.max()}"
    _shares(
        axes,
        f"Reliability: {len(sizes)} bins of {rows} rows (marker area)",
        *_CALIBRATION,
        square=True,
    )


def _with_bands(
    axes: Axes,
    label: Labels,
    group: Labels,
    risk: Floats,
    count: int,
    name: str,
    look: tuple[str, str, str],
) -> NDArray[np.int64]:
    """Draw a reliability curve with the 95 % band of each of ``count`` bins; return the number of
    rows in each bin."""
    colour, line, marker = look
    predicted, observed, size = scores.reliability(label, risk, count)
    bins = scores.equal_mass_bins(risk, count)
    ends = np.array(
        [
            scores.share_interval(float(share), group[bins == number])
            for number, share in enumerate(observed)
        ]
    ).T
    axes.errorbar(
        predicted,
        observed,
        np.abs(ends - observed),
        linestyle=line,
        color=colour,
        zorder=3,
        label=f"{name}, 95 % bands",
        linewidth=1.4,
        elinewidth=1.0,
        capsize=2.5,
    )
    axes.scatter(
        predicted, observed, 22.0 * size / size.mean(), color=colour, marker=marker, zorder=3
    )
    return size


def _coverage(axes: Axes, data: PlotData) -> None:
    for name, (colour, line) in zip(data.risk, _LINES, strict=False):
        answered, wrong = decisions.coverage_curve(data.label, data.risk[name])
        thin = look.thinned(len(wrong), _MAX_POINTS)
        axes.plot(answered[thin], wrong[thin], line, color=colour, label=name, linewidth=1.4)
    gate = decisions.at_threshold(data.label, data.risk[data.served], data.threshold)
    if gate["answered"]:
        axes.plot(
            gate["answered"],
            gate["wrong_among_answered"],
            "o",
            color=_LINES[list(data.risk).index(data.served)][0],
            markersize=8,
            markeredgecolor="black",
            zorder=4,
            clip_on=False,
            label=f"the bundle's threshold, {data.threshold:.3f}",
        )
    else:
        axes.plot(
            [], [], " ", label=f"the bundle's threshold, {data.threshold:.3f}, answers nothing"
        )
    share = float(np.mean(data.label == 0))
    axes.axhline(share, color=look.GREY, linewidth=0.8, label=f"everything answered ({share:.2f})")
    axes.set(
        title="Coverage and error, lowest risks answered first",
        xlabel="prompts answered (share)",
        ylabel="hallucinated among the answered (share)",
        xlim=(-0.01, 1.01),
        ylim=(0, None),
    )
    look.legend_below(axes)


def _trajectories(axes: Axes, data: PlotData) -> None:
    classes = zip(
        ("factual", "hallucinated"),
        data.trajectory_mean[::-1],
        data.trajectory_std[::-1],
        strict=True,
    )
    look.class_bands(
        axes, [(f"{name}: mean, band of 1 std", mean, std) for name, mean, std in classes]
    )
    axes.set(
        title="Truth logit over depth, out of fold",
        xlabel="layer (0 is the first block)",
        ylabel=f"truth logit\n({data.logit_unit})",
    )
    look.layer_ticks(axes, data.trajectory_mean.shape[1], 16)
    look.legend_below(axes, columns=3)


def _layers(axes: Axes, data: PlotData) -> None:
    layers = np.arange(data.layer_auroc.shape[1])
    mean = data.layer_auroc.mean(axis=0)
    axes.vlines(layers, 0.5, mean, color=look.BLUE, linewidth=1.0, alpha=0.5)
    axes.plot(layers, mean, "o", color=look.BLUE, markersize=5, label="one layer's truth logit")
    best = float(data.depth_mean_auroc.mean())
    axes.axhline(
        best, color=look.ORANGE, linestyle="--", linewidth=1.4, label="mean over all layers"
    )
    axes.axhline(0.5, color=look.GREY, linewidth=0.8, label="chance")
    low, high = min(0.5, float(mean.min())), max(best, float(mean.max()), 0.55)
    margin = 0.06 * (high - low)
    axes.set(
        title="Separation by layer, out of fold",
        xlabel="layer (0 is the first block)",
        ylabel="AUROC",
        ylim=(low - margin, min(1.005, high + 4 * margin)),
    )
    look.layer_ticks(axes, len(layers), 16)
    look.legend_below(axes, columns=3)


def png(plot: Callable[[Axes, Numbers], None], data: Numbers, *, wide: bool = False) -> bytes:
    """Return a figure as PNG bytes, reduced to a palette of colours, which makes the file a third
    of the size."""
    buffer, reduced = io.BytesIO(), io.BytesIO()
    with rc_context(_STYLE):
        figure = Figure(figsize=(6.2, 3.8) if wide else (4.8, 5.2), layout="constrained")
        FigureCanvasAgg(figure)
        plot(figure.add_subplot(), data)
        figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    image = (
        Image.open(buffer)
        .convert("RGB")
        .quantize(128, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    )
    image.save(reduced, format="png", optimize=True)
    return reduced.getvalue()
