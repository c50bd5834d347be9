"""From a repository of the hub into a store: the manifest, then what it lists and nothing else, then one rename."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from probes_store.bundle import MAX_MANIFEST, MAX_SIGNATURE, MAX_TOTAL, SIGNATURE, Bundle, read_signature
from probes_store.errors import (
    BadValue,
    BundleConflict,
    BundleDamaged,
    DigestMismatch,
    HubError,
    HubUnreachable,
    InvalidReference,
    MissingFile,
)
from probes_store.hub import MAIN, TAG, Hub, HubAddress, Snapshot, is_hidden, tag_of
from probes_store.manifest import MANIFEST, Manifest, is_digest, read_manifest, record_of
from probes_store.reference import VERSION, check_name
from probes_store.store import Store
from probes_store.transfer import add, check_addition, held

NO_BUNDLE = "A repository with a bundle has its files at the root: 'hallutracer bundle push' makes one"


class Bar(Protocol):
    """What shows the bytes that have arrived."""

    def update(self, n: int) -> Any:
        """``n`` more bytes."""


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
    bar: Callable[[int], Bar] | None = None,
) -> Pulled:
    """Fetch a bundle and add it to the store under its own name and version.

    digest: what the bundle must have; bar: makes a progress bar for so many bytes.  Where the hub gives no answer, the
    copy in huggingface_hub's cache is taken.  Raises HubError, BundleConflict, InvalidReference, StoreNotWritable and
    subclasses of BundleDamaged; the store is then as it was.
    """
    if digest is not None and not is_digest(digest):
        raise InvalidReference("not a digest", expected="sha256: and 64 hex digits", found=ascii(digest))
    hub, revision = Hub(address.repository, endpoint=endpoint, cache=cache), address.revision or MAIN
    snapshot, offline = _ask(hub, address.revision)
    if snapshot is not None and MANIFEST not in snapshot.files:
        raise MissingFile(f"no {MANIFEST} there, so it is no bundle", file=str(address), cure=NO_BUNDLE)
    manifest, data, commit = _manifest(hub, revision, snapshot)
    _check_wanted(manifest, address, digest)
    left_out = _compare(manifest, snapshot) if snapshot is not None else []
    origin = {"repository": str(HubAddress(address.repository)), "endpoint": hub.api.endpoint}
    existing = held(store, manifest)
    signature = _signature(hub, commit, snapshot)
    if existing is not None and (not signature or read_signature(existing.path)):
        return Pulled(existing, commit, False, offline, left_out)
    check_addition(store, manifest, origin, take_over)
    store.check_writable()
    files = {MANIFEST: data, **_fetch(hub, commit, manifest, snapshot is not None, bar), **signature}
    bundle = add(store, files, origin, take_over=take_over)
    return Pulled(bundle, commit, existing is None, offline, left_out)


def _ask(hub: Hub, revision: str | None) -> tuple[Snapshot | None, str | None]:
    try:
        return hub.snapshot(revision), None
    except HubUnreachable as error:
        return None, str(error)


def _manifest(hub: Hub, revision: str, snapshot: Snapshot | None) -> tuple[Manifest, bytes, str]:
    """The manifest, its bytes, and the commit that they belong to."""
    for again in (False, True):
        # By the name of the revision, not by its commit: so the cache knows it when there is no connection.
        data, path = hub.read(MANIFEST, revision, MAX_MANIFEST, cached=snapshot is None, again=again)
        commit = path.parent.name
        if snapshot is not None and commit != snapshot.commit:
            raise HubError("the repository changed meanwhile", file=hub.repository, cure="Run the command again")
        try:
            return read_manifest(data), data, commit
        except BundleDamaged:
            if again or snapshot is None:
                raise
    raise AssertionError("unreachable")


def _check_wanted(manifest: Manifest, address: HubAddress, digest: str | None) -> None:
    if digest is not None and manifest.digest != digest:
        raise DigestMismatch(
            "this is not the bundle that --digest names",
            file=str(address),
            field="digest",
            expected=digest,
            found=manifest.digest,
            cure="Ask its publisher which one is right; nothing was taken",
        )
    check_name(manifest.name, "a bundle")
    if not VERSION.fullmatch(str(manifest.version)):
        raise BadValue("bad value", file=MANIFEST, field="version", expected="1 to 999999999", found=manifest.version)
    if TAG.fullmatch(address.revision or "") and address.revision != tag_of(manifest):
        raise BundleConflict(
            f"the tag {address.revision} holds version {manifest.version}",
            file=str(address),
            cure="Ask its publisher; a commit can be named instead of the tag",
        )


def _compare(manifest: Manifest, snapshot: Snapshot) -> list[str]:
    """The names that are no part of the bundle.  Raises a subclass of BundleDamaged before anything is downloaded."""
    for name, record in manifest.files.items():
        remote = snapshot.files.get(name)
        if remote is None:
            raise MissingFile("the repository lacks this file of the bundle", file=name)
        if remote.differs(record):
            found = f"{remote.size} bytes" + (f", sha256 {remote.sha256}" if remote.sha256 else "")
            raise DigestMismatch(
                "the repository has another file", file=name, found=found,
                expected=f"{record.bytes} bytes, sha256 {record.sha256}",
            )  # fmt: skip
    total = sum(record.bytes for record in manifest.files.values())
    if total > MAX_TOTAL:
        raise BadValue("the bundle is too large", expected=f"at most {MAX_TOTAL} bytes", found=total)
    return sorted(
        name for name in snapshot.files if name not in (*manifest.files, MANIFEST, SIGNATURE) and not is_hidden(name)
    )


def _signature(hub: Hub, commit: str, snapshot: Snapshot | None) -> dict[str, bytes]:
    """model.sig where the repository has one; without a connection where the cache has it."""
    if snapshot is not None and SIGNATURE not in snapshot.files:
        return {}
    try:
        return {SIGNATURE: hub.read(SIGNATURE, commit, MAX_SIGNATURE, cached=snapshot is None)[0]}
    except HubUnreachable:
        if snapshot is not None:
            raise
        return {}


def _fetch(
    hub: Hub, commit: str, manifest: Manifest, online: bool, bar: Callable[[int], Bar] | None
) -> dict[str, bytes]:
    shown = bar(sum(record.bytes for record in manifest.files.values())) if bar is not None else None
    files = {}
    for name, record in manifest.files.items():
        files[name], _ = hub.read(name, commit, record.bytes, bar=shown, cached=not online)
        if online and record_of(files[name]) != record:  # what an earlier run left in the cache may be damaged
            files[name], _ = hub.read(name, commit, record.bytes, again=True)
    return files
