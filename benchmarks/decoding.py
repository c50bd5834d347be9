"""What a risk is worth where answers are decoded in other ways, through the running service's chat
route.

    hallutracer demo questions --split test > facts.jsonl
    python -m benchmarks.decoding --questions facts.jsonl [more.jsonl ...] --record decoding.jsonl
        [--rows 300] [--draws 4] [--model smollm2] [--bundle NAME] [--store DIR]
        [--url http://127.0.0.1:8765]

``--rows`` questions, as many of each file as there are, one of each group, each alone in a chat.
Each is answered at temperature 0, 0.7 and 1 and with no temperature named: 24 tokens, ``--draws``
times with different seeds, at temperature 0 once.  Answers are judged as training judges with
``contains``; those that abstain, and empty ones, are left out.  z is the difference over its
standard error, each question counted once: its draws are no independent rows. A run that was ended
goes on where the record stops."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.forms import difference_z
from benchmarks.harness import Check, table
from benchmarks.running_service import GENERATE, Job, Line, add_options, answers, together, user
from hallutracer_research.data.mixture import read_rows
from service.data.labels import CLASSES
from service.trainer.presentation import markdown_table

WAYS: dict[str, float | None] = {
    "temperature 0": 0.0,
    "none named": None,
    "temperature 0.7": 0.7,
    "temperature 1": 1.0,
}
OFF = 0.05  # target of a request that names no temperature


def one_of_each_group(paths: Sequence[Path], count: int, seed: int) -> list[Line]:
    """Return ``count`` questions, the files in turn; fewer where there are not so many groups."""
    draw = random.Random(seed)
    taken = set[str]()
    chosen = list[Line]()
    pools: list[list[Line]] = []
    for path in paths:
        pools.append([row for row in read_rows(path) if "prompt" in row])
        draw.shuffle(pools[-1])
    while any(pools) and len(chosen) < count:
        for pool in pools:
            while pool and pool[-1]["group"] in taken:
                pool.pop()
            if pool and len(chosen) < count:
                taken.add(pool[-1]["group"])
                chosen.append(pool.pop())
    return chosen


def jobs_of(rows: Sequence[Line], draws: int) -> list[Job]:
    """Return a request for each question, way of decoding and draw."""
    jobs = []
    for way, temperature in WAYS.items():
        for row in rows:
            for number in range(1 if temperature == 0 else draws):
                body = {
                    "messages": [user(row["prompt"])],
                    "max_tokens": GENERATE["max_tokens"],
                    "seed": number,
                }
                named = {} if temperature is None else {"temperature": temperature}
                known = {"way": way, "group": row["group"]}
                jobs.append(Job(f"{row['id']}+{way}+{number}", body | named, row["answers"], known))
    return jobs


def differences(lines: Sequence[Line]) -> str:
    """Return, by way of decoding, mean risk beside share wrong: of all answers, and of those below
    the threshold."""
    header = [
        "decoding",
        "answers",
        "left out",
        "mean risk",
        "wrong",
        "risk - wrong",
        "z",
        "below the threshold",
        "wrong among these",
        "their mean risk",
        "said to depart",
    ]
    rows = []
    for way in WAYS:
        own = [line for line in lines if line["way"] == way]
        judged = [line for line in own if line.get("verdict") in CLASSES]
        if not judged:
            continue
        told, wrong = _means(judged)
        below = [line for line in judged if not line["flagged"]]
        told_below, wrong_below = _means(below) if below else (None, None)
        departing = sum(line["departs"] is not None for line in judged)
        z = _z(judged)
        figures = [
            f"{told:.3f}",
            f"{wrong:.3f}",
            f"{told - wrong:+.3f}",
            "-" if z is None else f"{z:+.1f}",
        ]
        among = ["-" if share is None else f"{share:.3f}" for share in (wrong_below, told_below)]
        counts = [f"{len(judged):,}", f"{len(own) - len(judged):,}"]
        rows.append([way, *counts, *figures, f"{len(below):,}", *among, f"{departing:,}"])
    return markdown_table(header, rows, range(1, len(header)))


def _means(lines: Sequence[Line]) -> tuple[float, float]:
    """Return the mean risk and the share of wrong answers."""
    wrong = [1 - CLASSES[line["verdict"]] for line in lines]
    return float(np.mean([line["risk"] for line in lines])), float(np.mean(wrong))


def _z(lines: Sequence[Line]) -> float | None:
    """Return z of the difference, each question with the share of its draws that are right."""
    questions: dict[str, list[Line]] = {}
    for line in lines:
        questions.setdefault(line["group"], []).append(line)
    right = []
    for draws in questions.values():
        right.append(np.mean([CLASSES[line["verdict"]] for line in draws]))
    risk = np.array([draws[0]["risk"] for draws in questions.values()])
    return difference_z(np.array(right), risk, np.arange(len(questions)))


def target(lines: Sequence[Line]) -> Check:
    """Check the request that names no temperature, as most clients send it."""
    judged = [
        line for line in lines if line["way"] == "none named" and line.get("verdict") in CLASSES
    ]
    name, limit = "|mean risk - wrong|, no temperature named", f"<= {OFF}"
    if not judged:
        return Check(name, "-", limit, None, "no answer belongs to a class")
    told, wrong = _means(judged)
    return Check(name, f"{abs(told - wrong):.3f}", limit, abs(told - wrong) <= OFF)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--questions", type=Path, nargs="+", required=True, help="JSONL: id, prompt, answers, group"
    )
    parser.add_argument("--rows", type=int, default=300, help="questions")
    parser.add_argument("--draws", type=int, default=4, help="answers to each question")
    add_options(parser)
    parser.set_defaults(workers=16)
    options = parser.parse_args()
    rows = one_of_each_group(options.questions, options.rows, options.seed)
    with answers(options, chat=True) as ask:
        lines = together(ask, jobs_of(rows, options.draws), "answers", options.workers)
    bundle = next((line["bundle"] for line in lines if "bundle" in line), "-")
    print(
        f"Bundle {bundle[:19]}, {len(rows):,} questions, {len(lines):,}"
        f" requests.\n\n{differences(lines)}\n"
    )
    print(table([target(lines)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
