"""Where a store keeps its bundles (``Backend``), and a store that is not on this machine, read through a copy that is.

CACHE/NAME/VERSION/   the copies, in the layout of a local store; aliases.json as it was last read
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from probes_store.bundle import MAX_TOTAL, SIGNATURE, load_version
from probes_store.errors import BadValue, BundleConflict, BundleDamaged, StoreUnreachable
from probes_store.local import LocalBackend, atomic_write, writing
from probes_store.manifest import MANIFEST, Manifest, manifest_bytes, read_manifest
from probes_store.syntax import ALIASES, readable_json

log = logging.getLogger("hallutracer")
T = TypeVar("T")
STAYS_DOWN_S = 10.0  # after no answer the copies are taken at once: each further question could wait for its timeout


class _Place(Protocol):
    """Versions of names, and their aliases.

    Every operation may raise InvalidReference, a subclass of BundleDamaged, or, at a URL, StoreRefused and
    StoreUnreachable; those that write also StoreNotWritable.  ``publish`` takes a manifest that is not sealed yet, as
    the next version, or finds the same content: the version; ``add`` keeps its number: False where that is taken.
    ``set_alias`` changes as ``syntax.moved`` does, in one step; moves of other aliases at the same time are not lost.
    """

    @property
    def where(self) -> str: ...  # the folder or the URL, for people
    def names(self) -> Sequence[str]: ...  # those with a version
    def versions(self, name: str) -> set[int]: ...  # published ones
    def aliases(self, name: str) -> dict[str, int]: ...
    def check_writable(self) -> None: ...  # before long work
    def publish(self, manifest: Manifest, files: Mapping[str, bytes]) -> int: ...
    def add(self, manifest: Manifest, files: Mapping[str, bytes]) -> bool: ...
    def set_alias(self, name: str, alias: str, version: int, keep_as: str | None = None) -> None: ...
    def write_signature(self, name: str, version: int, data: bytes) -> None: ...


class Backend(_Place, Protocol):
    """A place with a local folder for each version."""

    @property
    def folders(self) -> Path:
        """ROOT of the folders ROOT/NAME/VERSION that ``folder`` returns."""

    def folder(self, name: str, version: int) -> Path:
        """Return the folder of a version that ``versions`` has; a URL's is fetched and checked first."""

    def stamp(self, name: str, version: int) -> str:
        """Return what changes where something of a version does, its signature too; nothing is fetched."""


class BundleSource(_Place, Protocol):
    """A place where copies come from.  Every method raises StoreUnreachable where there is no answer."""

    def manifest(self, name: str, version: int) -> bytes:
        """Return the manifest's bytes.  Raises MissingFile."""

    def signature(self, name: str, version: int) -> bytes | None:
        """Return the signature's bytes; None where there is none."""

    def files(self, manifest: Manifest) -> dict[str, bytes]:
        """Return the files that the manifest lists, compared with it.  Raises a subclass of BundleDamaged."""


def check_total(manifest: Manifest) -> None:
    """Raise BadValue where the files together are larger than a bundle from a network may be."""
    total = sum(record.bytes for record in manifest.files.values())
    if total > MAX_TOTAL:
        raise BadValue("the bundle is too large", expected=f"at most {MAX_TOTAL} bytes", found=total)


class RemoteBackend:
    """The bundles of a source; see ``Backend`` for what the methods do.

    Reading goes on with the copies where the source gives no answer, and says so in the log.  A refusal is an error.
    """

    def __init__(self, source: BundleSource, cache: Path, *, stand_in: bool = True) -> None:
        """``cache``: the folder of all sources' copies.  ``stand_in``: whether they do where there is no answer."""
        self._source, self._cache, self._stand_in = source, cache, stand_in
        self.where = source.where
        self._copies = LocalBackend(cache / hashlib.sha256(source.where.encode()).hexdigest()[:16])
        self.folders = self._copies.folders
        self._down_until = 0.0
        self.check_writable, self.publish, self.add = source.check_writable, source.publish, source.add
        self.set_alias, self.write_signature = source.set_alias, source.write_signature

    def answering(self) -> RemoteBackend:
        """Return the same, where no answer is an error."""
        return RemoteBackend(self._source, self._cache, stand_in=False)

    def names(self) -> Sequence[str]:
        """Return names with a version, or with a copy where there is no answer."""
        return self._or_copy(self._source.names, self._copies.names)

    def versions(self, name: str) -> set[int]:
        """Return the published versions, or those with a copy where there is no answer."""
        return self._or_copy(lambda: self._source.versions(name), lambda: self._copies.versions(name))

    def aliases(self, name: str) -> dict[str, int]:
        """Return the newest table, or the one that was read last where there is no answer."""

        def ask() -> dict[str, int]:
            table = self._source.aliases(name)
            path, data = self.folders / name / ALIASES, readable_json(table)
            self._make_folder()
            with writing(path.parent):
                path.parent.mkdir(exist_ok=True)
                if not path.is_file() or path.read_bytes() != data:
                    atomic_write(path, data)
            return table

        def copy() -> dict[str, int]:
            table = self._copies.aliases(name)
            said = ", ".join(f"{alias} -> {version}" for alias, version in sorted(table.items())) or "none"
            log.warning("aliases of %s as they were when %s last answered: %s", name, self.where, said)
            return table

        return self._or_copy(ask, copy)

    def folder(self, name: str, version: int) -> Path:
        """Return the version's copy, fetched and checked where there is none yet; else compared with the source's."""
        return self._or_copy(lambda: self._fetched(name, version), lambda: self._copy(name, version))

    def stamp(self, name: str, version: int) -> str:
        """Return the hashes of manifest and signature: any other change of a version is an error."""

        def ask() -> str:
            parts = self._source.manifest(name, version), self._source.signature(name, version) or b""
            return " ".join(hashlib.sha256(part).hexdigest() for part in parts)

        return self._or_copy(ask, lambda: self._copies.stamp(name, version))

    def _fetched(self, name: str, version: int) -> Path:
        data, signature = self._source.manifest(name, version), self._source.signature(name, version)
        if version in self._copies.versions(name):
            path = self._copies.folder(name, version)
            if self._is_copy(name, path, data):
                self._refresh_signature(path, signature)
                return path
            with writing(path):
                shutil.rmtree(path)  # damaged on this machine: fetched again
        shown = f"{name}/{version}/{MANIFEST}"
        manifest = read_manifest(data, shown)
        if (manifest.name, manifest.version) != (name, version):
            raise BadValue(
                "the place does not match the manifest", file=shown, field="name and version",
                expected=f"{name}:{version}", found=manifest.reference, cure="Publish the bundle anew",
            )  # fmt: skip
        check_total(manifest)
        files = {MANIFEST: data, **self._source.files(manifest)}
        if signature is not None:
            files[SIGNATURE] = signature
        self._make_folder()
        self._copies.add(manifest, files)  # False: another process of ours was faster
        return self._copies.folder(name, version)

    def _is_copy(self, name: str, path: Path, data: bytes) -> bool:
        """Return False for a damaged copy.  Raises BundleConflict where the source has another bundle there now."""
        try:
            copy = load_version(name, path).manifest
        except BundleDamaged:
            return False
        if manifest_bytes(copy) == data:
            return True
        raise BundleConflict(
            f"{self.where} has another bundle under this version than before, and a published version never changes",
            file=copy.reference, expected=copy.seal,
            found=read_manifest(data, f"{copy.name}/{copy.version}/{MANIFEST}").seal,
            cure=f"Ask who changed it.  Where that was meant, remove {path} and run the command again",
        )  # fmt: skip

    def _refresh_signature(self, path: Path, signature: bytes | None) -> None:
        """Take over a signature that came after its bundle, or changed."""
        here = path / SIGNATURE
        with writing(path):
            if signature is None:
                here.unlink(missing_ok=True)
            elif not here.is_file() or here.read_bytes() != signature:
                atomic_write(here, signature)

    def _copy(self, name: str, version: int) -> Path:
        if version not in self._copies.versions(name):
            raise StoreUnreachable(
                f"{self.where} gives no answer, and there is no copy of {name}:{version} in {self.folders}",
                cure="Connect once, so that it is fetched",
            )
        return self._copies.folder(name, version)

    def _make_folder(self) -> None:
        with writing(self.folders):
            self.folders.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.folders.mkdir(exist_ok=True, mode=0o700)

    def _or_copy(self, ask: Callable[[], T], copy: Callable[[], T]) -> T:
        """Return what the source says, and what the copies say where there is no answer."""
        if time.monotonic() < self._down_until:
            return copy()
        try:
            return ask()
        except StoreUnreachable as error:
            if not self._stand_in or not self._copies.names():
                raise
            log.warning("%s; going on with the copies in %s", error, self.folders)
            self._down_until = time.monotonic() + STAYS_DOWN_S
            return copy()
