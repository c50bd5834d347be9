"""hallutracer calibrate: a threshold with a guarantee, from rows that the bundle has never seen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from service.cli.loading import load_engine, open_store
from service.cli.options import (
    BatchRows,
    BundleOptions,
    Data,
    EngineChoice,
    GeneratedLabels,
    JudgeChoices,
    LabelChoices,
    PromiseChoices,
    RunDir,
    Seed,
    UsageError,
)
from service.cli.output import print_line
from service.options import Common
from service.settings import option, section


@section("Calibration", 5)
@dataclass(frozen=True, kw_only=True)
class CalibrateChoices:
    """What is tested, and what is published."""

    data: Data = ()
    labels: GeneratedLabels = None
    new_name: Annotated[
        str | None, option("Name to publish under.  Default: the bundle's own, as its next version.")
    ] = None
    trained_on: Annotated[
        tuple[str, ...],
        option("The bundle's own training and held-out files, repeatable: for bundles that do not record which rows "
               "they have seen."),
        Parameter(metavar="FILE"),
    ] = ()  # fmt: skip
    seed: Seed = 0
    dry_run: Annotated[
        bool, option("Print what would be tested.  Loads no model, looks at no label and spends nothing.")
    ] = False
    batch_rows: BatchRows = 32
    run_dir: RunDir = None


def calibrate(
    *,
    options: CalibrateChoices = CalibrateChoices(),
    promise: PromiseChoices = PromiseChoices(),
    bundles: BundleOptions = BundleOptions(),
    labels: LabelChoices = LabelChoices(),
    judge: JudgeChoices = JudgeChoices(),
    engine: EngineChoice = EngineChoice(),
    common: Common = Common(),
) -> None:
    """Give a bundle a threshold with a guarantee, and publish it as the bundle's next version.

    With confidence 1 - delta, at most a share alpha of the questions that are then answered is answered with a
    hallucination.  The rows must be new to the bundle, in groups of their own, and drawn as your questions are.  They
    are spent by one calibration; where no threshold qualifies nothing is published and the exit status is 1.

      hallutracer calibrate --bundle my-probe --data new.jsonl --alpha 0.1 --delta 0.05 --model ./my-model
    """
    if len(options.data) != 1:
        raise UsageError("--data", "name one JSONL file")
    if len(bundles.bundle) != 1:
        raise UsageError("--bundle", "name the bundle to calibrate")
    alphas = promise.alphas
    from rich.console import Console

    from service.data.options import JudgeOptions
    from service.readout import Site
    from service.trainer.calibrate import calibrate as run
    from service.trainer.options import CalibrateOptions

    if labels.prompt_format != "auto":
        raise UsageError("--prompt-format", "prompts are rendered as the bundle's training rows were")
    store = open_store(bundles)
    bundle = store.load(bundles.bundle[0])
    optional: dict[str, Any] = {
        "abstain_pattern": judge.abstain_pattern, "max_new_tokens": labels.max_new_tokens,
    }  # fmt: skip
    if labels.judge == "openai" and not (judge.judge_url and judge.judge_model):
        raise UsageError("--judge", "openai needs --judge-url (up to /v1) and --judge-model")
    if labels.judge is not None:
        optional["judge"] = JudgeOptions(
            labels.judge, judge.judge_url, judge.judge_model, judge.judge_key, answer_pattern=judge.answer_pattern
        )
    name = options.new_name or bundle.manifest.name
    calibration = CalibrateOptions(
        data=Path(options.data[0]),
        alphas=alphas,
        delta=promise.delta,
        seed=options.seed,
        publish_closed=promise.publish_closed,
        bundle=bundle.reference,
        run_dir=options.run_dir if options.run_dir is not None else Path("runs") / name,
        name=options.new_name,
        trained_on=tuple(map(Path, options.trained_on)),
        labels=options.labels,
        batch_rows=options.batch_rows,
        dry_run=options.dry_run,
        **{field: value for field, value in optional.items() if value is not None},
    )
    engine.options_for([bundle.manifest.name])  # a wrong option is reported before rows are read
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    site = Site(bundle.manifest.readout.site)
    try:
        found = run(calibration, lambda: load_engine(engine, bundles=[bundle], rows=[site]), store, console=console)
    except KeyboardInterrupt:
        console.print(f"the same command resumes from {calibration.run_dir}")
        raise
    if found is not None and found.manifest.guarantee is not None:
        print_line(f"{found.reference}  {found.manifest.digest}\n{found.path}\n{found.manifest.guarantee.statement}")
