"""hallutracer train: from JSONL rows to a published bundle."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from service.cli.loading import open_store
from service.cli.options import EngineChoice, StoreOptions, UsageError, check
from service.cli.output import print_line
from service.options import Common
from service.progress import note
from service.settings import DEFAULT_STORE
from service.trainer.options import TrainOptions

if TYPE_CHECKING:
    from service.library.training import Trained


def train(
    *,
    options: TrainOptions,
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
    check(options)
    if len(options.data) != 1:
        raise UsageError("--data", "name one JSONL file")
    from rich.console import Console

    from service.library.training import run_training

    chosen = engine.options_for()  # a wrong option is reported before rows are read
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        trained = run_training(options, chosen, open_store(store), threads=engine.threads, console=console)
    except KeyboardInterrupt:
        console.print(f"the same command resumes from {options.folder}")
        raise
    print_line(f"{trained.reference}  {trained.bundle.manifest.digest}\n{trained.folder}")
    for line in _next(trained, engine, store):
        note(line)


def _next(trained: Trained, engine: EngineChoice, store: StoreOptions) -> Iterator[str]:
    """Yield what to do with a new bundle: commands that can be copied."""
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
