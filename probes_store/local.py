"""Keeps bundles in a folder: ROOT/NAME/VERSION/, and ROOT/NAME/aliases.json, the only file that
changes.

A single rename publishes a version, so readers see a complete bundle or none, even after a crash.
Publishers need no lock: a rename onto an existing version fails, and the publisher tries the next
number."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from probes_store.bundle import SIGNATURE, Files, load_version
from probes_store.errors import (
    BadValue,
    BundleDamaged,
    BundleError,
    InvalidReference,
    StoreNotWritable,
    located,
)
from probes_store.index import INDEX, Offer, joined, offer_of
from probes_store.manifest import (
    MANIFEST,
    Manifest,
    manifest_bytes,
    read_manifest,
    sealed,
    timestamp,
)
from probes_store.syntax import (
    ALIASES,
    NAME,
    VERSION,
    moved,
    next_number,
    parse_aliases,
    readable_json,
)

ASIDE = ".publish-"  # prefix of a folder before it is published


class Backend(ABC):
    """How every backend lists its bundles and publishes a version."""

    @abstractmethod
    def children(self, *parts: str) -> list[str]:
        """Return the names directly below a path; none if it is not there."""

    def names(self) -> list[str]:
        """Return names with a version."""
        names = [name for name in self.children() if NAME.fullmatch(name) and name != INDEX]
        return [name for name in names if self.versions(name)]

    def versions(self, name: str) -> set[int]:
        """Return the published versions: what is still being written has no number."""
        return {int(child) for child in self.children(name) if VERSION.fullmatch(child)}

    @abstractmethod
    def manifest(self, name: str, version: int) -> bytes:
        """Return the bytes of a version's manifest."""

    @abstractmethod
    def add(self, manifest: Manifest, files: Files) -> bool:
        """Publish a sealed manifest and its files under its number, in one step; return False if
        the number is taken."""

    def publish(self, manifest: Manifest, files: Files) -> int:
        """Publish an unsealed manifest as the next version, or find the same content: the
        version."""
        name = manifest.name
        while True:
            # List them before the search: if the same content is published in between, the next
            # number is taken.
            versions = self.versions(name)
            if (existing := self._same_content(manifest, files)) is not None:
                return existing
            version = next_number(versions, name)
            if self.add(sealed(manifest, version=version, created=timestamp()), files):
                return version

    def _same_content(self, manifest: Manifest, files: Files) -> int | None:
        for version in sorted(self.versions(manifest.name)):
            with suppress(BundleDamaged, OSError):  # a damaged version never counts as the same
                data = self.manifest(manifest.name, version)
                # Search for the digest first: parsing hundreds of manifests would be slow.
                if (
                    manifest.digest.encode() in data
                    and read_manifest(data).digest == manifest.digest
                ):
                    self.mend(manifest, version, files)
                    return version
        return None

    @abstractmethod
    def mend(self, manifest: Manifest, version: int, files: Files) -> None:
        """Repair a version with this content and these files, or raise a subclass of BundleDamaged
        if it is damaged."""


class LocalBackend(Backend):
    """Bundles under ``folders``.  All backends have these methods; ``Store`` documents the
    errors."""

    def __init__(self, folders: Path) -> None:
        self.folders = folders
        self.where = str(folders)  # the folder or the URL, for messages

    def children(self, *parts: str) -> list[str]:
        """Return the names in a folder; none if it is missing or closed to this user."""
        try:
            return os.listdir(self.folders.joinpath(*parts))
        except OSError:
            return []

    def aliases(self, name: str) -> dict[str, int]:
        """Return the newest table, alias -> version."""
        with located(f"{name}/{ALIASES}"):
            try:
                return parse_aliases(self._inside(self.folders / name / ALIASES).read_bytes())
            except FileNotFoundError:
                return {}
            except OSError as error:
                raise BadValue(
                    f"cannot be read: {error.strerror}", cure="Check its permissions"
                ) from error

    def offers(self) -> list[Offer]:
        """Return what is here for which model, without damaged bundles."""
        offers = []
        for name in self.names():
            for version in self.versions(name):
                with suppress(BundleError):
                    bundle = load_version(name, self.folder(name, version))
                    offers.append(offer_of(bundle.manifest, bundle.evaluation()))
        return joined(offers)

    def folder(self, name: str, version: int) -> Path:
        """Return the folder of an existing version; a backend at a URL fetches and checks it
        first."""
        self._inside(self.folders / name)
        return self._inside(self.folders / name / str(version))

    def stamp(self, name: str, version: int) -> str:
        """Return a text that changes with any file of a version, also its signature; nothing is
        fetched."""
        folder = self.folder(name, version)
        states = []
        try:
            for path in sorted((folder, *folder.rglob("*"))):
                at = path.lstat()
                times = (at.st_mtime_ns, at.st_ctime_ns)
                states.append((str(path), at.st_ino, at.st_size, at.st_mode, *times))
        except OSError as error:
            return str(error)  # reading the version will raise a proper error
        return str(states)

    def check_writable(self) -> None:
        """Check that the store can be written, before long work."""
        with writing(self.folders):
            self.folders.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folders):
                pass

    def manifest(self, name: str, version: int) -> bytes:
        """Return the bytes of a version's manifest.  Raises OSError."""
        return (self.folders / name / str(version) / MANIFEST).read_bytes()

    def mend(self, manifest: Manifest, version: int, files: Files) -> None:
        """Raise what ``load_version`` raises."""
        load_version(manifest.name, self.folders / manifest.name / str(version))

    def set_alias(self, name: str, alias: str, version: int, keep_as: str | None = None) -> None:
        """Change the table by ``moved`` in one step; concurrent changes of other aliases are not
        lost."""
        folder = self.folders / name
        with writing(folder), _open_folder(folder) as descriptor:
            _lock(descriptor, fcntl.LOCK_EX)  # no effect on network mounts without locks
            aliases = moved(self.aliases(name), alias, version, keep_as)
            atomic_write(folder / ALIASES, readable_json(aliases))

    def write_signature(self, name: str, version: int, data: bytes) -> None:
        """Write the signature in one step, over an older one."""
        path = self.folder(name, version)
        with writing(path):
            atomic_write(path / SIGNATURE, data)

    def add(self, manifest: Manifest, files: Files) -> bool:
        """Write the files into a folder beside the versions, and rename it."""
        folder = self.folders / manifest.name
        target = folder / str(manifest.version)
        with writing(self.folders):
            folder.mkdir(parents=True, exist_ok=True)
            self._inside(folder)
            with folder_aside(folder) as aside:
                write_files(aside, files | {MANIFEST: manifest_bytes(manifest)})
                try:
                    os.rename(aside, target)
                except OSError:
                    if target.exists():
                        return False
                    raise
            _sync_folder(folder)
            _sync_folder(self.folders)
        return True

    def _inside(self, path: Path) -> Path:
        """Return ``path``, unless a link in it leads out of the store.  Raises InvalidReference."""
        if not path.resolve().is_relative_to(self.folders.resolve()):
            raise InvalidReference(
                "a link that leads out of the store",
                file=str(path.relative_to(self.folders)),
                cure="Replace it by a copy",
            )
        return path


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError in the block into a StoreNotWritable that names ``path``."""
    try:
        yield
    except OSError as error:
        raise StoreNotWritable(
            f"cannot write: {error.strerror or error}", file=str(path)
        ) from error


def write_files(into: Path, files: Files) -> None:
    """Write and flush files, and make and flush their folders.  Raises OSError."""
    for name, data in files.items():
        path = into / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    for folder in {(into / name).parent for name in files}:
        _sync_folder(folder)


def atomic_write(path: Path, data: bytes) -> None:
    """Write to a temporary file and rename it over ``path``: readers see the old bytes or the new
    ones."""
    aside = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        write_files(path.parent, {aside.name: data})
        os.replace(aside, path)
        _sync_folder(path.parent)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def folder_aside(parent: Path) -> Iterator[Path]:
    """Make a temporary folder in ``parent``, and remove it after the block unless it was renamed.

    Publishers share a lock on the store, which ends with their processes.  One that has the lock
    alone removes the folders of killed publishers first; without working locks they stay,
    unlisted."""
    with _open_folder(parent.parent) as descriptor:
        if _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
            for path in parent.glob(f"{ASIDE}*"):
                shutil.rmtree(path, ignore_errors=True)
        _lock(descriptor, fcntl.LOCK_SH)
        path = parent / f"{ASIDE}{secrets.token_hex(8)}"
        path.mkdir()
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _open_folder(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _sync_folder(path: Path) -> None:
    """Flush a folder's list of names."""
    with _open_folder(path) as descriptor:
        os.fsync(descriptor)


def _lock(descriptor: int, how: int) -> bool:
    """Try to lock; return whether the lock is held."""
    with suppress(OSError):
        fcntl.flock(descriptor, how)
        return True
    return False
