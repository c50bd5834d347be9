"""hallutracer evaluate: the paper's tables on your model and your data, baselines on the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from service.cli import options as o
from service.cli.loading import engine_options, load_engine
from service.data.options import JudgeName
from service.settings import env

if TYPE_CHECKING:
    from service.evaluation.options import Source

Suite = Literal["main", "paper"]
PromptFormat = Literal["auto", "chat", "text"]


def evaluate(
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="What to evaluate on, once or more often: a JSONL file as for 'train', or NAME=FOLDER for a public "
            "set you downloaded ('hallutracer data list').  Default, with the demo model only: its own questions.",
            envvar=env("data"),
            metavar="FILE|NAME=FOLDER",
            show_default=False,
        ),
    ] = None,
    model: o.Model = None,
    out: Annotated[
        Path, typer.Option(help="Folder for readouts, scores and the report.", envvar=env("out"), file_okay=False)
    ] = Path("evaluation"),
    suite: Annotated[
        Suite,
        typer.Option(
            help="main: the main table.  paper: every table and figure of the paper, beside its published numbers.",
            envvar=env("suite"),
        ),
    ] = "main",
    methods: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: hallutracer, residual-depth-mean, iti, fact-probe, iris, halluguard, "
            "first-token-max-prob, first-token-entropy, prompt-length.  Default: all but halluguard, which decodes and "
            "differentiates every answer.",
            envvar=env("methods"),
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Shuffles of the folds.", envvar=env("seeds"))] = 3,
    folds: Annotated[int, typer.Option(min=2, help="Outer folds.", envvar=env("folds"))] = 5,
    inner_folds: Annotated[
        int, typer.Option(min=2, help="Folds inside a training side.", envvar=env("inner-folds"))
    ] = 3,
    c: Annotated[
        float | None,
        typer.Option(
            help="Inverse strength of the probes' penalty.  Default: chosen inside each training side.",
            envvar=env("c"),
            show_default=False,
        ),
    ] = None,
    judge: Annotated[
        JudgeName | None,
        typer.Option(
            help="For sets whose labels are the model's own answers.  Default: the set's own, or 'contains'.",
            envvar=env("judge"),
            show_default=False,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Length of such an answer.", envvar=env("max-new-tokens"), show_default="the set's own, or 48"
        ),
    ] = None,
    prompt_format: Annotated[
        PromptFormat,
        typer.Option(help="How a bare prompt is rendered; auto: chat if the model can.", envvar=env("prompt-format")),
    ] = "auto",
    per_subset: Annotated[
        bool,
        typer.Option(help="Also train and test inside each sub-dataset.", envvar=env("per-subset")),
    ] = True,
    skip_long: Annotated[
        bool,
        typer.Option(
            "--skip-long",
            help="Leave out, and count, rows that the model's context cannot hold.  Without it they are an error.",
            envvar=env("skip-long"),
        ),
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            min=50, help="About this many rows of each set, for a quick look.", envvar=env("limit"), show_default="all"
        ),
    ] = None,
    batch_rows: Annotated[
        int, typer.Option(min=1, help="Prompts in one call of the engine.", envvar=env("batch-rows"))
    ] = 32,
    jobs: Annotated[int, typer.Option(min=0, help="Processes for the fits; 0: all cores.", envvar=env("jobs"))] = 0,
    revision: o.Revision = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    max_batch_tokens: o.MaxBatchTokens = None,
    threads: o.Threads = None,
    engine: o.Engine = "transformers",
    tensor_parallel_size: o.TensorParallel = 1,
    pipeline_parallel_size: o.PipelineParallel = 1,
    engine_arg: o.EngineArg = None,
) -> None:
    """Put HalluTracer and the baselines on the same rows of your model, and write a report.

    One forward pass over the prompts feeds every method; splits are group-disjoint, and everything a method learns
    comes from the training side.  Interrupt it whenever you like: the same command goes on where it stopped.

    \b
    hallutracer evaluate --suite paper                                     # the demo model on its own questions
    hallutracer evaluate --model ./my-model --data questions.jsonl
    hallutracer evaluate --model ./my-model --data truefalse=./true_false_data --data halueval2=./human_annotation
    """  # fmt: skip
    from rich.console import Console

    from service.evaluation.options import DEFAULT_METHODS, EvaluateOptions
    from service.evaluation.page.markdown import table_markdown
    from service.evaluation.run import evaluate as run
    from service.paper.report import command_line, write_report
    from service.readout import Site

    options = EvaluateOptions(
        sources=tuple(source(one) for one in data) if data else (_demo(model),),
        out=out,
        suite=suite,
        methods=tuple(part.strip() for part in methods.split(",") if part.strip()) if methods else DEFAULT_METHODS,
        seeds=seeds,
        folds=folds,
        inner_folds=inner_folds,
        c=c,
        judge=judge,
        max_new_tokens=max_new_tokens,
        prompt_format=prompt_format,
        per_subset=per_subset,
        skip_long=skip_long,
        limit=limit,
        batch_rows=batch_rows,
        jobs=jobs,
    )
    loading = engine_options(
        model, revision, dtype, device, max_batch_tokens, engine, tensor_parallel_size, pipeline_parallel_size,
        engine_arg,
    )  # fmt: skip
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        result = run(options, lambda: load_engine(loading, threads, rows=list(Site)), console=console)
        files = write_report(result, command_line())
    except KeyboardInterrupt:
        console.print(f"interrupted; the same command goes on from {out}")
        raise
    typer.echo(table_markdown(result.main))
    typer.echo("\n".join(str(path) for path in files))


def source(text: str) -> Source:
    """``NAME=FOLDER`` of a known set, or a JSONL file.  Raises BadParameter."""
    from service.data.sets.registry import SETS
    from service.evaluation.options import Source

    name, equals, folder = text.partition("=")
    if equals and name in SETS:
        return Source(name, Path(folder).expanduser(), name)
    path = Path(text).expanduser()
    if path.is_file():
        return Source(path.stem, path)
    raise typer.BadParameter(
        f"{text!r} is neither a JSONL file nor NAME=FOLDER with NAME one of {', '.join(SETS)}", param_hint="--data"
    )


def _demo(model: str | None) -> Source:
    if model is not None:
        raise typer.BadParameter("say what to evaluate this model on", param_hint="--data")
    from service.demo.questions import questions
    from service.evaluation.options import Source

    title = "the demo model's questions about real facts (its training split), answered by itself"
    return Source("demo-questions", None, rows=lambda: questions("train"), title=title)
