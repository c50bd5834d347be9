"""hallutracer data: public sets you downloaded -> JSONL rows for ``hallutracer train``.  No set is
shipped."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from hallutracer_research.data import judge_audit, mixture
from hallutracer_research.data.registry import SETS, SetInfo, read_set
from service.cli.options import Json, UsageError
from service.cli.output import print_json, print_line, print_table
from service.data import forms
from service.data.bank import ATTRIBUTION, bank_rows
from service.data.forms.tasks import task_rows
from service.data.options import Seed
from service.data.training_rows import read_dataset
from service.errors import HalluTracerError
from service.options import Common
from service.progress import note
from service.settings import Range, option

SetName = Literal[
    "truthfulqa",
    "truthfulqa-reference",
    "truefalse",
    "halueval2",
    "helm",
    "bfcl",
    "bfcl-answerable",
    "opentriviaqa",
    "opentriviaqa-choice",
    "nq-open",
    "knowledge",
]


def convert(
    name: Annotated[
        SetName,
        Parameter(help="Which set; `hallutracer data list` describes them.", show_env_var=False),
    ],
    folder: Annotated[
        Path,
        Parameter(
            help="The folder you downloaded: the set's own, or the repository.", show_env_var=False
        ),
    ],
    /,
    *,
    allow_other_counts: Annotated[
        bool,
        option(
            "Convert although the number of rows is not the published one: another version, another"
            " benchmark."
        ),
        Parameter(negative=""),
    ] = False,
    common: Common = Common(),
) -> None:
    """Print JSONL rows (id, prompt or messages, label or answers, group, kind); counts and caveats
    go to stderr.

    hallutracer data convert truefalse ~/true_false_data > truefalse.jsonl"""
    if not folder.is_dir():
        raise HalluTracerError(f"{folder} is not a folder")
    info = SETS[name]
    rows, counts = read_set(name, folder, allow_other_counts)
    _print(rows, f"rows of {info.title}", counts)
    if counts["read"] != info.rows:
        note(f"not the published {info.rows:,} rows: another version is another benchmark")
    note(f"label 0: {info.hallucinated}\n{info.caveat}")
    note(f"train with: {_advice(info)}")


def mix(
    *files: Annotated[
        str,
        Parameter(
            help="FILE, or FILE:ROWS for so many of its rows, drawn group by group.",
            show_env_var=False,
        ),
    ],
    seed: Seed = 0,
    without: Annotated[
        Path | None, option("Leave out every group that this file has a row of: for held-out rows.")
    ] = None,
    common: Common = Common(),
) -> None:
    """Print several files of rows as one: ids and kinds begin with the file's name.

    Rows of two files that ask the same question, by its words of content, get one group, so that no
    fold has one of them on either side.

      hallutracer data mix opentriviaqa.jsonl:3000 nq-open.jsonl:1500 mine.jsonl > rows.jsonl

      hallutracer data mix opentriviaqa.jsonl:500 nq-open.jsonl:200 --without rows.jsonl \\
          > held-out.jsonl
    """
    if not files:
        raise UsageError("FILES", "name at least one JSONL file")
    found = mixture.mix([_source(file) for file in files], seed, without)
    met = found.groups_before - found.groups
    _print(
        found.rows,
        "rows",
        found.by_source,
        f" in {found.groups:,} groups; {met:,} groups met in a question",
    )


def in_forms(
    file: Annotated[
        Path, Parameter(help="JSONL rows, questions asked by themselves.", show_env_var=False)
    ],
    /,
    *,
    form: Annotated[
        tuple[str, ...],
        option(
            f"Forms to draw from, repeatable: {', '.join(forms.families())}, one form's own name,"
            " or all."
        ),
    ] = ("all",),
    per_row: Annotated[
        int, option("In how many forms each question is asked.", limits=Range(1))
    ] = 1,
    said: Annotated[
        Path | None,
        option(
            "answers.jsonl of a run on these questions, for forms with the model's own earlier"
            " answers."
        ),
    ] = None,
    seed: Seed = 0,
    common: Common = Common(),
) -> None:
    """Print the questions as people ask them: in a chat, under a system prompt, beside a passage,
    in other words.

    A risk that was trained on lone questions is wrong in a conversation.  Each row has messages and
    names its form; its group, kind and answers stay.  The label has to come from the model's answer
    in that form (--labels generate).

      hallutracer data forms questions.jsonl > rows.jsonl

      hallutracer data forms questions.jsonl --form turns --form passages --per-row 2 > rows.jsonl
    """
    wanted, rows = forms.chosen(form), mixture.read_rows(file)
    own = {} if said is None else forms.read_model_answers(said)
    made = forms.in_forms(rows, wanted, per_row=per_row, seed=seed, model_answers=own)
    _print_counted(made, f"rows of {len(rows):,} questions", "form")


def bank(
    *,
    held_out: Annotated[
        bool,
        option("Print those of other entities, which training without --data holds out."),
        Parameter(negative=""),
    ] = False,
    common: Common = Common(),
) -> None:
    """Print the questions that come with the package: facts, OpenTriviaQA and NQ-Open, with
    accepted answers.

    Counts by kind and the file of sources and licences go to stderr.  `hallutracer train` asks
    these questions where no --data is given.

      hallutracer data bank > questions.jsonl"""
    rows = bank_rows("held-out" if held_out else "train")
    _print_counted(rows, "questions", "kind")
    note(f"sources and licences: {ATTRIBUTION}")


def tasks(
    *,
    count: Annotated[int, option("How many requests to print.", limits=Range(1))] = 1500,
    seed: Seed = 0,
    common: Common = Common(),
) -> None:
    """Print requests that ask the model for no fact: greetings, poems, translations, code,
    summaries, nonsense.

    Each row has messages and `"applies": false`; a bit under half of them stand alone, the others
    in a conversation.

      hallutracer data tasks > tasks.jsonl"""
    made = task_rows(count, seed)
    _print_counted(made, "rows", "kind")


def audit(
    file: Annotated[
        Path,
        Parameter(
            help="The training rows, with --sample; else the CSV that you have read.",
            show_env_var=False,
        ),
    ],
    /,
    *,
    sample: Annotated[
        Path | None, option("Print verdicts of the training run in this --run-dir, as CSV.")
    ] = None,
    rows: Annotated[
        int, option("How many verdicts to sample, half of each class.", limits=Range(2))
    ] = 300,
    seed: Seed = 0,
    as_json: Json = False,
    common: Common = Common(),
) -> None:
    """Measure how right the judge's labels are: print some to read, then compare what you read.

    In the CSV write right, wrong or unclear into the column "read" of each row: whether the answer
    is right, whatever the judge said.

      hallutracer data audit rows.jsonl --sample ./run > audit.csv

      hallutracer data audit audit.csv"""
    if sample is not None:
        judge_audit.write(
            judge_audit.sample(read_dataset(file, "generate", folds=0), sample, rows, seed),
            sys.stdout,
        )
        note(
            'write right, wrong or unclear into the column "read", then: hallutracer data audit'
            " FILE.csv"
        )
        return
    found = judge_audit.measure(judge_audit.read(file))
    if as_json:
        print_json(asdict(found))
        return
    print_line(f"{found.read} verdicts read, {found.unclear} more are unclear")
    for name, rate in (
        ("agreement", found.agreement),
        ("right, of those judged right", found.right_if_judged_right),
        ("wrong, of those judged wrong", found.wrong_if_judged_wrong),
        ("AUROC against these labels of a predictor that knows the truth", found.ceiling),
    ):
        print_line(f"{rate.value:.3f} [{rate.low:.3f}, {rate.high:.3f}]  {name}")
    note("95 % intervals (Jeffreys); classes weighted by their share of all verdicts")


def _print(
    rows: Sequence[Mapping[str, Any]], what: str, counts: Mapping[str, int], more: str = ""
) -> None:
    """Print the rows as JSONL, and on stderr how many there are of what."""
    for row in rows:
        print_line(json.dumps(row, ensure_ascii=False))
    note(
        f"{len(rows):,} {what}"
        f" ({', '.join(f'{name} {count:,}' for name, count in counts.items())}){more}"
    )


def _print_counted(rows: Sequence[Mapping[str, Any]], what: str, key: str) -> None:
    """Print the rows, and on stderr how many have each value of ``key``, most frequent first."""
    counts = Counter(row[key].removeprefix("task/") for row in rows)
    _print(rows, what, dict(counts.most_common()))


def _source(text: str) -> mixture.MixtureSource:
    name, colon, rows = text.rpartition(":")
    if colon and rows.isdigit() and int(rows) > 0:
        return mixture.MixtureSource(Path(name), int(rows))
    return mixture.MixtureSource(Path(text))


def _advice(info: SetInfo) -> str:
    """Return the options of ``hallutracer train`` that belong to the set."""
    if info.labels == "given":
        return "--labels given"
    parts = [f"--labels generate --judge {info.judge}"]
    if info.max_new_tokens is not None:
        parts.append(f"--max-new-tokens {info.max_new_tokens}")
    if info.abstain_pattern is not None:
        parts.append(f"--abstain-pattern '{info.abstain_pattern}'")
    return " ".join(parts)


def list_(*, as_json: Json = False, common: Common = Common()) -> None:
    """List the sets that have a reader: size, labels, groups, licence, and where to get them."""
    shown = (
        "name",
        "title",
        "rows",
        "labels",
        "group",
        "kinds",
        "hallucinated",
        "onset",
        "caveat",
        "licence",
        "source",
    )
    rows: list[dict[str, Any]] = []
    for info in SETS.values():
        row = {name: getattr(info, name) for name in shown}
        rows.append(row | {"labels": info.judge or info.labels, "train": _advice(info)})
    if as_json:
        print_json(rows)
        return
    renamed = {"name": "set", "kinds": "sub-sets", "source": "from"}
    columns = ("set", "rows", "labels", "group", "sub-sets", "licence", "from")
    shown_rows = []
    for row in rows:
        named = {renamed.get(key, key): value for key, value in row.items()}
        shown_rows.append(named | {"rows": f"{row['rows']:,}"})
    print_table(shown_rows, columns)
    print_line(
        "\nlabels: given = the set's own; any other = the model answers and this judge compares.\n"
        "Download a set yourself, then: hallutracer data convert SET FOLDER > rows.jsonl"
    )


COMMANDS = (
    "Turn public sets into training rows.",
    {
        "bank": bank,
        "convert": convert,
        "list": list_,
        "mix": mix,
        "forms": in_forms,
        "tasks": tasks,
        "audit": audit,
    },
)
