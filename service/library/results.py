"""What ``Detector.score`` gives: frozen risks that turn into a DataFrame and a picture; plots of trajectories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from service.risk import running_means

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from pandas import DataFrame

    from probes_store.bundle import Bundle
    from service.prompts import Message
    from service.scoring import RiskReport
    from service.serving.judgement import JudgedPrompt

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, which colour-blind readers can tell apart.  As many as ``score --plot`` takes prompts."""
LEGEND: dict[str, Any] = {"ncols": 1, "fontsize": 8, "frameon": False}
"""One column: a title with its answer is nearly as wide as the figure."""


@dataclass(frozen=True, eq=False)
class Risk:
    """The risk of one prompt, read before its first answer token."""

    prompt: str | tuple[Message, ...]  # as it was given
    risk: float  # 0 to 1: the probability that the answer is a hallucination, at the bundle's base rate
    flagged: bool  # risk >= threshold
    threshold: float
    decision: str  # "continue", or "abstain" where it is flagged
    depth_mean: float  # of the trajectory; the larger, the more factual
    trajectory: NDArray[np.float64] = field(repr=False)  # [m] truth logit of each layer, read-only
    interval: tuple[float, float] | None  # would hold 95 % of what other training rows would say; None: not recorded
    outside_training: bool | None  # unlike everything in training; None: the bundle does not know
    applies: bool | None  # False: it asks for no fact, so the risk says nothing; None: the bundle does not know
    answer: str | None  # None where none was asked for, or the prompt is flagged
    prompt_tokens: int

    @property
    def running_mean(self) -> NDArray[np.float64]:
        """Return the mean of the trajectory up to each layer, [m]; the last one is ``depth_mean``."""
        return running_means(self.trajectory)

    @property
    def text(self) -> str:
        """Return the prompt, or the last turn of a conversation."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]


@dataclass(frozen=True, eq=False)
class Risks(Sequence[Risk]):
    """The risks of several prompts, in their order.  A slice of it is one, too."""

    rows: tuple[Risk, ...]
    bundle: Bundle = field(repr=False)

    @overload
    def __getitem__(self, place: int) -> Risk: ...

    @overload
    def __getitem__(self, place: slice) -> Risks: ...

    def __getitem__(self, place: int | slice) -> Risk | Risks:
        """Return one risk, or a part of them."""
        return Risks(self.rows[place], self.bundle) if isinstance(place, slice) else self.rows[place]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Risk]:
        return iter(self.rows)

    @property
    def risk(self) -> NDArray[np.float64]:
        """Return the risks, [n]."""
        return np.array([row.risk for row in self.rows], np.float64)

    @property
    def trajectory(self) -> NDArray[np.float64]:
        """Return truth logits [n, m]: prompts by layers."""
        layers = self.bundle.manifest.model.num_layers
        return np.stack([row.trajectory for row in self.rows]) if self.rows else np.zeros((0, layers))

    def to_frame(self, *, trajectory: bool = False) -> DataFrame:
        """Return a row for each prompt; with ``trajectory`` also the columns layer_0 .. layer_m-1.  Needs pandas."""
        names = ("risk", "low", "high", "flagged", "outside_training", "applies", "decision", "threshold", "depth_mean",
                 "answer", "prompt_tokens")  # fmt: skip
        ends = [row.interval or (np.nan, np.nan) for row in self.rows]
        known: dict[str, list[Any]] = {"low": [low for low, _ in ends], "high": [high for _, high in ends]}
        columns: dict[str, Any] = {"prompt": [row.text for row in self.rows]}
        columns |= {name: known.get(name) or [getattr(row, name, None) for row in self.rows] for name in names}
        if trajectory:
            columns |= {f"layer_{layer}": values for layer, values in enumerate(self.trajectory.T)}
        return frame(columns)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the trajectories, at most six: truth logit over layers, its running mean, and where training lies.

        Into ``ax``, or into a new figure.  Raises ValueError for none, or more than six.
        """
        if not 1 <= len(self.rows) <= len(COLOURS):
            raise ValueError(f"a picture has room for 1 to {len(COLOURS)} prompts, and these are {len(self.rows)}: "
                             "take some, as in risks[:6].plot()")  # fmt: skip
        figure = None
        if ax is None:
            import matplotlib.pyplot as plt

            figure, ax = plt.subplots(figsize=(8, 5), layout="constrained")
        curves = [(title_of(row.text, row.answer, row.risk), row.trajectory) for row in self.rows]
        draw_curves(ax, self.bundle, curves)
        if figure is not None:  # the layout makes room for a legend of the figure only
            figure.legend(loc="outside lower center", **LEGEND)
        else:
            ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), **LEGEND)
        return ax


def risk_of(prompt: str | Sequence[Message], judged: JudgedPrompt) -> Risk:
    """Return one prompt of a judgement as a public result."""
    report = judged.report
    trajectory = np.array(report.trajectory, np.float64)
    trajectory.flags.writeable = False
    known = report.uncertain
    return Risk(
        prompt=prompt if isinstance(prompt, str) else tuple(prompt), risk=report.risk, flagged=report.verdict.flagged,
        threshold=report.verdict.threshold, decision=report.decision.value, depth_mean=report.depth_mean,
        trajectory=trajectory, interval=None if known is None else known.interval,
        outside_training=None if known is None else known.outside, applies=report.context.said,
        answer=None if report.completion is None else report.completion.text.strip(),
        prompt_tokens=report.prompt_tokens,
    )  # fmt: skip


def frame(columns: Any) -> DataFrame:
    """Return a DataFrame of columns by name, or of rows.  Raises ImportError without pandas, naming the cure."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError("to_frame() needs pandas: pip install 'hallutracer[notebook]', or pip install pandas",
                          name="pandas") from error  # fmt: skip
    return pandas.DataFrame(columns)


def draw_trajectories(bundle: Bundle, prompts: Sequence[str], reports: Sequence[RiskReport], path: Path) -> None:
    """Write a PNG of ``draw_curves``.  ``prompts`` are the reports' titles, at most ``len(COLOURS)``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.4 + 0.16 * len(prompts)), dpi=110, layout="constrained")
    curves = [
        (title_of(text, report.completion.text.strip() if report.completion else None, report.risk), report.trajectory)
        for text, report in zip(prompts, reports, strict=True)
    ]
    draw_curves(figure.subplots(), bundle, curves)
    figure.legend(loc="outside lower center", **LEGEND)
    figure.savefig(path, format="png", metadata={"Software": None})


def draw_curves(axes: Axes, bundle: Bundle, curves: Sequence[tuple[str, NDArray[np.float64]]]) -> None:
    """Draw trajectories [m] with their titles, their running means, and where the bundle's training rows lie."""
    layers = np.arange(bundle.manifest.model.num_layers)
    probes = bundle.probes
    for value, name, colour in ((1, "factual rows", "#0072b2"), (0, "hallucinated rows", "#d55e00")):
        mean, std = probes.trajectory_mean[value], probes.trajectory_std[value]
        axes.fill_between(layers, mean - std, mean + std, color=colour, alpha=0.12, linewidth=0)
        axes.plot(layers, mean, color=colour, linewidth=1, linestyle=":", label=f"{name}: mean ± 1 std")
    for (title, trajectory), colour in zip(curves, COLOURS, strict=False):
        axes.plot(layers, trajectory, color=colour, marker="o", markersize=4, label=title)
        axes.plot(layers, running_means(trajectory), color=colour, linewidth=1, linestyle="--")
    axes.set_xlabel("layer (dashed: running depth mean)")
    axes.set_ylabel("truth logit")
    axes.set_title("Read at the last prompt token, before the first answer token", fontsize=11)
    axes.set_xticks(layers[:: -(-len(layers) // 16)])
    axes.spines[["top", "right"]].set_visible(False)


def title_of(prompt: str, answer: str | None, risk: float) -> str:
    """Return a curve's title: the prompt, its answer and its risk, each in one line."""
    return "  ".join(filter(None, (_short(prompt), _short(answer or ""), f"risk {risk:.2f}")))


def _short(text: str, limit: int = 48) -> str:
    """Return one line without ``$``, which matplotlib would read as mathematics."""
    line = " ".join(text.split()).replace("$", r"\$")
    return line if len(line) <= limit else line[: limit - 1] + "…"
