"""Pushes bundles to the Hugging Face hub, and pulls them from it into a store.

Name, version, bytes and signature stay the same.  A repository of the hub has one commit and one
tag for each version of one bundle.  A pull reads the manifest, then only the files that it lists,
and then adds them by one rename."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete

from probes_store import errors
from probes_store.bundle import MAX_SMALL, SIGNATURE, Bundle, Files, check_total, read_signature
from probes_store.errors import BundleConflict, BundleDamaged, DigestMismatch, HubError, MissingFile
from probes_store.hub import MAIN, TAG, Hub, Snapshot, is_same
from probes_store.index import INDEX, index_bytes, offer_of
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
from probes_store.syntax import VERSION, VERSIONS, HubAddress
from probes_store.transfer import add, check_addition, held

# A repository may have these before its first bundle.
HARMLESS = {CARD, "LICENSE", "LICENSE.md", "LICENSE.txt"}
ELSEWHERE = "Push to another repository"


@dataclass(frozen=True)
class Pulled:
    """The result of a pull."""

    bundle: Bundle
    commit: str
    added: bool  # False: the store had it already
    offline: str | None  # why the hub did not answer; then huggingface_hub's cache has the files
    left_out: Sequence[str]  # files of the repository that are not the bundle's; not downloaded


def pull(
    store: Store,
    address: HubAddress,
    *,
    digest: str | None = None,
    take_over: bool = False,
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
    hub = Hub(address.repository)
    file = str(address)
    snapshot: Snapshot | None = None
    offline: str | None = None
    try:
        snapshot = hub.snapshot(address.revision)
    except errors.HubUnreachable as error:
        offline = str(error)
    if snapshot is not None and MANIFEST not in snapshot.files:
        raise MissingFile(
            f"no {MANIFEST} at its root, so it is no bundle", file=file, cure="Check the address"
        )
    # Read by the name of the revision and not by its commit, so the cache can find it without a
    # connection.
    manifest, path = hub.read(
        MANIFEST, address.revision or MAIN, MAX_SMALL, read_manifest, cached=snapshot is None
    )
    commit = path.parent.name
    if snapshot is not None and commit != snapshot.commit:
        raise HubError(
            "the repository changed meanwhile", file=hub.repository, cure="Run the command again"
        )
    if digest is not None and manifest.digest != digest:
        raise DigestMismatch(
            "this is not the bundle that --digest names",
            file=file,
            field="digest",
            expected=digest,
            found=manifest.digest,
            cure="Ask its publisher",
        )
    if not VERSION.fullmatch(version := str(manifest.version)):  # which no store can hold
        raise errors.BadValue(file=MANIFEST, field="version", expected=VERSIONS, found=version)
    tag = address.revision or ""
    if TAG.fullmatch(tag) and tag != f"v{version}":
        raise BundleConflict(
            f"the tag {tag} holds version {version}",
            file=file,
            cure="Ask its publisher, or name a commit",
        )
    left_out = [] if snapshot is None else _compare(manifest, snapshot)
    origin = {"repository": str(HubAddress(address.repository)), "endpoint": hub.api.endpoint}
    existing = held(store, manifest)
    signature = _signature(hub, commit, snapshot)
    if existing is not None and (not signature or read_signature(existing.path)):
        return Pulled(existing, commit, False, offline, left_out)
    check_addition(store, manifest, origin, take_over)
    store.check_writable()
    arrived = None if bar is None else bar(manifest.total)
    files = hub.files(manifest, commit, arrived=arrived, cached=snapshot is None)
    files |= {MANIFEST: manifest_bytes(manifest), **signature}
    bundle, added = add(store, manifest, files, origin, take_over=take_over)
    return Pulled(bundle, commit, added, offline, left_out)


def _compare(manifest: Manifest, snapshot: Snapshot) -> list[str]:
    """Return names that do not belong to the bundle.  Raises a subclass of BundleDamaged before
    anything is fetched."""
    for name, record in manifest.files.items():
        remote = snapshot.files.get(name)
        if remote is None:
            raise MissingFile("the repository lacks this file of the bundle", file=name)
        if not is_same(remote, record):
            raise DigestMismatch(
                "the repository has another file", file=name, expected=record, found=remote
            )
    check_total(manifest)
    return sorted(_strangers(snapshot) - {*manifest.files, MANIFEST, SIGNATURE})


def _strangers(snapshot: Snapshot) -> set[str]:
    """Return names that are neither hidden nor our index; the hub itself makes .gitattributes."""
    return {
        name for name in snapshot.files if name != INDEX and not Path(name).name.startswith(".")
    }


def _signature(hub: Hub, commit: str, snapshot: Snapshot | None) -> Files:
    """Read model.sig if the repository has it, or without a connection if the cache has it."""
    if snapshot is not None and SIGNATURE not in snapshot.files:
        return {}
    try:
        data, _ = hub.read(SIGNATURE, commit, MAX_SMALL, bytes, cached=snapshot is None)
    except errors.HubUnreachable:
        if snapshot is not None:
            raise
        return {}
    return {SIGNATURE: data}


@dataclass
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
    deleted: Sequence[str] = ()  # files of the previous version that this one lacks


def push(
    bundle: Bundle, address: HubAddress, *, private: bool = False, dry_run: bool = False
) -> Pushed:
    """Publish a verified bundle at the root of a repository of the hub; create the repository if
    there is none.

    ``private``: the repository must be private, or is created so.  ``dry_run``: ask the hub, change
    nothing.  Raises HubError, BundleConflict if the repository holds something else, and subclasses
    of BundleDamaged."""
    manifest = bundle.manifest
    files = bundle.files()
    hub = Hub(address.repository)
    tag = f"v{manifest.version}"
    done = Pushed(
        tag,
        url=f"{hub.url}/tree/{tag}",
        address=str(HubAddress(address.repository, tag)),
        private=private,
        files={name: len(files[name]) for name in sorted(files)},
    )
    head: Snapshot | None = None
    try:
        head = hub.snapshot()
    except errors.HubMissing:
        done.create = done.commit = True
    else:
        if private and not head.private:
            raise BundleConflict(
                "the repository is public",
                file=str(address),
                cure=f"Leave out --private, or make it private at {hub.url}/settings",
            )
        done.private = head.private
        _plan(done, hub, head, manifest, files)
    if dry_run or done.nothing:
        return done
    with hub.errors():  # if a step fails, the next push continues there
        if done.create:
            hub.api.create_repo(hub.repository, private=private or None)
        commit = hub.snapshot().commit if head is None else head.commit
        if done.commit:
            files_there = files | {INDEX: _index(hub, bundle, new=done.create)}
            commit = hub.api.create_commit(
                hub.repository,
                [
                    *(CommitOperationAdd(name, data) for name, data in files_there.items()),
                    *(CommitOperationDelete(name) for name in done.deleted),
                ],
                commit_message=f"{manifest.name} version {manifest.version}",
                commit_description=manifest.digest,
                parent_commit=commit,  # the hub refuses if another commit was faster
            ).oid
        hub.api.create_tag(hub.repository, tag=tag, tag_message=manifest.digest, revision=commit)
    there = hub.snapshot(tag)
    _check_complete(there, files)
    done.private = there.private
    return done


def _index(hub: Hub, bundle: Bundle, *, new: bool) -> bytes:
    """Return the index of a repository with this version and those of its tags."""
    offer = offer_of(bundle.manifest, bundle.evaluation())
    versions = {*offer.versions, *(() if new else hub.versions())}
    return index_bytes([replace(offer, versions=tuple(sorted(versions)))])


def _plan(done: Pushed, hub: Hub, head: Snapshot, manifest: Manifest, files: Files) -> None:
    """Set what there is to do in an existing repository."""
    name = manifest.name
    version = manifest.version
    if version in hub.versions():
        tag = f"v{version}"
        _check_same(hub, tag, manifest)
        _check_complete(hub.snapshot(tag), files)
        done.nothing = True
        return
    if MANIFEST not in head.files:
        if strangers := sorted(_strangers(head) - HARMLESS):
            raise BundleConflict(
                f"the repository holds something else: {', '.join(map(ascii, strangers[:5]))}",
                file=hub.url,
                cure=f"{ELSEWHERE}; one that does not exist is created",
            )
        done.commit = True
        return
    there = _check_same(hub, MAIN, manifest)
    if there.name != name:
        raise BundleConflict(
            "the repository is another bundle's",
            file=hub.url,
            expected=there.name,
            found=name,
            cure=ELSEWHERE,
        )
    if there.version > version:
        raise BundleConflict(
            f"the repository is at version {there.version} already; versions follow each other",
            file=hub.url,
            cure=f"Push a version above {there.version}",
        )
    if there.version == version:  # an earlier push stopped before its tag
        _check_complete(head, files)
        return
    done.commit = True
    done.deleted = sorted({*there.files, SIGNATURE} & head.files.keys() - files.keys())


def _check_same(hub: Hub, revision: str, ours: Manifest) -> Manifest:
    """Return the manifest at a revision.  Raises BundleConflict if this version has another content
    there."""
    try:
        there, _ = hub.read(MANIFEST, revision, MAX_SMALL, read_manifest)
    except BundleDamaged as error:
        raise BundleConflict(
            f"{revision} has no {MANIFEST} that can be read: {error}", file=hub.url, cure=ELSEWHERE
        ) from error
    if there.digest != ours.digest and (revision != MAIN or there.reference == ours.reference):
        raise BundleConflict(
            f"{revision} is another bundle with this version",
            file=ours.reference,
            expected=ours.digest,
            found=there.digest,
            cure="Publish yours as the next",
        )
    return there


def _check_complete(there: Snapshot, files: Files) -> None:
    """Check by the hub's digests that every byte arrived.  ``bundle.json`` may have another
    time."""
    for name, data in files.items():
        remote = there.files.get(name)
        ours = record_of(data)
        same = remote is not None and is_same(remote, ours, data)
        if name == SIGNATURE and not same:
            raise BundleConflict(
                "the hub has this version without this signature, and a tag does not move",
                file=name,
                cure="Sign before you push: publish the next version, sign and push it",
            )
        if remote is None:
            raise MissingFile("the hub does not have this file", file=name, cure=ELSEWHERE)
        if name != MANIFEST and not same:
            raise HubError(
                "the hub has another file than the one that was pushed",
                file=name,
                expected=ours,
                found=remote,
                cure=f"Delete the tag there, or: {ELSEWHERE}",
            )
