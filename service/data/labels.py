"""Labels of the rows: the file's own, or the model's answers judged.

Verdicts are kept as they come, so a run that is started again asks only for the rest.  Knows no engine.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from service.data.judges import answer_problems, make_judge
from service.data.options import JudgeOptions
from service.data.run_folder import AppendLog
from service.data.training_rows import Dataset, Message
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
    """Raise DataError where a row's accepted answers are of no use to the judge; needs no model."""
    problems = [
        f"line {row.line}: {problem}" for row in dataset.rows for problem in answer_problems(options, row.answers)
    ]
    if problems:
        raise DataError(str(dataset.path), problems)


def judged_labels(dataset: Dataset, folder: Path, options: JudgeOptions, abstain_pattern: str) -> Labelled:
    """Judge ``answers.jsonl`` of a collection.

    An answer that abstains is neither class: it is left out and counted, and so is an empty one.
    """
    answers = dict(_answers(folder / "answers.jsonl"))
    abstains = re.compile(abstain_pattern)
    judge = make_judge(options)
    log = AppendLog(folder / f"labels-{_key(options, abstain_pattern)}.jsonl")
    # An endpoint's verdict costs money and is kept at once; the others are cheap, and a flush each would be slow.
    kept_together = 1 if options.name == "openai" else 500
    pending: list[dict[str, str]] = []
    try:
        known = log.count
        for place, (row, prompt, messages) in enumerate(tqdm(dataset.prompts(), "labels", len(dataset), mininterval=5)):
            if place < known:
                continue
            text = answers[place]
            if not text.strip():
                verdict = "empty"
            elif abstains.search(text.replace("\u2019", "'")):
                verdict = "abstained"
            else:
                verdict = "factual" if judge(_question(prompt, messages), text, row.answers) else "hallucinated"
            pending.append({"id": row.id, "verdict": verdict})
            if len(pending) >= kept_together:
                log.append(pending)
                pending = []
        log.append(pending)
        records = list(log.read())
        if [record["id"] for record in records] != [row.id for row in dataset.rows]:
            raise RunMismatch(f"{log.path} does not hold one verdict for each row, in order: delete it and run again")
        verdicts = [record["verdict"] for record in records]
    finally:
        log.close()
    used = [place for place, verdict in enumerate(verdicts) if verdict in ("factual", "hallucinated")]
    label = [int(verdicts[place] == "factual") for place in used]
    left_out = Counter(verdict for verdict in verdicts if verdict in ("empty", "abstained"))
    return Labelled(np.array(used, np.int64), np.array(label, np.int64), dict(sorted(left_out.items())))


def _answers(path: Path) -> list[tuple[int, str]]:
    with path.open(encoding="utf-8") as file:
        return [(record["row"], record["answer"]) for record in map(json.loads, file)]


def _key(options: JudgeOptions, abstain_pattern: str) -> str:
    """Names the verdicts' file: other options, other file.  The API key and patience do not change a verdict."""
    matters = {
        key: value for key, value in asdict(options).items() if key in ("name", "base_url", "model", "answer_pattern")
    }
    return hashlib.sha256(json.dumps([matters, abstain_pattern], sort_keys=True).encode()).hexdigest()[:12]


def _question(prompt: str | None, messages: Sequence[Message] | None) -> str:
    """What the judge is shown: the prompt, or the conversation."""
    if prompt is not None:
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages or ())
