"""Draw docs/answered.svg: how many questions without a passage are answered, and how many of these
answers are wrong.

    python docs/answered.py --model "SmolLM2-135M" BUNDLE ROWS [RUN] \\
        --model "Qwen2.5-Coder-1.5B" BUNDLE ROWS [RUN]

A model that is not named is drawn as docs/answered.json has it, where the curves of each model are
kept.  BUNDLE is a bundle's folder, whose record has the cross-fitted risk of each row; ROWS its
training file, JSONL or JSONL.gz; RUN the run folder of that training, for the entropy of the first
token.  Kind + form + text is a logistic regression, cross-fitted on the same groups.  Run it after
a new bundle."""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from probes_store.bundle import Bundle, load_bundle
from service.data.forms import FORMS
from service.fitting.folds import group_folds
from service.fitting.scores import group_draws, within_stratum_auroc
from service.fitting.texts import text_logits
from service.judging.passages import has_passage
from service.trainer.prepare import WITH_PASSAGE
from service.trainer.publish import read_risks

TARGET = Path(__file__).parent / "answered.svg"
FOLDS, SEED = 5, 0
SHARES = np.linspace(0.01, 1.0, 100)  # of the questions that are answered
COLOURS = {
    "the bundle": "#0072b2",
    "first-token entropy": "#e69f00",
    "kind + form + text, no model": "#009e73",
}
Row = Mapping[str, Any]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Questions:
    """The questions of one training without a passage beside them: wrong, group [n], and scores [n]
    by signal."""

    title: str
    wrong: Floats
    group: NDArray[np.int64]
    scores: dict[str, Floats]  # the higher, the later the question is answered
    threshold: float  # of questions without a passage
    guaranteed: bool
    strata: list[tuple[str, str]]  # kind and form of each question
    break_even: (
        float  # the share of wrong answers at which answering is worth as much as withholding
    )


def questions(
    title: str, bundle: Bundle, rows: Sequence[Row], first_token: Floats | None
) -> Questions:
    """Return the labelled rows without a passage; ``first_token`` [all rows, 2] is the run's, of
    all of ``rows``.

    Raises ValueError where the rows are not those of the bundle's training."""
    evaluation, manifest = bundle.evaluation(), bundle.manifest
    recorded = read_risks(evaluation["out_of_fold"]["risks"])
    asking = [number for number, row in enumerate(rows) if row.get("label") is not None]
    label = np.array([rows[number]["label"] for number in asking], np.int64)
    if not np.array_equal(label, recorded.label):
        raise ValueError(
            f"{title}: the labels of the rows are not those that {manifest.reference} records"
        )
    if first_token is not None and len(first_token) != len(rows):
        raise ValueError(
            f"{title}: the run has {len(first_token)} prompts, the file {len(rows)} rows"
        )
    kept = np.array([not beside_passage(rows[number]) for number in asking])
    scores = {"the bundle": recorded.risk[kept]}
    if first_token is not None:
        scores["first-token entropy"] = first_token[asking, 1][kept]
    labelled = [rows[number] for number in asking]
    scores["kind + form + text, no model"] = without_model(labelled, label, recorded.group)[kept]
    return Questions(
        title,
        1.0 - label[kept],
        recorded.group[kept],
        scores,
        manifest.threshold_for(False),
        manifest.guarantee is not None,
        [
            (str(row.get("kind")), str(row.get("form")))
            for row, is_kept in zip(labelled, kept, strict=True)
            if is_kept
        ],
        float(evaluation["threshold"]["threshold"]),
    )


def beside_passage(row: Row) -> bool:
    """Return whether text to answer from stands beside the row's question, by its form or by its
    shape."""
    form = FORMS.get(str(row.get("form")))
    return has_passage(texts_of(row)[-1]) if form is None else form.family in WITH_PASSAGE


def texts_of(row: Row) -> list[str]:
    """Return the texts of the conversation up to its last user message."""
    messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
    last = max(number for number, message in enumerate(messages) if message["role"] == "user")
    return [str(message["content"]) for message in messages[: last + 1]]


def without_model(
    rows: Sequence[Row], label: NDArray[np.int64], group: NDArray[np.int64]
) -> Floats:
    """Return the cross-fitted score [n] of a logistic regression on kind, form and words; no model
    reads the prompt."""
    from sklearn.feature_extraction import DictVectorizer
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.pipeline import make_pipeline, make_union
    from sklearn.preprocessing import FunctionTransformer

    words = TfidfVectorizer(
        ngram_range=(1, 2), min_df=2, sublinear_tf=True, preprocessor=_lower_text
    )
    columns = make_union(make_pipeline(FunctionTransformer(_names), DictVectorizer()), words)
    score = np.zeros(len(rows))
    for train, test in group_folds(label, group, np.arange(len(rows)), FOLDS, SEED):
        [score[test]] = text_logits(columns, rows, 1 - label, train, test)
    return score


def _names(rows: Sequence[Row]) -> list[dict[str, str]]:
    return [{"kind": str(row.get("kind")), "form": str(row.get("form"))} for row in rows]


def _lower_text(row: Row) -> str:
    return "\n".join(texts_of(row)).lower()


def wrong_among_answered(wrong: Floats, score: Floats, weight: Floats | None = None) -> Floats:
    """Return the share of wrong answers [100] where ``SHARES`` of the questions are answered,
    lowest scores first.

    wrong, score, weight [n]: how often each row counts."""
    order = np.argsort(score, kind="stable")
    counts = np.ones(len(order)) if weight is None else weight[order]
    answered, bad = np.cumsum(counts), np.cumsum(counts * wrong[order])
    seen = answered > 0
    shares = bad[seen] / answered[seen]
    return np.interp(SHARES, answered[seen] / answered[-1], shares)


def band(wrong: Floats, score: Floats, group: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Return the middle 95 % of the curve over draws of groups, [100] each."""
    curves = np.array([wrong_among_answered(wrong, score, weight) for weight in group_draws(group)])
    low, high = np.quantile(curves, [0.025, 0.975], axis=0)
    return low, high


def at_threshold(own: Questions) -> tuple[float, float] | None:
    """Return which share is answered below the threshold, and which of these wrong; None where
    nothing is."""
    below = own.scores["the bundle"] < own.threshold
    return (float(below.mean()), float(own.wrong[below].mean())) if below.any() else None


@dataclass(frozen=True)
class Curves:
    """What the picture shows of one model: for each signal three curves [100] over ``SHARES``."""

    questions: int
    break_even: float
    guaranteed: bool
    at_threshold: tuple[float, float] | None
    signals: dict[str, tuple[list[float], list[float], list[float]]]  # share wrong, and its band


def curves(own: Questions) -> Curves:
    """Return the curves of one model."""

    def rounded(values: Floats) -> list[float]:
        return [round(float(value), 4) for value in values]

    signals = {}
    for name, score in own.scores.items():
        low, high = band(own.wrong, score, own.group)
        shares = wrong_among_answered(own.wrong, score)
        signals[name] = (rounded(shares), rounded(low), rounded(high))
    return Curves(len(own.wrong), own.break_even, own.guaranteed, at_threshold(own), signals)


def panel(axes: Axes, title: str, own: Curves) -> None:
    """Draw one model."""
    for name, (shares, low, high) in own.signals.items():
        colour = COLOURS[name]
        axes.fill_between(SHARES, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(SHARES, shares, color=colour, label=name)
    axes.axhline(
        own.break_even,
        color="#555555",
        linewidth=0.8,
        linestyle="--",
        label="as good as withholding all",
    )
    if (point := own.at_threshold) is not None:
        face = COLOURS["the bundle"] if own.guaranteed else "white"
        label = "the guaranteed threshold" if own.guaranteed else "the threshold, by cost"
        axes.plot(*point, "o", color=COLOURS["the bundle"], markerfacecolor=face, label=label)
    axes.set(
        title=f"{title}, {own.questions:,} questions",
        xlim=(0, 1),
        ylim=(0, 1),
        xlabel="share answered",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7, loc="lower right")


def draw(models: Mapping[str, Curves], target: Path) -> None:
    """Write the picture, a panel for each model."""
    with plt.rc_context({"svg.hashsalt": "answered", "font.size": 8}):
        figure, panels = plt.subplots(
            1, len(models), figsize=(4 * len(models), 3), layout="constrained", squeeze=False
        )
        for axes, (title, own) in zip(panels[0], models.items(), strict=True):
            panel(axes, title, own)
        panels[0][0].set_ylabel("share wrong among the answered")
        figure.savefig(target, metadata={"Date": None})
        plt.close(figure)


def figures(own: Questions) -> str:
    """Return a line for each signal, for the text beside the picture."""
    lines = [
        f"{own.title}: {len(own.wrong):,} questions without a passage, {own.wrong.mean():.3f}"
        " answered wrong"
    ]
    for name, score in own.scores.items():
        curve = wrong_among_answered(own.wrong, score)
        shares = ", ".join(
            f"{curve[np.argmin(abs(SHARES - share))]:.3f} of {share:.0%}"
            for share in (0.05, 0.1, 0.2, 0.5)
        )
        within = within_stratum_auroc((1 - own.wrong).astype(np.int64), score, own.strata)
        shown = "-" if within is None else f"{within:.3f}"
        lines.append(f"  {name}: wrong {shares}; AUROC within kind x form {shown}")
    if (point := at_threshold(own)) is not None:
        kind = "guaranteed" if own.guaranteed else "by cost"
        lines.append(
            f"  at the threshold {own.threshold:.3f} ({kind}): {point[0]:.3f} answered,"
            f" {point[1]:.3f} of these wrong"
        )
    return "\n".join(lines)


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file, which may be compressed."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def main() -> int:
    """Draw the picture of the models that are named, and print what it shows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", nargs="+", action="append", default=[], help="TITLE BUNDLE ROWS [RUN]"
    )
    parser.add_argument("--to", type=Path, default=TARGET)
    options = parser.parse_args()
    record = options.to.with_suffix(".json")
    recorded = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    models = {title: Curves(**kept) for title, kept in recorded.items()}
    for title, folder, rows, *run in options.model:
        first_token = (
            np.fromfile(Path(run[0]) / "train" / "first_token.f64", "<f8").reshape(-1, 2)
            if run
            else None
        )
        own = questions(title, load_bundle(Path(folder)), read_rows(Path(rows)), first_token)
        models[title] = curves(own)
        sys.stdout.write(figures(own) + "\n")
    draw(models, options.to)
    kept = {title: asdict(own) for title, own in models.items()}
    record.write_text(json.dumps(kept) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
