"""Resolves references in a store of bundles, in a folder or at a URL, with read-only fallbacks, and
checks trust.

``Store.load`` is the only way from a reference to a bundle: ``resolve`` finds its folder on this
machine; ``_read`` reads it strictly and checks whether it is trusted.  For a store at a URL the
folder is a copy:

CACHE/NAME/VERSION/   in the layout of a local store"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from probes_store import errors
from probes_store.bucket import Bucket
from probes_store.bundle import SIGNATURE, Bundle, BundleDraft, check_total, load_version, render
from probes_store.errors import BadValue, BundleConflict, BundleDamaged, BundleError, BundleNotFound
from probes_store.index import Offer, joined, offer_of, offers
from probes_store.local import LocalBackend, atomic_write, writing
from probes_store.manifest import MANIFEST, Manifest, manifest_bytes, read_manifest
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

log = logging.getLogger("hallutracer")
SHIPPED = (
    Path(__file__).parent / "shipped"
)  # bundles that come with the package, used as a fallback


class RemoteBackend:
    """The bundles of a source, each fetched once into a cache; see ``LocalBackend`` for what the
    methods do.

    What they mean is asked of the source each time: without its answer nothing is read, though a
    copy is here."""

    def __init__(self, source: Bucket | HubSource, cache: Path) -> None:
        """``cache``: the folder of all sources' copies."""
        self._source, self.where = source, source.where
        self._copies = LocalBackend(cache / hashlib.sha256(source.where.encode()).hexdigest()[:16])
        self.folders = self._copies.folders
        self.names = source.names
        self.versions = source.versions
        self.aliases = source.aliases
        self.offers = partial(offers, source)
        self.check_writable = source.check_writable
        self.publish = source.publish
        self.add = source.add
        self.set_alias = source.set_alias
        self.write_signature = source.write_signature

    def folder(self, name: str, version: int) -> Path:
        """Return the version's copy, fetched and checked where there is none yet; else compared
        with the source's."""
        data = self._source.manifest(name, version)
        signature = self._source.signature(name, version)
        shown = f"{name}/{version}/{MANIFEST}"
        if version in self._copies.versions(name):
            path = self._copies.folder(name, version)
            try:
                copied = load_version(name, path).manifest
            except BundleDamaged:
                with writing(path):
                    shutil.rmtree(path)  # fetched again
            else:
                if manifest_bytes(copied) != data:
                    problem = f"{self.where} has another bundle under this version than before"
                    cure = f"Ask who changed it, or remove {path} to take it"
                    raise BundleConflict(
                        problem,
                        file=copied.reference,
                        expected=copied.seal,
                        found=read_manifest(data, shown).seal,
                        cure=cure,
                    )
                _update_signature(path / SIGNATURE, signature)
                return path
        manifest = read_manifest(data, shown)
        if manifest.reference != f"{name}:{version}":
            raise BadValue(
                "the place does not match the manifest",
                file=shown,
                field="name and version",
                expected=f"{name}:{version}",
                found=manifest.reference,
            )
        check_total(manifest)
        files = {MANIFEST: data, **self._source.files(manifest)} | (
            {} if signature is None else {SIGNATURE: signature}
        )
        with writing(self.folders):
            self.folders.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.folders.mkdir(exist_ok=True, mode=0o700)
        self._copies.add(manifest, files)  # False: another process of ours was faster
        return self._copies.folder(name, version)

    def stamp(self, name: str, version: int) -> str:
        """Return the hashes of manifest and signature: any other change of a version is an
        error."""
        parts = self._source.manifest(name, version), self._source.signature(name, version) or b""
        return " ".join(hashlib.sha256(part).hexdigest() for part in parts)


def _update_signature(path: Path, signature: bytes | None) -> None:
    """Make a copy's signature the source's: it may have come after its bundle, or changed."""
    with writing(path):
        if signature is None:
            path.unlink(missing_ok=True)
        elif not path.is_file() or path.read_bytes() != signature:
            atomic_write(path, signature)


Backend = LocalBackend | RemoteBackend


@dataclass(frozen=True)
class BundleSummary:
    """One line of a listing.  A damaged or untrusted bundle has an error and no manifest."""

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


Summaries = list[BundleSummary]  # ``Store.list`` hides the builtin
Offers = list[Offer]


def _offers_of_folder(backend: LocalBackend) -> Iterator[Offer]:
    for name in backend.names():
        for version in sorted(backend.versions(name)):
            with suppress(BundleError):  # a damaged one is no offer
                bundle = load_version(name, backend.folder(name, version))
                yield offer_of(bundle.manifest, bundle.evaluation())


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
        """``cache`` is the folder for copies if ``location`` is a URL.

        Raises InvalidReference for a wrong URL, and for a folder in a home that does not exist."""
        self.own: Backend
        if isinstance(location, str) and is_url(location):
            source: Bucket | HubSource
            if location.startswith(HUB):
                from probes_store.hub import HubSource  # huggingface_hub takes a while to import

                source = HubSource(location)
            else:
                source = Bucket(location)
            caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "hallutracer" / "stores"
            self.own = RemoteBackend(
                source, expanded(caches if cache is None else cache, "HALLUTRACER_STORE_CACHE")
            )
        else:
            self.own = LocalBackend(expanded(location, "HALLUTRACER_STORE"))
        self.behind: tuple[Backend, ...] = tuple(
            LocalBackend(Path(fallback)) for fallback in fallbacks
        )
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
            raise errors.DigestMismatch(
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
        self.own.write_signature(
            bundle.manifest.name, bundle.manifest.version, signing.sign(bundle)
        )
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

    def list(self) -> Summaries:
        """Return every version of every name, sorted, without hidden fallbacks; damaged bundles
        have their error."""
        self.check_closed()
        seen: dict[str, Backend] = {}
        for backend in (self.own, *self.behind):
            for name in backend.names():
                seen.setdefault(name, backend)
        return [summary for name in sorted(seen) for summary in self._summaries(seen[name], name)]

    def offers(self) -> Offers:
        """Return what the store has itself, for which model; of a URL no bundle is fetched for it,
        and nothing is checked."""
        self.check_closed()
        if isinstance(self.own, RemoteBackend):
            return self.own.offers()
        return joined(_offers_of_folder(self.own))

    def _summaries(self, backend: Backend, name: str) -> Iterator[BundleSummary]:
        shared: BundleError | None = None
        try:
            aliases = backend.aliases(name)
        except (
            BundleError
        ) as error:  # without its aliases a name cannot be resolved: each version has this error
            aliases, shared = {}, error
        for version in sorted(backend.versions(name)):
            path: Path | None = None
            manifest: Manifest | None = None
            error_here = shared
            try:
                path = backend.folder(name, version)
                manifest = self._read(name, path, self.trust.signature).manifest
            except BundleError as error:
                error_here = error
            names = tuple(sorted(alias for alias, target in aliases.items() if target == version))
            yield BundleSummary(name, version, path, names, manifest, error_here)

    def _find(self, reference: str) -> tuple[Backend, str, int]:
        """Return the backend, the name and the number of the version that a reference means."""
        wanted = parse_reference(reference)
        backend, versions = self._backend(wanted.name)
        version = wanted.version
        if version is None:
            aliases = backend.aliases(wanted.name)
            version = aliases.get(wanted.alias or PRODUCTION)
            if version is None and wanted.alias is not None:
                near = did_you_mean(wanted.alias, aliases)
                cure = (
                    f"{near}Set it, or use one of its aliases:"
                    f" {', '.join(sorted(aliases)) or 'none'}"
                )
                raise BundleNotFound(f"bundle {wanted.name} has no alias {wanted.alias}", cure=cure)
            version = version or max(versions)
        if version not in versions:
            cure = f"Use one of its versions: {', '.join(map(str, sorted(versions)))}"
            raise BundleNotFound(
                f"{reference} names version {version}, which is not there", cure=cure
            )
        return backend, wanted.name, version

    def _backend(self, name: str) -> tuple[Backend, set[int]]:
        """Return the store's own backend or the first fallback that has versions of this name, and
        the versions."""
        self.check_closed()
        backends = (self.own, *self.behind)
        versions = [(backend, backend.versions(name)) for backend in backends]
        having = [(backend, numbers) for backend, numbers in versions if numbers]
        if not having:
            known = sorted({known for backend in backends for known in backend.names()})
            near = did_you_mean(name, known)
            cure = (
                f"{near}Train and publish it there, name another store, or use one of:"
                f" {', '.join(known) or 'none'}"
            )
            raise BundleNotFound(f"no bundle {name} in {self.where}", cure=cure)
        if having[0][0] is self.own and len(having) > 1 and name not in self._warned:
            self._warned.add(name)
            log.warning(
                "%s is that of %s, which hides the one that comes with the package",
                name,
                self.where,
            )
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
