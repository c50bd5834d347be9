"""hallutracer bundle: list, show, compare, verify, alias; ``bundle_transfer`` has sign, push and pull."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from probes_store.objects import is_url
from service.cli import bundle_rollout
from service.cli.bundle_transfer import pull, push, sign
from service.cli.loading import load_engine, load_scorers, open_store
from service.cli.options import EngineChoice, Json, Reference, StoreOptions, UsageError
from service.cli.output import note, print_json, print_line
from service.options import Common
from service.settings import DEFAULT_STORE, Range, option

if TYPE_CHECKING:
    from probes_store.bundle import Bundle
    from probes_store.guarantee import Guarantee
    from probes_store.store import BundleSummary


def list_(*, store: StoreOptions = StoreOptions(), as_json: Json = False, common: Common = Common()) -> None:
    """List every bundle; damaged ones with what is wrong."""
    if not is_url(store.store) and store.store != DEFAULT_STORE and not Path(store.store).expanduser().is_dir():
        note(f"there is no folder {store.store}: only the shipped bundles are listed")
    rows = [_described(summary) for summary in open_store(store).list()]
    if as_json:
        print_json(rows)
        return
    from rich.console import Console

    console = Console(highlight=False)
    if not rows:
        console.print(f"no bundles in {store.store}", markup=False)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    columns = [name for name in rows[0] if name not in ("path", "problem") and any(row[name] for row in rows)]
    for name in columns:
        table.add_column(name, overflow="fold", no_wrap=name in ("bundle", "model", "digest"))
    for row in rows:
        row["digest"] = (row["digest"] or "").removeprefix("sha256:")[:12]
        cells = (row[name] for name in columns)
        table.add_row(*("\n".join(cell) if isinstance(cell, list) else str(cell or "") for cell in cells))
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
        "guarantee": _promise(manifest.guarantee) if manifest and manifest.guarantee else None,
        "digest": manifest.digest if manifest else None,
        "problem": str(summary.error) if summary.error else None,
        "path": str(summary.path) if summary.path else None,
    }


def _promise(guarantee: Guarantee) -> str:
    return f"alpha {guarantee.alpha:g}, delta {guarantee.delta:g}"


def show(
    reference: Reference, /, *, store: StoreOptions = StoreOptions(), as_json: Json = False, common: Common = Common()
) -> None:
    """Print a bundle's model card, or its manifest with --json.

    In a terminal the card is laid out to be read; elsewhere it is the Markdown file as it is.
    """
    bundle = open_store(store).load(reference)
    if as_json:
        print_line((bundle.path / "bundle.json").read_text(encoding="utf-8"))
        return
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        print_line(bundle.card())
        return
    from service.cli.card import print_card

    print_card(bundle.card(), bundle.path, console)


def compare(
    *references: Annotated[str, Parameter(help="name, name@alias or name:version; two or more", show_env_var=False)],
    store: StoreOptions = StoreOptions(),
    common: Common = Common(),
) -> None:
    """Put bundles side by side: what they read, their figures, what keeps these from being compared.

    hallutracer bundle compare smollm2 smollm2-fused
    """
    from service.trainer.comparison import compare as side_by_side

    if len(references) < 2:
        raise UsageError("REFERENCES", "name two bundles or more")
    opened = open_store(store)
    found = side_by_side([opened.load(reference) for reference in references])
    print_line(found.markdown)
    for caveat in found.caveats:
        note(caveat)


def verify(
    reference: Reference,
    /,
    *,
    files_only: Annotated[bool, option("Check the files, load no model."), Parameter(negative="")] = False,
    store: StoreOptions = StoreOptions(),
    engine: EngineChoice = EngineChoice(),
    common: Common = Common(),
) -> None:
    """Check every byte, then replay the golden prompts on the model (default: that of a shipped bundle)."""
    bundle = open_store(store).verify(reference)
    print_line(f"{bundle.reference}: files match {bundle.manifest.digest}")
    if store.require_signature is not None:
        print_line(f"{bundle.reference}: {_vouched(bundle, store.require_signature)}")
    if files_only:
        return
    with closing(load_engine(engine, bundles=[bundle])) as loaded:
        load_scorers(loaded, {bundle.reference: bundle})
    print_line(
        f"{bundle.reference}: {len(bundle.golden.risk)} golden prompts gave the recorded risks on "
        f"{loaded.identity.model}"
    )


def _vouched(bundle: Bundle, signature: str) -> str:
    from probes_store.store import SHIPPED

    if bundle.path.is_relative_to(SHIPPED):
        return "comes with the package, which vouches for it"
    return f"signed by {signature}"


def alias(
    name: Annotated[str, Parameter(help="Bundle name.", show_env_var=False)],
    alias: Annotated[str, Parameter(help="production, canary, ...", show_env_var=False)],
    version: Annotated[int, Parameter(help="Version.", show_env_var=False, validator=Range(1))],
    /,
    *,
    store: StoreOptions = StoreOptions(),
    common: Common = Common(),
) -> None:
    """Point an alias at a version: the only thing about a published bundle that may change."""
    open_store(store).set_alias(name, alias, version)
    print_line(f"{name}@{alias} -> {name}:{version}")


COMMANDS = (
    "Look at, check, publish and fetch probe bundles.",
    {
        "list": list_,
        "show": show,
        "compare": compare,
        "verify": verify,
        "sign": sign,
        "alias": alias,
        "push": push,
        "pull": pull,
    }
    | bundle_rollout.COMMANDS,
)
