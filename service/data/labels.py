"""Labels of the rows: those of the data file, or verdicts on the model's answers.

Verdicts are saved as they arrive, so a run that is started again judges only the rest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from service.data.judges import answer_problems, make_judge
from service.data.options import JudgeOptions
from service.data.run_folder import AppendLog
from service.data.training_rows import Dataset
from service.errors import DataError, RunMismatch


@dataclass(frozen=True, eq=False)
class Labelled:
    """The rows that take part."""

    index: NDArray[np.int64]  # [n] data rows
    label: NDArray[np.int64]  # [n] 1 factual, 0 hallucinated
    left_out: dict[str, int]  # why the other rows do not take part, counted


def given_labels(dataset: Dataset) -> Labelled:
    """The file's own labels: every row takes part."""
    label = np.array([row.label for row in dataset.rows], np.int64)
    return Labelled(np.arange(len(dataset)), label, {})


def check_answers(dataset: Dataset, options: JudgeOptions) -> None:
    """Raise DataError if the judge cannot use a row's accepted answers; needs no model."""
    problems = [
        f"line {row.line}: {problem}" for row in dataset.rows for problem in answer_problems(options, row.answers)
    ]
    if problems:
        raise DataError(str(dataset.path), problems)


def judged_labels(dataset: Dataset, folder: Path, options: JudgeOptions, abstain_pattern: str) -> Labelled:
    """Judge ``answers.jsonl`` of a collection.

    Empty answers and abstentions belong to neither class: they are left out and counted.
    """
    with (folder / "answers.jsonl").open(encoding="utf-8") as file:
        answers = {record["row"]: record["answer"] for record in map(json.loads, file)}
    abstains = re.compile(abstain_pattern)
    judge = make_judge(options)
    # An endpoint's verdict costs money and is saved at once; the others are cheap, and one flush each would be slow.
    saved_together = 1 if options.name == "openai" else 500
    pending: list[dict[str, str]] = []
    with closing(AppendLog(folder / f"labels-{_key(options, abstain_pattern)}.jsonl")) as log:
        known = log.count
        for place, row in enumerate(tqdm(dataset.rows, "labels", mininterval=5)):
            if place < known:
                continue
            text = answers[place]
            if not text.strip():
                verdict = "empty"
            elif abstains.search(text.replace("\u2019", "'")):
                verdict = "abstained"
            else:
                verdict = "factual" if judge(row.question, text, row.answers) else "hallucinated"
            pending.append({"id": row.id, "verdict": verdict})
            if len(pending) >= saved_together:
                log.append(pending)
                pending = []
        log.append(pending)
        records = list(log.read())
        if [record["id"] for record in records] != [row.id for row in dataset.rows]:
            raise RunMismatch(f"{log.path} does not hold one verdict for each row, in order: delete it and run again")
        verdicts = [record["verdict"] for record in records]
    used = [place for place, verdict in enumerate(verdicts) if verdict in ("factual", "hallucinated")]
    label = [int(verdicts[place] == "factual") for place in used]
    left_out = Counter(verdict for verdict in verdicts if verdict in ("empty", "abstained"))
    return Labelled(np.array(used, np.int64), np.array(label, np.int64), dict(sorted(left_out.items())))


def _key(options: JudgeOptions, abstain_pattern: str) -> str:
    """Name of the verdicts' file: options that change a verdict give another file."""
    matters = {name: getattr(options, name) for name in ("name", "base_url", "model", "answer_pattern")}
    return hashlib.sha256(json.dumps([matters, abstain_pattern], sort_keys=True).encode()).hexdigest()[:12]
