"""hallutracer data: public sets you downloaded -> JSONL rows for ``hallutracer train``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from service.datasets.halueval2 import read_halueval2
from service.datasets.truefalse import read_truefalse

Reader = Callable[[Path], tuple[list[dict[str, Any]], dict[str, int]]]

app = typer.Typer(help="Turn public sets into training rows.", no_args_is_help=True)


class Set(StrEnum):
    """Sets with a reader."""

    TRUEFALSE = "truefalse"
    HALUEVAL2 = "halueval2"


READERS: dict[Set, Reader] = {Set.TRUEFALSE: read_truefalse, Set.HALUEVAL2: read_halueval2}


@app.command()
def convert(
    name: Annotated[Set, typer.Argument(help="Which set.")],
    folder: Annotated[
        Path,
        typer.Argument(
            help="truefalse: the folder of the seven CSV files.  halueval2: the folder human_annotation with its five "
            "JSON files.",
            exists=True,
            file_okay=False,
        ),
    ],
) -> None:
    """Print JSONL rows (id, prompt, label, group, kind); counts go to stderr.

    \b
    hallutracer data convert truefalse ~/true_false_data > truefalse.jsonl
    """
    rows, counts = READERS[name](folder)
    for row in rows:
        sys.stdout.write(json.dumps(row, ensure_ascii=False) + "\n")
    told = ", ".join(f"{key} {value}" for key, value in counts.items())
    typer.echo(f"{len(rows)} rows ({told})", err=True)


@app.callback()
def _group() -> None:
    """Keep ``convert`` a subcommand."""
