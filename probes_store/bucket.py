"""A store's objects below a URL.

    URL/NAME/blobs/SHA256           every file of every version, by its content; never overwritten with other bytes
    URL/NAME/VERSION/bundle.json    the manifest, created last and only where there is none: this publishes a version
    URL/NAME/VERSION/model.sig      its signature, if any
    URL/NAME/aliases/REVISION.json  the whole alias table; the highest revision counts, and a change creates the next

A publisher that dies leaves blobs, which are no bundle.  Nothing but ``model.sig`` is ever overwritten, so all that is
needed of the server is that an object can be created on the condition that there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from probes_store.aliases import ALIASES, moved, parse_aliases
from probes_store.bundle import MAX_MANIFEST, MAX_SIGNATURE, SIGNATURE, timestamp
from probes_store.errors import BundleDamaged, DigestMismatch, MissingFile
from probes_store.manifest import MANIFEST, NAME, Manifest, manifest_bytes, read_manifest, record_of, sealed
from probes_store.objects import Objects
from probes_store.reference import VERSION, next_number
from probes_store.strict import readable_json

TABLES = "aliases"
BLOBS = "blobs"


class Bucket:
    """See ``Source`` for what the methods do."""

    def __init__(self, url: str) -> None:
        self._objects = Objects(url)

    @property
    def where(self) -> str:
        """The URL."""
        return self._objects.url

    def names(self) -> Sequence[str]:
        """Names with a version."""
        return [name for name in self._objects.children() if NAME.fullmatch(name) and self.versions(name)]

    def versions(self, name: str) -> set[int]:
        """Numbers below the name: a publisher creates nothing there before the manifest."""
        return {int(child) for child in self._objects.children(name) if VERSION.fullmatch(child)}

    def aliases(self, name: str) -> dict[str, int]:
        """The newest table."""
        return self._table(name)[1]

    def manifest(self, name: str, version: int) -> bytes:
        """bundle.json."""
        path = f"{name}/{version}/{MANIFEST}"
        data = self._objects.read(path, MAX_MANIFEST)
        if data is None:
            raise MissingFile("the file is missing", file=path)
        return data

    def signature(self, name: str, version: int) -> bytes | None:
        """model.sig."""
        return self._objects.read(f"{name}/{version}/{SIGNATURE}", MAX_SIGNATURE)

    def files(self, manifest: Manifest) -> dict[str, bytes]:
        """The blobs that the manifest lists."""
        files = {}
        for name, record in manifest.files.items():
            shown = f"{manifest.name}/{manifest.version}/{name}"
            data = self._objects.read(f"{manifest.name}/{BLOBS}/{record.sha256}", record.bytes)
            if data is None:
                raise MissingFile("the file is missing", file=shown)
            if record_of(data) != record:
                found = record_of(data)
                raise DigestMismatch(
                    f"{self.where} has another file", file=shown, expected=f"{record.bytes} bytes, {record.sha256}",
                    found=f"{found.bytes} bytes, {found.sha256}",
                )  # fmt: skip
            files[name] = data
        return files

    def check_writable(self) -> None:
        """Test that the server takes objects, and honours a conditional create."""
        self._objects.check_exclusive()

    def publish(self, manifest: Manifest, files: Mapping[str, bytes]) -> int:
        """Blobs first, then the manifest under the next free number."""
        name = manifest.name
        self._objects.check_exclusive()
        self._upload(name, files)
        known: dict[int, str | None] = {}
        while True:
            versions = self.versions(name)
            for version in sorted(versions - known.keys()):
                known[version] = self._digest(name, version)
            same = [version for version, digest in known.items() if digest == manifest.digest]
            if same:
                return min(same)
            version = next_number(versions, name)
            if self._claim(sealed(manifest, version=version, created=timestamp())):
                return version

    def add(self, manifest: Manifest, files: Mapping[str, bytes]) -> bool:
        """Blobs first, then the manifest, then the signature."""
        self._objects.check_exclusive()
        self._upload(manifest.name, {name: files[name] for name in manifest.files})
        if not self._claim(manifest):
            return False
        if SIGNATURE in files:
            self.write_signature(manifest.name, manifest.version, files[SIGNATURE])
        return True

    def set_alias(self, name: str, alias: str, version: int, keep_as: str | None = None) -> None:
        """Create the next revision of the table; where another was faster, the one after it."""
        self._objects.check_exclusive()
        while True:
            revision, table = self._table(name)
            changed = moved(table, alias, version, keep_as)
            if changed == table:
                return
            following = next_number([revision], f"the alias table of {name}")
            if self._objects.create(f"{name}/{TABLES}/{following}.json", readable_json(changed)):
                return

    def write_signature(self, name: str, version: int, data: bytes) -> None:
        """Over an older one."""
        self._objects.put(f"{name}/{version}/{SIGNATURE}", data)

    def _table(self, name: str) -> tuple[int, dict[str, int]]:
        """The highest revision and its table; 0 and a local store's aliases.json, where that was copied to the URL."""
        children = self._objects.children(name, TABLES)
        revision = max((int(c[:-5]) for c in children if c.endswith(".json") and VERSION.fullmatch(c[:-5])), default=0)
        path = f"{name}/{TABLES}/{revision}.json" if revision else f"{name}/{ALIASES}"
        data = self._objects.read(path, MAX_MANIFEST)
        if data is None:
            if revision:
                raise MissingFile("the alias table was removed", file=path, cure="Set the aliases again")
            return 0, {}
        return revision, parse_aliases(data, path)

    def _digest(self, name: str, version: int) -> str | None:
        """None for a manifest that does not read: it is no substitute for anything."""
        try:
            return read_manifest(self.manifest(name, version)).digest
        except BundleDamaged:
            return None

    def _upload(self, name: str, files: Mapping[str, bytes]) -> None:
        for data in files.values():
            path = f"{name}/{BLOBS}/{record_of(data).sha256}"
            if not self._objects.create(path, data) and self._objects.read(path, len(data)) != data:
                self._objects.put(path, data)  # damaged: its name says what it must be

    def _claim(self, manifest: Manifest) -> bool:
        """Whether this manifest is the version's: the only step that publishes."""
        data = manifest_bytes(manifest)
        if self._objects.create(f"{manifest.name}/{manifest.version}/{MANIFEST}", data):
            return True
        # Ours after all, where the answer to an earlier attempt was lost on its way and the client asked again.
        return self.manifest(manifest.name, manifest.version) == data
