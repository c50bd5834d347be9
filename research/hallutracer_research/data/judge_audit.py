"""How right a judge's labels are, by a person who reads some of them.  ``sample`` draws verdicts to
read, half of each class; ``measure`` compares what the person found.  Wrong labels limit what any
predictor can show: one that knows which answers are true still has an AUROC against the judge of
only (right | judged right + wrong | judged wrong) / 2."""

from __future__ import annotations

import csv
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np

from service.data.run_folder import IN_FORMS, json_lines
from service.data.training_rows import Dataset
from service.errors import DataError, RunMismatch

COLUMNS = ("id", "kind", "question", "accepted", "answer", "verdict", "share", "read")
VERDICTS = {"factual": "right", "hallucinated": "wrong"}
"""A verdict -> what a person who agrees writes into the column ``read``."""
UNCLEAR = "unclear"
DRAWS = 20_000
FORMULA = tuple("=+-@\t\r")  # how a spreadsheet's formula begins
Rows = list[dict[str, str]]


@dataclass(frozen=True)
class Rate:
    """A share with a 95 % interval: Jeffreys' of a binomial, classes weighted by their share of all
    verdicts."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Audit:
    """What the person found.  ``ceiling``: AUROC, against these labels, of a predictor that knows
    the truth."""

    read: int
    unclear: int  # left out of the rates
    agreement: Rate
    right_if_judged_right: Rate
    wrong_if_judged_wrong: Rate
    ceiling: Rate
    disagreed: tuple[str, ...]  # ids


def sample(dataset: Dataset, run: Path, rows: int, seed: int = 0) -> Rows:
    """Return ``rows`` verdicts of a training run, as many of each class as there are, shuffled;
    ``read`` is empty.  ``share``: how much of all verdicts a row stands for; they sum to one.
    Raises DataError, RunMismatch."""
    folder = run / "train" if (run / "train").is_dir() else run
    judged_files = sorted(folder.glob("labels-*.jsonl"), key=lambda path: path.stat().st_mtime)
    if not (folder / "answers.jsonl").is_file():
        raise DataError(
            str(folder),
            ["has no answers.jsonl: give the --run-dir of a run with --labels generate"],
        )
    if not judged_files:
        raise DataError(str(folder), ["no answer has been judged yet: let the run go on"])
    answers = {record["row"]: record["answer"] for record in json_lines(folder / "answers.jsonl")}
    verdicts = list(json_lines(judged_files[-1]))
    judged_rows = [(number, row) for number, row in enumerate(dataset.rows) if row.applies]
    if [record["id"] for record in verdicts] != [row.id for _, row in judged_rows]:
        spread = run / IN_FORMS.format(folder.name)  # of a run that asked in forms
        file = str(spread) if spread.is_file() else "the file of that run"
        raise RunMismatch(f"{folder} judged other rows than {dataset.path} has: give {file}")
    rng = random.Random(seed)
    of_class: dict[str, list[int]] = {verdict: [] for verdict in VERDICTS}
    for position, record in enumerate(verdicts):
        if record["verdict"] in of_class:
            of_class[record["verdict"]].append(position)
    judged = sum(map(len, of_class.values()))
    drawn: Rows = []
    for verdict, positions in of_class.items():
        taken = rng.sample(positions, min(rows // 2, len(positions)))
        for position in taken:
            number, row = judged_rows[position]
            values = (
                row.id,
                row.strata.get("kind", ""),
                row.question,
                " | ".join(row.answers),
                answers[number],
                verdict,
                f"{len(positions) / judged / len(taken):.8f}",
                "",
            )
            drawn.append(dict(zip(COLUMNS, values, strict=True)))
    rng.shuffle(drawn)
    return drawn


def write(rows: Rows, target: TextIO) -> None:
    """Write CSV.  A text that a spreadsheet would take for a formula gets an apostrophe in
    front."""
    writer = csv.DictWriter(target, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        plain = {
            name: f"'{text}" if text.startswith(FORMULA) else text for name, text in row.items()
        }
        writer.writerow(plain)


def read(path: Path) -> Rows:
    """Return rows that a person has read.  Raises DataError, naming every line that is not."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            rows, names = list(reader), reader.fieldnames or ()
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(str(path), [str(error)]) from None
    needed = ("id", "verdict", "share", "read")
    if missing := [name for name in needed if name not in names]:
        raise DataError(str(path), [f"the first line names no column {name!r}" for name in missing])
    allowed = (*VERDICTS.values(), UNCLEAR)
    problems = []
    for number, row in enumerate(rows, 1):
        row["read"] = (row["read"] or "").strip().lower()
        if row["read"] not in allowed:
            problems.append(
                f"row {number} ({row['id']}): 'read' is {row['read']!r}; write {', '.join(allowed)}"
            )
        if row["verdict"] not in VERDICTS:
            problems.append(f"row {number} ({row['id']}): 'verdict' is {row['verdict']!r}")
    if not problems:
        judged = {row["verdict"] for row in rows if row["read"] != UNCLEAR}
        problems = [f"no row judged {name} was read" for name in VERDICTS if name not in judged]
    if problems:
        raise DataError(str(path), problems)
    return rows


def measure(rows: Rows) -> Audit:
    """Return rates over rows that are not unclear."""
    agrees: dict[str, list[bool]] = {verdict: [] for verdict in VERDICTS}
    weight = dict.fromkeys(VERDICTS, 0.0)
    disagreed = []
    for row in rows:
        verdict = row["verdict"]
        weight[verdict] += float(row["share"])
        if row["read"] == UNCLEAR:
            continue
        agrees[verdict].append(row["read"] == VERDICTS[verdict])
        if not agrees[verdict][-1]:
            disagreed.append(row["id"])
    rng = np.random.default_rng(0)
    value, drawn = {}, {}
    for verdict, of_verdict in agrees.items():
        agreed, read = sum(of_verdict), len(of_verdict)
        value[verdict] = float(np.mean(of_verdict))
        drawn[verdict] = rng.beta(agreed + 0.5, read - agreed + 0.5, DRAWS)
    right, wrong = VERDICTS

    def rate(of_right: float, of_wrong: float) -> Rate:
        low, high = np.quantile(of_right * drawn[right] + of_wrong * drawn[wrong], [0.025, 0.975])
        point = of_right * value[right] + of_wrong * value[wrong]
        return Rate(point, min(float(low), point), max(float(high), point))

    share = weight[right] / sum(weight.values())
    count = sum(map(len, agrees.values()))
    return Audit(
        read=count,
        unclear=len(rows) - count,
        agreement=rate(share, 1 - share),
        right_if_judged_right=rate(1, 0),
        wrong_if_judged_wrong=rate(0, 1),
        ceiling=rate(0.5, 0.5),
        disagreed=tuple(disagreed),
    )
