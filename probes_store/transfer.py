"""A bundle that was published elsewhere, into a store: the same name, version, bytes and signature."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from probes_store.aliases import PRODUCTION
from probes_store.backend import load_version
from probes_store.bundle import SIGNATURE, Bundle, read_files, read_signature, write_files
from probes_store.errors import BadValue, BundleConflict, BundleDamaged, BundleNotFound
from probes_store.manifest import MANIFEST, Manifest, manifest_bytes, read_manifest
from probes_store.reference import VERSION, check_name
from probes_store.store import Store
from probes_store.strict import parse_json, readable_json

ORIGIN = ".origin.json"  # in a bundle's folder: where it was pulled from; a hidden file is no part of a bundle


def files_of(bundle: Bundle) -> dict[str, bytes]:
    """Everything that travels with a bundle: what the manifest lists, the manifest, the signature if there is one."""
    files = {**read_files(bundle.path, bundle.manifest), MANIFEST: manifest_bytes(bundle.manifest)}
    signature = read_signature(bundle.path)
    return files if signature is None else {**files, SIGNATURE: signature}


def copy(bundle: Bundle, into: Store, *, source: str, take_over: bool = False) -> tuple[Bundle, bool]:
    """Add a bundle to another store; the bundle there, and whether it was new.

    source: the store that it came from.  Raises what ``add`` raises; the other store is then as it was.
    """
    before = held(into, bundle.manifest)
    done = add(into, files_of(bundle), {"repository": source}, take_over=take_over)
    return done, before is None


def held(store: Store, manifest: Manifest) -> Bundle | None:
    """The store's version of this name and number, which has the same content; None where there is none yet.

    Raises BundleConflict where it has another content, and what ``Store.load`` raises where it is damaged.
    """
    for backend in (store.own, *store.behind):
        if manifest.version not in backend.versions(manifest.name):
            continue
        found = load_version(manifest.name, backend.folder(manifest.name, manifest.version))
        if found.manifest.digest == manifest.digest:
            return found
        if backend is store.own:
            raise BundleConflict(
                "another bundle has this version already",
                file=manifest.reference,
                expected=found.manifest.digest,
                found=manifest.digest,
                cure="Take it into another store with --store, or remove the version that is here",
            )
    return None


def check_addition(store: Store, manifest: Manifest, origin: Mapping[str, str], take_over: bool = False) -> None:
    """Refuse an addition after which a bare name would mean another bundle, not from the same place.

    Whoever can publish a bundle chooses its name and its number: without this one could take the place of a bundle
    that a service loads by name.  Raises BundleConflict and what ``Store.resolve`` raises.
    """
    try:
        before = store.resolve(manifest.name)
    except BundleNotFound:
        return
    own = store.is_own(before)
    moves = not own or (PRODUCTION not in store.own.aliases(manifest.name) and manifest.version > int(before.name))
    if moves and not take_over and _read_origin(before) != dict(origin):
        pin = f"Pin it with 'hallutracer bundle alias {manifest.name} production {before.name}', t" if own else "T"
        raise BundleConflict(
            f"'{manifest.name}' would from now on mean this bundle; so far it means version {before.name}, "
            "which is not from there",
            file=manifest.reference,
            cure=f"{pin}ake the new one into another store with --store, or agree with --take-over",
        )


def add(store: Store, files: Mapping[str, bytes], origin: Mapping[str, str], *, take_over: bool = False) -> Bundle:
    """Add a version under its own number, in one step.

    files: the manifest's bytes, those of each file that it lists, and of its signature if it has one; origin: kept
    beside them in a folder.  Everything is read as ``Store.verify`` reads it before the store is touched.  Raises what
    that, ``held`` and ``check_addition`` raise, and StoreNotWritable.
    """
    with tempfile.TemporaryDirectory() as outside:
        manifest = read_manifest(files[MANIFEST])
        check_name(manifest.name, "a bundle")
        if not VERSION.fullmatch(str(manifest.version)):
            raise BadValue("no version of a store", field="version", expected="1 to 999999999", found=manifest.version)
        write_files(Path(outside, manifest.name, str(manifest.version)), files)
        Store(Path(outside), trust=store.trust).verify(manifest.reference)
    store.check_closed()
    existing = held(store, manifest)
    if existing is not None:
        _complete(store, existing, files)
        return existing
    check_addition(store, manifest, origin, take_over)
    if not store.own.add(manifest, {ORIGIN: readable_json(dict(origin)), **files}):
        existing = held(store, manifest)  # somebody else was faster: the same, or a conflict
        if existing is not None:
            return existing
    return load_version(manifest.name, store.own.folder(manifest.name, manifest.version))


def _complete(store: Store, existing: Bundle, files: Mapping[str, bytes]) -> None:
    """A signature that came after its bundle; one that is here stays."""
    manifest, signature = existing.manifest, files.get(SIGNATURE)
    here = store.is_own(existing.path) and not (existing.path / SIGNATURE).exists()
    if here and signature and manifest_bytes(manifest) == files[MANIFEST]:
        store.own.write_signature(manifest.name, manifest.version, signature)


def _read_origin(path: Path) -> dict[str, str] | None:
    """Where the bundle in a folder was pulled from; None where it was published here, or nobody can tell."""
    try:
        origin = parse_json((path / ORIGIN).read_bytes(), ORIGIN)
    except (OSError, BundleDamaged):
        return None
    return origin if isinstance(origin, dict) else None
