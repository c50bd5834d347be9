"""One repository of the Hugging Face hub, through huggingface_hub: what it holds, its files, and what went wrong.

HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE mean what they mean to huggingface_hub, which also resumes, retries
and caches downloads.  Nothing that is downloaded is executed or unpickled: files are read as bytes, by names we know.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import HfApi
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.sha import git_hash
from tqdm import tqdm

from probes_store.errors import (
    BundleError,
    DigestMismatch,
    HubError,
    HubMissing,
    HubUnreachable,
    InvalidReference,
    MissingFile,
)
from probes_store.manifest import FileRecord, Manifest
from probes_store.reference import HUB

MAIN = "main"
TAG = re.compile(r"v[1-9][0-9]*")  # of a version
_PART = r"(?![A-Za-z0-9._-]*(?:--|\.\.))[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
# A revision becomes a file's name in huggingface_hub's cache, so it must not lead anywhere.
_ADDRESS = re.compile(rf"({_PART}/{_PART})(?:@((?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._/-]{{0,199}}))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TOKEN = "Log in with 'hf auth login', or set HF_TOKEN to a token of https://huggingface.co/settings/tokens"


@dataclass(frozen=True, slots=True)
class HubAddress:
    """hf://OWNER/NAME, with or without @REVISION: a tag, a branch or a commit."""

    repository: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{HUB}{self.repository}" + (f"@{self.revision}" if self.revision else "")


def parse_address(text: str) -> HubAddress:
    """Raises InvalidReference."""
    match = _ADDRESS.fullmatch(text.removeprefix(HUB)) if text.startswith(HUB) else None
    if match is None:
        raise InvalidReference(
            "not an address on the hub",
            expected="hf://OWNER/NAME or hf://OWNER/NAME@REVISION",
            found=ascii(text),
            cure="Owner and name are those of the repository's page; the revision is a tag such as v1",
        )
    return HubAddress(match[1], match[2])


def tag_of(manifest: Manifest) -> str:
    """The tag of a bundle's version: v1, v2, ..."""
    return f"v{manifest.version}"


def is_hidden(name: str) -> bool:
    """Whether a file is none of a bundle's business, as .gitattributes, which the hub makes."""
    return name.rsplit("/", 1)[-1].startswith(".")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """What the hub says of a file before it is downloaded."""

    size: int
    sha256: str | None  # of files in large file storage
    blob: str | None  # git's digest, of the others

    def differs(self, record: FileRecord, data: bytes | None = None) -> bool:
        """Whether this cannot be the file of ``record``; ``data``, its bytes, allow git's digest to be compared."""
        if self.size != record.bytes:
            return True
        if self.sha256 is not None:
            return self.sha256 != record.sha256
        return data is not None and self.blob is not None and self.blob != git_hash(data)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A repository at one commit."""

    commit: str
    private: bool
    files: Mapping[str, RemoteFile]


class Hub:
    """One repository.  Every method raises HubError, of which HubUnreachable means that there was no answer."""

    def __init__(self, repository: str, *, endpoint: str | None = None, cache: Path | None = None) -> None:
        self.repository = repository
        self.api = HfApi(endpoint=endpoint, library_name="hallutracer")
        self._cache = cache

    @property
    def url(self) -> str:
        """The repository's page."""
        return f"{self.api.endpoint}/{self.repository}"

    def snapshot(self, revision: str | None = None) -> Snapshot:
        """The files at a revision, from one answer, so that they belong to one commit."""
        with self.errors(revision):
            info = self.api.model_info(self.repository, revision=revision, files_metadata=True)
            commit = info.sha or ""
            if not _COMMIT.fullmatch(commit):
                raise HubError("the hub names no commit", found=ascii(commit), expected="40 hex digits")
            files = {
                file.rfilename: RemoteFile(
                    file.size if isinstance(file.size, int) else -1, file.lfs.sha256 if file.lfs else None, file.blob_id
                )
                for file in info.siblings or []
            }
            return Snapshot(commit, bool(info.private), files)

    def tags(self) -> set[str]:
        """Names of the repository's tags."""
        with self.errors():
            return {ref.name for ref in self.api.list_repo_refs(self.repository).tags}

    def read(
        self, name: str, revision: str, limit: int, *, bar: Any = None, cached: bool = False, again: bool = False
    ) -> tuple[bytes, Path]:
        """A file of at most ``limit`` bytes, and its place in the cache; whatever is longer is not downloaded.

        ``bar`` has ``update(bytes)``; ``cached``: without a connection; ``again``: although the cache has it.
        """
        with self.errors(revision):
            path = self.api.hf_hub_download(
                self.repository, name, revision=revision, cache_dir=self._cache, local_files_only=cached,
                force_download=again, tqdm_class=_limited(name, limit, bar),
            )  # fmt: skip
            with open(path, "rb") as file:
                data = file.read(limit + 1)
        if len(data) > limit:
            raise _too_long(name, limit)
        return data, Path(path)

    @contextmanager
    def errors(self, revision: str | None = None) -> Iterator[None]:
        """Turn what huggingface_hub raises into a HubError that says what to do."""
        where = str(HubAddress(self.repository, revision))
        try:
            yield
        except BundleError:
            raise
        except GatedRepoError as error:
            cure = f"Accept its terms at {self.url} and then: {_TOKEN[0].lower()}{_TOKEN[1:]}"
            raise HubError("the repository is gated", file=where, cure=cure) from error
        except RepositoryNotFoundError as error:
            cure = f"Check the spelling.  Where it is private: {_TOKEN[0].lower()}{_TOKEN[1:]}"
            raise HubMissing("no such repository, or it is private", file=where, cure=cure) from error
        except RevisionNotFoundError as error:
            cure = f"Its tags and branches are at {self.url}/tree/main"
            raise HubError("no such revision", file=where, cure=cure) from error
        except (OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
            reason = "HF_HUB_OFFLINE is set" if isinstance(error, OfflineModeIsEnabled) else "not in the cache"
            cure = "Connect, or unset HF_HUB_OFFLINE; what was downloaded once is found in the cache"
            raise HubUnreachable(reason, file=where, cure=cure) from error
        except EntryNotFoundError as error:
            raise MissingFile("the repository has no such file", file=where) from error
        except HfHubHTTPError as error:
            raise self._refused(error, where) from error
        except httpx2.HTTPError as error:  # no answer, or half of one
            cure = "Check the connection and run the command again: finished files are kept in the cache"
            problem = f"no answer from {self.api.endpoint}: {_line(error)}"
            raise HubUnreachable(problem, file=where, cure=cure) from error
        except (OSError, ValueError, RuntimeError) as error:  # as huggingface_hub says it: sizes, metadata, uploads
            cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
            raise HubError(_line(cause), file=where, cure="Correct that, or run the command again") from error

    def _refused(self, error: HfHubHTTPError, where: str) -> HubError:
        status = error.response.status_code
        if status in (401, 403):
            return HubError(f"the hub refused the token, or asks for one ({status})", file=where, cure=_TOKEN)
        said = _line(error.server_message or error)
        if status >= 500 or status == 429:
            cure = "Run the command again later: finished files are kept in the cache"
            return HubUnreachable(f"the hub answered {status}: {said}", file=where, cure=cure)
        return HubError(f"the hub answered {status}: {said}", file=where, cure="Correct that, or run the command again")


def _limited(name: str, limit: int, bar: Any) -> type[tqdm[Any]]:
    """A progress bar that shows nothing by itself, and ends a download that is longer than it may be.

    The hub states sizes beforehand; this holds where what arrives is longer than that.
    """

    class Limited(tqdm):  # type: ignore[type-arg]  # tqdm[Any] is no class at run time
        arrived = 0

        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(disable=True)

        def update(self, n: float | None = 1) -> bool | None:
            self.arrived += int(n or 0)
            if self.arrived > limit:
                raise _too_long(name, limit)
            if bar is not None:
                bar.update(int(n or 0))
            return None

    return Limited


def _too_long(name: str, limit: int) -> DigestMismatch:
    return DigestMismatch("the file is too long", file=name, expected=f"at most {limit} bytes", found="more")


def _line(error: object, limit: int = 300) -> str:
    """What a server or library says, as one printable line."""
    return "".join(c if c.isprintable() else " " for c in " ".join(str(error).split()))[:limit].rstrip(".")
