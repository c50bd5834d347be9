"""hallutracer bundle: look at bundles, check them, point aliases at them; ``bundle_transfer`` sends and fetches."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from probes_store.syntax import PREVIOUS, PRODUCTION, is_url
from service.cli.bundle_transfer import pull, push, sign
from service.cli.loading import load_engine, load_scorers, open_store, running_service
from service.cli.options import EngineChoice, Json, Reference, StoreOptions, UsageError
from service.cli.output import print_json, print_line
from service.errors import HalluTracerError
from service.options import Common
from service.progress import note
from service.settings import DEFAULT_STORE, Range, option

if TYPE_CHECKING:
    from probes_store.store import BundleSummary

FOLLOW = "running services: those with --watch-s follow by themselves; else SIGHUP or POST /v1/admin/reload"
Name = Annotated[str, Parameter(help="Bundle name.", show_env_var=False)]
Candidate = Annotated[str, Parameter(help="NAME:VERSION or NAME@ALIAS, such as my-probe@canary.", show_env_var=False)]


def list_(*, store: StoreOptions = StoreOptions(), as_json: Json = False, common: Common = Common()) -> None:
    """List every bundle; damaged ones with what is wrong."""
    if not is_url(store.store) and store.store != DEFAULT_STORE and not Path(store.store).expanduser().is_dir():
        note(f"there is no folder {store.store}: only the shipped bundles are listed")
    rows = [_described(summary) for summary in open_store(store).list()]
    if as_json:
        print_json(rows)
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not rows:
        console.print(f"no bundles in {store.store}", markup=False)
        return
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
    guarantee = manifest.guarantee if manifest else None
    return {
        "bundle": summary.reference,
        "aliases": list(summary.aliases),
        "model": manifest.model.name if manifest else None,
        "readout": manifest.readout.site if manifest else None,
        "signals": list(manifest.signals) if manifest else [],
        "guarantee": f"alpha {guarantee.alpha:g}, delta {guarantee.delta:g}" if guarantee else None,
        "digest": manifest.digest if manifest else None,
        "problem": str(summary.error) if summary.error else None,
        "path": str(summary.path) if summary.path else None,
    }


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

    Of two, also every field of the manifest that differs, and how far the probes point elsewhere.

      hallutracer bundle compare smollm2 smollm2-fused
      hallutracer bundle compare my-probe@production my-probe@canary
    """
    from service.trainer.comparison import compare as side_by_side
    from service.trainer.comparison import differences, probes_apart
    from service.trainer.presentation import markdown_table

    if len(references) < 2:
        raise UsageError("REFERENCES", "name two bundles or more")
    opened = open_store(store)
    bundles = [opened.load(reference) for reference in references]
    found = side_by_side(bundles)
    print_line(found.markdown)
    if len(bundles) == 2:
        first, second = bundles
        rows = [list(row) for row in differences(first.manifest, second.manifest)]
        print_line(markdown_table(["field", first.reference, second.reference], rows) if rows else "the same bundle")
        print_line(probes_apart(first, second))
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
    from probes_store.store import SHIPPED

    bundle = open_store(store).verify(reference)
    print_line(f"{bundle.reference}: files match {bundle.manifest.digest}")
    if store.require_signature is not None:
        shipped = bundle.path.is_relative_to(SHIPPED)
        by = "comes with the package, which vouches for it" if shipped else f"signed by {store.require_signature}"
        print_line(f"{bundle.reference}: {by}")
    if files_only:
        return
    with closing(load_engine(engine, bundles=[bundle])) as loaded:
        load_scorers(loaded, {bundle.reference: bundle})
        model = loaded.identity.model
    print_line(f"{bundle.reference}: {len(bundle.golden.risk)} golden prompts gave the recorded risks on {model}")


def alias(
    name: Name,
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


def promote(
    candidate: Candidate,
    /,
    *,
    service: Annotated[
        str | None, option("Address of a service that reads the candidate as a shadow: it tells whether it may serve.")
    ] = None,
    service_key: Annotated[str | None, option("Key for that service.", secret=True)] = None,
    least_prompts: Annotated[int, option("Prompts that it must have read as a shadow.", limits=Range(1))] = 500,
    most_disagreement: Annotated[
        float,
        option("Share of prompts that it may flag otherwise: upper end of the 95 % interval.", limits=Range(0, 1)),
    ] = 0.05,
    most_drift: Annotated[
        float,
        option("How far its golden prompts may be off on that service, as a share of what the replay tolerates.",
               limits=Range(0, 1)),
    ] = 0.5,
    ungated: Annotated[bool, option("Promote without asking a service."), Parameter(negative="")] = False,
    store: StoreOptions = StoreOptions(),
    common: Common = Common(),
) -> None:  # fmt: skip
    """Point production at a version, and previous at the one that served.

    A service that reads the candidate as a shadow is asked first; where it disagrees too much, nothing is changed.

      hallutracer bundle promote my-probe@canary --service http://127.0.0.1:8765
    """
    from probes_store.syntax import parse_reference
    from service.trainer.comparison import PromotionBounds, promotion_findings

    if (service is None) is not ungated:
        raise UsageError("--service", "name a service that shadows the candidate, or say --ungated")
    opened = open_store(store)
    bundle = opened.load(candidate)
    name, version = bundle.manifest.name, bundle.manifest.version
    if parse_reference(candidate).name == candidate:
        raise UsageError("CANDIDATE", f"{candidate!r} alone is what serves: name a version or an alias")
    aliases = opened.aliases(name)
    if aliases.get(PRODUCTION) == version:
        note(f"{name}@{PRODUCTION} is {bundle.reference} already")
        return
    if service is not None:
        with running_service(service, service_key) as get:
            served = get("/v1/bundles")
        found = promotion_findings(bundle, served, PromotionBounds(least_prompts, most_disagreement, most_drift))
        for one in found:
            print_line(f"{'ok  ' if one.fine else 'FAIL'}  {one.text}")
        if not all(one.fine for one in found):
            raise HalluTracerError(f"{bundle.reference} is not promoted: nothing was changed")
    opened.set_alias(name, PRODUCTION, version, PREVIOUS)
    print_line(f"{name}@{PRODUCTION} -> {bundle.reference}")
    if PRODUCTION in aliases:
        print_line(f"{name}@{PREVIOUS} -> {name}:{aliases[PRODUCTION]}; back: hallutracer bundle rollback {name}")
    note(FOLLOW)


def rollback(name: Name, /, *, store: StoreOptions = StoreOptions(), common: Common = Common()) -> None:
    """Point production at the version that served before the last promotion; a second time undoes it."""
    opened = open_store(store)
    aliases = opened.aliases(name)
    if missing := [alias for alias in (PREVIOUS, PRODUCTION) if alias not in aliases]:
        raise HalluTracerError(f"{name} has no alias {missing[0]}: nothing was promoted")
    before, now = aliases[PREVIOUS], aliases[PRODUCTION]
    if before == now:
        raise HalluTracerError(f"{name}@{PREVIOUS} is what serves, {name}:{now}: there is nothing to go back to")
    opened.set_alias(name, PRODUCTION, before, PREVIOUS)
    print_line(f"{name}@{PRODUCTION} -> {name}:{before}\n{name}@{PREVIOUS} -> {name}:{now}")
    for alias in sorted(alias for alias in aliases if alias != PRODUCTION and aliases[alias] == now):
        note(f"{name}@{alias} is {name}:{now} still, also where it is a canary; to end that: "
             f"hallutracer bundle alias {name} {alias} {before}")  # fmt: skip
    note(FOLLOW)


COMMANDS = (
    "Look at, check, publish and fetch probe bundles.",
    {"list": list_, "show": show, "compare": compare, "verify": verify, "sign": sign, "alias": alias, "push": push,
     "pull": pull, "promote": promote, "rollback": rollback},
)  # fmt: skip
