"""hallutracer recalibrate: the risk of a bundle, recalibrated for the base rate of your own traffic."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from service.cli.new_rows import NewRowsChoices, run_on
from service.cli.options import BundleOptions, EngineChoice, JudgeChoices, LabelChoices, UsageError
from service.cli.output import print_line
from service.options import Common
from service.settings import DATABASE, option, section

if TYPE_CHECKING:
    from probes_store.bundle import Bundle


@section("Recalibration", 6)
@dataclass(frozen=True, kw_only=True)
class RecalibrateChoices:
    """What else is learnt from, and what becomes of the threshold."""

    feedback: Annotated[
        str,
        option(
            "Instead of --data and --traffic: what a service kept with --feedback-db, the same file or URL.  Loads "
            "no model.",
            metavar=DATABASE,
        ),
    ] = ""
    traffic: Annotated[
        Path | None,
        option("Unlabelled JSONL of the same traffic: risks as 'hallutracer score --output' writes them, or prompts to "
               "be scored."),
    ] = None  # fmt: skip
    threshold_rule: Annotated[
        Literal["map", "keep"],
        option("map: the threshold is carried along, so that the same prompts are flagged.  keep: the same number on "
               "the new scale, right for a threshold by --wrong-costs: what a wrong answer costs has not changed, and "
               "the new risk is a probability of your traffic."),
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
      hallutracer recalibrate --bundle my-probe --feedback feedback.db
    """
    if shift.feedback:
        _by_feedback(options, shift, bundles)
        return
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
    _say(found)


def _by_feedback(options: NewRowsChoices, shift: RecalibrateChoices, bundles: BundleOptions) -> None:
    """The same, by what users said."""
    others = {"--data": options.data, "--traffic": shift.traffic, "--labels": options.labels}
    for flag, given in others.items():
        if given:
            raise UsageError(flag, "--feedback brings rows, labels and traffic of its own")
    store, bundle = options.one_bundle(bundles, "recalibrate")
    from rich.console import Console

    from service.feedback.databases import location
    from service.trainer.feedback import FeedbackOptions, recalibrate_by_feedback

    wanted = FeedbackOptions(
        bundle=bundle.reference,
        feedback=location(shift.feedback),
        name=options.new_name,
        trained_on=tuple(map(Path, options.trained_on)),
        threshold=shift.threshold_rule,
        allow_other_shift=shift.allow_other_shift,
        seed=options.seed,
        dry_run=options.dry_run,
    )
    _say(recalibrate_by_feedback(wanted, store, console=Console(stderr=True, highlight=False, soft_wrap=True)))


def _say(published: Bundle | None) -> None:
    if published is not None:
        print_line(f"{published.reference}  {published.manifest.digest}\n{published.path}")
