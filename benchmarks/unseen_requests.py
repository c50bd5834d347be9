"""Whether a gate's decision holds where a question is asked in ways that no training had, through
the running service.

    python -m benchmarks.unseen_requests --record unseen.jsonl [--questions 40] [--texts 2] \\
        [--model smollm2] [--bundle NAME] [--store DIR] \\
        [--url http://127.0.0.1:8765]

``--questions`` held-out facts of different groups that the model answers wrong when they are asked
plainly (24 tokens, greedy), at a risk that reaches the threshold.  Each is then asked behind an
easy question, in a follow-up, inside a task and in key words, in ``--texts`` texts of each way, all
from ``unseen_requests.toml``.  What passes, and what the gate takes for a request that asks for no
fact (``applies``); and of requests that ask for none, how many are withheld. A run that was ended
goes on where the record stops."""

from __future__ import annotations

import argparse
import random
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Check
from benchmarks.harness import table as check_table
from benchmarks.running_service import (
    GENERATE,
    Job,
    Line,
    Message,
    add_options,
    answers,
    together,
    user,
)
from service.demo.questions import fact_rows
from service.fitting.scores import jeffreys
from service.trainer.presentation import markdown_table

TEXTS: Mapping[str, Any] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
PLAIN, KEY_WORDS, NO_FACT = "plain", "key words", "no fact: "
# targets: 6 of 40 requests that ask for no fact may be withheld
PASS, SMALL_TALK, WITHHELD = 0.15, 0.10, 0.15


def turns(*texts: str) -> list[Message]:
    """Return a conversation that begins with the user."""
    return [
        {"role": ("user", "assistant")[number % 2], "content": text}
        for number, text in enumerate(texts)
    ]


def questions(seed: int) -> list[Line]:
    """Return one held-out fact of each group, in a drawn order."""
    rows = [row for row in fact_rows("test") if row["relation"] in TEXTS["relation"]]
    random.Random(seed).shuffle(rows)
    return list({row["group"]: row for row in rows}.values())


def asked_plainly(row: Line) -> Job:
    body = {"messages": [user(row["prompt"])], "policy": "observe", "generate": GENERATE}
    return Job(f"{row['id']}+{PLAIN}", body, row["answers"], {"way": PLAIN})


def withheld_and_wrong(
    ask: Callable[[Job], Line], rows: Sequence[Line], wanted: int, workers: int
) -> list[Line]:
    """Return the first ``wanted`` rows that are answered wrong at a risk that reaches the
    threshold."""
    chosen: list[Line] = []
    for start in range(0, len(rows), wanted):
        some = rows[start : start + wanted]
        lines = together(ask, [asked_plainly(row) for row in some], "questions", workers)
        pairs = zip(some, lines, strict=True)
        chosen += [
            row for row, line in pairs if line.get("verdict") == "hallucinated" and line["flagged"]
        ]
        if len(chosen) >= wanted:
            break
    return chosen[:wanted]


def in_other_ways(row: Line, texts: int, seed: int) -> list[Job]:
    """Return the row in ``texts`` texts of each way, under the gate."""
    draw, jobs = random.Random(f"{seed} {row['id']}"), []
    for way in TEXTS["way"]:
        for number, frames in enumerate(draw.sample(way["turns"], min(texts, len(way["turns"])))):
            messages = turns(*(_filled(frame, row, draw) for frame in frames))
            body = {"messages": messages, "policy": "gate"}
            jobs.append(Job(f"{row['id']}+{way['name']}+{number}", body, (), {"way": way["name"]}))
    return jobs


def _filled(frame: str, row: Line, draw: random.Random) -> str:
    relation, question = TEXTS["relation"][row["relation"]], row["prompt"]
    phrase = draw.choice(relation["p"]).format(s=row["subject"])
    return frame.format(
        q=question,
        u=question[0].lower() + question[1:],
        s=row["subject"],
        S=_started(row["subject"]),
        p=phrase,
        P=_started(phrase),
        key=draw.choice(relation["key"]),
        easy=draw.choice(TEXTS["easy"]["questions"]),
    )


def _started(text: str) -> str:
    return text[:1].upper() + text[1:]


def no_fact_jobs() -> list[Job]:
    """Return the requests that ask for no fact, under the gate."""
    return [
        Job(
            f"{kind}+{number}",
            {
                "messages": turns(*([request] if isinstance(request, str) else request)),
                "policy": "gate",
            },
            (),
            {"way": f"{NO_FACT}{kind}"},
        )
        for kind, requests in TEXTS["no_fact"].items()
        for number, request in enumerate(requests)
    ]


def shares(lines: Sequence[Line]) -> str:
    """Return, by way of asking, what passed and what was taken for a request that asks for no
    fact."""
    rows = []
    for way in dict.fromkeys(line["way"] for line in lines):
        own = _answered(lines, way)
        if own:
            figures = [_share(own, passed), _share(own, taken_for_small_talk)]
            rows.append(
                [way, str(len(own)), *figures, str(sum(bool(line["outside"]) for line in own))]
            )
    return markdown_table(
        ["asked", "tried", "passes", "said to ask for no fact", "outside"], rows, range(1, 5)
    )


def passed(line: Line) -> bool:
    return bool(line["decision"] == "continue")


def taken_for_small_talk(line: Line) -> bool:
    return line["applies"] is False


def _answered(lines: Sequence[Line], *ways: str) -> list[Line]:
    return [line for line in lines if line["way"] in ways and "decision" in line]


def _share(lines: Sequence[Line], holds: Callable[[Line], bool]) -> str:
    share = sum(map(holds, lines)) / len(lines)
    low, high = jeffreys(share, len(lines))
    return f"{share:.2f} [{low:.2f}, {high:.2f}]"


def targets(lines: Sequence[Line]) -> list[Check]:
    """Check what passes, what of the key words is taken for small talk, and what that asks for no
    fact is withheld."""
    names = [way["name"] for way in TEXTS["way"]]
    dressed = _answered(lines, *(name for name in names if name != KEY_WORDS))
    key_words = _answered(lines, KEY_WORDS)
    no_fact = _answered(
        lines, *dict.fromkeys(line["way"] for line in lines if line["way"].startswith(NO_FACT))
    )
    return [
        _check("pass, all ways but key words", dressed, passed, PASS),
        _check("key words, said to ask for no fact", key_words, taken_for_small_talk, SMALL_TALK),
        _check(
            "requests that ask for no fact, withheld",
            no_fact,
            lambda line: not passed(line),
            WITHHELD,
        ),
    ]


def _check(name: str, lines: Sequence[Line], holds: Callable[[Line], bool], limit: float) -> Check:
    if not lines:
        return Check(name, "-", f"<= {limit:.2f}", None, "nothing was asked")
    count = sum(map(holds, lines))
    share = count / len(lines)
    return Check(name, f"{share:.2f} ({count} of {len(lines)})", f"<= {limit:.2f}", share <= limit)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--questions",
        type=int,
        default=40,
        help="that the gate withholds and the model answers wrong",
    )
    parser.add_argument(
        "--texts", type=int, default=2, help="of each way of asking, for each question"
    )
    add_options(parser)
    options = parser.parse_args()
    with answers(options) as ask:
        rows = withheld_and_wrong(ask, questions(options.seed), options.questions, options.workers)
        jobs = [
            job for row in rows for job in in_other_ways(row, options.texts, options.seed)
        ] + no_fact_jobs()
        lines = together(ask, jobs, "requests", options.workers)
    print(
        f"{len(rows)} questions that the gate withholds and the model answers"
        f" wrong.\n\n{shares(lines)}\n"
    )
    print(check_table(targets(lines)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
