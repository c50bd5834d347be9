"""hallutracer train: from JSONL rows to a published bundle."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from service.cli.loading import open_store
from service.cli.options import (
    Data,
    EngineChoice,
    FitChoices,
    GeneratedLabels,
    JudgeChoices,
    LabelChoices,
    PromiseChoices,
    RunDir,
    Samples,
    StoreOptions,
    UsageError,
)
from service.cli.output import print_line
from service.fitting.options import ClassBalance, LogitScale
from service.options import Common
from service.progress import note
from service.settings import DEFAULT_STORE, Range, option, section

if TYPE_CHECKING:
    from service.library.training import Trained


@section("Training", 5)
@dataclass(frozen=True, kw_only=True)
class TrainChoices:
    """What is trained on, and what the bundle reads."""

    data: Data = ()
    test: Annotated[Path | None, option("Held-out rows, scored with the final bundle and used for nothing else.")] = (
        None
    )
    labels: GeneratedLabels = "given"
    samples: Samples = 8
    temperature: Annotated[
        float, option("With --labels sample: of the sampled answers.", limits=Range(positive=True))
    ] = 1.0
    forms: Annotated[
        str | None,
        option("Forms of conversation that questions are asked in.  mixture: all, by weight, and requests that ask for "
               "no fact.  none: as they are.  Else families or names of 'hallutracer data forms', with commas.  "
               "Default: mixture; none with given labels, which belong to the prompts as they are.", metavar="NAMES"),
    ] = None  # fmt: skip
    readout: Annotated[
        Literal["attention_head", "residual_stream"], option("attention_head is the paper's default.")
    ] = "attention_head"
    logit_scale: Annotated[
        LogitScale,
        option(
            "unit_norm is the paper's rule; standardized divides each layer's logit by its within-class deviation; "
            "weighted gives each layer a weight, fitted on out-of-fold logits."
        ),
    ] = "unit_norm"
    signals: Annotated[str, option("depth_mean, or depth_mean,first_token.")] = "depth_mean"
    class_balance: Annotated[ClassBalance, option("In the probe fit only.")] = "weights"
    wrong_costs: Annotated[
        float | None,
        option("K: a wrong answer costs as much as K withheld right ones, and the threshold is 1 / (1 + K).  Default: "
               "1, answer what is more likely right than wrong.", limits=Range(positive=True)),
    ] = None  # fmt: skip
    target: Annotated[
        str | None,
        option("Instead of --wrong-costs, by out-of-fold risks: \"wrong<=0.2\" is the largest threshold with at most "
               "this share of wrong among the answered (20 rows or more), \"answered>=0.5\" the smallest that answers "
               "this share.  Out of reach: the closest threshold is published, and run and card say so.",
               metavar="TARGET"),
    ] = None  # fmt: skip
    keep_sample: Annotated[
        bool,
        option("Keep up to 48 questions with their accepted answers in the bundle, for 'hallutracer try' and the "
               "playground: of --test, else of rows that then leave training (5 % at most).  --no-sample where your "
               "questions are private."),
        Parameter(negative="--no-sample"),
    ] = True  # fmt: skip
    evaluate: Annotated[
        bool, option("Nested cross-validation for the model card; without it the card reports no performance.")
    ] = True
    allow_no_signal: Annotated[
        bool,
        option("Publish although the nested AUROC's interval reaches chance, as it does on labels drawn by a coin."),
    ] = False
    run_dir: RunDir = None
    calibration: Annotated[
        Path | None,
        option("Further rows, in groups of their own: the last step publishes a second version with a threshold that "
               "is guaranteed on them, as 'hallutracer calibrate' does."),
    ] = None  # fmt: skip


def train(
    *,
    name: Annotated[str, option("Name of the bundle.")],
    options: TrainChoices = TrainChoices(),
    labels: LabelChoices = LabelChoices(),
    judge: JudgeChoices = JudgeChoices(),
    promise: PromiseChoices = PromiseChoices(),
    fit: FitChoices = FitChoices(),
    engine: EngineChoice = EngineChoice(),
    store: StoreOptions = StoreOptions(),
    common: Common = Common(),
) -> None:
    """Train a probe bundle on your own model and publish it.

    Reads every row first (all problems at once, by line), extracts activations through the serving engine into
    --run-dir, fits a probe for each head and layer, calibrates on out-of-fold depth means, and publishes NAME:VERSION
    with its model card, evaluation and plots.  Interrupt it at any time: the same command resumes where it stopped.

      hallutracer train --model ./my-model --data rows.jsonl --name my-probe
    """
    if len(options.data) != 1:
        raise UsageError("--data", "name one JSONL file")
    if options.target is not None and options.wrong_costs is not None:
        raise UsageError("--target", "excludes --wrong-costs: the threshold has one rule, so give one of them")
    alphas = promise.alphas
    from rich.console import Console

    from service.data.options import JudgeOptions
    from service.library.training import run_training
    from service.readout import Site
    from service.trainer.options import PromiseOptions, TrainOptions, parse_forms, parse_signals

    optional: dict[str, Any] = {
        "abstain_pattern": judge.abstain_pattern, "c": fit.c, "max_new_tokens": labels.max_new_tokens,
    }  # fmt: skip
    training = TrainOptions(
        data=Path(options.data[0]),
        name=name,
        run_dir=options.run_dir if options.run_dir is not None else Path("runs") / name,
        test=options.test,
        readout=Site(options.readout),
        logit_scale=options.logit_scale,
        signals=parse_signals(options.signals),
        labels=options.labels or "given",
        samples=options.samples,
        temperature=options.temperature,
        judge=JudgeOptions(
            labels.judge or "contains",
            judge.judge_url,
            judge.judge_model,
            judge.judge_key,
            answer_pattern=judge.answer_pattern,
        ),
        forms=parse_forms(options.forms),
        prompt_format=labels.prompt_format,
        folds=fit.folds,
        seeds=tuple(range(fit.seeds)),
        class_balance=options.class_balance,
        batch_rows=fit.batch_rows,
        wrong_costs=options.wrong_costs,
        target=options.target,
        sample=options.keep_sample,
        evaluate=options.evaluate,
        allow_no_signal=options.allow_no_signal,
        jobs=fit.jobs,
        calibration=None
        if options.calibration is None
        else PromiseOptions(options.calibration, alphas, promise.delta, publish_closed=promise.publish_closed),
        **{field: value for field, value in optional.items() if value is not None},
    )
    chosen = engine.options_for()  # a wrong option is reported before rows are read
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        trained = run_training(training, chosen, open_store(store), threads=engine.threads, console=console)
    except KeyboardInterrupt:
        console.print(f"the same command resumes from {training.run_dir}")
        raise
    print_line(f"{trained.reference}  {trained.bundle.manifest.digest}\n{trained.folder}")
    for line in _next(trained, engine, store):
        note(line)


def _next(trained: Trained, engine: EngineChoice, store: StoreOptions) -> Iterator[str]:
    """What to do with a new bundle: commands that can be copied."""
    where = [] if store.store == DEFAULT_STORE else ["--store", store.store]
    model = [] if engine.model is None else ["--model", engine.model]
    name = trained.bundle.manifest.name
    yield "next:"
    for command in (
        ["score", "What is the capital of France?", *model, "--bundle", name, *where],
        ["bundle", "show", name, *where],
        ["serve", *model, "--bundle", name, *where],
    ):
        yield f"  {shlex.join(['hallutracer', *command])}"
