"""hallutracer bundle push and pull: send a bundle to the Hugging Face hub or to a store at a URL,
and fetch it from there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated, Any

from cyclopts import Parameter

from probes_store.syntax import HUB, check_url, is_url
from service.cli.bundle import pinned
from service.cli.loading import open_store
from service.cli.options import DryRun, Reference, StoreOptions, UsageError
from service.cli.output import print_line
from service.options import Common
from service.progress import note, progress
from service.settings import option


def push(
    reference: Reference,
    to: Annotated[
        str, Parameter(help="hf://OWNER/NAME, or the URL of a store", show_env_var=False)
    ],
    /,
    *,
    private: Annotated[
        bool, option("The repository is, or becomes, a private one."), Parameter(negative="")
    ] = False,
    dry_run: DryRun = False,
    store: StoreOptions = StoreOptions(),
    common: Common = Common(),
) -> None:
    """Publish a bundle on the Hugging Face hub, one commit and one tag for each version, or in the
    store at a URL.

    The version and the signature stay as they are.

      hallutracer bundle push my-probe hf://my-name/my-probe --dry-run
      hallutracer bundle push my-probe s3://my-bucket/probes"""
    if is_url(to) and not to.startswith(HUB):
        _push_to_store(reference, to, store, private=private, dry_run=dry_run)
        return
    from probes_store.syntax import parse_address
    from service.annexes.hub.transfer import push as push_to_hub

    address = parse_address(to)
    if address.revision is not None:
        raise UsageError("TO", f"a push makes its own tag: hf://{address.repository}")
    bundle = open_store(store).verify(reference)
    with progress(f"pushing {bundle.reference}"):
        done = push_to_hub(bundle, address, private=private, dry_run=dry_run)
    if done.nothing:
        print_line(f"{bundle.reference}: the hub has it already, nothing was done")
    else:
        kind = "private" if done.private else "public"
        steps = [
            f"create the {kind} repository" if done.create else "",
            (
                f"commit {len(done.files)} files ({sum(done.files.values()):,} bytes)"
                if done.commit
                else ""
            ),
            f"delete {', '.join(done.deleted)}" if done.deleted else "",
            f"tag {done.tag}",
        ]
        verb = "would " if dry_run else f"to a {kind} repository: "
        print_line(f"{bundle.reference}: {verb}{', '.join(filter(None, steps))}")
    print_line(
        f"{done.url}\nhallutracer bundle pull {done.address} --digest {bundle.manifest.digest}"
    )


def _push_to_store(
    reference: str, to: str, store: StoreOptions, *, private: bool, dry_run: bool
) -> None:
    from probes_store.transfer import copy, held

    if private:
        raise UsageError(
            "--private", "is about the Hugging Face hub; who may read a URL is up to its server"
        )
    source, target = open_store(store), open_store(replace(store, store=check_url(to)))
    bundle = source.verify(reference)
    if dry_run:
        target.check_writable()
        print_line(
            f"{bundle.reference}:"
            f" {'is there' if held(target, bundle.manifest) else 'would be added'}"
        )
        return
    done, added = copy(
        bundle, target, source=source.where, take_over=True
    )  # its publisher says what a name means there
    print_line(
        f"{done.reference}: {'added to' if added else 'the same is there already:'} {target.where}"
    )
    print_line(f"hallutracer bundle verify {pinned(done)} --store {target.where}")


def pull(
    source: Annotated[
        str,
        Parameter(
            help=(
                "hf://OWNER/NAME or hf://OWNER/NAME@REVISION, or the URL of a store, / and NAME,"
                " NAME@ALIAS or "
                "NAME:VERSION"
            ),
            show_env_var=False,
        ),
    ],
    /,
    *,
    digest: Annotated[
        str | None,
        option(
            "sha256:...: what the bundle must have, as its publisher or your own review names it."
        ),
    ] = None,
    take_over: Annotated[
        bool,
        option(
            "Also where a name that you have, or that comes with the package, would mean the pulled"
            " bundle from now on."
        ),
        Parameter(negative=""),
    ] = False,
    store: StoreOptions = StoreOptions(),
    common: Common = Common(),
) -> None:
    """Fetch a bundle from the Hugging Face hub or from the store at a URL, under its own name and
    version.

    hallutracer bundle pull hf://some-name/some-probe@v1
    hallutracer bundle pull s3://my-bucket/probes/my-probe:3"""
    target = open_store(store, to_read=False)
    if is_url(source) and not source.startswith(HUB):
        from probes_store.transfer import copy

        url, _, reference = source.rpartition("/")
        there = open_store(replace(store, store=check_url(url)))
        pinned = there.verify(reference if digest is None else f"{reference}@{digest}")
        bundle, added = copy(pinned, target, source=there.where, take_over=take_over)
        origin = source
    else:
        from tqdm import tqdm

        from probes_store.syntax import parse_address
        from service.annexes.hub.transfer import pull as pull_from_hub

        address = parse_address(source)
        with ExitStack() as stack:

            def bar(total: int) -> Callable[[int], Any]:
                shown = tqdm(
                    total=total,
                    unit="B",
                    unit_scale=True,
                    desc=str(address),
                    disable=None,
                    leave=False,
                )
                return stack.enter_context(shown).update

            done = pull_from_hub(target, address, digest=digest, take_over=take_over, bar=bar)
        bundle, added = done.bundle, done.added
        origin = f"{address} at commit {done.commit}"
        if done.offline:
            note(
                f"{done.offline}\nno connection to the hub: taken from the cache, which may lack"
                " the newest version"
            )
        if done.left_out:
            shown = ", ".join(map(ascii, done.left_out[:10])) + (
                ", ..." if len(done.left_out) > 10 else ""
            )
            note(f"not part of the bundle and not downloaded: {shown}")
    print_line(
        f"{bundle.reference}: {'pulled from' if added else 'here already, the same as'} {origin}"
    )
    print_line(f"{bundle.manifest.digest}, for {ascii(bundle.manifest.model.name)[1:-1]}")
    print_line(f"hallutracer bundle verify {bundle.reference} --model MODEL")


COMMANDS = (
    "Look at, check, publish and fetch probe bundles.",
    {"push": push, "pull": pull},
)
