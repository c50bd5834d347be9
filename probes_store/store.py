"""A store of bundles, in a folder or at a URL, with read-only folders behind it: what a reference means, and trust.

``Store.load`` is the one way from a reference to a bundle: ``resolve`` finds its folder on this machine, ``_read``
reads that strictly and asks whether it is trusted.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from probes_store.bucket import Bucket
from probes_store.bundle import Bundle, BundleDraft, load_version, render
from probes_store.errors import BundleConflict, BundleError, BundleNotFound, DigestMismatch
from probes_store.local import LocalBackend
from probes_store.manifest import Manifest
from probes_store.remote import Backend, RemoteBackend
from probes_store.syntax import HUB, PRODUCTION, BundleReference, check_name, is_url, parse_reference
from probes_store.trust import RequiredSignature, Signing, check_bundle_closed, check_closed

log = logging.getLogger("hallutracer")
SHIPPED = Path(__file__).parent / "shipped"  # bundles that come with the package, used as a fallback


@dataclass(frozen=True)
class BundleSummary:
    """One line of a listing.  A damaged bundle, or one that is not trusted, has an error and no manifest."""

    name: str
    version: int
    path: Path | None
    aliases: tuple[str, ...]
    manifest: Manifest | None
    error: BundleError | None

    @property
    def reference(self) -> str:
        """NAME:VERSION."""
        return f"{self.name}:{self.version}"


Summaries = list[BundleSummary]


@dataclass(frozen=True)
class Trust:
    """What a bundle of the store must have beside sound bytes.  Fallbacks are trusted as the package is."""

    signature: RequiredSignature | None = None
    open_store: bool = False  # whether anyone on this machine may be able to write to the store


def cache_folder(chosen: Path | None = None) -> Path:
    """Return where copies of stores at a URL are kept: hallutracer/stores in the user's cache folder."""
    if chosen is not None:
        return chosen.expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hallutracer" / "stores"


class Store:
    """Bundles in a folder or at a URL; names that it lacks are looked up in the read-only ``fallbacks``."""

    def __init__(
        self, place: Path | str, fallbacks: Sequence[Path] = (), *, trust: Trust = Trust(), cache: Path | None = None
    ) -> None:
        """``cache``: where copies are kept if ``place`` is a URL.  Raises InvalidReference for a wrong URL."""
        self.own: Backend
        if not isinstance(place, str) or not is_url(place):
            self.own = LocalBackend(Path(place).expanduser())
        elif place.startswith(HUB):
            from probes_store.hub import HubSource  # huggingface_hub takes a while to import

            self.own = RemoteBackend(HubSource(place), cache_folder(cache))
        else:
            self.own = RemoteBackend(Bucket(place), cache_folder(cache))
        self.behind: tuple[Backend, ...] = tuple(LocalBackend(Path(fallback)) for fallback in fallbacks)
        self.trust = trust
        self._told: set[str] = set()

    @property
    def where(self) -> str:
        """The folder or the URL, as ``--store`` takes it."""
        return self.own.where

    @property
    def root(self) -> Path:
        """ROOT of the folders ROOT/NAME/VERSION of the store's own bundles; of a URL, its copies on this machine."""
        return self.own.folders

    def check_writable(self) -> None:
        """Test that something can be published, before long work.

        Raises StoreNotWritable, OpenStore, StoreRefused and StoreUnreachable.
        """
        self.check_closed()
        self.own.check_writable()

    def publish(self, draft: BundleDraft) -> Bundle:
        """Publish a draft as the next version of its name, or return the version that has the same content.

        Raises what ``render`` raises for a draft that would not load, and what ``check_writable`` raises.
        """
        name = check_name(draft.manifest.name, "a bundle")
        manifest, files = render(draft)
        self.check_closed()
        return load_version(name, self.own.folder(name, self.own.publish(manifest, files)))

    def resolve(self, reference: str) -> Path:
        """Return the folder of a reference; of a URL, that of the copy, which is fetched if need be.

        A bare name is the alias ``production`` where it is set, and else the highest version.  A pin is not compared
        here.  Raises InvalidReference, BundleNotFound, OpenStore, StoreRefused, StoreUnreachable, and a subclass of
        BundleDamaged for a damaged aliases.json.
        """
        wanted = parse_reference(reference)
        backend, version = self._find(wanted, reference)
        return backend.folder(wanted.name, version)

    def stamp(self, reference: str) -> str:
        """Return what changes where the reference means another version, or its bytes or signature change.

        Of a URL nothing but small objects is read.  Raises what ``resolve`` raises.
        """
        wanted = parse_reference(reference)
        backend, version = self._find(wanted, reference)
        return f"{backend.where} {wanted.name}:{version} {backend.stamp(wanted.name, version)}"

    def answering(self) -> Store:
        """Return the same store, where no answer from its URL is an error, rather than a reason to take copies."""
        if not isinstance(self.own, RemoteBackend):
            return self
        store = copy.copy(self)
        store.own = self.own.answering()
        return store

    def load(self, reference: str) -> Bundle:
        """Resolve and load; the whole bundle is validated, compared with a pin, and must be trusted.

        Raises what ``resolve`` and ``load_bundle`` raise, DigestMismatch and BundleUntrusted.
        """
        return self._load(reference, self.trust.signature)

    def _load(self, reference: str, signature: RequiredSignature | None) -> Bundle:
        wanted = parse_reference(reference)
        bundle = self._read(wanted.name, self.resolve(reference), signature)
        if wanted.digest is not None and bundle.manifest.digest != wanted.digest:
            raise DigestMismatch(
                "this is not the bundle that the reference pins", file=bundle.reference, field="digest",
                expected=wanted.digest, found=bundle.manifest.digest,
                cure="Look at both with 'hallutracer bundle list' and pin the one that you mean",
            )  # fmt: skip
        return bundle

    def verify(self, reference: str) -> Bundle:
        """Do as ``load``, and read the evaluation and the card.  Raises what ``load`` raises."""
        bundle = self.load(reference)
        bundle.evaluation()
        bundle.card()
        return bundle

    def sign(self, reference: str, signing: Signing) -> Bundle:
        """Put a signature beside a bundle of the store itself, which need not have had one.

        Raises what ``load`` raises, BundleConflict, SigningError and StoreNotWritable.
        """
        bundle = self._load(reference, None)
        if not self.is_own(bundle.path):
            problem = "this bundle comes with the package, which vouches for it"
            raise BundleConflict(problem, file=reference, cure="Sign bundles of your own store")
        self.own.write_signature(bundle.manifest.name, bundle.manifest.version, signing.sign(bundle))
        return bundle

    def aliases(self, name: str) -> dict[str, int]:
        """Return alias -> version.  Raises InvalidReference, BundleNotFound and a subclass of BundleDamaged."""
        backend, _ = self._backend(check_name(name, "a bundle"))
        return backend.aliases(name)

    def set_alias(self, name: str, alias: str, version: int, keep_as: str | None = None) -> None:
        """Point an alias at a version that loads, in one step: a reader sees the old or the new version.

        In the same step the alias ``keep_as`` gets the version before, which need not load: that may be why it goes.
        Raises InvalidReference, BundleNotFound, what ``load`` raises, and StoreNotWritable.
        """
        check_name(alias, "an alias")
        if not self.own.versions(check_name(name, "a bundle")):
            cure = "Publish it here first; fallbacks are only read"
            raise BundleNotFound(f"no bundle {name} in this store", cure=cure)
        self.load(f"{name}:{version}")
        self.own.set_alias(name, alias, version, keep_as)

    def list(self) -> Summaries:
        """Return every version of every name, sorted, without shadowed fallbacks; damaged bundles with their error."""
        self.check_closed()
        seen: dict[str, Backend] = {}
        for backend in (self.own, *self.behind):
            for name in backend.names():
                seen.setdefault(name, backend)
        return [summary for name in sorted(seen) for summary in self._summaries(seen[name], name)]

    def _summaries(self, backend: Backend, name: str) -> Iterator[BundleSummary]:
        aliases: dict[str, int] = {}
        shared: BundleError | None = None
        try:
            aliases = backend.aliases(name)
        except BundleError as error:
            shared = error  # without its aliases a name cannot be resolved: reported for each of its versions
        for version in sorted(backend.versions(name)):
            path, manifest, error_here = None, None, shared
            try:
                path = backend.folder(name, version)
                manifest = self._read(name, path, self.trust.signature).manifest
            except BundleError as error:
                error_here = error
            names = tuple(sorted(alias for alias, target in aliases.items() if target == version))
            yield BundleSummary(name, version, path, names, manifest, error_here)

    def _find(self, wanted: BundleReference, reference: str) -> tuple[Backend, int]:
        """Return where the version that a reference means is, and its number."""
        backend, versions = self._backend(wanted.name)
        version = wanted.version
        if version is None:
            aliases = backend.aliases(wanted.name)
            version = aliases.get(wanted.alias or PRODUCTION)
            if version is None and wanted.alias is not None:
                known = ", ".join(sorted(aliases)) or "none"
                raise BundleNotFound(
                    f"bundle {wanted.name} has no alias {wanted.alias}",
                    cure=f"Set it, or use one of its aliases: {known}",
                )
            version = version or max(versions)
        if version not in versions:
            raise BundleNotFound(
                f"{reference} names version {version} of bundle {wanted.name}, which is not there",
                cure=f"Use one of its versions: {', '.join(map(str, sorted(versions)))}",
            )
        return backend, version

    def _backend(self, name: str) -> tuple[Backend, set[int]]:
        """Return the store itself or the first fallback that has versions of this name, and these."""
        self.check_closed()
        having = [(found, at) for at in (self.own, *self.behind) if (found := at.versions(name))]
        if not having:
            known = sorted({known for backend in (self.own, *self.behind) for known in backend.names()})
            raise BundleNotFound(
                f"no bundle {name} in {self.where}",
                cure=f"Train and publish it there, name another store, or use one of: {', '.join(known) or 'none'}",
            )
        versions, backend = having[0]
        if backend is self.own and len(having) > 1 and name not in self._told:
            self._told.add(name)
            log.warning("%s is that of %s, which hides the one that comes with the package", name, self.where)
        return backend, versions

    def _read(self, name: str, path: Path, signature: RequiredSignature | None) -> Bundle:
        """Read the bundle in a folder of the store's or of a fallback.  Raises what ``load`` raises."""
        bundle = load_version(name, path)
        if self.is_own(path):
            if not self.trust.open_store:
                check_bundle_closed(path)
            if signature is not None:
                signature.check(bundle)
        return bundle

    def is_own(self, path: Path) -> bool:
        """Return whether a bundle's folder is the store's, rather than a fallback's."""
        return path.parent.parent.resolve() == self.root.resolve()

    def check_closed(self) -> None:
        """Raise OpenStore where anyone on this machine can write to the store, unless that was agreed to."""
        if not self.trust.open_store:
            check_closed(self.root)
