"""Bundles between stores, and between a store and the hub: copy, push and pull.

They keep name, version, bytes and signature.  A repository of the hub has one commit and one tag for each version of
one bundle; from it come the manifest, then what that lists and nothing else, then one rename."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete

from probes_store import bundle as bundles
from probes_store import errors
from probes_store.bundle import MAX_MANIFEST, SIGNATURE, Bundle, load_version, read_signature
from probes_store.errors import BundleConflict, BundleDamaged, HubError, MissingFile
from probes_store.hub import MAIN, TAG, Hub, Snapshot
from probes_store.local import write_files
from probes_store.manifest import CARD, DIGEST, MANIFEST, Manifest, manifest_bytes, read_manifest, record_of
from probes_store.store import Store
from probes_store.syntax import PRODUCTION, VERSION, VERSIONS, HubAddress, check_name, parse_json, readable_json

ORIGIN = ".origin.json"  # in a bundle's folder: where it was pulled from; a hidden file is no part of a bundle
HARMLESS = (CARD, "LICENSE", "LICENSE.md", "LICENSE.txt")  # may lie in a repository that gets its first bundle


def files_of(bundle: Bundle) -> dict[str, bytes]:
    """Return all that travels with a bundle: what the manifest lists, the manifest, the signature if there is one."""
    signature = read_signature(bundle.path)
    return {**bundle.files(), **({} if signature is None else {SIGNATURE: signature})}


def copy(bundle: Bundle, into: Store, *, source: str, take_over: bool = False) -> tuple[Bundle, bool]:
    """Add a bundle from the store ``source`` to another one; return the bundle there, and whether it was new.

    Raises what ``add`` raises; the other store is then as it was."""
    new = held(into, bundle.manifest) is None
    return add(into, files_of(bundle), {"repository": source}, take_over=take_over), new


def held(store: Store, manifest: Manifest) -> Bundle | None:
    """Return the store's version of this name and number, which has the same content; None where there is none yet.

    Raises BundleConflict where it has another content, and what ``Store.load`` raises where it is damaged."""
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
                cure="Name another store with --store, or remove the version here",
            )
    return None


def _check_addition(store: Store, manifest: Manifest, origin: Mapping[str, str], take_over: bool = False) -> None:
    """Refuse an addition after which a bare name would mean another bundle, not from the same place.

    Otherwise whoever publishes could take the place of a bundle that a service loads by name.  Raises BundleConflict
    and what ``Store.resolve`` raises."""
    try:
        before = store.resolve(manifest.name)
    except errors.BundleNotFound:
        return
    own = store.is_own(before)
    moves = not own or (PRODUCTION not in store.own.aliases(manifest.name) and manifest.version > int(before.name))
    try:
        came_from = parse_json((before / ORIGIN).read_bytes(), ORIGIN)
    except (OSError, BundleDamaged):
        came_from = None  # published here, or nobody can tell
    if moves and not take_over and came_from != origin:
        pin = f"Pin it with 'hallutracer bundle alias {manifest.name} production {before.name}', n" if own else "N"
        problem = f"'{manifest.name}' would mean this bundle instead of version {before.name}, which is not from there"
        cure = f"{pin}ame another store with --store, or agree with --take-over"
        raise BundleConflict(problem, file=manifest.reference, cure=cure)


def add(store: Store, files: Mapping[str, bytes], origin: Mapping[str, str], *, take_over: bool = False) -> Bundle:
    """Add a version under its own number, in one step.

    files: as of ``files_of``; origin: kept beside them in a folder.  Everything is read as ``Store.verify`` reads it
    before the store is touched.  Raises what that and ``held`` raise, BundleConflict and StoreNotWritable."""
    with tempfile.TemporaryDirectory() as outside:
        manifest = read_manifest(files[MANIFEST])
        _check_place(manifest)
        write_files(Path(outside, manifest.name, str(manifest.version)), files)
        Store(Path(outside), trust=store.trust).verify(manifest.reference)
    store.check_closed()
    existing = held(store, manifest)
    if existing is not None:
        signature = files.get(SIGNATURE)  # it may have come after its bundle; one that is here stays
        here = store.is_own(existing.path) and not (existing.path / SIGNATURE).exists()
        if here and signature and manifest_bytes(existing.manifest) == files[MANIFEST]:
            store.own.write_signature(manifest.name, manifest.version, signature)
        return existing
    _check_addition(store, manifest, origin, take_over)
    taken = not store.own.add(manifest, {ORIGIN: readable_json(dict(origin)), **files})
    if taken and (existing := held(store, manifest)):  # somebody else was faster: the same, or a conflict
        return existing
    return load_version(manifest.name, store.own.folder(manifest.name, manifest.version))


def _check_place(manifest: Manifest) -> None:
    """Raise InvalidReference or BadValue for a name or a number that no store can hold."""
    check_name(manifest.name, "a bundle")
    if not VERSION.fullmatch(found := str(manifest.version)):
        raise errors.BadValue("bad value", file=MANIFEST, field="version", expected=VERSIONS, found=found)


@dataclass(frozen=True)
class Pulled:
    """What a pull did."""

    bundle: Bundle
    commit: str
    added: bool  # False: the store had it
    offline: str | None  # why the hub was not asked; then the files come from huggingface_hub's cache
    left_out: Sequence[str]  # files of the repository that are no part of the bundle; not downloaded


def pull(
    store: Store,
    address: HubAddress,
    *,
    digest: str | None = None,
    take_over: bool = False,
    endpoint: str | None = None,
    cache: Path | None = None,
    bar: Callable[[int], Callable[[int], Any]] | None = None,
) -> Pulled:
    """Fetch a bundle and add it to the store under its own name and version.

    digest: what the bundle must have; ``bar`` of so many bytes returns what is told how many more came.  Where the hub
    gives no answer, the copy in huggingface_hub's cache is taken.  Raises HubError, BundleConflict, InvalidReference,
    StoreNotWritable and subclasses of BundleDamaged; the store is then as it was."""
    if digest is not None and not DIGEST.fullmatch(digest):
        raise errors.InvalidReference("not a digest", expected="sha256: and 64 hex digits", found=ascii(digest))
    hub, offline = Hub(address.repository, endpoint=endpoint, cache=cache), None
    try:
        snapshot = hub.snapshot(address.revision)
    except errors.HubUnreachable as error:
        snapshot, offline = None, str(error)
    if snapshot is not None and MANIFEST not in snapshot.files:
        raise MissingFile(f"no {MANIFEST} at its root, so it is no bundle", file=str(address), cure="Check the address")
    # By the name of the revision, not by its commit: so the cache knows it when there is no connection.
    revision, read = address.revision or MAIN, lambda data: (read_manifest(data), data)
    (manifest, data), path = hub.read(MANIFEST, revision, MAX_MANIFEST, read, cached=snapshot is None)
    commit = path.parent.name
    if snapshot is not None and commit != snapshot.commit:
        raise HubError("the repository changed meanwhile", file=hub.repository, cure="Run the command again")
    if digest is not None and manifest.digest != digest:
        raise errors.DigestMismatch(
            "this is not the bundle that --digest names",
            file=str(address),
            field="digest",
            expected=digest,
            found=manifest.digest,
            cure="Ask its publisher",
        )
    _check_place(manifest)
    if TAG.fullmatch(address.revision or "") and address.revision != f"v{manifest.version}":
        problem = f"the tag {address.revision} holds version {manifest.version}"
        raise BundleConflict(problem, file=str(address), cure="Ask its publisher, or name a commit")
    left_out = [] if snapshot is None else _compare(manifest, snapshot)
    origin = {"repository": str(HubAddress(address.repository)), "endpoint": hub.api.endpoint}
    existing, signature = held(store, manifest), _signature(hub, commit, snapshot)
    if existing is not None and (not signature or read_signature(existing.path)):
        return Pulled(existing, commit, False, offline, left_out)
    _check_addition(store, manifest, origin, take_over)
    store.check_writable()
    arrived = None if bar is None else bar(sum(record.bytes for record in manifest.files.values()))
    files = hub.files(manifest, commit, arrived=arrived, cached=snapshot is None)
    bundle = add(store, {MANIFEST: data, **files, **signature}, origin, take_over=take_over)
    return Pulled(bundle, commit, existing is None, offline, left_out)


def _compare(manifest: Manifest, snapshot: Snapshot) -> list[str]:
    """Return names that are no part of the bundle.  Raises a subclass of BundleDamaged before anything is fetched."""
    for name, record in manifest.files.items():
        remote = snapshot.files.get(name)
        if remote is None:
            raise MissingFile("the repository lacks this file of the bundle", file=name)
        if remote.differs(record):
            raise errors.DigestMismatch("the repository has another file", file=name, expected=record, found=remote)
    bundles.check_total(manifest)
    return sorted(name for name in _strangers(snapshot) if name not in (*manifest.files, MANIFEST, SIGNATURE))


def _strangers(snapshot: Snapshot) -> list[str]:
    """Return names that are not hidden: .gitattributes, which the hub makes, is none of a bundle's business."""
    return [name for name in snapshot.files if not name.rsplit("/", 1)[-1].startswith(".")]


def _signature(hub: Hub, commit: str, snapshot: Snapshot | None) -> dict[str, bytes]:
    """Read model.sig where the repository has one; without a connection where the cache has it."""
    if snapshot is not None and SIGNATURE not in snapshot.files:
        return {}
    try:
        return {SIGNATURE: hub.read(SIGNATURE, commit, bundles.MAX_SIGNATURE, bytes, cached=snapshot is None)[0]}
    except errors.HubUnreachable:
        if snapshot is not None:
            raise
        return {}


@dataclass(frozen=True)
class Pushed:
    """What a push did, or would do."""

    tag: str
    url: str  # of the version's page
    address: str  # what to pull
    private: bool
    files: Mapping[str, int]  # name -> bytes
    create: bool = False  # the repository
    commit: bool = False  # the files
    nothing: bool = False  # the hub has that version already; else it is tagged
    deleted: tuple[str, ...] = ()  # files of the version before that this one lacks


def push(
    bundle: Bundle,
    address: HubAddress,
    *,
    private: bool = False,
    dry_run: bool = False,
    endpoint: str | None = None,
    cache: Path | None = None,
) -> Pushed:
    """Publish a verified bundle at the root of a repository of the hub, which is created where there is none.

    private: the repository must be, or becomes, a private one.  dry_run: ask the hub, change nothing.  Raises
    HubError, BundleConflict where the repository holds something else, and subclasses of BundleDamaged."""
    manifest, files, tag = bundle.manifest, files_of(bundle), f"v{bundle.manifest.version}"
    hub, sizes = (
        Hub(address.repository, endpoint=endpoint, cache=cache),
        {name: len(files[name]) for name in sorted(files)},
    )
    done = Pushed(tag, f"{hub.url}/tree/{tag}", str(HubAddress(address.repository, tag)), private, sizes)
    head: Snapshot | None = None
    try:
        head = hub.snapshot()
    except errors.HubMissing:
        done = replace(done, create=True, commit=True)
    else:
        if private and not head.private:
            cure = f"Leave out --private, or make it private at {hub.url}/settings"
            raise BundleConflict("the repository is public", file=str(address), cure=cure)
        done = replace(done, private=head.private, **_changes(hub, head, manifest, files))
    if dry_run or done.nothing:
        return done
    with hub.errors():  # each step alone may be the last: the next push goes on from there
        if done.create:
            hub.api.create_repo(hub.repository, private=private or None)
        commit = hub.snapshot().commit if head is None else head.commit
        if done.commit:
            additions = [CommitOperationAdd(name, data) for name, data in files.items()]
            commit = hub.api.create_commit(
                hub.repository,
                [*additions, *(CommitOperationDelete(name) for name in done.deleted)],
                commit_message=f"{manifest.name} version {manifest.version}",
                commit_description=manifest.digest,
                parent_commit=commit,  # refused where somebody else was faster
            ).oid
        hub.api.create_tag(hub.repository, tag=tag, tag_message=manifest.digest, revision=commit)
    there = hub.snapshot(tag)
    _check_complete(there, files)
    return replace(done, private=there.private)


def _changes(hub: Hub, head: Snapshot, manifest: Manifest, files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the fields of ``Pushed`` for a repository that there is."""
    tag, elsewhere = f"v{manifest.version}", "Push to another repository"
    if tag in hub.tags():
        _check_same(hub, tag, manifest)
        _check_complete(hub.snapshot(tag), files)
        return {"nothing": True}
    if MANIFEST not in head.files:
        if strangers := sorted(name for name in _strangers(head) if name not in HARMLESS):
            problem = f"the repository holds something else: {', '.join(map(ascii, strangers[:5]))}"
            raise BundleConflict(problem, file=hub.url, cure=f"{elsewhere}; one that does not exist is created")
        return {"commit": True}
    there = _check_same(hub, MAIN, manifest)
    if there.name != manifest.name:
        raise BundleConflict(
            "the repository is another bundle's", file=hub.url, expected=there.name, found=manifest.name, cure=elsewhere
        )
    if there.version > manifest.version:
        problem = f"the repository is at version {there.version} already, and versions follow each other"
        raise BundleConflict(problem, file=hub.url, cure=f"Push a version above {there.version}")
    if there.version == manifest.version:  # an earlier push ended before its tag
        _check_complete(head, files)
        return {}
    deleted = tuple(name for name in (*there.files, SIGNATURE) if name not in files and name in head.files)
    return {"commit": True, "deleted": deleted}


def _check_same(hub: Hub, revision: str, ours: Manifest) -> Manifest:
    """Return the manifest at a revision.  Raises BundleConflict where this version of this bundle is another there."""
    try:
        there, _ = hub.read(MANIFEST, revision, MAX_MANIFEST, read_manifest)
    except BundleDamaged as error:
        problem = f"{revision} has no {MANIFEST} that can be read: {error}"
        raise BundleConflict(problem, file=hub.url, cure="Push to another repository") from error
    if there.digest != ours.digest and (revision != MAIN or there.reference == ours.reference):
        raise BundleConflict(
            f"{revision} is another bundle with this version",
            file=ours.reference,
            expected=ours.digest,
            found=there.digest,
            cure="Publish yours as the next",
        )
    return there


def _check_complete(there: Snapshot, files: Mapping[str, bytes]) -> None:
    """Check that every byte arrived, by the hub's own digests.  ``bundle.json`` may have another time."""
    for name, data in files.items():
        remote = there.files.get(name)
        differs = remote is None or remote.differs(record_of(data), data)
        if name == SIGNATURE and differs:
            problem = "the hub has this version without this signature, and a tag does not move"
            raise BundleConflict(
                problem, file=name, cure="Sign before you push: publish the next version, sign and push it"
            )
        if remote is None:
            raise MissingFile("the hub does not have this file", file=name, cure="Push to another repository")
        if name != MANIFEST and differs:
            raise HubError(
                "the hub has another file than the one that was pushed",
                file=name,
                expected=record_of(data),
                found=remote,
                cure="Delete the tag there, or push to another repository",
            )
