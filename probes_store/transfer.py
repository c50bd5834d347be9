"""Adds bundles from elsewhere to a store.  Name, version, bytes and signature stay the same; a
bundle that was read whole is added by one rename."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from probes_store.bundle import SIGNATURE, Bundle, Files, load_version
from probes_store.errors import BundleConflict, BundleDamaged, BundleNotFound
from probes_store.local import write_files
from probes_store.manifest import MANIFEST, Manifest, manifest_bytes
from probes_store.store import Store
from probes_store.syntax import PRODUCTION, parse_json, readable_json

ORIGIN = ".origin.json"  # in a bundle's folder: its source; hidden files do not belong to a bundle


def copy(
    bundle: Bundle, into: Store, *, source: str, take_over: bool = False
) -> tuple[Bundle, bool]:
    """Add a bundle from the store ``source`` to ``into``; return the bundle there, and whether it
    was new.

    Raises what ``add`` raises; the other store is then as it was."""
    origin = {"repository": source}
    return add(into, bundle.manifest, bundle.files(), origin, take_over=take_over)


def held(store: Store, manifest: Manifest) -> Bundle | None:
    """Return the store's bundle of this name, version and content; None if there is none yet.

    Raises BundleConflict if its content differs, and what ``Store.load`` raises if it is
    damaged."""
    name = manifest.name
    version = manifest.version
    for backend in (store.own, *store.behind):
        if version in backend.versions(name):
            bundle = load_version(name, backend.folder(name, version))
            if bundle.manifest.digest == manifest.digest:
                return bundle
            if backend is store.own:
                raise BundleConflict(
                    "another bundle has this version already",
                    file=manifest.reference,
                    expected=bundle.manifest.digest,
                    found=manifest.digest,
                    cure="Name another store with --store, or remove the version here",
                )
    return None


def check_addition(
    store: Store, manifest: Manifest, origin: Mapping[str, str], take_over: bool
) -> None:
    """Refuse an addition after which a bare name would resolve to a bundle of another source.

    Otherwise any publisher could replace a bundle that a service loads by name.  Raises
    BundleConflict and what ``Store.resolve`` raises."""
    name = manifest.name
    try:
        before = store.resolve(name)
    except BundleNotFound:
        return
    is_own = store.is_own(before)
    stays = is_own and (
        PRODUCTION in store.own.aliases(name) or manifest.version <= int(before.name)
    )
    try:
        same_source = parse_json((before / ORIGIN).read_bytes()) == origin
    except (OSError, BundleDamaged):
        same_source = False  # it was published here, or its source is unknown
    if stays or same_source or take_over:
        return
    cure = "Name another store with --store, or agree with --take-over"
    if is_own:
        cure = f"Pin it with 'hallutracer bundle alias {name} production {before.name}'.  {cure}"
    raise BundleConflict(
        f"'{name}' means version {before.name}, from another source; this bundle would replace it",
        file=manifest.reference,
        cure=cure,
    )


def add(
    store: Store,
    manifest: Manifest,
    files: Files,
    origin: Mapping[str, str],
    *,
    take_over: bool = False,
) -> tuple[Bundle, bool]:
    """Add a version under its own number, in one step; return it, and whether it was new.

    files: as of ``Bundle.files``; origin: kept beside them in a folder.  Everything is read as
    ``Store.verify`` reads it before the store is touched.  Raises what that and ``held`` raise,
    BundleConflict and StoreNotWritable."""
    name = manifest.name
    version = manifest.version
    with tempfile.TemporaryDirectory() as outside:
        write_files(Path(outside, name, str(version)), files)
        bundle = Store(Path(outside), trust=store.trust).verify(manifest.reference)
    store.check_closed()
    existing = held(store, bundle.manifest)
    if existing is None:
        check_addition(store, bundle.manifest, origin, take_over)
        if store.own.add(bundle.manifest, {ORIGIN: readable_json(origin), **files}):
            return replace(bundle, path=store.own.folder(name, version)), True
        # Somebody else was faster: with the same, or with a conflict.
        existing = held(store, bundle.manifest) or bundle
    # The signature may have come after its bundle; one that is here stays.
    unsigned = store.is_own(existing.path) and not (existing.path / SIGNATURE).exists()
    if unsigned and SIGNATURE in files and manifest_bytes(existing.manifest) == files[MANIFEST]:
        store.own.write_signature(name, version, files[SIGNATURE])
    return existing, False
