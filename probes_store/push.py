"""From a store to a repository of the hub: one commit and one tag for each version of one bundle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete

from probes_store.bundle import MAX_MANIFEST, SIGNATURE, Bundle
from probes_store.errors import BundleConflict, BundleDamaged, HubError, HubMissing, MissingFile
from probes_store.hub import MAIN, Hub, HubAddress, Snapshot, is_hidden, tag_of
from probes_store.manifest import CARD, MANIFEST, Manifest, read_manifest, record_of
from probes_store.transfer import files_of

HARMLESS = (CARD, "LICENSE", "LICENSE.md", "LICENSE.txt")  # may lie in a repository that gets its first bundle


@dataclass(frozen=True)
class Plan:
    """What a push will do; all false: the hub has that version already."""

    create: bool  # the repository
    commit: bool  # the files
    tag: bool
    deleted: tuple[str, ...]  # files of the version before that this one lacks
    head: str | None  # the commit that the new one follows

    @property
    def nothing(self) -> bool:
        """Whether the hub has it all."""
        return not (self.create or self.commit or self.tag)


@dataclass(frozen=True)
class Pushed:
    """What a push did, or would do."""

    plan: Plan
    tag: str
    url: str  # of the version's page
    address: str  # what to pull
    private: bool
    files: Mapping[str, int]  # name -> bytes


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
    HubError, BundleConflict where the repository holds something else, and subclasses of BundleDamaged.
    """
    manifest, tag = bundle.manifest, tag_of(bundle.manifest)
    files = files_of(bundle)
    hub = Hub(address.repository, endpoint=endpoint, cache=cache)
    try:
        head = hub.snapshot()
    except HubMissing:
        head = None
    if head is not None and private and not head.private:
        raise BundleConflict(
            "the repository is public", file=str(address), cure="Leave out --private, or make it private at "
            f"{hub.url}/settings",
        )  # fmt: skip
    plan = _plan(hub, head, manifest, files)
    is_private = head.private if head is not None else private
    if not (dry_run or plan.nothing):
        is_private = _carry_out(hub, plan, manifest, files, private)
    sizes = {name: len(data) for name, data in sorted(files.items())}
    pulled = HubAddress(address.repository, tag)
    return Pushed(plan, tag, f"{hub.url}/tree/{tag}", str(pulled), is_private, sizes)


def _plan(hub: Hub, head: Snapshot | None, manifest: Manifest, files: Mapping[str, bytes]) -> Plan:
    if head is None:
        return Plan(True, True, True, (), None)
    tag = tag_of(manifest)
    if tag in hub.tags():
        _check_same(_manifest_at(hub, tag), manifest, f"the tag {tag}")
        _check_complete(hub.snapshot(tag), files)
        return Plan(False, False, False, (), head.commit)
    if MANIFEST not in head.files:
        strangers = sorted(name for name in head.files if not is_hidden(name) and name not in HARMLESS)
        if strangers:
            raise BundleConflict(
                f"the repository holds something else: {', '.join(map(ascii, strangers[:5]))}", file=hub.url,
                cure="Push to another repository; one that does not exist is created",
            )  # fmt: skip
        return Plan(False, True, True, (), head.commit)
    there = _manifest_at(hub, MAIN)
    if there.name != manifest.name:
        raise BundleConflict(
            "the repository is another bundle's", file=hub.url, expected=there.name, found=manifest.name,
            cure="Push to another repository: each has the versions of one bundle",
        )  # fmt: skip
    if there.version > manifest.version:
        raise BundleConflict(
            f"the repository is at version {there.version} already, and versions follow each other", file=hub.url,
            cure=f"Push a version above {there.version}",
        )  # fmt: skip
    if there.version == manifest.version:  # an earlier push ended before its tag
        _check_same(there, manifest, MAIN)
        _check_complete(head, files)
        return Plan(False, False, True, (), head.commit)
    deleted = tuple(name for name in (*there.files, SIGNATURE) if name not in files and name in head.files)
    return Plan(False, True, True, deleted, head.commit)


def _manifest_at(hub: Hub, revision: str) -> Manifest:
    try:
        data, _ = hub.read(MANIFEST, revision, MAX_MANIFEST)
        return read_manifest(data)
    except BundleDamaged as error:
        raise BundleConflict(
            f"{revision} has no {MANIFEST} that can be read: {error}", file=hub.url, cure="Push to another repository"
        ) from error


def _check_same(there: Manifest, ours: Manifest, where: str) -> None:
    if there.digest != ours.digest:
        raise BundleConflict(
            f"{where} is another bundle with this version", file=ours.reference, expected=ours.digest,
            found=there.digest, cure="A published version never changes: train or publish yours as the next version",
        )  # fmt: skip


def _check_complete(there: Snapshot, files: Mapping[str, bytes]) -> None:
    """Every byte arrived, as far as the hub's own digests tell.  ``bundle.json`` may have another time."""
    for name, data in files.items():
        remote = there.files.get(name)
        if name == SIGNATURE and (remote is None or remote.differs(record_of(data), data)):
            raise BundleConflict(
                "the hub has this version without this signature, and a tag does not move", file=SIGNATURE,
                cure="Sign before you push: publish the next version, sign and push that",
            )  # fmt: skip
        if remote is None:
            raise MissingFile("the hub does not have this file", file=name, cure="Push to another repository")
        if name != MANIFEST and remote.differs(record_of(data), data):
            raise HubError(
                "the hub has another file than the one that was pushed", file=name, expected=f"{len(data)} bytes",
                found=f"{remote.size} bytes", cure="Delete the tag there, or push to another repository",
            )  # fmt: skip


def _carry_out(hub: Hub, plan: Plan, manifest: Manifest, files: Mapping[str, bytes], private: bool) -> bool:
    """Create, commit, tag, look again.  Each step alone may be the last: the next push goes on from there."""
    tag, head = tag_of(manifest), plan.head
    with hub.errors():
        if plan.create:
            hub.api.create_repo(hub.repository, private=private or None)
            head = hub.snapshot().commit
        if plan.commit:
            additions = [CommitOperationAdd(name, data) for name, data in files.items()]
            head = hub.api.create_commit(
                hub.repository,
                [*additions, *(CommitOperationDelete(name) for name in plan.deleted)],
                commit_message=f"{manifest.name} version {manifest.version}",
                commit_description=manifest.digest,
                parent_commit=head,  # refused where somebody else was faster
            ).oid
        hub.api.create_tag(hub.repository, tag=tag, tag_message=manifest.digest, revision=head)
    there = hub.snapshot(tag)
    _check_complete(there, files)
    return there.private
