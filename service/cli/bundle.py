"""hallutracer bundle: list, show, verify, alias."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli import options as o
from service.cli.loading import open_store
from service.settings import env

if TYPE_CHECKING:
    from probes_store.store import BundleSummary

app = typer.Typer(help="Look at and check published probe bundles.", no_args_is_help=True)
Reference = Annotated[str, typer.Argument(help="name, name@alias or name:version")]


@app.command("list")
def list_(store: o.StoreOption = o.STORE_DEFAULT, as_json: o.Json = False) -> None:
    """List every bundle, damaged ones with their damage."""
    rows = [_described(summary) for summary in open_store(store).list()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        typer.echo(f"no bundles in {store}")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    columns = [name for name in rows[0] if name not in ("path", "problem") and any(row[name] for row in rows)]
    for name in columns:
        table.add_column(name, overflow="fold", no_wrap=name in ("bundle", "model", "digest"))
    for row in rows:
        row["digest"] = (row["digest"] or "").removeprefix("sha256:")[:12]
        cells = (row[name] for name in columns)
        table.add_row(*("\n".join(cell) if isinstance(cell, list) else str(cell or "") for cell in cells))
    console = Console(highlight=False)
    console.print(table)
    for row in rows:
        if row["problem"]:
            console.print(f"{row['bundle']} is damaged: {row['problem']}", style="red", soft_wrap=True, markup=False)


def _described(summary: BundleSummary) -> dict[str, Any]:
    manifest = summary.manifest
    return {
        "bundle": summary.reference,
        "aliases": list(summary.aliases),
        "model": manifest.model.name if manifest else None,
        "readout": manifest.readout.site if manifest else None,
        "signals": list(manifest.signals) if manifest else [],
        "digest": manifest.digest if manifest else None,
        "problem": str(summary.error) if summary.error else None,
        "path": str(summary.path),
    }


@app.command()
def show(reference: Reference, store: o.StoreOption = o.STORE_DEFAULT, as_json: o.Json = False) -> None:
    """Print a bundle's model card, or its manifest with --json."""
    bundle = open_store(store).load(reference)
    typer.echo((bundle.path / "bundle.json").read_text(encoding="utf-8") if as_json else bundle.card())


@app.command()
def verify(
    reference: Reference,
    model: o.Model = None,
    revision: o.Revision = None,
    store: o.StoreOption = o.STORE_DEFAULT,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    files_only: Annotated[
        bool, typer.Option("--files-only", help="Check the files, load no model.", envvar=env("files-only"))
    ] = False,
) -> None:
    """Check every byte, then replay the golden prompts on the model (default: the demo model)."""
    bundle = open_store(store).verify(reference)
    typer.echo(f"{bundle.reference}: files match {bundle.manifest.digest}")
    if files_only:
        return
    from service.cli.loading import engine_options, load_engine, load_scorers

    engine = load_engine(engine_options(model, revision, dtype, device, None), None)
    load_scorers(engine, [bundle])
    typer.echo(
        f"{bundle.reference}: {len(bundle.golden.risk)} golden prompts gave the recorded risks on "
        f"{engine.identity.model}"
    )


@app.command()
def alias(
    name: Annotated[str, typer.Argument(help="Bundle name.")],
    alias: Annotated[str, typer.Argument(help="production, canary, ...")],
    version: Annotated[int, typer.Argument(min=1)],
    store: o.StoreOption = o.STORE_DEFAULT,
) -> None:
    """Point an alias at a version: the only thing about a published bundle that may change."""
    open_store(store).set_alias(name, alias, version)
    typer.echo(f"{name}@{alias} -> {name}:{version}")
