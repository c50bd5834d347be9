"""Copies bundles between stores, and pushes and pulls them between a store and the hub.

Name, version, bytes and signature stay the same.  A repository of the hub has one commit and one
tag for each version of one bundle.  A pull reads the manifest, then only the files that it lists,
and then adds them by one rename."""

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
from probes_store.index import INDEX, index_bytes, offer_of
from probes_store.local import write_files
from probes_store.manifest import (
    CARD,
    DIGEST,
    MANIFEST,
    Manifest,
    manifest_bytes,
    read_manifest,
    record_of,
)
from probes_store.store import Store
from probes_store.syntax import (
    PRODUCTION,
    VERSION,
    VERSIONS,
    HubAddress,
    check_name,
    parse_json,
    readable_json,
)

ORIGIN = ".origin.json"  # in a bundle's folder: its source; hidden files do not belong to a bundle
HARMLESS = (
    CARD,
    "LICENSE",
    "LICENSE.md",
    "LICENSE.txt",
)  # a repository may have these before its first bundle


def files_of(bundle: Bundle) -> dict[str, bytes]:
    """Return all files of a bundle: the manifest, the files that it lists, and the signature if
    there is one."""
    signature = read_signature(bundle.path)
    return {**bundle.files(), **({} if signature is None else {SIGNATURE: signature})}


def copy(
    bundle: Bundle, into: Store, *, source: str, take_over: bool = False
) -> tuple[Bundle, bool]:
    """Add a bundle from the store ``source`` to ``into``; return the bundle there, and whether it
    was new.

    Raises what ``add`` raises; the other store is then as it was."""
    return add(into, bundle.manifest, files_of(bundle), {"repository": source}, take_over=take_over)


def held(store: Store, manifest: Manifest) -> Bundle | None:
    """Return the store's bundle of this name, version and content; None if there is none yet.

    Raises BundleConflict if its content differs, and what ``Store.load`` raises if it is
    damaged."""
    for backend in (store.own, *store.behind):
        if manifest.version not in backend.versions(manifest.name):
            continue
        bundle = load_version(manifest.name, backend.folder(manifest.name, manifest.version))
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


def _check_addition(
    store: Store, manifest: Manifest, origin: Mapping[str, str], take_over: bool = False
) -> None:
    """Refuse an addition after which a bare name would resolve to a bundle of another source.

    Otherwise any publisher could replace a bundle that a service loads by name.  Raises
    BundleConflict and what ``Store.resolve`` raises."""
    try:
        before = store.resolve(manifest.name)
    except errors.BundleNotFound:
        return
    is_own = store.is_own(before)
    moves = not is_own or (
        PRODUCTION not in store.own.aliases(manifest.name) and manifest.version > int(before.name)
    )
    try:
        came_from = parse_json((before / ORIGIN).read_bytes(), ORIGIN)
    except (OSError, BundleDamaged):
        came_from = None  # it was published here, or its source is unknown
    if moves and not take_over and came_from != origin:
        pin = (
            f"Pin it with 'hallutracer bundle alias {manifest.name} production {before.name}', n"
            if is_own
            else "N"
        )
        problem = (
            f"'{manifest.name}' means version {before.name}, from another source; this bundle would"
            " replace it"
        )
        cure = f"{pin}ame another store with --store, or agree with --take-over"
        raise BundleConflict(problem, file=manifest.reference, cure=cure)


def add(
    store: Store,
    manifest: Manifest,
    files: Mapping[str, bytes],
    origin: Mapping[str, str],
    *,
    take_over: bool = False,
) -> tuple[Bundle, bool]:
    """Add a version under its own number, in one step; return it, and whether it was new.

    files: as of ``files_of``; origin: kept beside them in a folder.  Everything is read as
    ``Store.verify`` reads it before the store is touched.  Raises what that and ``held`` raise,
    BundleConflict and StoreNotWritable."""
    _check_place(manifest)
    with tempfile.TemporaryDirectory() as outside:
        write_files(Path(outside, manifest.name, str(manifest.version)), files)
        bundle = Store(Path(outside), trust=store.trust).verify(manifest.reference)
    store.check_closed()
    existing = held(store, bundle.manifest)
    if existing is not None:
        signature = files.get(
            SIGNATURE
        )  # it may have come after its bundle; one that is here stays
        unsigned = store.is_own(existing.path) and not (existing.path / SIGNATURE).exists()
        if unsigned and signature and manifest_bytes(existing.manifest) == files[MANIFEST]:
            store.own.write_signature(manifest.name, manifest.version, signature)
        return existing, False
    _check_addition(store, bundle.manifest, origin, take_over)
    taken = not store.own.add(bundle.manifest, {ORIGIN: readable_json(dict(origin)), **files})
    if taken and (
        existing := held(store, bundle.manifest)
    ):  # somebody else was faster: the same, or a conflict
        return existing, False
    return replace(bundle, path=store.own.folder(manifest.name, manifest.version)), True


def _check_place(manifest: Manifest) -> None:
    """Raise InvalidReference or BadValue for a name or a number that no store can hold."""
    check_name(manifest.name, "a bundle")
    if not VERSION.fullmatch(version := str(manifest.version)):
        raise errors.BadValue(
            "bad value", file=MANIFEST, field="version", expected=VERSIONS, found=version
        )


@dataclass(frozen=True)
class Pulled:
    """The result of a pull."""

    bundle: Bundle
    commit: str
    added: bool  # False: the store had it already
    offline: (
        str | None
    )  # why the hub did not answer; then the files come from huggingface_hub's cache
    left_out: Sequence[
        str
    ]  # files of the repository that do not belong to the bundle; not downloaded


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

    ``digest`` is the digest that the bundle must have.  ``bar``, called with the total of bytes,
    returns a function to call with the number of bytes as they arrive.  If the hub gives no answer,
    the copy in huggingface_hub's cache is taken.  Raises HubError, BundleConflict,
    InvalidReference, StoreNotWritable and subclasses of BundleDamaged; the store is unchanged
    then."""
    if digest is not None and not DIGEST.fullmatch(digest):
        raise errors.InvalidReference(
            "not a digest", expected="sha256: and 64 hex digits", found=ascii(digest)
        )
    hub, offline = Hub(address.repository, endpoint=endpoint, cache=cache), None
    try:
        snapshot = hub.snapshot(address.revision)
    except errors.HubUnreachable as error:
        snapshot, offline = None, str(error)
    if snapshot is not None and MANIFEST not in snapshot.files:
        raise MissingFile(
            f"no {MANIFEST} at its root, so it is no bundle",
            file=str(address),
            cure="Check the address",
        )
    # Read by the name of the revision and not by its commit, so the cache can find it without a
    # connection.
    revision, read = address.revision or MAIN, lambda data: (read_manifest(data), data)
    (manifest, data), path = hub.read(
        MANIFEST, revision, MAX_MANIFEST, read, cached=snapshot is None
    )
    commit = path.parent.name
    if snapshot is not None and commit != snapshot.commit:
        raise HubError(
            "the repository changed meanwhile", file=hub.repository, cure="Run the command again"
        )
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
    bundle, added = add(
        store, manifest, {MANIFEST: data, **files, **signature}, origin, take_over=take_over
    )
    return Pulled(bundle, commit, added, offline, left_out)


def _compare(manifest: Manifest, snapshot: Snapshot) -> list[str]:
    """Return names that do not belong to the bundle.  Raises a subclass of BundleDamaged before
    anything is fetched."""
    for name, record in manifest.files.items():
        remote = snapshot.files.get(name)
        if remote is None:
            raise MissingFile("the repository lacks this file of the bundle", file=name)
        if remote.differs(record):
            raise errors.DigestMismatch(
                "the repository has another file", file=name, expected=record, found=remote
            )
    bundles.check_total(manifest)
    return sorted(
        name for name in _strangers(snapshot) if name not in (*manifest.files, MANIFEST, SIGNATURE)
    )


def _strangers(snapshot: Snapshot) -> list[str]:
    """Return names that are neither hidden nor our index; the hub itself makes .gitattributes."""
    names = (name for name in snapshot.files if name != INDEX)
    return [name for name in names if not name.rsplit("/", 1)[-1].startswith(".")]


def _signature(hub: Hub, commit: str, snapshot: Snapshot | None) -> dict[str, bytes]:
    """Read model.sig if the repository has it, or without a connection if the cache has it."""
    if snapshot is not None and SIGNATURE not in snapshot.files:
        return {}
    try:
        return {
            SIGNATURE: hub.read(
                SIGNATURE, commit, bundles.MAX_SIGNATURE, bytes, cached=snapshot is None
            )[0]
        }
    except errors.HubUnreachable:
        if snapshot is not None:
            raise
        return {}


@dataclass(frozen=True)
class Pushed:
    """The steps of a push that was done, or with dry_run, would be done."""

    tag: str
    url: str  # of the version's page
    address: str  # for a pull
    private: bool
    files: Mapping[str, int]  # name -> bytes
    create: bool = False  # create the repository
    commit: bool = False  # commit the files
    nothing: bool = False  # the hub has that version already; else it gets a tag
    deleted: tuple[str, ...] = ()  # files of the previous version that this one lacks


def push(
    bundle: Bundle,
    address: HubAddress,
    *,
    private: bool = False,
    dry_run: bool = False,
    endpoint: str | None = None,
    cache: Path | None = None,
) -> Pushed:
    """Publish a verified bundle at the root of a repository of the hub; create the repository if
    there is none.

    ``private``: the repository must be private, or is created so.  ``dry_run``: ask the hub, change
    nothing.  Raises HubError, BundleConflict if the repository holds something else, and subclasses
    of BundleDamaged."""
    manifest = bundle.manifest
    files = files_of(bundle)
    tag = f"v{manifest.version}"
    hub = Hub(address.repository, endpoint=endpoint, cache=cache)
    sizes = {name: len(files[name]) for name in sorted(files)}
    done = Pushed(
        tag, f"{hub.url}/tree/{tag}", str(HubAddress(address.repository, tag)), private, sizes
    )
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
    with hub.errors():  # if a step fails, the next push continues there
        if done.create:
            hub.api.create_repo(hub.repository, private=private or None)
        commit = hub.snapshot().commit if head is None else head.commit
        if done.commit:
            listed = {INDEX: _index(hub, bundle, new=done.create)}
            additions = [CommitOperationAdd(*item) for item in (files | listed).items()]
            commit = hub.api.create_commit(
                hub.repository,
                [*additions, *(CommitOperationDelete(name) for name in done.deleted)],
                commit_message=f"{manifest.name} version {manifest.version}",
                commit_description=manifest.digest,
                parent_commit=commit,  # the hub refuses if another commit was faster
            ).oid
        hub.api.create_tag(hub.repository, tag=tag, tag_message=manifest.digest, revision=commit)
    there = hub.snapshot(tag)
    _check_complete(there, files)
    return replace(done, private=there.private)


def _index(hub: Hub, bundle: Bundle, *, new: bool) -> bytes:
    """Return the index of a repository with this version and those of its tags."""
    tags = set[str]() if new else hub.tags()
    before = {int(tag[1:]) for tag in tags if TAG.fullmatch(tag)}
    offer = offer_of(bundle.manifest, bundle.evaluation())
    return index_bytes([replace(offer, versions=tuple(sorted({*before, *offer.versions})))])


def _changes(
    hub: Hub, head: Snapshot, manifest: Manifest, files: Mapping[str, bytes]
) -> dict[str, Any]:
    """Return the fields of ``Pushed`` for an existing repository."""
    tag, elsewhere = f"v{manifest.version}", "Push to another repository"
    if tag in hub.tags():
        _check_same(hub, tag, manifest)
        _check_complete(hub.snapshot(tag), files)
        return {"nothing": True}
    if MANIFEST not in head.files:
        if strangers := sorted(name for name in _strangers(head) if name not in HARMLESS):
            problem = f"the repository holds something else: {', '.join(map(ascii, strangers[:5]))}"
            raise BundleConflict(
                problem, file=hub.url, cure=f"{elsewhere}; one that does not exist is created"
            )
        return {"commit": True}
    there = _check_same(hub, MAIN, manifest)
    if there.name != manifest.name:
        raise BundleConflict(
            "the repository is another bundle's",
            file=hub.url,
            expected=there.name,
            found=manifest.name,
            cure=elsewhere,
        )
    if there.version > manifest.version:
        problem = (
            f"the repository is at version {there.version} already, and versions follow each other"
        )
        raise BundleConflict(problem, file=hub.url, cure=f"Push a version above {there.version}")
    if there.version == manifest.version:  # an earlier push stopped before its tag
        _check_complete(head, files)
        return {}
    deleted = tuple(
        name for name in (*there.files, SIGNATURE) if name not in files and name in head.files
    )
    return {"commit": True, "deleted": deleted}


def _check_same(hub: Hub, revision: str, ours: Manifest) -> Manifest:
    """Return the manifest at a revision.  Raises BundleConflict if this version has another content
    there."""
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
    """Check by the hub's digests that every byte arrived.  ``bundle.json`` may have another
    time."""
    for name, data in files.items():
        remote = there.files.get(name)
        differs = remote is None or remote.differs(record_of(data), data)
        if name == SIGNATURE and differs:
            problem = "the hub has this version without this signature, and a tag does not move"
            raise BundleConflict(
                problem,
                file=name,
                cure="Sign before you push: publish the next version, sign and push it",
            )
        if remote is None:
            raise MissingFile(
                "the hub does not have this file", file=name, cure="Push to another repository"
            )
        if name != MANIFEST and differs:
            raise HubError(
                "the hub has another file than the one that was pushed",
                file=name,
                expected=record_of(data),
                found=remote,
                cure="Delete the tag there, or push to another repository",
            )
