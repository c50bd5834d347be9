"""Where a store keeps its bundles: a folder (``local``) or a URL (``remote``) behind the same few operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from probes_store.bundle import Bundle, load_bundle
from probes_store.errors import BadValue
from probes_store.manifest import MANIFEST, Manifest


class Backend(Protocol):
    """Versions of names, their aliases, and a local folder for each version.

    Every operation may raise InvalidReference, a subclass of BundleDamaged, or, at a URL, StoreRefused and
    StoreUnreachable; those that write also StoreNotWritable.
    """

    @property
    def where(self) -> str:
        """The folder or the URL, for people."""

    @property
    def folders(self) -> Path:
        """ROOT of the folders ROOT/NAME/VERSION that ``folder`` returns."""

    def names(self) -> Sequence[str]:
        """Names with a version."""

    def versions(self, name: str) -> set[int]:
        """Published versions; empty where there is none."""

    def aliases(self, name: str) -> dict[str, int]:
        """Alias -> version."""

    def folder(self, name: str, version: int) -> Path:
        """The folder of a version that ``versions`` has, on this machine; a URL's is fetched and checked first."""

    def stamp(self, name: str, version: int) -> str:
        """Changes where something of a version that ``versions`` has does, its signature too; nothing is fetched."""

    def check_writable(self) -> None:
        """Test that something can be published, before long work."""

    def publish(self, manifest: Manifest, files: Mapping[str, bytes]) -> int:
        """Publish as the next version, or find the same content: the version.  ``manifest`` is not sealed yet."""

    def add(self, manifest: Manifest, files: Mapping[str, bytes]) -> bool:
        """Add a version under its own number; ``files`` with the manifest's bytes.  False where the number is taken."""

    def set_alias(self, name: str, alias: str, version: int, keep_as: str | None = None) -> None:
        """``aliases.moved``, in one step; moves of other aliases at the same time are not lost."""

    def write_signature(self, name: str, version: int, data: bytes) -> None:
        """Put a signature beside a published version, in the place of an older one."""


def load_version(name: str, path: Path) -> Bundle:
    """The bundle in .../NAME/VERSION, whose manifest must say the same.  Raises what ``load_bundle`` raises."""
    bundle = load_bundle(path)
    for field, expected in (("name", name), ("version", int(path.name))):
        found = getattr(bundle.manifest, field)
        if found != expected:
            raise BadValue(
                "the folder does not match the manifest",
                file=f"{name}/{path.name}/{MANIFEST}",
                field=field,
                expected=expected,
                found=found,
                cure="Move the folder back to its place, or publish the bundle anew",
            )
    return bundle
