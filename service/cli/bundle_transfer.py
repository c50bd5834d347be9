"""hallutracer bundle sign, push and pull: what goes with a bundle to others."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from probes_store.syntax import HUB, check_url, is_url
from service.cli.loading import open_store
from service.cli.options import DryRun, Reference, StoreOptions, UsageError
from service.cli.output import print_line
from service.options import Common
from service.progress import note, progress
from service.settings import option

if TYPE_CHECKING:
    from tqdm import tqdm

    from probes_store.bundle import Bundle


def sign(
    reference: Reference,
    /,
    *,
    key_file: Annotated[Path | None, option("Private key, PEM, elliptic curve.  Default: sigstore.")] = None,
    key_password: Annotated[str, option("Of the private key; prefer the environment variable.", secret=True)] = "",
    certificate: Annotated[Path | None, option("Certificate of the key, PEM.")] = None,
    chain: Annotated[
        tuple[str, ...], option("Certificate of the certificate's issuer, then of that one's, and so on, repeatable.")
    ] = (),
    store: StoreOptions = StoreOptions(),
    common: Common = Common(),
) -> None:
    """Sign a bundle of your store in the format of OpenSSF model signing: model.sig, beside its files.

    Without a key, with sigstore: the identity that this machine has (in CI) or that you log in as.

      openssl ecparam -name prime256v1 -genkey -noout -out key.pem
      openssl pkey -in key.pem -pubout -out key.pub
      hallutracer bundle sign my-probe:3 --key-file key.pem
      hallutracer bundle verify my-probe:3 --require-signature key.pub --files-only
    """
    from probes_store.bundle import SIGNATURE
    from probes_store.trust import Signing

    if key_file is None and (certificate or chain or key_password):
        raise UsageError("--key-file", "name the private key")
    if chain and certificate is None:
        raise UsageError("--chain", "needs --certificate")
    bundle = open_store(store).sign(
        reference, Signing(key_file, key_password or None, certificate, tuple(map(Path, chain)))
    )
    print_line(f"{_pinned(bundle)}: signed, {bundle.path / SIGNATURE}")


def push(
    reference: Reference,
    to: Annotated[str, Parameter(help="hf://OWNER/NAME, or the URL of a store", show_env_var=False)],
    /,
    *,
    private: Annotated[bool, option("The repository is, or becomes, a private one."), Parameter(negative="")] = False,
    dry_run: DryRun = False,
    store: StoreOptions = StoreOptions(),
    common: Common = Common(),
) -> None:
    """Publish a bundle on the Hugging Face hub, one commit and one tag for each version, or in the store at a URL.

    The version and the signature stay as they are.

      hallutracer bundle push my-probe hf://my-name/my-probe --dry-run
      hallutracer bundle push my-probe s3://my-bucket/probes
    """
    if is_url(to) and not to.startswith(HUB):
        _push_to_store(reference, to, store, private=private, dry_run=dry_run)
        return
    from probes_store.syntax import parse_address
    from probes_store.transfer import push as push_to_hub

    address = parse_address(to)
    if address.revision is not None:
        raise UsageError("TO", f"a push makes its own tag: hf://{address.repository}")
    bundle = open_store(store).verify(reference)
    with progress(f"pushing {bundle.reference}"):
        done = push_to_hub(bundle, address, private=private, dry_run=dry_run)
    if done.plan.nothing:
        print_line(f"{bundle.reference}: the hub has it already, nothing was done")
    else:
        kind = "private" if done.private else "public"
        steps = [
            f"create the {kind} repository" if done.plan.create else "",
            f"commit {len(done.files)} files ({sum(done.files.values()):,} bytes)" if done.plan.commit else "",
            f"delete {', '.join(done.plan.deleted)}" if done.plan.deleted else "",
            f"tag {done.tag}",
        ]
        verb = "would " if dry_run else f"to a {kind} repository: "
        print_line(f"{bundle.reference}: {verb}{', '.join(filter(None, steps))}")
    print_line(f"{done.url}\nhallutracer bundle pull {done.address} --digest {bundle.manifest.digest}")


def _push_to_store(reference: str, to: str, store: StoreOptions, *, private: bool, dry_run: bool) -> None:
    from probes_store.transfer import copy, held

    if private:
        raise UsageError("--private", "is about the Hugging Face hub; who may read a URL is up to its server")
    own, there = open_store(store), open_store(replace(store, store=check_url(to)))
    bundle = own.verify(reference)
    if dry_run:
        there.check_writable()
        print_line(f"{bundle.reference}: {'is there' if held(there, bundle.manifest) else 'would be added'}")
        return
    done, added = copy(bundle, there, source=own.where, take_over=True)  # its publisher says what a name means there
    print_line(f"{done.reference}: {'added to' if added else 'the same is there already:'} {there.where}")
    print_line(f"hallutracer bundle verify {_pinned(done)} --store {there.where}")


def pull(
    source: Annotated[
        str,
        Parameter(help="hf://OWNER/NAME or hf://OWNER/NAME@REVISION, or the URL of a store, / and NAME, NAME@ALIAS or "
                  "NAME:VERSION", show_env_var=False),
    ],
    /,
    *,
    digest: Annotated[
        str | None, option("sha256:...: what the bundle must have, as its publisher or your own review names it.")
    ] = None,
    take_over: Annotated[
        bool,
        option("Also where a name that you have, or that comes with the package, would mean the pulled bundle from now "
               "on."),
        Parameter(negative=""),
    ] = False,
    store: StoreOptions = StoreOptions(),
    common: Common = Common(),
) -> None:  # fmt: skip
    """Fetch a bundle from the Hugging Face hub or from the store at a URL, under its own name and version.

    hallutracer bundle pull hf://some-name/some-probe@v1
    hallutracer bundle pull s3://my-bucket/probes/my-probe:3
    """
    own = open_store(store)
    if is_url(source) and not source.startswith(HUB):
        from probes_store.transfer import copy

        url, _, reference = source.rpartition("/")
        there = open_store(replace(store, store=check_url(url)))
        pinned = there.verify(reference if digest is None else f"{reference}@{digest}")
        bundle, added = copy(pinned, own, source=there.where, take_over=take_over)
        place = source
    else:
        from probes_store.syntax import parse_address
        from probes_store.transfer import pull as pull_from_hub

        address = parse_address(source)
        with ExitStack() as stack:
            done = pull_from_hub(own, address, digest=digest, take_over=take_over,
                                 bar=lambda total: stack.enter_context(_bar(total, str(address))).update)  # fmt: skip
        bundle, added, place = done.bundle, done.added, f"{address} at commit {done.commit}"
        if done.offline:
            note(f"{done.offline}\nno connection to the hub: taken from the cache, which may lack the newest version")
        if done.left_out:
            shown = ", ".join(map(ascii, done.left_out[:10])) + (", ..." if len(done.left_out) > 10 else "")
            note(f"not part of the bundle and not downloaded: {shown}")
    print_line(f"{bundle.reference}: {'pulled from' if added else 'here already, the same as'} {place}")
    print_line(f"{bundle.manifest.digest}, for {ascii(bundle.manifest.model.name)[1:-1]}")
    print_line(f"hallutracer bundle verify {bundle.reference} --model MODEL")


def _bar(total: int, title: str) -> tqdm[Any]:
    from tqdm import tqdm

    return tqdm(total=total, unit="B", unit_scale=True, desc=title, disable=None, leave=False)


def _pinned(bundle: Bundle) -> str:
    return f"{bundle.reference}@{bundle.manifest.digest}"
