"""hallutracer evaluate: the paper's tables on your model and your data, baselines on the same
rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from hallutracer_research.evaluation.methods import METHODS
from service.cli.options import EngineChoice, Out, UsageError, check_place
from service.cli.output import print_line
from service.data.options import Data, LabelOptions, LabelSource, outside_training
from service.options import Common
from service.settings import Range, option, section
from service.trainer.options import FoldOptions, made_of

if TYPE_CHECKING:
    from hallutracer_research.evaluation.options import EvaluationSource

FEWEST_ROWS = 50  # of a --limit


@section("Evaluation", 5)
@dataclass(frozen=True, kw_only=True)
class EvaluateChoices:
    """What is compared, and on which rows."""

    data: Data = ()
    labels: LabelSource = None
    out: Out = None
    suite: Annotated[
        Literal["main", "paper"],
        option(
            "main: the main table.  paper: every table and figure of the paper, beside its"
            " published numbers."
        ),
    ] = "main"
    methods: Annotated[
        str | None,
        option(
            f"Comma-separated: {', '.join(METHODS)}; or a class by its cost: none, A, B, C, D; or"
            " default, all.  Default: those that read the prompt alone."
        ),
    ] = None
    other_model: Annotated[
        str | None,
        option(
            "Another model, whose states on the same questions are a rival: where they tell as"
            " much, a probe reads which questions are hard.  A folder, a GGUF file or a hub name."
        ),
    ] = None
    embedder: Annotated[
        Path | None,
        option(
            "Folder of a sentence encoder, whose embedding of the text is a rival that reads no"
            " model."
        ),
    ] = None
    beside: Annotated[
        tuple[str, ...],
        option(
            "Folder of a finished evaluation of another model on the same data, repeatable: the"
            " report puts both side by side."
        ),
        Parameter(metavar="FOLDER"),
    ] = ()
    samples: Annotated[
        int,
        option("Answers sampled for each prompt, for methods that compare them.", limits=Range(2)),
    ] = 10
    inner_folds: Annotated[int, option("Folds inside a training side.", limits=Range(2))] = 3
    per_subset: Annotated[bool, option("Also train and test inside each sub-dataset.")] = True
    skip_long: Annotated[
        bool,
        option(
            "Leave out, and count, rows that the model's context cannot hold.  Without it they are"
            " an error."
        ),
    ] = False
    limit: Annotated[
        tuple[str, ...],
        option(
            "ROWS, about so many of each set, or NAME=ROWS for one of them; repeatable.  Default:"
            " all."
        ),
        Parameter(metavar="ROWS"),
    ] = ()


def evaluate(
    *,
    options: EvaluateChoices = EvaluateChoices(),
    labels: LabelOptions = LabelOptions(),
    fit: FoldOptions = FoldOptions(),
    engine: EngineChoice = EngineChoice(),
    common: Common = Common(),
) -> None:
    """Put HalluTracer and the baselines on the same rows of your model, and write a report.

    One forward pass over the prompts feeds every method; splits are group-disjoint, and everything
    a method learns comes from the training side.  Interrupt it at any time: the same command
    resumes where it stopped.

      hallutracer evaluate --suite paper    # the demo model on its own questions
      hallutracer evaluate --model ./my-model --data questions.jsonl
      hallutracer evaluate --model ./my-model --data helm=./helm --data bfcl=./bfcl"""
    from rich.console import Console

    from hallutracer_research.evaluating import BadSource, run_evaluation, source, sources_of
    from hallutracer_research.evaluation.options import EvaluateOptions, method_names
    from hallutracer_research.evaluation.page import table_markdown
    from hallutracer_research.paper.report import command_line

    try:
        sources = tuple(map(source, options.data)) or sources_of(None, engine.model)
    except BadSource as error:
        raise UsageError("--data", str(error)) from None
    if options.other_model is not None:
        check_place(options.other_model)
    names = method_names(
        options.methods, other_model=options.other_model, embedder=options.embedder
    )
    evaluation = made_of(
        EvaluateOptions,
        options,
        labels,
        fit,
        sources=limited(sources, options.limit),
        out=options.out or Path("evaluation"),
        methods=names,
        beside=tuple(map(Path, options.beside)),
        seeds=len(fit.shuffles),
        labels=outside_training(options.labels),
    )
    chosen = engine.options_for()  # a wrong option is reported before rows are read
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        found = run_evaluation(
            evaluation, chosen, threads=engine.threads, console=console, command=command_line()
        )
    except KeyboardInterrupt:
        console.print(f"the same command resumes from {evaluation.out}")
        raise
    print_line(table_markdown(found.result.main))
    print_line("\n".join(str(path) for path in found.files))


def limited(
    sources: Sequence[EvaluationSource], limits: Sequence[str]
) -> tuple[EvaluationSource, ...]:
    """Return the sources with their ``--limit``: NAME=ROWS before ROWS.  Raises UsageError."""
    rows: dict[str | None, int] = {}
    for text in limits:
        name, equals, count = text.rpartition("=")
        key = name if equals else None
        if not (count.isdecimal() and int(count) >= FEWEST_ROWS):
            raise UsageError(
                "--limit", f"{text!r} is not ROWS or NAME=ROWS with at least {FEWEST_ROWS} rows"
            )
        if equals and name not in (known := [source.name for source in sources]):
            raise UsageError("--limit", f"{name!r} is not among the data: {', '.join(known)}")
        if key in rows:
            raise UsageError("--limit", f"{name or 'ROWS'} is given twice")
        rows[key] = int(count)
    return tuple(replace(source, limit=rows.get(source.name, rows.get(None))) for source in sources)
