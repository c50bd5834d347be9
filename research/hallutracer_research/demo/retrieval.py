"""hallutracer demo retrieval: what a passage does to a model's answers and to their risks, and when
fetching one pays. Held-out questions about real facts are asked without a passage, with one that
states the fact, with one about other things, and with one that contradicts it
(service/demo/questions.py).  Everything is answered; the policies are computed afterwards from the
same answers."""

from __future__ import annotations

from operator import itemgetter
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from hallutracer_research.documents import Row
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


class Answered(NamedTuple):
    """n questions, answered with each kind of passage."""

    group: Index  # [n] entity
    risk: dict[Passage, Floats]  # [n]
    right: dict[Passage, Flags]  # [n] the answer names an accepted one
    threshold: float
    examples: list[Row]


def ask(scorer: Scorer, split: str, count: int, max_tokens: int) -> Answered:
    """Ask ``count`` questions of a split, evenly spaced over it, four times each."""
    rows = questions(split)
    rows = rows[:: max(1, len(rows) // count)][:count]
    risk: dict[Passage, Floats] = {}
    right: dict[Passage, Flags] = {}
    examples: list[Row] = [{"question": row["prompt"], "accepted": row["answers"]} for row in rows]
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
            found = []
            for example, text, report in zip(examples, texts, reports, strict=True):
                found.append(contains("", text, example["accepted"]))
                example[which] = {"answer": text.strip(), "risk": round(report.risk, 4)}
            right[which] = np.array(found, np.bool_)
    names = {row["group"]: number for number, row in enumerate(rows)}
    group = np.array([names[row["group"]] for row in rows])
    return Answered(group, risk, right, scorer.bundle.manifest.threshold, examples)


def measured(answered: Answered) -> list[Row]:
    """Return a row for each passage; intervals are 95 %, by jackknife over entities."""
    found = []
    for which in PASSAGES:
        risk, right = answered.risk[which], answered.right[which]
        row: Row = {
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


def policies(answered: Answered, passage: Passage) -> list[Row]:
    """Return what is shown under each policy where the retriever finds this passage: shares of all
    questions."""
    flagged = {which: answered.risk[which] >= answered.threshold for which in ("none", passage)}
    alone, read = answered.right["none"], answered.right[passage]
    everywhere = np.ones(len(alone), np.bool_)
    nowhere, doubted, trusted = ~everywhere, flagged["none"], ~flagged[passage]
    # where a passage is fetched; shown from memory; shown with the passage
    plans: dict[str, tuple[Flags, Flags, Flags]] = {
        "never retrieve": (nowhere, everywhere, nowhere),
        "never retrieve, gate": (nowhere, ~doubted, nowhere),
        "always retrieve": (everywhere, nowhere, everywhere),
        "always retrieve, gate": (everywhere, nowhere, trusted),
        "retrieve where flagged, gate": (doubted, ~doubted, doubted & trusted),
    }
    found = []
    for name, (fetched, memory, reading) in plans.items():
        right = float(((memory & alone) | (reading & read)).mean())
        shown = float((memory | reading).mean())
        shares = {"right": right, "wrong": shown - right, "withheld": 1 - shown}
        found.append({"policy": name, **shares, "retrieved": float(fetched.mean())})
    return found


def document(answered: Answered, facts: Row) -> Row:
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


def markdown(found: Row) -> str:
    """Return the document's tables."""

    def written(cell: Any) -> str:
        if isinstance(cell, dict):
            return "{value:.3f} [{low:.3f}, {high:.3f}]".format(**cell)
        return f"{cell:.3f}" if isinstance(cell, float) else cell or ""

    parts = [
        (
            f"{found['model']} read by {found['bundle']}: {found['questions']:,} questions about"
            f" {found['entities']:,} entities, each asked four times; flagged: risk of"
            f" {found['threshold']:.3f} and more. Intervals: 95 %, jackknife over entities."
        ),
    ]
    titles = {
        "passage": "passage",
        "right": "answered right",
        "risk": "mean risk",
        "drop": "drop of the risk",
        "flagged": "flagged",
        "auroc": "AUROC of the risk",
    }
    cells = [list(map(written, map(row.get, titles))) for row in found["passages"]]
    parts.append(markdown_table(list(titles.values()), cells))
    columns = itemgetter("policy", "right", "wrong", "withheld", "retrieved")
    for which, rows in found["policies"].items():
        cells = [list(map(written, columns(row))) for row in rows]
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
