"""Resolves references in a store of bundles, in a folder or at a URL, with read-only fallbacks, and
checks trust.

``Store.load`` is the only way from a reference to a bundle: ``resolve`` finds its folder on this
machine; ``_read`` reads it strictly and checks whether it is trusted.  For a store at a URL the
folder is a copy."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from probes_store.bucket import Bucket
from probes_store.bundle import Bundle, BundleDraft, load_version, render
from probes_store.errors import BundleConflict, BundleError, BundleNotFound, DigestMismatch
from probes_store.index import Offer
from probes_store.local import LocalBackend
from probes_store.manifest import Manifest
from probes_store.syntax import (
    HUB,
    PRODUCTION,
    check_name,
    did_you_mean,
    expanded,
    is_url,
    parse_reference,
)
from probes_store.trust import RequiredSignature, Signing, check_bundle_closed, check_closed

if TYPE_CHECKING:
    from probes_store.hub import HubSource

    Backend = LocalBackend | Bucket | HubSource

log = logging.getLogger("hallutracer")
SHIPPED = Path(__file__).parent / "shipped"  # bundles of the package, used as a fallback


def open_backend(location: Path | str, cache: Path | None) -> Backend:
    """Return the bundles at a URL, with their copies in ``cache``, or those of a folder.

    Raises InvalidReference for a wrong URL, and for a folder in a home that does not exist."""
    if not isinstance(location, str) or not is_url(location):
        return LocalBackend(expanded(location, "HALLUTRACER_STORE"))
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "hallutracer", "stores")
    copies = expanded(cache or default, "HALLUTRACER_STORE_CACHE")
    if not location.startswith(HUB):
        return Bucket(location, copies)
    from probes_store.hub import HubSource  # huggingface_hub takes a while to import

    return HubSource(location, copies)


@dataclass
class BundleSummary:
    """One line of a listing.  A damaged or untrusted bundle has an error and no manifest."""

    name: str
    version: int
    aliases: tuple[str, ...]
    path: Path | None = None
    manifest: Manifest | None = None
    error: BundleError | None = None

    @property
    def reference(self) -> str:
        """NAME:VERSION."""
        return f"{self.name}:{self.version}"


@dataclass(frozen=True)
class Trust:
    """The requirements on a bundle of the store besides intact bytes.  Fallbacks are trusted like
    the package."""

    signature: RequiredSignature | None = None
    open_store: bool = False  # accept a store that anyone on this machine can write to


class Store:
    """Bundles in a folder or at a URL; names that it lacks are looked up in the read-only
    ``fallbacks``.

    Methods raise InvalidReference and BundleNotFound, a subclass of BundleDamaged for a damaged
    bundle or aliases.json, OpenStore and, at a URL, StoreRefused and StoreUnreachable; methods that
    write also raise StoreNotWritable."""

    def __init__(
        self,
        location: Path | str,
        fallbacks: Sequence[Path] = (),
        *,
        trust: Trust = Trust(),
        cache: Path | None = None,
    ) -> None:
        """Raises what ``open_backend`` raises."""
        self.own = open_backend(location, cache)
        self.behind = tuple(LocalBackend(Path(fallback)) for fallback in fallbacks)
        self.trust = trust
        self._warned: set[str] = set()  # names whose fallback is hidden
        self.where = self.own.where  # the folder or the URL, as ``--store`` takes it
        self.root = self.own.folders  # its own bundles, or their copies, are in ROOT/NAME/VERSION

    def check_writable(self) -> None:
        """Check that the store can be written, before long work."""
        self.check_closed()
        self.own.check_writable()

    def publish(self, draft: BundleDraft) -> Bundle:
        """Publish a draft as the next version of its name, or return the version that has the same
        content.

        Raises what ``render`` raises for a draft that would not load, and what ``check_writable``
        raises."""
        name = check_name(draft.manifest.name, "a bundle")
        manifest, files = render(draft)
        self.check_closed()
        return load_version(name, self.own.folder(name, self.own.publish(manifest, files)))

    def resolve(self, reference: str) -> Path:
        """Return the folder of a reference, fetched from a URL if necessary; this does not check a
        pin.

        A bare name means the alias ``production`` if it is set, else the highest version."""
        backend, name, version = self._find(reference)
        return backend.folder(name, version)

    def stamp(self, reference: str) -> str:
        """Return a text that changes if the reference means another version, or if its bytes or
        signature change."""
        backend, name, version = self._find(reference)
        return f"{backend.where} {name}:{version} {backend.stamp(name, version)}"

    def load(self, reference: str) -> Bundle:
        """Resolve a reference, load and validate the whole bundle, compare it with a pin, and check
        trust.

        Raises what ``resolve`` and ``load_bundle`` raise, DigestMismatch and BundleUntrusted."""
        return self._load(reference, self.trust.signature)

    def _load(self, reference: str, signature: RequiredSignature | None) -> Bundle:
        wanted = parse_reference(reference)
        bundle = self._read(wanted.name, self.resolve(reference), signature)
        digest = bundle.manifest.digest
        if wanted.digest is not None and wanted.digest != digest:
            raise DigestMismatch(
                "this is not the bundle that the reference pins",
                file=bundle.reference,
                field="digest",
                expected=wanted.digest,
                found=digest,
                cure="Pin the one that 'hallutracer bundle list' shows",
            )
        return bundle

    def verify(self, reference: str) -> Bundle:
        """Load a bundle, and also read its evaluation and card.  Raises what ``load`` raises."""
        bundle = self.load(reference)
        bundle.evaluation()
        bundle.card()
        return bundle

    def sign(self, reference: str, signing: Signing) -> Bundle:
        """Sign a bundle of the store itself.  Raises what ``load`` raises and SigningError."""
        bundle = self._load(reference, None)
        if not self.is_own(bundle.path):
            raise BundleConflict(
                "it comes with the package", file=reference, cure="Sign bundles of your own store"
            )
        manifest = bundle.manifest
        signature = signing.sign(bundle)
        self.own.write_signature(manifest.name, manifest.version, signature)
        return bundle

    def aliases(self, name: str) -> dict[str, int]:
        """Return alias -> version."""
        return self._backend(check_name(name, "a bundle"))[0].aliases(name)

    def set_alias(self, name: str, alias: str, version: int, keep_as: str | None = None) -> None:
        """Point an alias at a version that loads, in one step: a reader sees the old or the new
        version.

        In the same step the alias ``keep_as`` gets the previous version, which need not load."""
        check_name(alias, "an alias")
        if not self.own.versions(check_name(name, "a bundle")):
            raise BundleNotFound(
                f"no bundle {name} in this store; fallbacks are only read",
                cure="Publish it here first",
            )
        self.load(f"{name}:{version}")
        self.own.set_alias(name, alias, version, keep_as)

    def list(self) -> Sequence[BundleSummary]:
        """Return every version of every name, sorted, without hidden fallbacks; damaged bundles
        have their error."""
        self.check_closed()
        holder: dict[str, Backend] = {}
        for backend in (*reversed(self.behind), self.own):  # the first one that has a name
            holder |= dict.fromkeys(backend.names(), backend)
        return [summary for name in sorted(holder) for summary in self._all_of(name, holder[name])]

    def offers(self) -> Sequence[Offer]:
        """Return what the store has itself, for which model; of a URL no bundle is fetched for it,
        and nothing is checked."""
        self.check_closed()
        return self.own.offers()

    def _all_of(self, name: str, backend: Backend) -> Iterator[BundleSummary]:
        aliases: dict[str, int] = {}
        unreadable: BundleError | None = None
        try:
            aliases = backend.aliases(name)
        except BundleError as error:  # then no reference is resolved: each version has this error
            unreadable = error
        for version in sorted(backend.versions(name)):
            summary = BundleSummary(
                name,
                version,
                aliases=tuple(sorted(alias for alias in aliases if aliases[alias] == version)),
                error=unreadable,
            )
            try:
                summary.path = backend.folder(name, version)
                summary.manifest = self._read(name, summary.path, self.trust.signature).manifest
            except BundleError as error:
                summary.error = error
            yield summary

    def _find(self, reference: str) -> tuple[Backend, str, int]:
        """Return the backend, the name and the number of the version that a reference means."""
        wanted = parse_reference(reference)
        name = wanted.name
        alias = wanted.alias
        version = wanted.version
        backend, versions = self._backend(name)
        if version is None:
            aliases = backend.aliases(name)
            version = aliases.get(alias or PRODUCTION)
            if alias and version is None:
                known = ", ".join(sorted(aliases)) or "none"
                raise BundleNotFound(
                    f"bundle {name} has no alias {alias}",
                    cure=f"{did_you_mean(alias, aliases)}Set it, or use one of these: {known}",
                )
            version = version or max(versions)
        if version not in versions:
            raise BundleNotFound(
                f"{reference} names version {version}, which is not there",
                cure=f"Use one of its versions: {', '.join(map(str, sorted(versions)))}",
            )
        return backend, name, version

    def _backend(self, name: str) -> tuple[Backend, set[int]]:
        """Return the store's own backend or the first fallback that has versions of this name, and
        the versions."""
        self.check_closed()
        backends = (self.own, *self.behind)
        having = [(each, versions) for each in backends if (versions := each.versions(name))]
        if not having:
            names = sorted({known for backend in backends for known in backend.names()})
            raise BundleNotFound(
                f"no bundle {name} in {self.where}",
                cure=f"{did_you_mean(name, names)}Train and publish it there, name another store,"
                f" or use one of: {', '.join(names) or 'none'}",
            )
        if having[0][0] is self.own and len(having) > 1 and name not in self._warned:
            self._warned.add(name)
            warning = "%s is that of %s, which hides the one that comes with the package"
            log.warning(warning, name, self.where)
        return having[0]

    def _read(self, name: str, path: Path, signature: RequiredSignature | None) -> Bundle:
        """Read the bundle in a folder of the store or of a fallback.  Raises what ``load``
        raises."""
        bundle = load_version(name, path)
        if self.is_own(path):
            if not self.trust.open_store:
                check_bundle_closed(path)
            if signature is not None:
                signature.check(bundle)
        return bundle

    def is_own(self, path: Path) -> bool:
        """Return whether a bundle's folder belongs to the store and not to a fallback."""
        return path.parent.parent.resolve() == self.root.resolve()

    def check_closed(self) -> None:
        """Raise OpenStore if anyone on this machine can write to the store, unless ``open_store``
        allows it."""
        if not self.trust.open_store:
            check_closed(self.root)
