"""Keeps bundles in a folder: ROOT/NAME/VERSION/, and ROOT/NAME/aliases.json, the only file that
changes.

A single rename publishes a version, so readers see a complete bundle or none, even after a crash.
Publishers need no
lock: a rename onto an existing version fails, and the publisher tries the next number."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from probes_store.bundle import SIGNATURE, load_version, timestamp
from probes_store.errors import BadValue, BundleDamaged, InvalidReference, StoreNotWritable
from probes_store.manifest import MANIFEST, Manifest, manifest_bytes, read_manifest, sealed
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


class LocalBackend:
    """Bundles under ``folders``.  All backends have these methods; ``Store`` documents the
    errors."""

    def __init__(self, folders: Path) -> None:
        self.folders = folders
        self.where = str(folders)  # the folder or the URL, for messages

    def names(self) -> Sequence[str]:
        """Return names with a version."""
        try:
            return [
                name
                for name in os.listdir(self.folders)
                if NAME.fullmatch(name) and self.versions(name)
            ]
        except OSError:
            return []

    def versions(self, name: str) -> set[int]:
        """Return the published versions; a folder that is still being written has no number."""
        try:
            return {
                int(entry) for entry in os.listdir(self.folders / name) if VERSION.fullmatch(entry)
            }
        except OSError:
            return set()

    def aliases(self, name: str) -> dict[str, int]:
        """Return the newest table, alias -> version."""
        shown = f"{name}/{ALIASES}"
        try:
            return parse_aliases(self._inside(self.folders / name / ALIASES).read_bytes(), shown)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise BadValue(
                f"cannot be read: {error.strerror}", file=shown, cure="Check its permissions"
            ) from error

    def folder(self, name: str, version: int) -> Path:
        """Return the folder of an existing version; a backend at a URL fetches and checks it
        first."""
        self._inside(self.folders / name)
        return self._inside(self.folders / name / str(version))

    def stamp(self, name: str, version: int) -> str:
        """Return a text that changes with any file of a version, also its signature; nothing is
        fetched."""
        folder = self.folder(name, version)
        try:
            entries = [(str(path), path.lstat()) for path in sorted((folder, *folder.rglob("*")))]
        except OSError as error:
            return str(error)  # reading the version will raise a proper error
        state = [
            (
                path,
                status.st_ino,
                status.st_size,
                status.st_mode,
                status.st_mtime_ns,
                status.st_ctime_ns,
            )
            for path, status in entries
        ]
        return hashlib.sha256(repr(state).encode()).hexdigest()

    def check_writable(self) -> None:
        """Check that the store can be written, before long work."""
        with writing(self.folders):
            self.folders.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folders):
                pass

    def publish(self, manifest: Manifest, files: Mapping[str, bytes]) -> int:
        """Publish an unsealed manifest as the next version, or find the same content: the
        version."""
        if (existing := self._same_content(manifest)) is not None:
            return existing
        with self._written_aside(manifest.name, files) as aside:
            while True:
                # Take the number before the search: if the same content is published in between,
                # the rename fails.
                version = next_number(self.versions(manifest.name), manifest.name)
                if (existing := self._same_content(manifest)) is not None:
                    return existing
                dated = sealed(manifest, version=version, created=timestamp())
                write_files(
                    aside, {MANIFEST: manifest_bytes(dated)}
                )  # last: until then the folder is no bundle
                if self._rename(aside, version):
                    return version

    def add(self, manifest: Manifest, files: Mapping[str, bytes]) -> bool:
        """Add a version under its own number; return False if the number is taken."""
        with self._written_aside(manifest.name, files) as aside:
            return self._rename(aside, manifest.version)

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

    @contextmanager
    def _written_aside(self, name: str, files: Mapping[str, bytes]) -> Iterator[Path]:
        """Make a folder with the files beside the versions of a bundle; it is removed later unless
        it was renamed."""
        folder = self.folders / name
        with writing(self.folders):
            folder.mkdir(parents=True, exist_ok=True)
            self._inside(folder)
            _clean_aside(folder)
            with folder_aside(folder) as aside:
                write_files(aside, files)
                yield aside

    def _rename(self, aside: Path, version: int) -> bool:
        """Rename the folder to its version; return False if another publisher was faster.  Raises
        OSError."""
        try:
            os.rename(aside, target := aside.parent / str(version))
        except OSError:
            if target.exists():
                return False
            raise
        _sync_folder(target.parent)
        _sync_folder(self.folders)
        return True

    def _same_content(self, manifest: Manifest) -> int | None:
        for version in sorted(self.versions(manifest.name)):
            path = self.folders / manifest.name / str(version)
            with suppress(BundleDamaged, OSError):  # a damaged version never counts as the same
                data = (path / MANIFEST).read_bytes()
                # Search for the digest first: parsing hundreds of manifests would be slow.
                if (
                    manifest.digest.encode() in data
                    and read_manifest(data).digest == manifest.digest
                ):
                    load_version(manifest.name, path)
                    return version
        return None

    def _inside(self, path: Path) -> Path:
        """Return ``path``, unless a link in it leads out of the store.  Raises InvalidReference."""
        if not path.resolve().is_relative_to(self.folders.resolve()):
            shown = str(path.relative_to(self.folders))
            raise InvalidReference(
                "a link that leads out of the store", file=shown, cure="Replace it by a copy"
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


def write_files(into: Path, files: Mapping[str, bytes]) -> None:
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
    """Make a temporary folder in ``parent``, locked during the block and then removed unless it was
    renamed.

    The lock ends with the process, so ``_clean_aside`` can recognise the folder of a killed
    publisher."""
    while True:
        path = parent / f"{ASIDE}{secrets.token_hex(8)}"
        path.mkdir()
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # ``_clean_aside`` of another process has removed it
        _lock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink and path.exists():
            break
        os.close(descriptor)  # it was removed before it was locked
    try:
        yield path
    finally:
        os.close(descriptor)
        shutil.rmtree(path, ignore_errors=True)


def _clean_aside(parent: Path) -> None:
    """Remove the temporary folders of killed publishers; without working locks they stay,
    unlisted."""
    for path in parent.glob(f"{ASIDE}*"):
        with suppress(OSError), _open_folder(path, os.O_NOFOLLOW) as descriptor:
            if _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _open_folder(path: Path, flags: int = 0) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | flags)
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
