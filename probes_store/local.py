"""A folder of bundles: ROOT/NAME/VERSION/, and ROOT/NAME/aliases.json, the only file in it that changes.

A version appears by one rename, so readers see a complete bundle or none.  Publishers need no lock: a rename onto an
existing version fails, and the next number is tried.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from probes_store.aliases import ALIASES, moved, parse_aliases
from probes_store.backend import load_version
from probes_store.bundle import SIGNATURE, timestamp, write_files, write_manifest
from probes_store.durable import atomic_write, clean_aside, folder_aside, locked, sync_folder, writing
from probes_store.errors import BadValue, BundleDamaged, InvalidReference
from probes_store.manifest import MANIFEST, NAME, Manifest, read_manifest, sealed
from probes_store.reference import VERSION, next_number
from probes_store.strict import readable_json


class LocalBackend:
    """Bundles under ``root``; see ``Backend`` for what the methods do."""

    def __init__(self, root: Path) -> None:
        self.folders = root

    @property
    def where(self) -> str:
        """The folder."""
        return str(self.folders)

    def names(self) -> Sequence[str]:
        """Names with a version."""
        try:
            return [name for name in os.listdir(self.folders) if NAME.fullmatch(name) and self.versions(name)]
        except OSError:
            return []

    def versions(self, name: str) -> set[int]:
        """Numbered folders; a folder that is still being written has no number."""
        try:
            names = os.listdir(self.folders / name)
        except OSError:
            return set()
        return {int(name) for name in names if VERSION.fullmatch(name)}

    def aliases(self, name: str) -> dict[str, int]:
        """aliases.json; no file means no alias."""
        path, shown = self.folders / name / ALIASES, f"{name}/{ALIASES}"
        try:
            data = self._inside(path).read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise BadValue(
                f"the file cannot be read: {error.strerror}", file=shown, cure="Check its permissions"
            ) from error
        return parse_aliases(data, shown)

    def folder(self, name: str, version: int) -> Path:
        """The folder, unless a link in it leads out of the store."""
        self._inside(self.folders / name)
        return self._inside(self.folders / name / str(version))

    def stamp(self, name: str, version: int) -> str:
        """Sizes, times and modes of the files."""
        folder = self.folder(name, version)
        try:
            found = [(str(path), path.lstat()) for path in sorted((folder, *folder.rglob("*")))]
        except OSError as error:
            return str(error)  # whoever reads it will say so
        said = [(path, at.st_ino, at.st_size, at.st_mode, at.st_mtime_ns, at.st_ctime_ns) for path, at in found]
        return hashlib.sha256(repr(said).encode()).hexdigest()

    def check_writable(self) -> None:
        """Create the root and test that it can be written."""
        with writing(self.folders):
            self.folders.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folders):
                pass

    def publish(self, manifest: Manifest, files: Mapping[str, bytes]) -> int:
        """As the next version, by one rename; the same content is not copied."""
        existing = self._same_content(manifest)
        if existing is not None:
            return existing
        with self._written_aside(manifest.name, files) as aside:
            return self._take_version(aside.parent, aside, manifest)

    def _take_version(self, folder: Path, aside: Path, manifest: Manifest) -> int:
        """Rename the finished folder to the next free version, unless the same content was published meanwhile."""
        while True:
            # Take the number before the search: if the same content is published in between, the rename fails.
            version = next_number(self.versions(folder.name), folder.name)
            existing = self._same_content(manifest)
            if existing is not None:
                return existing
            write_manifest(aside, sealed(manifest, version=version, created=timestamp()))
            if self._rename(aside, folder / str(version)):
                return version

    def add(self, manifest: Manifest, files: Mapping[str, bytes]) -> bool:
        """Under its own number, by one rename."""
        with self._written_aside(manifest.name, files) as aside:
            return self._rename(aside, aside.parent / str(manifest.version))

    @contextmanager
    def _written_aside(self, name: str, files: Mapping[str, bytes]) -> Iterator[Path]:
        """A folder beside the versions of a bundle, with the files; gone afterwards unless it was renamed."""
        folder = self.folders / name
        with writing(self.folders):
            folder.mkdir(parents=True, exist_ok=True)
            self._inside(folder)
            clean_aside(folder)
            with folder_aside(folder) as aside:
                write_files(aside, files)
                yield aside

    def _rename(self, aside: Path, target: Path) -> bool:
        """False where another publisher was faster.  Raises OSError."""
        try:
            os.rename(aside, target)
        except OSError:
            if target.exists():
                return False
            raise
        sync_folder(target.parent)
        sync_folder(self.folders)
        return True

    def _same_content(self, manifest: Manifest) -> int | None:
        for version in sorted(self.versions(manifest.name)):
            path = self.folders / manifest.name / str(version)
            try:
                if read_manifest((path / MANIFEST).read_bytes()).digest == manifest.digest:
                    load_version(manifest.name, path)
                    return version
            except (BundleDamaged, OSError):
                continue  # a damaged version is no substitute
        return None

    def set_alias(self, name: str, alias: str, version: int, keep_as: str | None = None) -> None:
        """In one rename: a reader sees the old or the new table."""
        folder = self.folders / name
        with writing(folder), locked(folder):
            aliases = moved(self.aliases(name), alias, version, keep_as)
            atomic_write(folder / ALIASES, readable_json(aliases))

    def write_signature(self, name: str, version: int, data: bytes) -> None:
        """In one rename."""
        path = self.folder(name, version)
        with writing(path):
            atomic_write(path / SIGNATURE, data)

    def _inside(self, path: Path) -> Path:
        """``path``, unless a link in it leads out of the store.  Raises InvalidReference."""
        if not path.resolve().is_relative_to(self.folders.resolve()):
            raise InvalidReference(
                "a link that leads out of the store",
                file=str(path.relative_to(self.folders)),
                expected="a folder",
                found="a link",
                cure="Replace the link by a copy of the bundle",
            )
        return path
