"""hallutracer calibrate: a threshold with a guarantee, from rows that the bundle has never seen."""

from __future__ import annotations

from service.cli.new_rows import NewRowsChoices, run_on
from service.cli.options import BundleOptions, EngineChoice, JudgeChoices, LabelChoices, PromiseChoices
from service.cli.output import print_line
from service.options import Common


def calibrate(
    *,
    options: NewRowsChoices = NewRowsChoices(),
    promise: PromiseChoices = PromiseChoices(),
    bundles: BundleOptions = BundleOptions(),
    labels: LabelChoices = LabelChoices(),
    judge: JudgeChoices = JudgeChoices(),
    engine: EngineChoice = EngineChoice(),
    common: Common = Common(),
) -> None:
    """Give a bundle a threshold with a guarantee, and publish it as the bundle's next version.

    With confidence 1 - delta, at most a share alpha of the question groups that are then answered, counted equally
    whatever their size, is answered with a hallucination.  The rows must be new to the bundle, in groups of their own,
    and drawn as your questions are.  They are spent by one calibration; where no threshold qualifies nothing is
    published and the exit status is 1.

      hallutracer calibrate --bundle my-probe --data new.jsonl --alpha 0.1 --delta 0.05 --model ./my-model
    """
    store, bundle = options.bundle_of(bundles, "calibrate")
    alphas = promise.alphas
    from service.trainer.calibrate import calibrate as run
    from service.trainer.options import CalibrateOptions

    wanted = CalibrateOptions(
        alphas=alphas,
        delta=promise.delta,
        publish_closed=promise.publish_closed,
        **options.of(bundle, labels, judge),
    )
    found = run_on(engine, store, bundle, run, wanted)
    if found is not None and found.manifest.guarantee is not None:
        print_line(f"{found.reference}  {found.manifest.digest}\n{found.path}\n{found.manifest.guarantee.statement}")
