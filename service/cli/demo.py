"""hallutracer demo: the embedded demonstration model, its questions and its bundles."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from service.cli import options as o
from service.cli.loading import DEMO_BUNDLES, open_store
from service.settings import env

app = typer.Typer(help="The demonstration model: what it is, its questions, how it is built.", no_args_is_help=True)


class Split(StrEnum):
    """Question splits; no entity is in two of them."""

    TRAIN = "train"
    DEV = "dev"
    TEST = "test"


@app.command()
def info(as_json: o.Json = False, store: o.StoreOption = o.STORE_DEFAULT) -> None:
    """Where the model and its bundles are."""
    from service.demo import MODEL_DIR

    books = open_store(store)
    bundles = [books.load(name) for name in DEMO_BUNDLES]
    if as_json:
        facts = [
            {
                "name": bundle.manifest.name,
                "version": bundle.manifest.version,
                "digest": bundle.manifest.digest,
                "path": str(bundle.path),
            }
            for bundle in bundles
        ]
        typer.echo(json.dumps({"model": str(MODEL_DIR), "bundles": facts}, indent=2))
        return
    typer.echo(f"model    {MODEL_DIR}")
    for bundle in bundles:
        typer.echo(f"bundle   {bundle.reference:<14} signals {', '.join(bundle.manifest.signals)}  {bundle.path}")
    typer.echo("\nModel card: hallutracer bundle show demo")


@app.command()
def questions(
    split: Annotated[
        Split,
        typer.Option(
            help="train: the bundles' training rows.  dev: chose recipe and seed.  test: only ever reported.",
            envvar=env("split"),
        ),
    ],
) -> None:
    """Print questions as JSONL: id, prompt, answers, group, kind, exposures, template, in_refusals."""
    from service.demo.questions import questions as rows

    for row in rows(split.value):
        sys.stdout.write(json.dumps(row, ensure_ascii=False) + "\n")


@app.command()
def build(
    out: Annotated[
        Path, typer.Option(help="Folder for models, runs and bundles; finished steps are kept.", envvar=env("out"))
    ] = Path("demo-build"),
    seeds: Annotated[
        int, typer.Option(min=1, max=20, help="Train models with seeds 0 .. K-1.", envvar=env("seeds"))
    ] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Threads for each training.", envvar=env("threads"))] = 2,
    report: Annotated[
        bool,
        typer.Option(
            help="Also make the table of the README: every method on held-out entities.", envvar=env("report")
        ),
    ] = False,
) -> None:
    """Train the demo model from its facts, choose a seed on the dev split, train both bundles on it.

    One seed takes about ten minutes of one core.  Nothing of the installed package is overwritten.
    """
    from rich.console import Console

    from service.demo.build import build as run

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    run(out, seeds=range(seeds), threads=threads, with_report=report, console=console)
