"""Reads bundles of a store at a URL, each fetched once into a cache.  The cache has the layout of a
local store: CACHE/STORE/NAME/VERSION/.

What a reference means is asked of the server each time: without its answer nothing is read, though
a copy is here."""

from __future__ import annotations

import hashlib
import shutil
from abc import abstractmethod
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from probes_store.bundle import SIGNATURE, Files, check_place, check_total, load_version
from probes_store.errors import BundleConflict, BundleDamaged, BundleNotFound, MissingFile, located
from probes_store.index import INDEX, Offer, joined, offer_of, read_index
from probes_store.local import Backend, LocalBackend, atomic_write, writing
from probes_store.manifest import MANIFEST, Manifest, read_manifest


class RemoteBackend(Backend):
    """The bundles at a URL; ``LocalBackend`` documents the methods that a store calls."""

    def __init__(self, where: str, cache: Path) -> None:
        """``cache``: the folder of all stores' copies."""
        self.where = where
        self._copies = LocalBackend(cache / hashlib.sha256(where.encode()).hexdigest()[:16])
        self.folders = self._copies.folders

    @abstractmethod
    def fetch(self, file: str, name: str = "", version: int = 0) -> bytes | None:
        """Return the bytes of a version's manifest or signature, or without a name, of
        ``index.json``; None if there is none."""

    @abstractmethod
    def files(self, manifest: Manifest) -> Files:
        """Read and verify the files that the manifest lists.  Raises a subclass of
        BundleDamaged."""

    def manifest(self, name: str, version: int) -> bytes:
        """Return the manifest's bytes.  Raises MissingFile."""
        if (data := self.fetch(MANIFEST, name, version)) is None:
            raise MissingFile(file=f"{name}/{version}/{MANIFEST}")
        return data

    def offers(self) -> list[Offer]:
        """Return what is here for which model, by the index and else by the manifests, without
        damaged bundles."""
        index = read_index(self.fetch(INDEX))
        listed = {(offer.name, version): offer for offer in index for version in offer.versions}
        offers = list[Offer]()
        for name in self.names():
            for version in sorted(self.versions(name)):
                if offer := listed.get((name, version)):
                    offers.append(replace(offer, versions=(version,)))
                    continue
                with suppress(BundleDamaged):
                    offers.append(offer_of(read_manifest(self.manifest(name, version))))
        return joined(offers)

    def folder(self, name: str, version: int) -> Path:
        """Return the version's copy, fetched and checked where there is none yet; else compared
        with the server's."""
        data = self.manifest(name, version)
        with located(f"{name}/{version}"):
            manifest = read_manifest(data)
        signature = self.fetch(SIGNATURE, name, version)
        path = self._copies.folder(name, version)
        try:
            copied = load_version(name, path).manifest
        except BundleDamaged:
            with writing(path):
                shutil.rmtree(path)
            return self.folder(name, version)
        except BundleNotFound:
            check_place(manifest, f"{name}:{version}")
            check_total(manifest)
            files = self.files(manifest)
            with writing(self.folders):
                self.folders.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                self.folders.mkdir(exist_ok=True, mode=0o700)
            self._copies.add(manifest, files)  # False: another process of ours was faster
            copied = manifest
        if copied != manifest:
            raise BundleConflict(
                f"{self.where} has another bundle under this version than before",
                file=copied.reference,
                expected=copied.seal,
                found=manifest.seal,
                cure=f"Ask who changed it, or remove {path} to take it",
            )
        _update_signature(path / SIGNATURE, signature)
        return path

    def stamp(self, name: str, version: int) -> str:
        """Return the hashes of manifest and signature: any other change of a version is an
        error."""
        parts = self.manifest(name, version), self.fetch(SIGNATURE, name, version) or b""
        return " ".join(hashlib.sha256(part).hexdigest() for part in parts)


def _update_signature(path: Path, signature: bytes | None) -> None:
    """Make a copy's signature the server's: it may have come after its bundle, or changed."""
    with writing(path):
        if signature is None:
            path.unlink(missing_ok=True)
        elif not path.is_file() or path.read_bytes() != signature:
            atomic_write(path, signature)
