"""hallutracer train: from JSONL rows to a published bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from service.cli import options as o
from service.cli.loading import engine_options, load_engine, open_store
from service.data.options import JudgeName, Labels
from service.fitting.options import ClassBalance, LogitScale
from service.settings import env

Readout = Literal["attention_head", "residual_stream"]
PromptFormat = Literal["auto", "chat", "text"]


def train(
    data: Annotated[
        Path,
        typer.Option(
            help="JSONL rows: id, prompt or messages, label or answers, group.", envvar=env("data"), dir_okay=False
        ),
    ],
    name: Annotated[str, typer.Option(help="Name of the bundle.", envvar=env("name"))],
    model: o.Model = None,
    store: o.StoreOption = o.STORE_DEFAULT,
    test: Annotated[
        Path | None,
        typer.Option(
            help="Held-out rows, scored with the final bundle and used for nothing else.",
            envvar=env("test"),
            dir_okay=False,
        ),
    ] = None,
    labels: Annotated[
        Labels,
        typer.Option(
            help="given: each row's 'label' (1 factual, 0 hallucinated).  generate: the "
            "model answers greedily and a judge compares with 'answers'.",
            envvar=env("labels"),
        ),
    ] = "given",
    judge: Annotated[
        JudgeName,
        typer.Option(
            help="For generated labels.  exact: equal but for case, punctuation and articles.  contains: an accepted "
            "answer occurs as whole words.  regex: the answers are patterns.  openai: ask an OpenAI-compatible "
            "endpoint.  similarity, calls: TruthfulQA's and BFCL's own rules ('hallutracer data').",
            envvar=env("judge"),
        ),
    ] = "contains",
    judge_url: Annotated[
        str, typer.Option(help="Endpoint of the openai judge, up to /v1.", envvar=env("judge-url"))
    ] = "",
    judge_model: Annotated[str, typer.Option(help="Model of the openai judge.", envvar=env("judge-model"))] = "",
    judge_key: Annotated[
        str, typer.Option(help="Bearer key of the openai judge; prefer the environment.", envvar=env("judge-key"))
    ] = "",
    answer_pattern: Annotated[
        str,
        typer.Option(
            help="Regular expression whose first group is the answer inside the generated text, for judges that "
            "compare text.  Default: the whole text.",
            envvar=env("answer-pattern"),
        ),
    ] = "",
    abstain_pattern: Annotated[
        str | None,
        typer.Option(
            help="Answers that match belong to neither class.  Default: 'I am not sure' and its like.",
            envvar=env("abstain-pattern"),
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Length of a generated answer.", envvar=env("max-new-tokens"))
    ] = 48,
    readout: Annotated[
        Readout, typer.Option(help="attention_head is the paper's default.", envvar=env("readout"))
    ] = "attention_head",
    logit_scale: Annotated[
        LogitScale,
        typer.Option(
            help="unit_norm is the paper's rule; standardized divides each "
            "layer's logit by its within-class deviation.",
            envvar=env("logit-scale"),
        ),
    ] = "unit_norm",
    signals: Annotated[
        str, typer.Option(help="depth_mean, or depth_mean,first_token.", envvar=env("signals"))
    ] = "depth_mean",
    prompt_format: Annotated[
        PromptFormat,
        typer.Option(
            help="auto: one chat turn where the tokenizer has a chat template, else plain text.",
            envvar=env("prompt-format"),
        ),
    ] = "auto",
    seeds: Annotated[
        int, typer.Option(min=1, max=100, help="Shuffles of the folds: seeds 0 .. K-1.", envvar=env("seeds"))
    ] = 3,
    folds: Annotated[int, typer.Option(min=2, help="Group-disjoint stratified folds.", envvar=env("folds"))] = 5,
    c: Annotated[
        float | None,
        typer.Option(
            "--c",
            help="Inverse strength of the probes' regularisation.  Default: chosen by inner grouped cross-validation.",
            envvar=env("c"),
            show_default=False,
        ),
    ] = None,
    class_balance: Annotated[
        ClassBalance, typer.Option(help="In the probe fit only.", envvar=env("class-balance"))
    ] = "weights",
    evaluate: Annotated[
        bool,
        typer.Option(
            help="Nested cross-validation for the model card; without it the card reports no performance.",
            envvar=env("evaluate"),
        ),
    ] = True,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            help="Readouts and progress; a killed run resumes from here.  Default: runs/NAME.",
            envvar=env("run-dir"),
            file_okay=False,
            show_default=False,
        ),
    ] = None,
    batch_rows: Annotated[
        int, typer.Option(min=1, help="Prompts in one call of the engine.", envvar=env("batch-rows"))
    ] = 32,
    jobs: Annotated[
        int, typer.Option(min=0, help="Processes for the probe fits; 0: all cores.", envvar=env("jobs"))
    ] = 0,
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
    """Train a probe bundle on your own model and publish it.

    Reads every row first (all problems at once, by line), extracts readouts through the serving engine into --run-dir,
    fits a probe for each head and layer, calibrates on out-of-fold depth means, and publishes NAME:VERSION with its
    model card, evaluation and plots.  Interrupt it whenever you like: the same command goes on where it stopped.

    \b
    hallutracer train --model ./my-model --data questions.jsonl --labels generate --name my-probe
    """  # fmt: skip
    from rich.console import Console

    from service.data.options import JudgeOptions
    from service.readout import Site
    from service.trainer.options import TrainOptions, parse_signals
    from service.trainer.run import train as run

    chosen: dict[str, Any] = {}
    if abstain_pattern is not None:
        chosen["abstain_pattern"] = abstain_pattern
    if c is not None:
        chosen["c"] = c
    options = TrainOptions(
        data=data,
        name=name,
        run_dir=run_dir if run_dir is not None else Path("runs") / name,
        test=test,
        readout=Site(readout),
        logit_scale=logit_scale,
        signals=parse_signals(signals),
        labels=labels,
        judge=JudgeOptions(judge, judge_url, judge_model, judge_key, answer_pattern=answer_pattern),
        max_new_tokens=max_new_tokens,
        prompt_format=prompt_format,
        folds=folds,
        seeds=tuple(range(seeds)),
        class_balance=class_balance,
        batch_rows=batch_rows,
        evaluate=evaluate,
        jobs=jobs,
        **chosen,
    )
    loading = engine_options(
        model,
        revision,
        dtype,
        device,
        max_batch_tokens,
        engine,
        tensor_parallel_size,
        pipeline_parallel_size,
        engine_arg,
    )
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        bundle = run(
            options, lambda: load_engine(loading, threads, rows=[options.readout]), open_store(store), console=console
        )
    except KeyboardInterrupt:
        console.print(f"interrupted; the same command goes on from {options.run_dir}")
        raise
    typer.echo(f"{bundle.reference}  {bundle.manifest.digest}\n{bundle.path}")
