"""hallutracer demo retrieval: what a passage does to a model's answers and to their risks, and when
fetching one pays. Held-out questions about real facts are asked without a passage, with one that
states the fact, with one about other things, and with one that contradicts it
(service/demo/questions.py).  Everything is answered; the policies are computed afterwards from the
same answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from service.data.judges import contains
from service.demo import Passage
from service.demo.questions import questions, with_passages
from service.engines.base import Sampling
from service.fitting.probes import Floats, Index
from service.fitting.recalibration import means_without
from service.fitting.scores import auroc_interval, risk_auroc, t_interval
from service.policies.guard import OBSERVE
from service.scoring import Scorer
from service.trainer.presentation import markdown_table

PASSAGES: tuple[Passage, ...] = get_args(Passage)
BATCH = 64  # questions between two updates of the progress bar

Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Answered:
    """n questions, answered with each kind of passage."""

    group: Index  # [n] entity
    risk: dict[Passage, Floats]  # [n]
    right: dict[Passage, Flags]  # [n] the answer names an accepted one
    threshold: float
    examples: list[dict[str, Any]]


def ask(scorer: Scorer, split: str, count: int, max_tokens: int) -> Answered:
    """Ask ``count`` questions of a split, evenly spaced over it, four times each."""
    rows = questions(split)
    rows = rows[:: max(1, len(rows) // count)][:count]
    risk: dict[Passage, Floats] = {}
    right: dict[Passage, Flags] = {}
    examples: list[dict[str, Any]] = [
        {"question": row["prompt"], "accepted": row["answers"]} for row in rows
    ]
    with tqdm(total=len(rows) * len(PASSAGES), desc="questions", mininterval=2) as bar:
        for which in PASSAGES:
            asked = with_passages(rows, [which])
            reports = []
            for start in range(0, len(asked), BATCH):
                ids = [scorer.render(prompt=row["prompt"]) for row in asked[start : start + BATCH]]
                reports += scorer.score_or_continue(ids, Sampling(max_tokens=max_tokens), OBSERVE)
                bar.update(len(ids))
            texts = [report.completion.text if report.completion else "" for report in reports]
            risk[which] = np.array([report.risk for report in reports])
            found = [
                contains("", text, row["answers"]) for text, row in zip(texts, rows, strict=True)
            ]
            right[which] = np.array(found, np.bool_)
            for example, text, report in zip(examples, texts, reports, strict=True):
                example[which] = {"answer": text.strip(), "risk": round(report.risk, 4)}
    names = {row["group"]: number for number, row in enumerate(rows)}
    group = np.array([names[row["group"]] for row in rows])
    return Answered(group, risk, right, scorer.bundle.manifest.threshold, examples)


def measured(answered: Answered) -> list[dict[str, Any]]:
    """Return a row for each passage; intervals are 95 %, by jackknife over entities."""
    found = []
    for which in PASSAGES:
        risk, right = answered.risk[which], answered.right[which]
        row: dict[str, Any] = {
            "passage": which,
            "right": _mean(answered.group, right),
            "risk": _mean(answered.group, risk),
            "flagged": float((risk >= answered.threshold).mean()),
            "auroc": _auroc(answered.group, right, risk),
        }
        if which != "none":
            row["drop"] = _mean(answered.group, answered.risk["none"] - risk)
        found.append(row)
    return found


def policies(answered: Answered, passage: Passage) -> list[dict[str, Any]]:
    """Return what is shown under each policy where the retriever finds this passage: shares of all
    questions."""
    flagged = {which: answered.risk[which] >= answered.threshold for which in ("none", passage)}
    alone, read = answered.right["none"], answered.right[passage]
    everywhere = np.ones(len(alone), np.bool_)
    plans: dict[str, tuple[Flags, Flags]] = {  # answered from memory; answered with the passage
        "never retrieve": (everywhere, ~everywhere),
        "never retrieve, gate": (~flagged["none"], ~everywhere),
        "always retrieve": (~everywhere, everywhere),
        "always retrieve, gate": (~everywhere, ~flagged[passage]),
        "retrieve where flagged, gate": (~flagged["none"], flagged["none"] & ~flagged[passage]),
    }
    found = []
    for name, (memory, reading) in plans.items():
        right = float(((memory & alone) | (reading & read)).mean())
        shown = float((memory | reading).mean())
        retrieved = (
            0.0
            if name.startswith("never")
            else 1.0
            if name.startswith("always")
            else flagged["none"].mean()
        )
        found.append(
            {
                "policy": name,
                "right": right,
                "wrong": shown - right,
                "withheld": 1 - shown,
                "retrieved": float(retrieved),
            }
        )
    return found


def document(answered: Answered, facts: dict[str, Any]) -> dict[str, Any]:
    """Return everything, for ``retrieval.json``."""
    return {
        **facts,
        "questions": len(answered.group),
        "entities": len(np.unique(answered.group)),
        "threshold": answered.threshold,
        "passages": measured(answered),
        "policies": {which: policies(answered, which) for which in PASSAGES if which != "none"},
        "examples": answered.examples,
    }


def markdown(found: dict[str, Any]) -> str:
    """Return the document's tables."""

    def interval(cell: dict[str, float] | None) -> str:
        return "{value:.3f} [{low:.3f}, {high:.3f}]".format(**cell) if cell else ""

    parts = [
        (
            f"{found['model']} read by {found['bundle']}: {found['questions']:,} questions about"
            f" {found['entities']:,} entities, each asked four times; flagged: risk of"
            f" {found['threshold']:.3f} and more. Intervals: 95 %, jackknife over entities."
        ),
        markdown_table(
            [
                "passage",
                "answered right",
                "mean risk",
                "drop of the risk",
                "flagged",
                "AUROC of the risk",
            ],
            [
                [
                    row["passage"],
                    interval(row["right"]),
                    interval(row["risk"]),
                    interval(row.get("drop")),
                    f"{row['flagged']:.3f}",
                    interval(row["auroc"]),
                ]
                for row in found["passages"]
            ],
        ),
    ]
    shares = ("right", "wrong", "withheld", "retrieved")
    for which, rows in found["policies"].items():
        cells = []
        for row in rows:
            cells.append([row["policy"], *(f"{row[key]:.3f}" for key in shares)])
        header = ["policy", "right shown", "wrong shown", "withheld", "retrievals"]
        parts += [
            f"Where the retriever finds a passage that is {which}, shares of all questions:",
            markdown_table(header, cells),
        ]
    return "\n\n".join(parts) + "\n"


def _auroc(group: Index, right: Flags, risk: Floats) -> dict[str, float] | None:
    """Return it with its interval; None where all answers are right, or all wrong."""
    if right.all() or not right.any():
        return None
    label = right.astype(np.int64)
    found = auroc_interval(label, group, [(np.arange(len(label)), risk)])
    return {"value": risk_auroc(label, risk), **found._asdict()}


def _mean(group: Index, column: NDArray[Any]) -> dict[str, float]:
    value = float(column.mean())
    return {"value": value, **t_interval(value, means_without(column, group))._asdict()}
