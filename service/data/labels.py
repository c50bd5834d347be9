"""Labels the rows: by the data file, by a judge's verdicts on the model's answers, or by how far
sampled answers agree with the greedy one."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from service.data.judges import Judge, agree, answer_problems, make_judge
from service.data.options import SAMPLE_TEMPERATURE, SAMPLES, JudgeOptions
from service.data.run_folder import AppendLog, json_lines
from service.data.training_rows import Dataset
from service.engines.base import Completion, LoadedModel, TokenIds
from service.engines.thoughts import OPENED, TAIL, opens_thought, spoken, with_marks
from service.errors import DataError, RunMismatch, TrainingError

Verdict = Literal["factual", "hallucinated", "abstained", "empty", "unfinished thought"]
UNFINISHED: Verdict = "unfinished thought"
MOST = 0.5  # share of the sampled answers; above it, most of them agree with the greedy one
# share of the answers; above it, the finished answers are those that took the least thought
MOST_UNFINISHED = 0.5
SAMPLES_FILE = f"samples-{SAMPLES}-{SAMPLE_TEMPERATURE:g}.jsonl"  # in a run folder
FiguresBy = Literal["answers", "label", "agreement"]
CLASSES = {"hallucinated": 0, "factual": 1}
"""The verdicts that are labels; any other verdict belongs to neither class."""


@dataclass(frozen=True, eq=False)
class Labelled:
    """The rows that take part."""

    index: NDArray[np.int64]  # [n] data rows
    label: NDArray[np.int64]  # [n] 1 factual, 0 hallucinated
    left_out: dict[str, int]  # count of the other rows by the reason why they do not take part
    thoughts: int = 0  # answers that begin with a thought
    # [n] share of the sampled answers that agree with the greedy one; then ``label`` is whether
    # most of them do
    agreement: NDArray[np.float64] | None = None
    # [n] whether the greedy answer is right, where the rows bring what tells it
    truth: NDArray[np.int64] | None = None
    figures_by: FiguresBy | None = None  # what figures of self-labelled rows are by


def given_labels(dataset: Dataset) -> Labelled:
    """Return the file's own labels: every row that applies takes part."""
    index = dataset.asking
    thoughts = sum(
        spoken(dataset.rows[row].answer) != dataset.rows[row].answer for row in index.tolist()
    )
    return Labelled(
        index, np.array([dataset.rows[row].label for row in index.tolist()], np.int64), {}, thoughts
    )


def check_answers(dataset: Dataset, options: JudgeOptions) -> None:
    """Raise DataError if the judge cannot use a row's accepted answers; needs no model."""
    if not has_answers(dataset):
        return
    if problems := [
        f"line {row.line}: {problem}"
        for row in dataset.rows
        if row.applies
        for problem in answer_problems(options, row.answers)
    ]:
        raise DataError(str(dataset.path), problems)


def judged_labels(dataset: Dataset, folder: Path, options: JudgeOptions) -> Labelled:
    """Judge ``answers.jsonl`` of a collection, which has an answer of each row that applies.

    Raises TrainingError if most of the answers are thoughts that do not end."""
    records = {record["row"]: record for record in json_lines(folder / "answers.jsonl")}
    answers = sorted((row, _judged(record)) for row, record in records.items())
    thoughts = sum(
        "with_thought" in record or _judged(record) != record["answer"]
        for record in records.values()
    )
    unfinished = sum(text is None for _, text in answers)
    if unfinished > MOST_UNFINISHED * len(answers):
        raise TrainingError(
            f"{dataset.path}, labelled by its answers:"
            f" {unfinished_thoughts(unfinished, len(answers))}",
            param="labels",
        )
    key = _key(options, thoughts > 0)
    verdicts = _verdicts(dataset, answers, folder / f"labels-{key}.jsonl", options)
    used = {
        row: CLASSES[verdict]
        for (row, _), verdict in zip(answers, verdicts, strict=True)
        if verdict in CLASSES
    }
    left_out = Counter(verdict for verdict in verdicts if verdict not in CLASSES)
    why = dict(sorted(left_out.items()))
    return Labelled(
        np.array([*used], np.int64), np.array([*used.values()], np.int64), why, thoughts
    )


def has_answers(dataset: Dataset) -> bool:
    """Return whether each row that applies has accepted answers."""
    return all(row.answers for row in dataset.rows if row.applies)


def has_labels(dataset: Dataset) -> bool:
    """Return whether each row that applies has a label of its own."""
    return all(row.label is not None for row in dataset.rows if row.applies)


def self_labels(dataset: Dataset, folder: Path, options: JudgeOptions) -> Labelled:
    """Label each answer of a collection by the share of ``SAMPLES_FILE``'s answers that agree with
    it.

    An answer that abstains, is empty or ends in its thought is left out; a sample of that kind
    agrees with none.  ``truth`` is what a judge says where all rows have accepted answers, else
    the label of each where all have one."""
    judge = options.judge if has_answers(dataset) else None
    judged = judged_labels(dataset, folder, replace(options, judge=judge))
    records = json_lines(folder / "answers.jsonl")
    greedy = {record["row"]: _judged(record) or "" for record in records}
    samples = {record["row"]: record["answers"] for record in json_lines(folder / SAMPLES_FILE)}
    shares = []
    for number in judged.index.tolist():
        question = dataset.rows[number].texts[-1]
        same = [
            sample is not None and agree(question, greedy[number], sample)
            for sample in samples[number]
        ]
        shares.append(float(np.mean(same)))
    agreement = np.array(shares, np.float64)
    truth: NDArray[np.int64] | None = None
    figures_by: FiguresBy = "agreement"
    if has_answers(dataset):
        truth, figures_by = judged.label, "answers"
    elif has_labels(dataset):
        given = [dataset.rows[number].label for number in judged.index.tolist()]
        truth, figures_by = np.array(given, np.int64), "label"
    return replace(
        judged,
        label=(agreement > MOST).astype(np.int64),
        agreement=agreement,
        truth=truth,
        figures_by=figures_by,
    )


def unfinished_thoughts(unfinished: int, answers: int) -> str:
    """Return the message about answers that were cut inside their thought."""
    return (
        f"{unfinished} of {answers} answers are thoughts that do not end, so nothing is said that"
        " could be judged: let them be longer (--max-new-tokens), or train on a model, or a chat"
        " template, that does not think first"
    )


def _judged(record: dict[str, Any]) -> str | None:
    """Return the answer in a record of answers.jsonl without its thought; None if the thought does
    not end."""
    return spoken(record["answer"]) if record.get("thought_ends", True) else None


def answer_texts(
    completion: Completion, prompt: TokenIds, engine: LoadedModel
) -> tuple[str, str | None]:
    """Return the text of an answer with the marks of its thoughts, and the text without thoughts
    and marks.

    The latter is None if a thought does not end; ``prompt`` may have opened the first."""
    text = with_marks(
        completion.text, engine.spell(list(completion.token_ids)), engine.special_tokens
    )
    return text, spoken_behind(prompt, text, engine)


def spoken_behind(prompt: TokenIds, text: str, engine: LoadedModel) -> str | None:
    """Return the text of an answer without its thoughts; None if a thought does not end.

    ``prompt`` may have opened the first thought."""
    return spoken(OPENED + text if opens_thought(engine.spell(prompt[-TAIL:])) else text)


def verdict_on(
    spoken_text: str | None,
    question: str,
    accepted: Sequence[str],
    judge: Judge,
    abstains: re.Pattern[str],
) -> Verdict:
    """Return the verdict on an answer without its thoughts; None stands for a thought that does not
    end."""
    if spoken_text is None:
        return UNFINISHED
    if not spoken_text.strip():
        return "empty"
    if abstains.search(spoken_text.replace("\u2019", "'")):
        return "abstained"
    return "factual" if judge(question, spoken_text, accepted) else "hallucinated"


def _verdicts(
    dataset: Dataset, answers: Sequence[tuple[int, str | None]], path: Path, options: JudgeOptions
) -> list[str]:
    """Return a verdict for each data row with its answer (None: a thought that does not end); store
    it in ``path``."""
    abstains, judge = options.abstains, make_judge(options)
    # An endpoint's verdict costs money, so save it at once. Other verdicts are cheap, and a flush
    # for each is slow.
    saved_together = 1 if options.judge == "openai" else 500
    pending: list[dict[str, str]] = []
    with closing(AppendLog(path)) as log:
        known = log.count
        for number, text in tqdm(
            answers[known:], "labels", len(answers), initial=known, mininterval=5
        ):
            row = dataset.rows[number]
            verdict = verdict_on(text, row.question, row.answers, judge, abstains)
            pending.append({"id": row.id, "verdict": verdict})
            if len(pending) >= saved_together:
                log.append(pending)
                pending = []
        log.append(pending)
        records = list(log.read())[: len(answers)]
        if [record["id"] for record in records] != [
            dataset.rows[number].id for number, _ in answers
        ]:
            raise RunMismatch(
                f"{path} does not hold one verdict for each answer, in order: delete it and run"
                " again"
            )
        return [record["verdict"] for record in records]


def _key(options: JudgeOptions, thoughts: bool) -> str:
    """Return a key for the file of verdicts, which differs for options that change a verdict."""
    matters = {
        "name": options.judge_name,
        "base_url": options.judge_url,
        "model": options.judge_model,
    }
    key = [matters | {"answer_pattern": options.answer_pattern}, options.abstains.pattern]
    key += ["without thoughts"] if thoughts else []  # release 1.0.0 judged the thoughts, too
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
