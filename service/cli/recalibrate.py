"""hallutracer recalibrate: the risk of a bundle, recalibrated for the base rate of your own traffic."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from service.cli.new_rows import NewRowsChoices, run_on
from service.cli.options import BundleOptions, EngineChoice, JudgeChoices, LabelChoices
from service.cli.output import print_line
from service.options import Common
from service.settings import option, section


@section("Recalibration", 6)
@dataclass(frozen=True, kw_only=True)
class RecalibrateChoices:
    """What else is learnt from, and what becomes of the threshold."""

    traffic: Annotated[
        Path | None,
        option("Unlabelled JSONL of the same traffic: risks as 'hallutracer score --output' writes them, or prompts to "
               "be scored."),
    ] = None  # fmt: skip
    threshold_rule: Annotated[
        Literal["map", "keep", "youden"],
        option("map: the threshold is carried along, so that the same prompts are flagged.  keep: the same number on "
               "the new scale.  youden: chosen anew on the labelled rows."),
    ] = "map"  # fmt: skip
    allow_other_shift: Annotated[
        bool, option("Use the traffic although prior shift alone does not explain it, or although nobody can tell.")
    ] = False


def recalibrate(
    *,
    options: NewRowsChoices = NewRowsChoices(),
    shift: RecalibrateChoices = RecalibrateChoices(),
    bundles: BundleOptions = BundleOptions(),
    labels: LabelChoices = LabelChoices(),
    judge: JudgeChoices = JudgeChoices(),
    engine: EngineChoice = EngineChoice(),
    common: Common = Common(),
) -> None:
    """Recalibrate a bundle's risk for the base rate of your traffic, and publish it as the bundle's next version.

    A risk is a probability at the training rows' share of hallucinations.  Candidates are the risk as it is, prior
    shift (by --traffic), intercept, Platt, beta and isotonic; the simplest one whose held-out log loss is within one
    standard error of the best is published.  Where that is the risk as it is nothing is.  The rows must be new to the
    bundle and drawn at random from your traffic; 'hallutracer calibrate' may not use them again.

      hallutracer recalibrate --bundle my-probe --data labelled.jsonl --traffic risks.jsonl --model ./my-model
    """
    store, bundle = options.bundle_of(bundles, "recalibrate")
    from service.trainer.options import RecalibrateOptions
    from service.trainer.recalibrate import recalibrate as run

    wanted = RecalibrateOptions(
        traffic=shift.traffic,
        threshold=shift.threshold_rule,
        allow_other_shift=shift.allow_other_shift,
        **options.of(bundle, labels, judge),
    )
    found = run_on(engine, store, bundle, run, wanted)
    if found is not None:
        print_line(f"{found.reference}  {found.manifest.digest}\n{found.path}")
