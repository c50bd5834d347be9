"""hallutracer demo: the embedded demonstration model, its questions and its bundles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from service.cli.loading import bundle_names, load_bundles, load_engine, load_scorers, open_store
from service.cli.options import BundleOptions, EngineChoice, Json, Out, StoreOptions, Threads
from service.cli.output import print_json, print_line
from service.demo import Passage
from service.library.default_model import DEMO, SHIPPED
from service.options import Common
from service.settings import Range, option


def info(*, as_json: Json = False, store: StoreOptions = StoreOptions(), common: Common = Common()) -> None:
    """Where the model and its bundles are."""
    from service.demo import MODEL_DIR

    opened = open_store(store)
    bundles = [opened.load(name) for name in SHIPPED[DEMO]]
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
        print_json({"model": str(MODEL_DIR), "bundles": facts})
        return
    print_line(f"model    {MODEL_DIR}")
    for bundle in bundles:
        print_line(f"bundle   {bundle.reference:<14} signals {', '.join(bundle.manifest.signals)}  {bundle.path}")
    print_line("\nModel card: hallutracer bundle show demo")


def questions(
    *,
    split: Annotated[
        Literal["train", "dev", "test"],
        option("No entity is in two of them.  train: the bundles' training rows.  dev: chose recipe and seed.  test: "
               "only ever reported."),
    ],
    passages: Annotated[
        tuple[Passage, ...],
        option("In front of each question, repeatable, a row for each: right states the fact among two others; "
               "unrelated and contradicting are the controls; none."),
    ] = ("none",),
    common: Common = Common(),
) -> None:  # fmt: skip
    """Print questions as JSONL: id, prompt, answers, group, kind, passage, exposures, template, in_refusals.

    hallutracer demo questions --split test --passages none --passages right > questions.jsonl
    """
    from service.demo.passages import with_passages
    from service.demo.questions import questions as rows

    for row in with_passages(rows(split), tuple(dict.fromkeys(passages))):
        print_line(json.dumps(row, ensure_ascii=False))


def build(
    *,
    out: Out = None,
    seeds: Annotated[
        int,
        option("Train models with seeds 0 .. K-1.", "model-seeds", "seeds", limits=Range(1, 20)),
    ] = 1,
    threads: Threads = None,
    report: Annotated[
        bool, option("Also make the table of held-out entities: every method."), Parameter(negative="")
    ] = False,
    common: Common = Common(),
) -> None:
    """Train the demo model from its facts, choose a seed on the dev split, train both bundles on it.

    One seed takes about ten minutes of one core.  Nothing of the installed package is overwritten.
    """
    from rich.console import Console

    from service.demo.build import build as run

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    run(out or Path("demo-build"), seeds=range(seeds), threads=threads or 2, with_report=report, console=console)


def retrieval(
    *,
    questions: Annotated[int, option("Held-out questions; each is asked four times.", limits=Range(20))] = 400,
    max_tokens: Annotated[int, option("Length of an answer.", limits=Range(1, 256))] = 24,
    out: Out = None,
    engine: EngineChoice = EngineChoice(),
    bundles: BundleOptions = BundleOptions(),
    common: Common = Common(),
) -> None:
    """Ask with and without passages: accuracy, risk and its drop, and what "retrieve where flagged" shows.

    Writes retrieval.json (every answer) and retrieval.md under --out, and prints the tables.

      hallutracer demo retrieval --model ./my-model --bundle my-probe
    """
    from contextlib import closing

    from service.demo.retrieval import ask, document, markdown

    names = bundle_names(engine.model, bundles)[:1]
    opened = load_bundles(open_store(bundles), names)
    with closing(load_engine(engine, bundles=tuple(opened.values()))) as loaded:
        (scorer,) = load_scorers(loaded, opened).values()
        facts = {"model": loaded.identity.model, "bundle": scorer.bundle.reference, "split": "test"}
        found = document(ask(scorer, "test", questions, max_tokens), facts)
    folder = out or Path("retrieval")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "retrieval.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "retrieval.md").write_text(markdown(found), encoding="utf-8")
    print_line(markdown(found))


COMMANDS = (
    "The demonstration model: what it is, its questions, how it is built.",
    {"info": info, "questions": questions, "retrieval": retrieval, "build": build},
)
