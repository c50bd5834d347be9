"""Reads a repository of the Hugging Face hub, through huggingface_hub, also as a read-only store.

HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE have their usual meaning; huggingface_hub resumes,
retries and caches downloads.  Nothing that is downloaded is executed or unpickled: files with known
names are read as bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import httpx
import httpx2
from huggingface_hub import HfApi
from huggingface_hub import errors as of_hub
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils.sha import git_hash
from tqdm import tqdm

from probes_store import errors
from probes_store.bundle import MAX_SMALL, Files, listed, too_long
from probes_store.errors import (
    BundleError,
    HubError,
    HubUnreachable,
    MissingFile,
    StoreUnreachable,
    one_line,
)
from probes_store.manifest import MANIFEST, FileRecord, Manifest, read_manifest
from probes_store.remote import RemoteBackend
from probes_store.syntax import HubAddress, parse_address

T = TypeVar("T")
MAIN = "main"
# No answer or part of one; huggingface_hub 1 and 2 raise these.
NO_ANSWER = (httpx.HTTPError, httpx2.HTTPError)
TAG = re.compile(r"v[1-9][0-9]*")  # the tag of a version
_TOKEN = "log in with 'hf auth login', or set HF_TOKEN: https://huggingface.co/settings/tokens"


def is_same(remote: RepoSibling, record: FileRecord, data: bytes | None = None) -> bool:
    """Return whether the hub's file is that of ``record``, by what the hub says of it.

    ``data`` are its bytes: a file outside the large file storage has git's digest, not sha256."""
    if remote.lfs is not None:
        return (remote.size, remote.lfs.sha256) == (record.bytes, record.sha256)
    if data is not None and remote.blob_id not in (None, git_hash(data)):
        return False
    return remote.size == record.bytes


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A repository at one commit."""

    commit: str
    private: bool
    files: Mapping[str, RepoSibling]


class Hub:
    """One repository.  Every method raises HubError, or ``no_answer``."""

    def __init__(self, repository: str, *, no_answer: type[BundleError] = HubUnreachable) -> None:
        self.repository = repository
        self._no_answer = no_answer
        self.api = HfApi(library_name="hallutracer")
        self.url = f"{self.api.endpoint}/{repository}"  # the repository's page

    def snapshot(self, revision: str | None = None) -> Snapshot:
        """Return the files at a revision; they come from one answer, so they belong to one
        commit."""
        with self.errors(revision):
            info = self.api.model_info(self.repository, revision=revision, files_metadata=True)
        commit = info.sha or ""
        if not re.fullmatch(r"[0-9a-f]{40}", commit):
            raise HubError("the hub names no commit", expected="40 hex digits", found=ascii(commit))
        files = {file.rfilename: file for file in info.siblings or []}
        return Snapshot(commit, bool(info.private), files)

    def versions(self) -> set[int]:
        """Return the numbers of the tags v1, v2, ..."""
        with self.errors():
            tags = [ref.name for ref in self.api.list_repo_refs(self.repository).tags]
        return {int(tag[1:]) for tag in tags if TAG.fullmatch(tag)}

    def read(
        self,
        name: str,
        revision: str,
        limit: int,
        accept: Callable[[bytes], T],
        *,
        arrived: Callable[[int], Any] | None = None,
        cached: bool = False,
        again: bool = False,
    ) -> tuple[T, Path]:
        """Read a file of at most ``limit`` bytes; return what ``accept`` makes of its bytes, and
        its path in the cache.

        If ``accept`` raises BundleDamaged, the file is fetched ``again``, since the copy in the
        cache may be damaged. ``arrived`` is called with the number of bytes as they arrive.
        ``cached`` reads the cache only."""

        class Limited(tqdm):  # type: ignore[type-arg]  # tqdm[Any] is no class at run time
            """Shows nothing, and stops a download that is longer than the limit."""

            total_arrived = 0

            def __init__(self, *_: Any, **__: Any) -> None:
                super().__init__(disable=True)

            def update(self, n: float | None = 1) -> bool | None:
                self.total_arrived += int(n or 0)
                if self.total_arrived > limit:
                    raise too_long(name, limit)
                if arrived is not None:
                    arrived(int(n or 0))
                return None

        with self.errors(revision):
            path = self.api.hf_hub_download(
                self.repository,
                name,
                revision=revision,
                local_files_only=cached,
                force_download=again,
                tqdm_class=Limited,
            )
            with open(path, "rb") as file:
                data = file.read(limit + 1)
        if len(data) > limit:
            raise too_long(name, limit)
        try:
            return accept(data), Path(path)
        except errors.BundleDamaged:
            if cached or again:
                raise
        return self.read(name, revision, limit, accept, again=True)

    def files(self, manifest: Manifest, revision: str, **options: Any) -> Files:
        """Read and verify the files that the manifest lists; ``options`` are those of ``read``."""
        return {
            name: self.read(
                name, revision, record.bytes, partial(listed, record=record, file=name), **options
            )[0]
            for name, record in manifest.files.items()
        }

    @contextmanager
    def errors(self, revision: str | None = None) -> Iterator[None]:
        """Turn the errors of huggingface_hub into a HubError with a cure."""
        try:
            yield
        except (of_hub.EntryNotFoundError, *NO_ANSWER, OSError, ValueError, RuntimeError) as error:
            explained = self._explained(error)
            explained.file = str(HubAddress(self.repository, revision))
            raise explained from error

    def _explained(self, error: Exception) -> BundleError:
        """Return our error, with a cure."""
        later = "the command again: finished files are kept in the cache"
        match error:
            case of_hub.GatedRepoError():
                return HubError(
                    "the repository is gated",
                    cure=f"Accept its terms at {self.url} and then: {_TOKEN}",
                )
            case of_hub.RepositoryNotFoundError():
                return errors.HubMissing(
                    "no such repository, or it is private", cure=f"Check the spelling, or {_TOKEN}"
                )
            case of_hub.RevisionNotFoundError():
                return HubError(
                    "no such revision", cure=f"Its tags and branches are at {self.url}/tree/main"
                )
            case of_hub.OfflineModeIsEnabled() | of_hub.LocalEntryNotFoundError():
                offline = isinstance(error, of_hub.OfflineModeIsEnabled)
                return self._no_answer(
                    "HF_HUB_OFFLINE is set" if offline else "not in the cache",
                    cure="Connect, or unset HF_HUB_OFFLINE",
                )
            case of_hub.EntryNotFoundError():
                return MissingFile("the repository has no such file")
            case of_hub.HfHubHTTPError():
                status = error.response.status_code
                if status in (401, 403):
                    return HubError(
                        f"the hub refused the token, or asks for one ({status})",
                        cure=f"Try this: {_TOKEN}",
                    )
                problem = f"the hub answered {status}: {one_line(error.server_message or error)}"
                if status >= 500 or status == 429:
                    return self._no_answer(problem, cure=f"Wait, and run {later}")
            case httpx.HTTPError() | httpx2.HTTPError():
                return self._no_answer(
                    f"no answer from {self.api.endpoint}: {one_line(error)}",
                    cure=f"Check the connection and run {later}",
                )
            case RuntimeError() if error.__cause__:
                problem = one_line(error.__cause__)
            case _:
                problem = one_line(error)
        return HubError(problem, cure="Correct that, or run the command again")


class HubSource(RemoteBackend):
    """A repository as a read-only store: its tags v1, v2, ... are the versions of its bundle."""

    def __init__(self, url: str, cache: Path) -> None:
        address = parse_address(url.rstrip("/"))
        if address.revision is not None:
            raise errors.InvalidReference(
                "a store has all versions",
                expected="hf://OWNER/NAME",
                found=ascii(url),
                cure="Name the version with the bundle",
            )
        super().__init__(str(address), cache)
        self._hub = Hub(address.repository, no_answer=StoreUnreachable)

    def names(self) -> list[str]:
        """Return the name of the repository's bundle."""
        self._hub.versions()  # raises if there is no answer; a file would come from the cache then
        return [self._hub.read(MANIFEST, MAIN, MAX_SMALL, read_manifest)[0].name]

    def versions(self, name: str) -> set[int]:
        """Return the numbers of the tags."""
        return self._hub.versions() if name in self.names() else set()

    def aliases(self, name: str) -> dict[str, int]:
        """Return an empty table: a repository has no aliases."""
        return {}

    def fetch(self, file: str, name: str = "", version: int = 0) -> bytes | None:
        """Read a file at a version's tag, or without a version, at the head."""
        try:
            return self._hub.read(file, f"v{version}" if version else MAIN, MAX_SMALL, bytes)[0]
        except MissingFile:
            return None

    def files(self, manifest: Manifest) -> Files:
        """Read and verify the files at the tag."""
        return self._hub.files(manifest, f"v{manifest.version}")

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise errors.StoreRefused(
            "a repository of the hub is only read",
            file=self.where,
            cure="Publish and sign in a store of your own, and run 'hallutracer bundle push'",
        )

    children = check_writable = add = mend = set_alias = write_signature = _refuse
