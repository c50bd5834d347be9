"""Reads a repository of the Hugging Face hub, through huggingface_hub, also as a read-only store.

HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE have their usual meaning; huggingface_hub resumes,
retries and caches downloads.  Nothing that is downloaded is executed or unpickled: files with known
names are read as bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import httpx
import httpx2
from huggingface_hub import HfApi
from huggingface_hub import errors as of_hub
from huggingface_hub.utils.sha import git_hash
from tqdm import tqdm

from probes_store import errors
from probes_store.bundle import MAX_MANIFEST, MAX_SIGNATURE, SIGNATURE, listed, too_long
from probes_store.errors import BundleError, HubError, HubUnreachable, one_line
from probes_store.index import INDEX
from probes_store.manifest import MANIFEST, FileRecord, Manifest, read_manifest
from probes_store.syntax import HubAddress, parse_address

T = TypeVar("T")
MAIN = "main"
NO_ANSWER = (
    httpx.HTTPError,
    httpx2.HTTPError,
)  # no answer or part of one; huggingface_hub 1 and 2 raise these
TAG = re.compile(r"v[1-9][0-9]*")  # the tag of a version
_TOKEN = (
    "log in with 'hf auth login', or set HF_TOKEN to a token of"
    " https://huggingface.co/settings/tokens"
)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """The hub's record of a file."""

    size: int
    sha256: str | None  # for files in large file storage
    blob: str | None  # git's digest, for other files

    def differs(self, record: FileRecord, data: bytes | None = None) -> bool:
        """Return whether this is not the file of ``record``; ``data`` are its bytes, to compare
        git's digest."""
        if self.size != record.bytes or self.sha256 is not None:
            return self.size != record.bytes or self.sha256 != record.sha256
        return data is not None and self.blob is not None and self.blob != git_hash(data)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A repository at one commit."""

    commit: str
    private: bool
    files: Mapping[str, RemoteFile]


class Hub:
    """One repository.  Every method raises HubError; its subclass HubUnreachable means no
    answer."""

    def __init__(
        self, repository: str, *, endpoint: str | None = None, cache: Path | None = None
    ) -> None:
        self.repository, self._cache = repository, cache
        self.api = HfApi(endpoint=endpoint, library_name="hallutracer")
        self.url = f"{self.api.endpoint}/{repository}"  # the repository's page

    def snapshot(self, revision: str | None = None) -> Snapshot:
        """Return the files at a revision; they come from one answer, so they belong to one
        commit."""
        with self.errors(revision):
            info = self.api.model_info(self.repository, revision=revision, files_metadata=True)
            if not re.fullmatch(r"[0-9a-f]{40}", commit := info.sha or ""):
                raise HubError(
                    "the hub names no commit", found=ascii(commit), expected="40 hex digits"
                )
            files = {}
            for file in info.siblings or []:
                size = file.size if isinstance(file.size, int) else -1
                files[file.rfilename] = RemoteFile(
                    size, file.lfs.sha256 if file.lfs else None, file.blob_id
                )
            return Snapshot(commit, bool(info.private), files)

    def tags(self) -> set[str]:
        """Return the names of the repository's tags."""
        with self.errors():
            return {ref.name for ref in self.api.list_repo_refs(self.repository).tags}

    def read(
        self,
        name: str,
        revision: str,
        limit: int,
        accept: Callable[[bytes], T],
        *,
        arrived: Callable[[int], Any] | None = None,
        cached: bool = False,
    ) -> tuple[T, Path]:
        """Read a file of at most ``limit`` bytes; return what ``accept`` makes of its bytes, and
        its path in the cache.

        If ``accept`` raises BundleDamaged, the file is fetched again, since the copy in the cache
        may be damaged. ``arrived`` is called with the number of bytes as they arrive.  ``cached``
        reads the cache only."""

        class Limited(tqdm):  # type: ignore[type-arg]  # tqdm[Any] is no class at run time
            """Shows nothing, and stops a download that is longer than the limit."""

            total_arrived = 0

            def __init__(self, *_: Any, **__: Any) -> None:
                super().__init__(disable=True)

            def update(self, n: float | None = 1) -> bool | None:
                self.total_arrived += int(n or 0)
                if self.total_arrived > limit:
                    raise too_long(name, limit)
                if arrived is not None and not again:
                    arrived(int(n or 0))
                return None

        for again in (False, True):
            with self.errors(revision):
                path = self.api.hf_hub_download(
                    self.repository,
                    name,
                    revision=revision,
                    cache_dir=self._cache,
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
        raise AssertionError("unreachable")

    def files(self, manifest: Manifest, revision: str, **options: Any) -> dict[str, bytes]:
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
        except BundleError:
            raise
        except (of_hub.EntryNotFoundError, *NO_ANSWER, OSError, ValueError, RuntimeError) as error:
            kind, problem, cure = self._explained(error)
            raise kind(
                problem, file=str(HubAddress(self.repository, revision)), cure=cure
            ) from error

    def _explained(self, error: Exception) -> tuple[type[BundleError], str, str | None]:
        later = "the command again: finished files are kept in the cache"
        match error:
            case of_hub.GatedRepoError():
                return (
                    HubError,
                    "the repository is gated",
                    f"Accept its terms at {self.url} and then: {_TOKEN}",
                )
            case of_hub.RepositoryNotFoundError():
                return (
                    errors.HubMissing,
                    "no such repository, or it is private",
                    f"Check the spelling, or {_TOKEN}",
                )
            case of_hub.RevisionNotFoundError():
                return (
                    HubError,
                    "no such revision",
                    f"Its tags and branches are at {self.url}/tree/main",
                )
            case of_hub.OfflineModeIsEnabled() | of_hub.LocalEntryNotFoundError():
                offline = isinstance(error, of_hub.OfflineModeIsEnabled)
                problem = "HF_HUB_OFFLINE is set" if offline else "not in the cache"
                return HubUnreachable, problem, "Connect, or unset HF_HUB_OFFLINE"
            case of_hub.EntryNotFoundError():
                return errors.MissingFile, "the repository has no such file", None
            case of_hub.HfHubHTTPError() if error.response.status_code in (401, 403):
                problem = (
                    f"the hub refused the token, or asks for one ({error.response.status_code})"
                )
                return HubError, problem, f"Try this: {_TOKEN}"
            case of_hub.HfHubHTTPError():
                status = error.response.status_code
                problem = f"the hub answered {status}: {one_line(error.server_message or error)}"
                if status >= 500 or status == 429:
                    return HubUnreachable, problem, f"Wait, and run {later}"
                return HubError, problem, "Correct that, or run the command again"
            case httpx.HTTPError() | httpx2.HTTPError():
                problem = f"no answer from {self.api.endpoint}: {one_line(error)}"
                return HubUnreachable, problem, f"Check the connection and run {later}"
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        return HubError, one_line(cause), "Correct that, or run the command again"


class HubSource:
    """A repository as a read-only store: its tags v1, v2, ... are the versions of its bundle; see
    ``Bucket``."""

    def __init__(self, url: str) -> None:
        address = parse_address(url.rstrip("/"))
        if address.revision is not None:
            raise errors.InvalidReference(
                "a store has all versions",
                expected="hf://OWNER/NAME",
                found=ascii(url),
                cure="Name the version with the bundle",
            )
        self.where = str(address)
        self._hub = Hub(address.repository)

    def names(self) -> Sequence[str]:
        """Return the name of the repository's bundle."""
        with _answering():
            self._hub.tags()  # raises if there is no answer; a file would come from the cache then
            return [self._hub.read(MANIFEST, MAIN, MAX_MANIFEST, read_manifest)[0].name]

    def versions(self, name: str) -> set[int]:
        """Return the numbers of the tags."""
        if name not in self.names():
            return set()
        with _answering():
            return {int(tag[1:]) for tag in self._hub.tags() if TAG.fullmatch(tag)}

    def aliases(self, name: str) -> dict[str, int]:
        """Return an empty table: a repository has no aliases."""
        return {}

    def index(self) -> bytes | None:
        """Read ``index.json``; None if the repository has none."""
        with _answering():
            if INDEX not in self._hub.snapshot().files:
                return None
            return self._hub.read(INDEX, MAIN, MAX_MANIFEST, bytes)[0]

    def manifest(self, name: str, version: int) -> bytes:
        """Read bundle.json at the tag."""
        with _answering():
            return self._hub.read(MANIFEST, f"v{version}", MAX_MANIFEST, bytes)[0]

    def signature(self, name: str, version: int) -> bytes | None:
        """Read model.sig at the tag."""
        with _answering():
            if SIGNATURE not in self._hub.snapshot(f"v{version}").files:
                return None
            return self._hub.read(SIGNATURE, f"v{version}", MAX_SIGNATURE, bytes)[0]

    def files(self, manifest: Manifest) -> dict[str, bytes]:
        """Read and verify the files at the tag."""
        with _answering():
            return self._hub.files(manifest, f"v{manifest.version}")

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        cure = "Publish and sign in a store of your own, and run 'hallutracer bundle push'"
        raise errors.StoreRefused(
            "a repository of the hub is only read", file=self.where, cure=cure
        )

    check_writable = publish = add = set_alias = write_signature = _refuse


@contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except HubUnreachable as error:
        raise errors.StoreUnreachable(str(error)) from error
