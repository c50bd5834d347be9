"""What the risk is worth in each form of conversation, through the running service.

    hallutracer demo questions --split test > questions.jsonl
    python -m benchmarks.forms --questions questions.jsonl --record forms.jsonl
        [--said answers.jsonl] [--per-form 300] [--forms turns passages ...] [--model smollm2]
        [--bundle NAME] [--store DIR] [--url http://127.0.0.1:8765]
    python -m benchmarks.forms --rows held-out.jsonl --by kind --record kinds.jsonl
    python -m benchmarks.forms --record prompts.jsonl --applies chats.txt --applies questions.txt

Each form (service/data/forms) gets ``--per-form`` rows: the same questions in every form, as far as
they fit it.  Each row is asked under a policy that lets everything through, its answer (24 tokens,
greedy) is judged as training judges with ``contains``, and ``answered`` is what the threshold would
let through.  Answers that abstain are left out as in training; a second table counts them as
wrong.  AUROC with a 95 % interval, by bootstrap over groups.  ``--rows``: rows as they stand, by
their form or kind.  ``--applies``: files with a prompt on each line: how many the gate withholds,
and how many it says the risk does not apply to.

A run that was ended goes on where the record stops."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from benchmarks.harness import Check, table
from benchmarks.running_service import GENERATE, Job, Line, add_options, answers, together, user
from hallutracer_research.data.mixture import read_rows
from service.data.forms import FORMS, Form, chosen, in_forms, read_model_answers
from service.data.labels import CLASSES
from service.data.rows import objects
from service.fitting.scores import (
    debiased_calibration_error,
    group_draws,
    risk_auroc,
    shown_bins,
    within_stratum_auroc,
)
from service.trainer.presentation import markdown_table

LONE, ALL = "lone", "all forms"
CHANCE, LOSS, OFF_ANSWERED = 0.05, 0.04, 0.08  # targets (a), (b), (c)
ENOUGH = 20  # answered ones, for (c)
COMPANY = 400  # questions at least from which a form takes what stands around one


def plan(
    rows: Sequence[Line],
    forms: Sequence[Form],
    per_form: int,
    seed: int,
    said: dict[str, str] | None = None,
) -> list[Job]:
    questions = [row for row in rows if "prompt" in row]
    random.Random(seed).shuffle(questions)
    drawn = questions[: max(4 * per_form, COMPANY)]
    asked = [
        (form, row)
        for form in forms
        for row in in_forms(drawn, [form], seed=seed, model_answers=said)[:per_form]
    ]
    return [
        Job(
            row["id"],
            {"messages": row["messages"], "policy": "observe", "generate": GENERATE},
            row["answers"],
            {"form": form.name, "group": row["group"]},
        )
        for form, row in asked
    ]


def as_they_stand(path: Path, by: str) -> list[Job]:
    """Return a request for each row of a file; the tables are by its key ``by``."""
    rows = [value for _, value in objects(path, [])]
    return [
        Job(
            str(row["id"]),
            {
                "messages": row.get("messages") or [user(row["prompt"])],
                "policy": "observe",
                "generate": GENERATE,
            },
            row["answers"],
            {
                "form": row.get(by) or "none",
                "group": row.get("group") or row["id"],
                "kind": row.get("kind") or "",
            },
        )
        for row in rows
    ]


@dataclass(frozen=True)
class Worth:
    """Figures of the risk in one form; None where there is nothing to take them of."""

    rows: int
    left_out: int
    wrong: float
    risk: float  # mean
    z: float | None  # of its difference from ``wrong``
    calibration: float  # debiased calibration error
    auroc: float | None
    within: float | None  # AUROC among rows of one kind, where they name theirs
    low: float | None
    high: float | None
    answered: int
    answered_wrong: float | None
    answered_risk: float | None  # mean
    outside: float | None

    @property
    def off(self) -> float:
        """Mean risk minus the share of wrong answers."""
        return self.risk - self.wrong

    @property
    def answered_off(self) -> float:
        assert self.answered_risk is not None
        assert self.answered_wrong is not None
        return self.answered_risk - self.answered_wrong


def worth(lines: Sequence[Line], *, abstained_wrong: bool = False) -> Worth | None:
    """Return the figures of the rows of one form, or of several; None where no answer belongs to a
    class."""
    verdicts = CLASSES | ({"abstained": 0, "empty": 0} if abstained_wrong else {})
    kept = [line for line in lines if line.get("verdict") in verdicts]
    if not kept:
        return None
    label = np.array([verdicts[line["verdict"]] for line in kept], np.int64)
    risk = np.array([line["risk"] for line in kept])
    group = np.unique([line["group"] for line in kept], return_inverse=True)[1]
    answered = ~np.array([line["flagged"] for line in kept])
    outside = [line["outside"] for line in kept if line["outside"] is not None]
    both = 0 < label.sum() < len(label)
    low, high = auroc_interval(label, risk, group) if both else (None, None)
    return Worth(
        rows=len(kept),
        left_out=len(lines) - len(kept),
        wrong=float(1 - label.mean()),
        risk=float(risk.mean()),
        z=difference_z(label, risk, group),
        calibration=debiased_calibration_error(label, risk, shown_bins(len(kept))),
        auroc=risk_auroc(label, risk) if both else None,
        low=low,
        high=high,
        answered=int(answered.sum()),
        within=within_stratum_auroc(label, risk, [line["kind"] for line in kept])
        if "kind" in kept[0]
        else None,
        answered_wrong=float(1 - label[answered].mean()) if answered.any() else None,
        answered_risk=float(risk[answered].mean()) if answered.any() else None,
        outside=float(np.mean(outside)) if outside else None,
    )


def difference_z(
    label: NDArray[np.int64] | NDArray[np.float64],
    risk: NDArray[np.float64],
    group: NDArray[np.int64],
) -> float | None:
    """Return mean risk minus the share of wrong answers over its standard error: label, risk, group
    [n].

    A label is 1 for a right answer, 0 for a wrong one, or the share of right ones where a row is
    several answers. The error is the larger of what draws by the risks themselves have and of the
    spread between groups, whose rows depend on each other.  None where there is a single group or
    no risk between 0 and 1."""
    of_group = np.bincount(group, risk - (1 - label))
    error = float(np.sqrt(max(np.sum(risk * (1 - risk)), np.sum(of_group**2))))
    return None if len(of_group) < 2 or error == 0 else float(of_group.sum() / error)


def beyond_chance(z: Mapping[str, float]) -> set[str]:
    """Return the names whose z is beyond what chance gives so many of them, by Holm's procedure at
    5 %."""
    beyond = set[str]()
    for name in sorted(z, key=lambda name: -abs(z[name])):
        if 2 * norm.sf(abs(z[name])) * (len(z) - len(beyond)) > CHANCE:
            break
        beyond.add(name)
    return beyond


def auroc_interval(
    label: NDArray[np.int64], risk: NDArray[np.float64], group: NDArray[np.int64]
) -> tuple[float, float] | tuple[None, None]:
    """Return the middle 95 % over draws of groups; a draw without a class is left out.  label,
    risk, group [n]."""
    found = []
    for weight in group_draws(group):
        rows = np.repeat(np.arange(len(label)), weight.astype(np.int64))
        if 0 < label[rows].sum() < len(rows):
            found.append(risk_auroc(label[rows], risk[rows]))
    if not found:
        return None, None
    low, high = np.quantile(found, [0.025, 0.975])
    return float(low), float(high)


def worths(lines: Sequence[Line], *, abstained_wrong: bool = False) -> dict[str, Worth]:
    parts: dict[str, list[Line]] = {}
    for line in lines:
        parts.setdefault(line["form"], []).append(line)
    parts[ALL] = list(lines)
    found = {name: worth(part, abstained_wrong=abstained_wrong) for name, part in parts.items()}
    return {name: one for name, one in found.items() if one is not None}


HEADER = [
    "form",
    "n",
    "left out",
    "wrong",
    "mean risk",
    "risk - wrong",
    "z",
    "calibration error",
    "AUROC",
    "within kind",
    "answered",
    "wrong among answered",
    "their mean risk",
    "outside",
]


def shown(found: dict[str, Worth]) -> str:
    rows = [
        [
            name if name == ALL else f"`{name}`",
            f"{one.rows:,}",
            f"{one.left_out:,}",
            _number(one.wrong),
            _number(one.risk),
            f"{one.off:+.3f}",
            "-" if one.z is None else f"{one.z:+.1f}",
            _number(one.calibration),
            "-"
            if one.auroc is None
            else f"{one.auroc:.3f} [{_number(one.low)}, {_number(one.high)}]",
            _number(one.within),
            f"{one.answered:,}",
            *map(_number, (one.answered_wrong, one.answered_risk, one.outside)),
        ]
        for name, one in found.items()
    ]
    return markdown_table(HEADER, rows, range(1, len(HEADER)))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def targets(found: dict[str, Worth]) -> list[Check]:
    """Check whether each form meets (a), (b) and (c), and which do not."""
    forms = {name: one for name, one in found.items() if name != ALL}
    lone = forms[LONE].auroc if LONE in forms else None
    z = {name: one.z for name, one in forms.items() if one.z is not None}
    beyond = beyond_chance(z)
    worst = ", ".join(
        f"{name} {forms[name].off:+.3f} (z {z[name]:+.1f})"
        for name in sorted(beyond, key=lambda name: -abs(z[name]))
    )
    gains = {
        name: one.auroc - lone
        for name, one in forms.items()
        if one.auroc is not None and lone is not None
    }
    answered = {name: one.answered_off for name, one in forms.items() if one.answered >= ENOUGH}
    wanting = (
        "not judged, for want of lone questions or of a class",
        f"not judged, fewer than {ENOUGH} answered",
    )
    return [
        Check(
            "(a) mean risk is the share of wrong",
            f"met by {len(z) - len(beyond)} of {len(z)}",
            "z within chance (Holm)",
            not beyond if z else None,
            f"missed by {worst}" if beyond else "",
        ),
        _check("(b) AUROC - the lone question's", gains, forms, LOSS, wanting[0], one_sided=True),
        _check("(c) |mean risk - wrong| among answered", answered, forms, OFF_ANSWERED, wanting[1]),
    ]


def _check(
    name: str,
    found: dict[str, float],
    forms: Iterable[str],
    limit: float,
    why_not: str = "",
    *,
    one_sided: bool = False,
) -> Check:
    values = {form: round(value, 9) for form, value in found.items()}  # 0.05 itself is met
    missed = {
        form: value
        for form, value in values.items()
        if (-value if one_sided else abs(value)) > limit
    }
    notes = []
    if missed:
        worst_first = sorted(missed.items(), key=lambda item: -abs(item[1]))
        notes.append(
            "missed by " + ", ".join(f"{form} {number:+.3f}" for form, number in worst_first)
        )
    if others := [form for form in forms if form not in values]:
        notes.append(f"{len(others)} {why_not}: {', '.join(others)}")
    figure = f"met by {len(values) - len(missed)} of {len(values)}"
    target = f">= -{limit}" if one_sided else f"<= {limit}"
    return Check(name, figure, target, not missed if values else None, "; ".join(notes))


def report(lines: Sequence[Line], forms: Sequence[str]) -> str:
    """Return both tables with their verdicts, what was refused, and which of ``forms`` have no
    row."""
    parts = []
    for title, wrong in (
        ("Abstentions left out", False),
        ("Abstentions and empty answers counted as wrong", True),
    ):
        found = worths(lines, abstained_wrong=wrong)
        parts.append(f"## {title}\n\n{shown(found)}\n\n```\n{table(targets(found))}\n```")
    sent = [line for line in lines if "bundle" in line]
    if sent:
        thresholds = {line["threshold"] for line in sent}
        levels = ", ".join(f"{level:.3f}" for level in sorted(thresholds))
        parts.insert(
            0, f"Bundle {sent[0]['bundle'][:19]}, threshold {levels}, {len(lines):,} requests."
        )
    if refused := [line for line in lines if "refused" in line]:
        names = ", ".join(sorted({f"{line['form']} ({line['refused']})" for line in refused}))
        parts.append(f"{len(refused):,} requests were refused: {names}.")
    asked = {line["form"] for line in lines}
    if without := [name for name in forms if name not in asked]:
        parts.append(f"No question fits {', '.join(without)}: some forms need --said.")
    if LONE in forms:
        parts.append(examples(lines))
    return "\n\n".join(parts)


def examples(lines: Sequence[Line]) -> str:
    """Return the middle one of the lone questions that are answered right, and of those withheld
    and wrong. The rule by which examples for README, playground and ``serve`` are drawn."""
    rows = []
    for title, flagged, verdict in (
        ("answered, right", False, "factual"),
        ("withheld, wrong", True, "hallucinated"),
    ):
        own = [line for line in lines if line["form"] == LONE and line.get("verdict") == verdict]
        own = sorted(
            (line for line in own if line["flagged"] is flagged),
            key=lambda line: (line["risk"], line["id"]),
        )
        middle: Line = own[(len(own) - 1) // 2] if own else {"id": "-", "answer": "", "risk": None}
        rows.append(
            [title, f"{len(own):,}", middle["id"], _number(middle["risk"]), middle["answer"]]
        )
    return markdown_table(["lone questions", "n", "the middle one", "risk", "answer"], rows, (1, 3))


def prompts(path: Path) -> list[Job]:
    """Return a request for each line of a file, under the gate."""
    texts = [text.strip() for text in path.read_text(encoding="utf-8").splitlines() if text.strip()]
    bodies = [{"messages": [user(text)], "policy": "gate"} for text in texts]
    return [
        Job(f"{path.stem}:{number}", body, (), {"file": path.stem})
        for number, body in enumerate(bodies, 1)
    ]


def applying(lines: Sequence[Line]) -> str:
    """Return by file what the gate withholds, and what it says the risk does not apply to."""
    header = ["prompts", "n", "withheld", "said not to apply", "mean risk", "outside"]
    rows = []
    for name in dict.fromkeys(line["file"] for line in lines):
        own = [line for line in lines if line["file"] == name and "risk" in line]
        said = [line["applies"] for line in own if line["applies"] is not None]
        counts = [len(own), sum(line["decision"] != "continue" for line in own)]
        risk = _number(float(np.mean([line["risk"] for line in own])) if own else None)
        outside = sum(bool(line["outside"]) for line in own)
        not_applying = f"{said.count(False):,}" if said else "-"
        rows.append([name, *(f"{count:,}" for count in counts), not_applying, risk, f"{outside:,}"])
    return markdown_table(header, rows, range(1, len(header)))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--questions", type=Path, help="JSONL rows: id, prompt, answers, group, kind"
    )
    parser.add_argument(
        "--said", type=Path, help="answers.jsonl of a run on them, for forms with the model's own"
    )
    parser.add_argument("--per-form", type=int, default=300)
    parser.add_argument(
        "--forms", nargs="+", default=["all"], help=f"of {', '.join(FORMS)}; or families"
    )
    parser.add_argument(
        "--rows",
        type=Path,
        help="JSONL rows as they stand: id, prompt or messages, answers, form, kind",
    )
    parser.add_argument(
        "--by", choices=["form", "kind"], default="form", help="what the table of --rows is by"
    )
    parser.add_argument(
        "--applies",
        type=Path,
        action="append",
        default=[],
        help="a prompt on each line; repeatable",
    )
    add_options(parser)
    options = parser.parse_args()
    if not (options.questions or options.rows or options.applies):
        parser.error("give --questions, --rows or --applies")
    if options.questions and options.rows:
        parser.error("--questions and --rows exclude each other")
    asked = [job for path in options.applies for job in prompts(path)]
    forms = chosen(options.forms)
    jobs: list[Job] = []
    if options.questions:
        said = None if options.said is None else read_model_answers(options.said)
        jobs = plan(read_rows(options.questions), forms, options.per_form, options.seed, said)
    if options.rows:
        jobs = as_they_stand(options.rows, options.by)
        forms = []
    with answers(options) as ask:
        if jobs:
            lines = together(ask, jobs, "forms", options.workers)
            print(report(lines, [form.name for form in forms]), flush=True)
        if asked:
            print("\n" * bool(jobs) + applying(together(ask, asked, "prompts", options.workers)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
