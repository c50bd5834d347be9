"""What ``Detector.score`` gives: frozen risks that turn into a DataFrame and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from service.risk import running_means

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

    from probes_store.bundle import Bundle
    from service.prompts import Message
    from service.serving.judgement import JudgedPrompt

MAX_PLOTTED = 6


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
        """Mean of the trajectory up to each layer, [m]; the last one is ``depth_mean``."""
        return running_means(self.trajectory)

    @property
    def text(self) -> str:
        """The prompt, or the last turn of a conversation."""
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
        """One risk, or a part of them."""
        return Risks(self.rows[place], self.bundle) if isinstance(place, slice) else self.rows[place]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Risk]:
        return iter(self.rows)

    @property
    def risk(self) -> NDArray[np.float64]:
        """[n]."""
        return np.array([row.risk for row in self.rows], np.float64)

    @property
    def trajectory(self) -> NDArray[np.float64]:
        """Truth logits [n, m]: prompts by layers."""
        layers = self.bundle.manifest.model.num_layers
        return np.stack([row.trajectory for row in self.rows]) if self.rows else np.zeros((0, layers))

    def to_frame(self, *, trajectory: bool = False) -> DataFrame:
        """A row for each prompt; with ``trajectory`` also the columns layer_0 .. layer_m-1.  Needs pandas."""
        columns: dict[str, Any] = {
            "prompt": [row.text for row in self.rows],
            "risk": [row.risk for row in self.rows],
            "low": [row.interval[0] if row.interval else np.nan for row in self.rows],
            "high": [row.interval[1] if row.interval else np.nan for row in self.rows],
            "flagged": [row.flagged for row in self.rows],
            "outside_training": [row.outside_training for row in self.rows],
            "applies": [row.applies for row in self.rows],
            "decision": [row.decision for row in self.rows],
            "threshold": [row.threshold for row in self.rows],
            "depth_mean": [row.depth_mean for row in self.rows],
            "answer": [row.answer for row in self.rows],
            "prompt_tokens": [row.prompt_tokens for row in self.rows],
        }
        if trajectory:
            columns |= {f"layer_{layer}": values for layer, values in enumerate(self.trajectory.T)}
        return frame(columns)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the trajectories, at most six: truth logit over layers, its running mean, and where training lies.

        Into ``ax``, or into a new figure.  Raises ValueError for none, or more than six.
        """
        from service.library.plots import LEGEND, draw_curves, title_of

        if not 1 <= len(self.rows) <= MAX_PLOTTED:
            raise ValueError(
                f"a picture has room for 1 to {MAX_PLOTTED} prompts, and these are {len(self.rows)}: take some, as in "
                "risks[:6].plot()"
            )
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
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),
        risk=report.risk,
        flagged=report.verdict.flagged,
        threshold=report.verdict.threshold,
        decision=report.decision.value,
        depth_mean=report.depth_mean,
        trajectory=trajectory,
        interval=None if known is None else known.interval,
        outside_training=None if known is None else known.outside,
        applies=report.context.said,
        answer=None if report.completion is None else report.completion.text.strip(),
        prompt_tokens=report.prompt_tokens,
    )


def frame(columns: Any) -> DataFrame:
    """A DataFrame of columns by name, or of rows.  Raises ImportError without pandas, naming the cure."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError("to_frame() needs pandas: pip install 'hallutracer[notebook]', or pip install pandas",
                          name="pandas") from error  # fmt: skip
    return pandas.DataFrame(columns)
