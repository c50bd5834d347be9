"""The report's figures, as SVG bytes that depend on the numbers alone: no timestamp, no version,
one fixed style.  Text stays text.  Ink is ``currentColor`` and the background is transparent, so a
drawing inside a page follows its light or dark colours.  Lines differ in style as well as in colour
(Okabe and Ito's)."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import figure as mpl
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray
from sklearn.metrics import precision_recall_curve, roc_curve

from hallutracer_research.documents import table_beside
from hallutracer_research.evaluation.options import CLASSES, Cost
from hallutracer_research.evaluation.page import Figure
from service.fitting.scores import (
    ECE_BINS,
    auprc,
    ece,
    equal_mass_bins,
    risk_auroc,
    share_interval,
    shown_bins,
)
from service.fitting.scores import reliability as reliability_bins
from service.trainer import presentation as look

Floats = NDArray[np.float64]

_COLOURS = (look.BLUE, look.ORANGE, look.GREEN, look.PURPLE, "#56B4E9", "#E69F00", look.GREY)
_LINES = ("-", "--", "-.", ":")
# All pairs differ, consecutive ones in both.
_LOOKS = tuple(zip(_COLOURS * len(_LINES), _LINES * len(_COLOURS), strict=True))
_STYLE = {**look.STYLE, "grid.color": look.GREY, **table_beside(__file__, "figures.toml")}
_MAX_TICKS = 12
_SHARES: Any = {"xlim": (-0.01, 1.01), "ylim": (-0.01, 1.01)}
_MAX_POINTS = 200  # of a curve; more would not be seen


def depth_subsampling(
    curves: Mapping[str, tuple[ArrayLike, ArrayLike, ArrayLike | None]],
) -> Figure:
    """Draw AUROC of the mean of a few layers, evenly spaced over depth (Fig. depth-subsampling).
    curves: name (a data set) -> (layers included [p], mean AUROC [p], its standard deviation over
        seeds [p] or None)."""
    with rc_context(_STYLE):
        figure, (axes,) = _figure(1)
        shown = []
        for (name, (count, mean, std)), (colour, line) in zip(curves.items(), _LOOKS, strict=False):
            x, y = _array(count, name), _array(mean, name)
            order = np.argsort(x)
            x, y = x[order], y[order]
            if std is not None:
                band = _array(std, name)[order]
                axes.fill_between(x, y - band, y + band, color=colour, alpha=0.15, linewidth=0)
            axes.plot(
                x, y, line, color=colour, marker="o", markersize=3.5, linewidth=1.6, label=name
            )
            shown.append(f"{name}: {y[0]:.3f} with {x[0]:.0f}, {y[-1]:.3f} with {x[-1]:.0f}")
        axes.set(xlabel="layers included", ylabel="AUROC")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        look.legend_below(axes, columns=3)
        return Figure(
            "depth_subsampling",
            "Depth subsampling: AUROC of the depth mean against the number of layers it takes,"
            " evenly spaced over depth (one layer: the best by training AUROC). Bands are one"
            " standard deviation over seeds.",
            f"Line chart of AUROC by layers included. {'; '.join(shown)}.",
            _svg(figure),
        )


def trajectories(trajectory: ArrayLike, label: ArrayLike) -> Figure:
    """Draw the mean truth logit by layer and class, with a band of one deviation: trajectory
    [N, m], label [N]."""
    values, classes = _array(trajectory, "trajectory", ndim=2), np.asarray(label)
    with rc_context(_STYLE):
        figure, (axes,) = _figure(1)
        bands, shown = [], []
        for row, name in ((1, "factual"), (0, "hallucinated")):
            inside = values[classes == row]
            if not len(inside):
                raise ValueError(
                    f"no {name} row (label {row}) among {len(values)}: both classes are drawn"
                )
            mean = inside.mean(axis=0)
            bands.append((f"{name} (n = {len(inside):,})", mean, inside.std(axis=0)))
            shown.append(
                f"{name} rows average {mean.mean():.2f} over depth, {mean[-1]:.2f} at the last"
                " layer"
            )
        look.class_bands(axes, bands)
        axes.set(xlabel="layer (0 is the first block)", ylabel="truth logit\n(unit-norm probes)")
        look.layer_ticks(axes, values.shape[1], _MAX_TICKS)
        look.legend_below(axes, columns=2)
        return Figure(
            "trajectories",
            "Truth logit over depth: mean of each class, band of one standard deviation.",
            f"Two lines over {values.shape[1]} layers: {'; '.join(shown)}.",
            _svg(figure),
        )


def roc_pr(label: ArrayLike, risks: Mapping[str, ArrayLike]) -> Figure:
    """Draw ROC and precision-recall curves, hallucinated positive: label [n] (1 factual), method ->
    risk [n].  The first method is drawn strongest.  A risk ranks; it need not be a probability."""
    classes = np.asarray(label)
    share = float(np.mean(classes == 0))
    with rc_context(_STYLE):
        figure, (left, right) = _figure(2, height=3.9)
        shown = []
        for index, ((name, risk), (colour, line)) in enumerate(
            zip(risks.items(), _LOOKS, strict=False)
        ):
            score, width = _array(risk, name), 2.2 if index == 0 else 1.2
            area, precision_area = risk_auroc(classes, score), auprc(classes, score, positive=0)
            wrong, caught, _ = roc_curve(1 - classes, score)
            thin = look.thinned(len(wrong), _MAX_POINTS)
            text = f"{name} ({area:.3f}, {precision_area:.3f})"
            left.plot(wrong[thin], caught[thin], line, color=colour, linewidth=width, label=text)
            precision, recall, _ = precision_recall_curve(1 - classes, score)
            thin = look.thinned(len(recall), _MAX_POINTS)
            right.step(
                recall[thin], precision[thin], line, where="post", color=colour, linewidth=width
            )
            shown.append(f"{name} {area:.3f} and {precision_area:.3f}")
        left.plot([0, 1], [0, 1], color=look.GREY, linewidth=0.8)
        right.axhline(share, color=look.GREY, linewidth=0.8)
        left.set(
            title="ROC",
            xlabel="factual prompts flagged (share)",
            ylabel="hallucinated prompts flagged (share)",
            **_SHARES,
        )
        right.set(
            title="Precision and recall",
            xlabel="hallucinated prompts flagged (share)",
            ylabel="flagged prompts that are\nhallucinated (share)",
            **_SHARES,
        )
        look.legend_below(left, columns=2)
        return Figure(
            "roc_pr",
            f"ROC and precision-recall curves of {len(classes):,} rows,"
            f" {int(np.sum(classes == 0)):,} of them hallucinated, which is the positive class. In"
            " brackets: AUROC and AUPRC. Grey: chance (the share of hallucinated rows,"
            f" {share:.2f}, on the right).",
            f"Two panels of curves. AUROC and AUPRC of each method: {'; '.join(shown)}.",
            _svg(figure),
        )


def cost(methods: Mapping[str, tuple[Cost, ArrayLike]]) -> Figure:
    """Draw AUROC against cost: method -> its cost and its AUROC by split.  A line of the drawing
    for each method, a band for each class, cheapest below: on an axis of costs a class would be one
    point, and two classes may differ by a hundredth.  The first method is drawn strongest."""
    ours = next(iter(methods))
    aurocs = {name: _array(values, name) for name, (_, values) in methods.items()}
    means = {name: float(values.mean()) for name, values in aurocs.items()}
    bands: list[tuple[str, list[str]]] = []
    for cls, text in CLASSES.items():
        inside = [name for name, (price, _) in methods.items() if price.cls == cls]
        if inside:
            prefills = [methods[name][0].prefills for name in inside]
            heading = (text if cls == "none" else f"{cls}: {text}") + _amounts(prefills)
            bands.append((heading, sorted(inside, key=means.__getitem__)))
    with rc_context(_STYLE):
        figure, (axes,) = _figure(1, height=1.0 + 0.21 * (len(methods) + len(bands)))
        ticks, shown = [], []
        line, best = 0.0, -math.inf
        for heading, names in bands:
            heights = line + np.arange(len(names))
            for height, name in zip(heights.tolist(), names, strict=True):
                strong = name == ours
                axes.errorbar(
                    means[name],
                    height,
                    xerr=aurocs[name].std(),
                    fmt="o",
                    elinewidth=0.8,
                    markersize=6 if strong else 4,
                    color=look.BLUE if strong else look.GREY,
                )
                ticks.append((height, name))
            best = max(best, means[names[-1]])
            ends = [line - 0.6, line + len(names) - 0.4]
            axes.plot([best, best], ends, color=look.ORANGE, linewidth=1.2)
            beside = axes.get_yaxis_transform()
            axes.text(1.02, float(heights.mean()), heading, transform=beside, va="center")
            line += len(names) + 0.6
            listed = ", ".join(f"{name} {means[name]:.3f}" for name in reversed(names))
            shown.append(f"{', '.join(heading.splitlines())}: {listed}")
        axes.set(xlabel="AUROC", ylim=(-0.8, line - 0.8))
        axes.set_yticks(*zip(*ticks, strict=True))
        axes.grid(visible=False, axis="y")
        return Figure(
            "cost",
            "AUROC by what a score takes, cheapest below, in prefills of the same prompt; bars are"
            " one standard deviation over folds and seeds. Orange: the best at this cost or less.",
            f"AUROC of each method by its cost. {'; '.join(shown)}.",
            _svg(figure),
        )


def _amounts(prefills: Sequence[float | None]) -> str:
    """Return the least and the largest of what methods take, on a line of its own; "" where none is
    known."""
    known = [prefill for prefill in prefills if prefill is not None]
    if not known:
        return ""
    ends = " to ".join(dict.fromkeys((f"{min(known):.4g}", f"{max(known):.4g}")))
    return f"\n{ends} prefill{'' if ends == '1' else 's'}"


def reliability(
    label: ArrayLike, risks: Mapping[str, ArrayLike], group: ArrayLike | None = None
) -> Figure:
    """Draw the share hallucinated against mean risk in bins of equal counts, fewer where rows are
    few.  label [n], name -> calibrated risk [n] in [0, 1]; group [n] of rows that depend on each
    other, for the bands."""
    classes = np.asarray(label)
    groups = np.arange(len(classes)) if group is None else np.asarray(group)
    bins = shown_bins(len(classes))
    with rc_context(_STYLE):
        figure, (axes,) = _figure(1, width=4.8, height=4.4)
        axes.plot([0, 1], [0, 1], color=look.GREY, linewidth=0.8)
        shown, sizes = [], np.zeros(1, np.int64)
        for (name, risk), (colour, line), marker in zip(
            risks.items(), _LOOKS, "osD^vP*" * 4, strict=False
        ):
            score = _array(risk, name)
            if score.min() < 0 or score.max() > 1:
                raise ValueError(
                    f"the risk of {name!r} leaves [0, 1], so it is no probability to check"
                )
            predicted, observed, sizes = reliability_bins(classes, score, bins)
            member = equal_mass_bins(score, bins)
            ends = np.array(
                [share_interval(y, groups[member == number]) for number, y in enumerate(observed)]
            ).T
            error = ece(classes, score)
            axes.errorbar(
                predicted,
                observed,
                np.abs(ends - observed),
                linestyle=line,
                marker=marker,
                markersize=4,
                color=colour,
                linewidth=1.2,
                elinewidth=0.8,
                capsize=2,
                label=f"{name} (ECE {error:.3f})",
            )
            points = zip(observed, sizes, predicted, strict=True)
            bars = ", ".join("{:.2f} of {} at {:.2f}".format(*point) for point in points)
            shown.append(f"{name}, ECE {error:.3f}: {bars}")
        axes.set(
            xlabel="mean risk of the bin (probability)",
            ylabel="hallucinated in the bin (share)",
            **_SHARES,
        )
        axes.set_aspect("equal")
        look.legend_below(axes, columns=1)
        rows = " to ".join(dict.fromkeys((f"{sizes.min():,}", f"{sizes.max():,}")))
        few = f" So few rows give {len(sizes)} bins here and {ECE_BINS} in ECE."
        return Figure(
            "reliability",
            f"Reliability: {len(classes):,} rows in {len(sizes)} bins of {rows}; bars are 95 %"
            " intervals of a bin's share, grey is perfect calibration. ECE is the mean distance"
            f" from it over {ECE_BINS} bins.{few if bins < ECE_BINS else ''}",
            f"Share of hallucinated rows against mean risk. {'; '.join(shown)}.",
            _svg(figure),
        )


def geometry(adjacent_cos: ArrayLike, energy: ArrayLike, width: int) -> Figure:
    """Draw adjacent |cos| [m - 1] beside sqrt(2 / (pi d)), the probe's share of variance [m] beside
    1 / d, d = width. Property "probe isotropy" and Assumption "sparse signal"
    (tab:validation_results), by layer."""
    cosines, shares = _array(adjacent_cos, "adjacent_cos"), _array(energy, "energy")
    chance, even = math.sqrt(2 / (math.pi * width)), 1 / width
    with rc_context(_STYLE):
        figure, (left, right) = _figure(2, height=3.2)
        panels = ((left, np.abs(cosines), chance), (right, shares, even))
        for axes, values, random in panels:
            axes.plot(
                values, "o-", color=look.BLUE, markersize=3.5, linewidth=1.0, label="measured"
            )
            axes.axhline(
                random,
                color=look.ORANGE,
                linestyle="--",
                linewidth=1.4,
                label="a random direction",
            )
            look.layer_ticks(axes, len(values), _MAX_TICKS)
            axes.set_ylim(0, 1.1 * max(float(axes.dataLim.ymax), random))
        left.set(title="|cos| of neighbouring probes", xlabel="layer l of the pair (l, l + 1)")
        right.set(title="share of variance along the probe", xlabel="layer")
        look.legend_below(right, columns=2)
        return Figure(
            "geometry",
            f"Geometry of the probes by layer, d = {width}. A random direction has |cos|"
            f" {chance:.3f} = √(2/(πd)) in expectation and takes {even:.3%} = 1/d of the variance.",
            f"Two panels. Mean |cos| of neighbouring probes {np.abs(cosines).mean():.3f} against"
            f" {chance:.3f} by chance; mean share of variance {shares.mean():.3%} against"
            f" {even:.3%}.",
            _svg(figure),
        )


def _figure(
    panels: int, width: float = 6.6, height: float = 3.4
) -> tuple[mpl.Figure, Sequence[Axes]]:
    figure = mpl.Figure(figsize=(width, height), layout="constrained", facecolor="none")
    FigureCanvasSVG(figure)
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def _array(values: ArrayLike, name: str, ndim: int = 1) -> Floats:
    array = np.asarray(values, np.float64)
    if array.ndim != ndim or not array.size or not np.isfinite(array).all():
        raise ValueError(
            f"{name!r}: {ndim}-dimensional, non-empty and finite is needed, the shape is"
            f" {array.shape}"
        )
    return array


def _svg(figure: mpl.Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(
        buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
    )
    text = buffer.getvalue().decode("utf-8").replace(_STYLE["text.color"], "currentColor")
    # A hundredth of a point is finer than any screen, and the file is half as long.
    numbers = re.compile(r"-?\d+\.\d+")

    def rounded(path: re.Match[str]) -> str:
        return numbers.sub(
            lambda number: f"{float(number[0]) + 0.0:.2f}".rstrip("0").rstrip("."), path[0]
        )

    return re.sub(r' d="[^"]*"', rounded, text).encode("utf-8")
