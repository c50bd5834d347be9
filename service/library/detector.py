"""``load``: a model and a bundle that reads it, ready to score prompts in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np
from numpy.typing import NDArray

from service.engines.places import place_of
from service.errors import RequestError
from service.library.engine import (
    SHIPPED,
    Engine,
    check_store,
    default_bundles,
    load_engine,
    open_store,
)
from service.progress import Report, note
from service.risk import running_means
from service.settings import DEFAULT_STORE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

    from probes_store.bundle import Bundle
    from service.engines.chat import Message
    from service.scoring import RiskReport, Scorer
    from service.serving.judgement import JudgedPrompt

    Prompts = str | Sequence[str | Sequence[Message]] | Sequence[Message]

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, which colour-blind readers can tell apart.  As many as ``score --plot`` takes
prompts."""
LEGEND: dict[str, Any] = {"ncols": 1, "fontsize": 8, "frameon": False}
"""One column: a title with its answer is nearly as wide as the figure."""


@dataclass(frozen=True, eq=False)
class Risk:
    """The risk of one prompt, read before its first answer token."""

    prompt: str | tuple[Message, ...]  # as it was given
    # 0 to 1: the probability that the answer is a hallucination, at the bundle's base rate
    risk: float
    flagged: bool  # the risk applies and reached the threshold
    threshold: float
    decision: str  # "continue", or "abstain" where it is flagged or lies outside training
    depth_mean: float  # of the trajectory; the larger, the more factual
    trajectory: NDArray[np.float64] = field(repr=False)  # [m] truth logit of each layer, read-only
    interval: (
        tuple[float, float] | None
    )  # would hold 95 % of what other training rows would say; None: not recorded
    outside_training: bool | None  # unlike everything in training; None: the bundle does not know
    applies: (
        bool | None
    )  # False: it asks for no fact, so the risk says nothing; None: the bundle does not know
    answer: str | None  # None where none was asked for, or it is withheld
    prompt_tokens: int
    answer_risk: float | None = (
        None  # that the answer is wrong, by its own tokens; None where nothing reads answers
    )

    @property
    def running_mean(self) -> NDArray[np.float64]:
        """Return the mean of the trajectory up to each layer, [m]; the last one is
        ``depth_mean``."""
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
    def __getitem__(self, index: int) -> Risk: ...

    @overload
    def __getitem__(self, index: slice) -> Risks: ...

    def __getitem__(self, index: int | slice) -> Risk | Risks:
        """Return one risk, or a part of them."""
        return (
            Risks(self.rows[index], self.bundle) if isinstance(index, slice) else self.rows[index]
        )

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
        return (
            np.stack([row.trajectory for row in self.rows]) if self.rows else np.zeros((0, layers))
        )

    def to_frame(self, *, trajectory: bool = False) -> DataFrame:
        """Return a row for each prompt; with ``trajectory`` also the columns layer_0 .. layer_m-1.
        Needs pandas."""
        names = (
            "risk",
            "low",
            "high",
            "flagged",
            "outside_training",
            "applies",
            "decision",
            "threshold",
            "depth_mean",
            "answer",
            "answer_risk",
            "prompt_tokens",
        )
        ends = [row.interval or (np.nan, np.nan) for row in self.rows]
        known: dict[str, list[Any]] = {
            "low": [low for low, _ in ends],
            "high": [high for _, high in ends],
        }
        columns: dict[str, Any] = {"prompt": [row.text for row in self.rows]}
        for name in names:
            columns[name] = known.get(name) or [getattr(row, name, None) for row in self.rows]
        if trajectory:
            columns |= {f"layer_{layer}": values for layer, values in enumerate(self.trajectory.T)}
        return frame(columns)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the trajectories, at most six: truth logit over layers, its running mean, and where
        training lies.

        Into ``ax``, or into a new figure.  Raises ValueError for none, or more than six."""
        if not 1 <= len(self.rows) <= len(COLOURS):
            raise ValueError(
                f"a picture has room for 1 to {len(COLOURS)} prompts, and these are"
                f" {len(self.rows)}: take some, as in risks[:6].plot()"
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
        answer=report.shown.text.strip() if report.outcome.shows else None,
        prompt_tokens=report.prompt_tokens,
        answer_risk=None if report.answer is None else report.answer.risk,
    )


def frame(columns: Any) -> DataFrame:
    """Return a DataFrame of columns by name, or of rows.  Raises ImportError without pandas, naming
    the cure."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError(
            "to_frame() needs pandas: pip install 'hallutracer[notebook]', or pip install pandas",
            name="pandas",
        ) from error
    return pandas.DataFrame(columns)


def draw_trajectories(
    bundle: Bundle, prompts: Sequence[str], reports: Sequence[RiskReport], path: Path
) -> None:
    """Write a PNG of ``draw_curves``.  ``prompts`` are the reports' titles, at most
    ``len(COLOURS)``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.4 + 0.16 * len(prompts)), dpi=110, layout="constrained")
    curves = [
        (
            title_of(
                text, report.completion.text.strip() if report.completion else None, report.risk
            ),
            report.trajectory,
        )
        for text, report in zip(prompts, reports, strict=True)
    ]
    draw_curves(figure.subplots(), bundle, curves)
    figure.legend(loc="outside lower center", **LEGEND)
    figure.savefig(path, format="png", metadata={"Software": None})


def draw_curves(
    axes: Axes, bundle: Bundle, curves: Sequence[tuple[str, NDArray[np.float64]]]
) -> None:
    """Draw trajectories [m] with their titles, their running means, and where the bundle's training
    rows lie."""
    layers = np.arange(bundle.manifest.model.num_layers)
    probes = bundle.probes
    for value, name, colour in (
        (1, "factual rows", "#0072b2"),
        (0, "hallucinated rows", "#d55e00"),
    ):
        mean, std = probes.trajectory_mean[value], probes.trajectory_std[value]
        axes.fill_between(layers, mean - std, mean + std, color=colour, alpha=0.12, linewidth=0)
        axes.plot(
            layers, mean, color=colour, linewidth=1, linestyle=":", label=f"{name}: mean ± 1 std"
        )
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
    line = " ".join(text.split()).replace("$", r"\$")
    return line if len(line) <= limit else line[: limit - 1] + "…"


class Detector:
    """A loaded model and a bundle that reads it. ``close`` frees the model; ``with`` does so at its
    end."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def __repr__(self) -> str:
        return f"<Detector: {self.model} read by {self.bundle.reference}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def bundle(self) -> Bundle:
        """Return the bundle: its manifest, probes, ``card()`` and ``evaluation()``."""
        return self._scorer.bundle

    @property
    def model(self) -> str:
        """Return the name of the loaded model."""
        return self._scorer.engine.identity.model

    @property
    def threshold(self) -> float:
        """Return the bundle's: a risk of so much is flagged."""
        return self.bundle.manifest.threshold

    def score(
        self,
        prompts: Prompts,
        *,
        threshold: float | None = None,
        generate: int = 0,
    ) -> Risks:
        """Return the risk of each prompt, before its first answer token.

        Args:
            prompts: One prompt or several.  Each is a text, or a conversation: a list of messages
                with ``role`` and ``content``.
            threshold: Flag a risk at or above this one; None: the bundle's own.
            generate: Also answer with up to so many tokens, greedily, where the risk is below the
                threshold.

        Raises RequestError for a prompt that is empty, too long for the model, or none at all.

        >>> import hallutracer as ht
        >>> detector = ht.load("demo")
        >>> questions = ["What is the capital of Italy?", "What is the capital of Palau?"]
        >>> risks = detector.score(questions, generate=8)
        >>> [(round(risk.risk, 1), risk.decision, risk.answer) for risk in risks]
        [(0.0, 'continue', 'It is Rome.'), (0.6, 'abstain', None)]
        >>> risks.trajectory.shape  # prompts, layers
        (2, 8)
        >>> detector.score([{"role": "user", "content": questions[0]}])[0].flagged
        False"""
        from service.engines.base import Sampling
        from service.policies.guard import GATE
        from service.serving.judgement import Judgement

        inputs = as_prompts(prompts)
        ids = [self._scorer.render(*text_or_messages(prompt)) for prompt in inputs]
        standings = [self._scorer.standing(*text_or_messages(prompt)) for prompt in inputs]
        policy = GATE.at(threshold)
        if generate < 0:
            raise RequestError(
                f"generate must be 0 or more tokens, not {generate}", param="generate"
            )
        reports = (
            self._scorer.score_or_continue(ids, Sampling(max_tokens=generate), policy, standings)
            if generate
            else self._scorer.score(ids, policy, standings)
        )
        judgement = Judgement.of(self._scorer, policy, reports)
        return Risks(tuple(map(risk_of, inputs, judgement.prompts)), self.bundle)

    def close(self) -> None:
        """Free the model; later calls raise EngineError."""
        self._scorer.engine.close()


def load(
    model: str | Path | None = None,
    bundle: str | None = None,
    *,
    store: str | Path = DEFAULT_STORE,
    require_signature: str | Path | None = None,
    engine: Engine | None = None,
    report: Report = note,
) -> Detector:
    """Load a model and a bundle that reads it.

    Args:
        model: Model folder, GGUF file, hub name, "smollm2" or "demo".  None: the model of a shipped
            bundle, else smollm2 where its package is installed, else demo.
        bundle: NAME, NAME@ALIAS or NAME:VERSION, with @sha256:DIGEST to pin it.  None: the shipped
            bundle of the model.
        store: Folder or URL (s3://, gs://, az://) of published bundles; those shipped with the
            package are found as well.
        require_signature: Public key or certificates (PEM) that the bundle must be signed with.
        engine: How the model is loaded: dtype, device, threads, vLLM.
        report: Takes lines about what takes long; the default writes them to standard error.

    Raises HalluTracerError for a named store that is not there, ModelLoadError, NoDefaultBundle
    (the model comes without bundles, and none is named), and BundleError: there is no such bundle,
    it is damaged, or it is for another model.

    >>> import hallutracer as ht
    >>> with ht.load("demo") as detector:
    ...     print(detector, round(detector.threshold, 2))
    <Detector: hallutracer-demo read by demo:1> 0.31"""
    from service.scoring import Scorer

    name = None if model is None else str(model)
    if bundle is None and name not in (None, *SHIPPED):
        place_of(
            str(name)
        )  # a path where nothing is, rather than the question which bundle reads it
    check_store(store)
    opened = open_store(store, require_signature=require_signature).load(
        bundle or default_bundles(name)[0]
    )
    chosen = engine or Engine()
    loaded = load_engine(
        chosen.options(name, [opened.manifest.name]),
        bundles=[opened],
        threads=chosen.threads,
        report=report,
    )
    try:
        return Detector(Scorer(loaded, opened))
    except BaseException:
        loaded.close()
        raise


def as_prompts(prompts: Prompts) -> list[str | list[Message]]:
    """Return one prompt or several as a list; a list of messages is one.  Raises RequestError."""
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(prompt, Mapping) for prompt in items):
        return [_conversation(items, "prompts")]
    return [
        prompt if isinstance(prompt, str) else _conversation(prompt, f"prompts[{at}]")
        for at, prompt in enumerate(items)
    ]


def text_or_messages(prompt: str | list[Message]) -> tuple[str | None, list[Message] | None]:
    """Return the prompt as the text or as the messages that it is, and None for the other."""
    return (prompt, None) if isinstance(prompt, str) else (None, prompt)


def _conversation(messages: object, name: str) -> list[Message]:
    if not isinstance(messages, Sequence) or not all(
        isinstance(message, Mapping) for message in messages
    ):
        raise RequestError(
            f"{name} is {type(messages).__name__}: a text or a list of messages is expected",
            param="prompts",
        )
    for message in messages:
        if set(message) != {"role", "content"} or not all(
            isinstance(text, str) for text in message.values()
        ):
            raise RequestError(
                "a message has exactly a text 'role' and a text 'content'", param="prompts"
            )
    return [{"role": message["role"], "content": message["content"]} for message in messages]
