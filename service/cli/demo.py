"""hallutracer demo: the embedded demonstration model, its questions and its bundles."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from service.cli.loading import open_store
from service.cli.options import Json, StoreOptions
from service.cli.output import print_json, print_line
from service.demo import Passage
from service.library.default_model import DEMO, SHIPPED
from service.options import Common
from service.settings import option


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
    from service.demo.questions import questions as rows
    from service.demo.questions import with_passages

    for row in with_passages(rows(split), tuple(dict.fromkeys(passages))):
        print_line(json.dumps(row, ensure_ascii=False))


COMMANDS = (
    "The demonstration model: what it is and its questions.",
    {"info": info, "questions": questions},
)
