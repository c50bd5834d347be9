"""hallutracer data: public sets you downloaded -> JSONL rows for ``hallutracer train``.  No set is shipped."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from service.cli import options as o
from service.data.sets.registry import SETS, SetInfo, read_set
from service.settings import env

app = typer.Typer(help="Turn public sets into training rows.", no_args_is_help=True)


class Set(StrEnum):
    """The names of ``SETS``, as the command line takes them."""

    TRUTHFULQA = "truthfulqa"
    TRUTHFULQA_REFERENCE = "truthfulqa-reference"
    TRUEFALSE = "truefalse"
    HALUEVAL2 = "halueval2"
    HELM = "helm"
    BFCL = "bfcl"
    BFCL_ANSWERABLE = "bfcl-answerable"


@app.command()
def convert(
    name: Annotated[Set, typer.Argument(help="Which set; `hallutracer data list` describes them.")],
    folder: Annotated[
        Path,
        typer.Argument(
            help="The folder you downloaded: the set's own, or the repository.", exists=True, file_okay=False
        ),
    ],
    allow_other_counts: Annotated[
        bool,
        typer.Option(
            "--allow-other-counts",
            help="Convert although the number of rows is not the published one: another version, another benchmark.",
            envvar=env("allow-other-counts"),
        ),
    ] = False,
) -> None:
    """Print JSONL rows (id, prompt or messages, label or answers, group, kind); counts and caveats go to stderr.

    \b
    hallutracer data convert truefalse ~/true_false_data > truefalse.jsonl
    """
    info = SETS[name]
    rows, counts = read_set(name, folder, allow_other_counts)
    for row in rows:
        sys.stdout.write(json.dumps(row, ensure_ascii=False) + "\n")
    told = ", ".join(f"{key} {value:,}" for key, value in counts.items())
    typer.echo(f"{len(rows):,} rows of {info.title} ({told})", err=True)
    if counts["read"] != info.rows:
        typer.echo(f"not the published {info.rows:,} rows: another version is another benchmark", err=True)
    typer.echo(f"label 0: {info.hallucinated}\n{info.caveat}", err=True)
    typer.echo(f"train with: {_advice(info)}", err=True)


def _advice(info: SetInfo) -> str:
    """The options of ``hallutracer train`` that belong to the set."""
    if info.labels == "given":
        return "--labels given"
    parts = [f"--labels generate --judge {info.judge}"]
    if info.max_new_tokens is not None:
        parts.append(f"--max-new-tokens {info.max_new_tokens}")
    if info.abstain_pattern is not None:
        parts.append(f"--abstain-pattern '{info.abstain_pattern}'")
    return " ".join(parts)


@app.command("list")
def list_(as_json: o.Json = False) -> None:
    """List the sets that have a reader: size, labels, groups, licence, and where to get them."""
    rows = [_described(info) for info in SETS.values()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table

    facts, places = Table(box=None, pad_edge=False), Table(box=None, pad_edge=False)
    for title in ("set", "rows", "labels", "group", "sub-sets", "licence"):
        number = title in ("rows", "sub-sets")
        facts.add_column(title, overflow="fold", no_wrap=title == "set", justify="right" if number else "left")
    places.add_column("set", no_wrap=True)
    places.add_column("from", overflow="fold")
    for row in rows:
        facts.add_row(row["name"], f"{row['rows']:,}", row["labels"], row["group"], str(row["kinds"]), row["licence"])
        places.add_row(row["name"], row["source"])
    console = Console(highlight=False)
    for table in (facts, "", places):
        console.print(table)
    console.print(
        "\nlabels: given = the set's own; similarity, calls = the model answers and this judge compares.\n"
        "Download a set yourself, then: hallutracer data convert SET FOLDER > rows.jsonl",
        soft_wrap=True,
    )


def _described(info: SetInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "title": info.title,
        "rows": info.rows,
        "labels": info.judge or info.labels,
        "group": info.group,
        "kinds": info.kinds,
        "hallucinated": info.hallucinated,
        "onset": info.onset,
        "caveat": info.caveat,
        "licence": info.licence,
        "source": info.source,
        "train": _advice(info),
    }
