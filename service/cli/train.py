"""hallutracer train, guarantee and recalibrate: bundles from rows of your own."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from service.cli.loading import load_engine, open_store
from service.cli.options import BundleOptions, EngineChoice, StoreOptions, UsageError, check
from service.cli.output import print_line
from service.errors import TrainingError
from service.options import Common
from service.progress import note
from service.settings import DEFAULT_STORE
from service.trainer.options import (
    GuaranteeOptions,
    NewRowsOptions,
    RecalibrateOptions,
    TrainOptions,
)

if TYPE_CHECKING:
    from rich.console import Console

    from probes_store.bundle import Bundle
    from probes_store.store import Store

Options = TypeVar("Options", bound=NewRowsOptions)
Result = TypeVar("Result")


def train(
    *,
    options: TrainOptions = TrainOptions(),
    engine: EngineChoice = EngineChoice(),
    store: StoreOptions = StoreOptions(),
    common: Common = Common(),
) -> None:
    """Train a probe bundle on your own model and publish it.

    Without --data the model answers questions that come with the package ('hallutracer data bank'),
    in the forms that people ask in, and the bundle is named after the model.

    Reads every row first (all problems at once, by line), extracts activations through the serving
    engine into --run-dir, fits a probe for each head and layer, calibrates on out-of-fold depth
    means, and publishes NAME:VERSION with its model card, evaluation and plots.  Interrupt it at
    any time: the same command resumes where it stopped.

      hallutracer train --model ./my-model
      hallutracer train --model ./my-model --data rows.jsonl --name my-probe"""
    if len(options.data) > 1:
        raise UsageError("--data", "name one file of rows, such as rows.jsonl")
    if not options.data and engine.model is None:
        raise UsageError(
            "--model",
            "name the model that the bundle is for, such as ./my-model; or rows with --data",
        )
    check(options)
    from service.library.training import completed, run_training

    try:
        options = completed(options, engine.model)
    except TrainingError as error:
        raise UsageError(f"--{error.param}", error.message) from None
    check(options)
    chosen = engine.options_for()  # a wrong option is reported before rows are read
    with _console(options.folder) as console:
        trained = run_training(
            options,
            chosen,
            open_store(store, to_read=False),
            threads=engine.threads,
            console=console,
        )
    _print_published(trained.bundle)
    where = [] if store.store == DEFAULT_STORE else ["--store", store.store]
    model = [] if engine.model is None else ["--model", engine.model]
    model += [] if engine.adapter is None else ["--adapter", engine.adapter]
    name = trained.bundle.manifest.name
    note("next:")
    for command in (
        ["score", "What is the capital of France?", *model, "--bundle", name, *where],
        ["bundle", "show", name, *where],
        ["try", *model, "--bundle", name, *where],
        ["serve", *model, "--bundle", name, *where],
    ):
        note(f"  {shlex.join(['hallutracer', *command])}")


def guarantee(
    *,
    options: GuaranteeOptions = GuaranteeOptions(),
    bundles: BundleOptions = BundleOptions(),
    engine: EngineChoice = EngineChoice(),
    common: Common = Common(),
) -> None:
    """Give a bundle a threshold with a guarantee, and publish it as the bundle's next version.

    With confidence 1 - delta, at most a share alpha of the question groups that are then answered,
    counted equally whatever their size, is answered with a hallucination.  The rows must be new to
    the bundle, in groups of their own, and drawn as your questions are.  Risks come first: only
    rows below the loosest threshold that is tested are answered and judged, or need a label.
    --dry-run prints these, a JSON object a line; then the others may have no 'label'.  Questions
    with a passage beside them and questions without one have thresholds of their own.  The rows are
    spent by one guarantee; where no threshold qualifies nothing is published and the exit status is
    1.

      hallutracer guarantee --bundle my-probe --data new.jsonl --alpha 0.1 --delta 0.05 \\
          --model ./my-model
    """
    check(options)
    store, bundle = one_bundle(bundles, "to give a guarantee")
    from service.trainer.guarantee import guarantee as run
    from service.trainer.guarantee import rows_to_label

    if options.dry_run:
        for row in _run_on(engine, store, bundle, rows_to_label, options):
            print_line(json.dumps(row, ensure_ascii=False))
        return
    published = _run_on(engine, store, bundle, run, options)
    if published is not None and published.manifest.guarantee is not None:
        _print_published(published)
        print_line(published.manifest.guarantee.statement)


def recalibrate(
    *,
    options: RecalibrateOptions = RecalibrateOptions(),
    bundles: BundleOptions = BundleOptions(),
    engine: EngineChoice = EngineChoice(),
    common: Common = Common(),
) -> None:
    """Recalibrate a bundle's risk for the base rate of your traffic, and publish it as the bundle's
    next version.

    A risk is a probability at the training rows' share of hallucinations.  Candidates are the risk
    as it is, prior shift (by --traffic), intercept and isotonic; the simplest one whose held-out
    log loss is within one standard error of the best is published.  Where that is the risk as it
    is, nothing is published.  The rows must be new to the bundle and drawn at random from your
    traffic; 'hallutracer guarantee' may not use them again.

      hallutracer recalibrate --bundle my-probe --data labelled.jsonl --traffic risks.jsonl \\
          --model ./my-model
      hallutracer recalibrate --bundle my-probe --feedback feedback.db"""
    check(options)
    store, bundle = one_bundle(bundles, "to recalibrate")
    if options.feedback:
        from service.trainer.feedback import recalibrate_by_feedback

        with _console() as console:
            published = recalibrate_by_feedback(bundle, options, store, console=console)
    else:
        from service.trainer.recalibrate import recalibrate as run

        published = _run_on(engine, store, bundle, run, options)
    if published is not None:
        _print_published(published)


def one_bundle(bundles: BundleOptions, purpose: str) -> tuple[Store, Bundle]:
    """Return the store and the one bundle that is named.  Raises UsageError, and what the store
    raises."""
    if len(bundles.bundle) != 1:
        raise UsageError("--bundle", f"name the bundle {purpose}")
    store = open_store(
        bundles, to_read=False
    )  # what is made of a shipped bundle may be the first in it
    return store, store.load(bundles.bundle[0])


def _print_published(bundle: Bundle) -> None:
    print_line(f"{bundle.reference}  {bundle.manifest.digest}\n{bundle.path}")


@contextmanager
def _console(resumes: Path | None = None) -> Iterator[Console]:
    """Give where a run reports to; an interrupted one says which folder it ``resumes`` from."""
    from rich.console import Console

    # Lines name files and kinds of the user's, in which nothing is markup.
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)
    try:
        yield console
    except KeyboardInterrupt:
        if resumes is not None:
            console.print(f"the same command resumes from {resumes}")
        raise


def _run_on(
    engine: EngineChoice, store: Store, bundle: Bundle, run: Callable[..., Result], options: Options
) -> Result:
    """Return what ``run`` of the trainer published or found, with an engine that is loaded when it
    is asked for."""
    from service.readout import Site

    engine.options_for([bundle.manifest.name])  # a wrong option is reported before rows are read
    site = Site(bundle.manifest.readout.site)
    options = replace(options, new_name=options.new_name or bundle.manifest.name)
    with _console(options.folder) as console:
        return run(
            bundle,
            options,
            lambda: load_engine(engine, bundles=[bundle], rows=[site]),
            store,
            console=console,
        )
