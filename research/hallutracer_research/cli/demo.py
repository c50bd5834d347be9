"""hallutracer demo build and retrieval: make the demonstration model, and measure what passages do
to its risk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from hallutracer_research.documents import write_json
from service.cli.loading import bundle_names, load_engine, load_first, load_scorers, open_store
from service.cli.options import BundleOptions, EngineChoice, Out
from service.cli.output import print_line
from service.data.options import Questions
from service.library.engine import Threads
from service.options import Common
from service.settings import Range, option

QUESTIONS = 400  # that retrieval asks


def build(
    *,
    out: Out = None,
    seeds: Annotated[
        int,
        option("Train models with seeds 0 .. K-1.", "model-seeds", "seeds", limits=Range(1, 20)),
    ] = 1,
    threads: Threads = None,
    report: Annotated[
        bool,
        option("Also make the table of held-out entities: every method."),
        Parameter(negative=""),
    ] = False,
    common: Common = Common(),
) -> None:
    """Train the demo model from its facts, choose a seed on the dev split, train both bundles on
    it.

    One seed takes about ten minutes of one core.  Nothing of the installed package is
    overwritten."""
    from rich.console import Console

    from hallutracer_research.demo.build import build as run

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    run(
        out or Path("demo-build"),
        seeds=range(seeds),
        threads=threads or 2,
        with_report=report,
        console=console,
    )


def retrieval(
    *,
    questions: Questions = None,
    max_tokens: Annotated[int, option("Length of an answer.", limits=Range(1, 256))] = 24,
    out: Out = None,
    engine: EngineChoice = EngineChoice(),
    bundles: BundleOptions = BundleOptions(),
    common: Common = Common(),
) -> None:
    """Ask with and without passages: accuracy, risk and its drop, and what "retrieve where flagged"
    shows.

    Writes retrieval.json (every answer) and retrieval.md under --out, and prints the tables.

      hallutracer demo retrieval --model ./my-model --bundle my-probe"""
    from contextlib import closing

    from hallutracer_research.demo.retrieval import ask, document, markdown

    bundle = load_first(open_store(bundles), bundle_names(engine.model, bundles))
    with closing(load_engine(engine, bundles=[bundle])) as loaded:
        (scorer,) = load_scorers(loaded, {bundle.reference: bundle}).values()
        facts = {"model": loaded.identity.model, "bundle": scorer.bundle.reference, "split": "test"}
        found = document(ask(scorer, "test", questions or QUESTIONS, max_tokens), facts)
    folder = out or Path("retrieval")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "retrieval.json", found, indent=1)
    (folder / "retrieval.md").write_text(markdown(found), encoding="utf-8")
    print_line(markdown(found))


COMMANDS = (
    "The demonstration model: what it is, its questions, how it is built.",
    {"retrieval": retrieval, "build": build},
)
