"""hallutracer bundle promote, rollback, diff: which version serves, and what changes with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from probes_store.aliases import PREVIOUS, PRODUCTION
from service.cli.loading import open_store
from service.cli.options import StoreOptions, UsageError
from service.cli.output import print_line
from service.options import Common
from service.progress import note
from service.settings import Range, option

if TYPE_CHECKING:
    from probes_store.bundle import Bundle
    from service.trainer.comparison import PromotionBounds

FOLLOW = "running services: those with --watch-s follow by themselves; else SIGHUP or POST /v1/admin/reload"
Candidate = Annotated[str, Parameter(help="NAME:VERSION or NAME@ALIAS, such as my-probe@canary.", show_env_var=False)]
Name = Annotated[str, Parameter(help="Bundle name.", show_env_var=False)]


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
        option(
            "How far its golden prompts may be off on that service, as a share of what the replay tolerates.",
            limits=Range(0, 1),
        ),
    ] = 0.5,  # fmt: skip
    ungated: Annotated[bool, option("Promote without asking a service."), Parameter(negative="")] = False,
    store: StoreOptions = StoreOptions(),
    common: Common = Common(),
) -> None:
    """Point production at a version, and previous at the one that served.

    A service that reads the candidate as a shadow is asked first; where it disagrees too much, nothing is changed.

      hallutracer bundle promote my-probe@canary --service http://127.0.0.1:8765
    """
    from probes_store.reference import parse_reference
    from service.errors import HalluTracerError
    from service.trainer.comparison import PromotionBounds

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
        bounds = PromotionBounds(least_prompts, most_disagreement, most_drift)
        if not _passes(bundle, _served(service, service_key), bounds):
            raise HalluTracerError(f"{bundle.reference} is not promoted: nothing was changed")
    opened.set_alias(name, PRODUCTION, version, PREVIOUS)
    print_line(f"{name}@{PRODUCTION} -> {bundle.reference}")
    if PRODUCTION in aliases:
        print_line(f"{name}@{PREVIOUS} -> {name}:{aliases[PRODUCTION]}; back: hallutracer bundle rollback {name}")
    note(FOLLOW)


def rollback(name: Name, /, *, store: StoreOptions = StoreOptions(), common: Common = Common()) -> None:
    """Point production at the version that served before the last promotion; a second time undoes it."""
    from service.errors import HalluTracerError

    opened = open_store(store)
    aliases = opened.aliases(name)
    before, now = aliases.get(PREVIOUS), aliases.get(PRODUCTION)
    if before is None or now is None:
        raise HalluTracerError(
            f"{name} has no alias {PREVIOUS if before is None else PRODUCTION}: nothing was promoted"
        )
    if before == now:
        raise HalluTracerError(f"{name}@{PREVIOUS} is what serves, {name}:{now}: there is nothing to go back to")
    opened.set_alias(name, PRODUCTION, before, PREVIOUS)
    print_line(f"{name}@{PRODUCTION} -> {name}:{before}\n{name}@{PREVIOUS} -> {name}:{now}")
    for alias in sorted(alias for alias in aliases if alias != PRODUCTION and aliases[alias] == now):
        note(f"{name}@{alias} is {name}:{now} still, also where it is a canary; to end that: "
             f"hallutracer bundle alias {name} {alias} {before}")  # fmt: skip
    note(FOLLOW)


def diff(
    before: Annotated[str, Parameter(help="name, name@alias or name:version", show_env_var=False)],
    after: Annotated[str, Parameter(help="name, name@alias or name:version", show_env_var=False)],
    /,
    *,
    store: StoreOptions = StoreOptions(),
    common: Common = Common(),
) -> None:
    """What differs between two bundles: every field of the manifest, and how far the probes point elsewhere.

    Their figures side by side: hallutracer bundle compare.

      hallutracer bundle diff my-probe@production my-probe@canary
    """
    from service.fitting.markdown import markdown_table
    from service.trainer.comparison import differences, probes_apart

    opened = open_store(store)
    first, second = (opened.load(reference) for reference in (before, after))
    rows = [list(row) for row in differences(first.manifest, second.manifest)]
    if not rows:
        print_line("the same bundle")
        return
    print_line(markdown_table(["field", first.reference, second.reference], rows))
    print_line(probes_apart(first, second))


def _passes(bundle: Bundle, served: Any, bounds: PromotionBounds) -> bool:
    from service.trainer.comparison import promotion_findings as findings

    found = findings(bundle, served, bounds)
    for one in found:
        print_line(f"{'ok  ' if one.fine else 'FAIL'}  {one.text}")
    return all(one.fine for one in found)


def _served(address: str, key: str | None) -> Any:
    import httpx

    from service.errors import HalluTracerError

    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    url = f"{address.rstrip('/')}/v1/bundles"
    try:
        answer = httpx.get(url, headers=headers, timeout=10, trust_env=False)
        answer.raise_for_status()
        return answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise HalluTracerError(f"{url} did not tell what it serves: {error}; nothing was changed") from None


COMMANDS = {"promote": promote, "rollback": rollback, "diff": diff}
