"""hallutracer bundle: look at bundles, check them, sign them, point aliases at them."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from probes_store.syntax import HUB, PREVIOUS, PRODUCTION, is_url
from service.cli.loading import load_engine, load_scorers, open_store, running_service
from service.cli.options import EngineChoice, Json, Reference, StoreOptions, UsageError
from service.cli.output import print_card, print_json, print_line, print_table
from service.errors import HalluTracerError
from service.options import Common
from service.progress import note
from service.settings import DEFAULT_STORE, Range, option

if TYPE_CHECKING:
    from probes_store.bundle import Bundle
    from probes_store.store import BundleSummary
    from service.library.offers import Match

FOLLOW = (
    "running services: those with --watch-s follow by themselves; else SIGHUP or POST"
    " /v1/admin/reload"
)
Name = Annotated[str, Parameter(help="Bundle name.", show_env_var=False)]
Candidate = Annotated[
    str, Parameter(help="NAME:VERSION or NAME@ALIAS, such as my-probe@canary.", show_env_var=False)
]


def list_(
    *, store: StoreOptions = StoreOptions(), as_json: Json = False, common: Common = Common()
) -> None:
    """List every bundle; damaged ones with what is wrong."""
    if (
        not is_url(store.store)
        and store.store != DEFAULT_STORE
        and not Path(os.path.expanduser(store.store)).is_dir()
    ):
        note(f"there is no folder {store.store}: only the shipped bundles are listed")
    rows = [_described(summary) for summary in open_store(store, to_read=False).list()]
    if as_json:
        print_json(rows)
        return
    from rich.console import Console

    if not rows:
        print_line(f"no bundles in {store.store}")
        return
    columns = [
        name
        for name in rows[0]
        if name not in ("path", "problem") and any(map(itemgetter(name), rows))
    ]
    shown = [row | {"digest": (row["digest"] or "").removeprefix("sha256:")[:12]} for row in rows]
    print_table(shown, columns)
    for row in filter(lambda row: row["problem"], rows):
        Console(highlight=False).print(
            f"{row['bundle']} is damaged: {row['problem']}",
            style="red",
            soft_wrap=True,
            markup=False,
        )


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


def find(
    model: Annotated[
        str, Parameter(help="Folder, GGUF file or hub name of a model.", show_env_var=False)
    ],
    /,
    *,
    look_in: Annotated[
        tuple[str, ...],
        option("hf://OWNER/NAME or the URL of a store, to look there, too; repeatable."),
    ] = (),
    store: StoreOptions = StoreOptions(),
    as_json: Json = False,
    common: Common = Common(),
) -> None:
    """Find bundles for a model: by its weights, where they are here, else by its name.

    Nothing is fetched. Whether a bundle fits is checked when it is served. Without one, the command
    that trains one is printed, with status 1.

      hallutracer bundle find ./my-model --look-in hf://some-name/some-probe"""
    from probes_store.store import SHIPPED
    from service.library.offers import for_model

    there = [open_store(replace(store, store=place)) for place in look_in]
    matches = for_model(model, [open_store(store), *there])
    if not matches:
        raise HalluTracerError(
            f"no bundle for {model} is in {', '.join([store.store, *look_in])}; one command makes"
            f" one: hallutracer train --model {model}"
        )
    rows: list[dict[str, Any]] = [
        {
            "bundle": match.reference,
            "in": "the package" if match.where == str(SHIPPED) else match.where,
            "model": match.offer.model,
            "known by": "weights" if match.same_weights else "name",
            "auroc": match.offer.auroc,
            "next": _next(match, model, store),
        }
        for match in matches
    ]
    if as_json:
        print_json(rows)
        return
    shown = [row | {"auroc": f"{row['auroc']:.3f}" if row["auroc"] else "-"} for row in rows]
    print_table(shown, [name for name in rows[0] if name != "next"])
    print_line(rows[0]["next"])


def _next(match: Match, model: str, store: StoreOptions) -> str:
    """Return the command that goes on with a bundle that was found."""
    if match.where.startswith(HUB):
        return f"hallutracer bundle pull {match.where}@v{match.offer.versions[-1]}"
    if is_url(match.where) and match.where != store.store:
        return f"hallutracer bundle pull {match.where}/{match.reference}"
    at = "" if store.store == DEFAULT_STORE else f" --store {store.store}"
    return f"hallutracer serve --model {model} --bundle {match.offer.name}{at}"


def show(
    reference: Reference,
    /,
    *,
    store: StoreOptions = StoreOptions(),
    as_json: Json = False,
    common: Common = Common(),
) -> None:
    """Print a bundle's model card, or its manifest with --json.

    In a terminal the card is laid out to be read; elsewhere it is Markdown."""
    bundle = open_store(store).load(reference)
    if as_json:
        print_line((bundle.path / "bundle.json").read_text(encoding="utf-8"))
        return
    from rich.console import Console

    from service.trainer.cards import card_of

    console = Console(highlight=False)
    if not console.is_terminal:
        print_line(card_of(bundle))
    else:
        print_card(card_of(bundle), bundle.path, console)


def compare(
    *references: Annotated[
        str, Parameter(help="name, name@alias or name:version; two or more", show_env_var=False)
    ],
    store: StoreOptions = StoreOptions(),
    common: Common = Common(),
) -> None:
    """Put bundles side by side: what they read, their figures, what keeps these from being
    compared.

    Of two, also every field of the manifest that differs, and how far the probes point elsewhere.

      hallutracer bundle compare smollm2 smollm2-fused
      hallutracer bundle compare my-probe@production my-probe@canary"""
    from service.trainer.comparison import compare as side_by_side
    from service.trainer.comparison import differences, probes_apart
    from service.trainer.presentation import markdown_table

    if len(references) < 2:
        raise UsageError("REFERENCES", "name two bundles or more")
    opened = open_store(store)
    bundles = [opened.load(reference) for reference in references]
    comparison = side_by_side(bundles)
    print_line(comparison.markdown)
    if len(bundles) == 2:
        first, second = bundles
        rows = [list(row) for row in differences(first.manifest, second.manifest)]
        print_line(
            markdown_table(["field", first.reference, second.reference], rows)
            if rows
            else "the same bundle"
        )
        print_line(probes_apart(first, second))
    for caveat in comparison.caveats:
        note(caveat)


def verify(
    reference: Reference,
    /,
    *,
    files_only: Annotated[
        bool, option("Check the files, load no model."), Parameter(negative="")
    ] = False,
    store: StoreOptions = StoreOptions(),
    engine: EngineChoice = EngineChoice(),
    common: Common = Common(),
) -> None:
    """Check every byte, then replay the golden prompts on the model (default: that of a shipped
    bundle)."""
    from probes_store.store import SHIPPED

    bundle = open_store(store).verify(reference)
    print_line(f"{bundle.reference}: files match {bundle.manifest.digest}")
    if store.require_signature is not None:
        shipped = bundle.path.is_relative_to(SHIPPED)
        by = (
            "comes with the package, which vouches for it"
            if shipped
            else f"signed by {store.require_signature}"
        )
        print_line(f"{bundle.reference}: {by}")
    if files_only:
        return
    with closing(load_engine(engine, bundles=[bundle])) as loaded:
        load_scorers(loaded, {bundle.reference: bundle})
        model = loaded.identity.model
    print_line(
        f"{bundle.reference}: {len(bundle.golden.risk)} golden prompts gave the recorded risks on"
        f" {model}"
    )


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
        str | None,
        option(
            "Address of a service that reads the candidate as a shadow: it tells whether it may"
            " serve."
        ),
    ] = None,
    service_key: Annotated[str | None, option("Key for that service.", secret=True)] = None,
    least_prompts: Annotated[
        int, option("Prompts that it must have read as a shadow.", limits=Range(1))
    ] = 500,
    most_disagreement: Annotated[
        float,
        option(
            "Share of prompts that it may flag otherwise: upper end of the 95 % interval.",
            limits=Range(0, 1),
        ),
    ] = 0.05,
    most_drift: Annotated[
        float,
        option(
            "How far its golden prompts may be off on that service, as a share of what the replay"
            " tolerates.",
            limits=Range(0, 1),
        ),
    ] = 0.5,
    ungated: Annotated[
        bool, option("Promote without asking a service."), Parameter(negative="")
    ] = False,
    store: StoreOptions = StoreOptions(),
    common: Common = Common(),
) -> None:
    """Point production at a version, and previous at the one that served.

    A service that reads the candidate as a shadow is asked first; where it disagrees too much,
    nothing is changed.

      hallutracer bundle promote my-probe@canary --service http://127.0.0.1:8765"""
    from probes_store.syntax import parse_reference
    from service.trainer.comparison import PromotionBounds, promotion_findings

    if (service is None) is not ungated:
        raise UsageError("--service", "name a service that shadows the candidate, or say --ungated")
    opened = open_store(store)
    bundle = opened.load(candidate)
    name, version = bundle.manifest.name, bundle.manifest.version
    if parse_reference(candidate).name == candidate:
        raise UsageError(
            "CANDIDATE", f"{candidate!r} alone is what serves: name a version or an alias"
        )
    aliases = opened.aliases(name)
    if aliases.get(PRODUCTION) == version:
        note(f"{name}@{PRODUCTION} is {bundle.reference} already")
        return
    if service is not None:
        with running_service(service, service_key) as get:
            served = get("/v1/bundles")
        findings = promotion_findings(
            bundle, served, PromotionBounds(least_prompts, most_disagreement, most_drift)
        )
        for finding in findings:
            print_line(f"{'ok  ' if finding.fine else 'FAIL'}  {finding.text}")
        if not all(finding.fine for finding in findings):
            raise HalluTracerError(f"{bundle.reference} is not promoted: nothing was changed")
    opened.set_alias(name, PRODUCTION, version, PREVIOUS)
    print_line(f"{name}@{PRODUCTION} -> {bundle.reference}")
    if PRODUCTION in aliases:
        print_line(
            f"{name}@{PREVIOUS} -> {name}:{aliases[PRODUCTION]}; back: hallutracer bundle rollback"
            f" {name}"
        )
    note(FOLLOW)


def rollback(
    name: Name, /, *, store: StoreOptions = StoreOptions(), common: Common = Common()
) -> None:
    """Point production at the version that served before the last promotion; a second time undoes
    it."""
    opened = open_store(store)
    aliases = opened.aliases(name)
    if missing := [alias for alias in (PREVIOUS, PRODUCTION) if alias not in aliases]:
        raise HalluTracerError(f"{name} has no alias {missing[0]}: nothing was promoted")
    before, now = aliases[PREVIOUS], aliases[PRODUCTION]
    if before == now:
        raise HalluTracerError(
            f"{name}@{PREVIOUS} is what serves, {name}:{now}: there is nothing to go back to"
        )
    opened.set_alias(name, PRODUCTION, before, PREVIOUS)
    print_line(f"{name}@{PRODUCTION} -> {name}:{before}\n{name}@{PREVIOUS} -> {name}:{now}")
    for alias in sorted(
        alias for alias in aliases if alias != PRODUCTION and aliases[alias] == now
    ):
        note(
            f"{name}@{alias} is {name}:{now} still, also where it is a canary; to end that: "
            f"hallutracer bundle alias {name} {alias} {before}"
        )
    note(FOLLOW)


def sign(
    reference: Reference,
    /,
    *,
    key_file: Annotated[
        Path | None, option("Private key, PEM, elliptic curve.  Default: sigstore.")
    ] = None,
    key_password: Annotated[
        str, option("Of the private key; prefer the environment variable.", secret=True)
    ] = "",
    certificate: Annotated[Path | None, option("Certificate of the key, PEM.")] = None,
    chain: Annotated[
        tuple[str, ...],
        option(
            "Certificate of the certificate's issuer, then of that one's, and so on, repeatable."
        ),
    ] = (),
    store: StoreOptions = StoreOptions(),
    common: Common = Common(),
) -> None:
    """Sign a bundle of your store in the format of OpenSSF model signing: model.sig, beside its
    files.

    Without a key, with sigstore: the identity that this machine has (in CI) or that you log in as.

      openssl ecparam -name prime256v1 -genkey -noout -out key.pem
      openssl pkey -in key.pem -pubout -out key.pub
      hallutracer bundle sign my-probe:3 --key-file key.pem
      hallutracer bundle verify my-probe:3 --require-signature key.pub --files-only"""
    from probes_store.bundle import SIGNATURE
    from probes_store.trust import Signing

    if key_file is None and (certificate or chain or key_password):
        raise UsageError("--key-file", "name the private key")
    if chain and certificate is None:
        raise UsageError("--chain", "needs --certificate")
    bundle = open_store(store).sign(
        reference, Signing(key_file, key_password or None, certificate, tuple(map(Path, chain)))
    )
    print_line(f"{pinned(bundle)}: signed, {bundle.path / SIGNATURE}")


def pinned(bundle: Bundle) -> str:
    """Return NAME:VERSION@DIGEST."""
    return f"{bundle.reference}@{bundle.manifest.digest}"


COMMANDS = (
    "Look at, check, publish and fetch probe bundles.",
    {
        "list": list_,
        "find": find,
        "show": show,
        "compare": compare,
        "verify": verify,
        "sign": sign,
        "alias": alias,
        "promote": promote,
        "rollback": rollback,
    },
)
