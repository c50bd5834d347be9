"""Keeps a store's bundles as objects below a URL, through fsspec.

    URL/NAME/blobs/SHA256           every file of every version, by its content; never overwritten
                                    with other bytes
    URL/NAME/VERSION/bundle.json    the manifest, created last and only if there is none: this
                                    publishes a version
    URL/NAME/VERSION/model.sig      its signature, if any
    URL/NAME/aliases/REVISION.json  the whole alias table; the highest revision counts, and a change
                                    creates the next
    URL/index.json                  what is offered (``index``); of two publishers at once one may
                                    be missing from it, so nothing relies on it

A publisher that dies leaves only blobs, which are not a bundle.  Nothing but ``model.sig`` and
``index.json`` is ever overwritten, so the server needs only one guarantee: it can create an object
on the condition that there is none.

Credentials and endpoints come from fsspec's implementations: AWS_* variables and ~/.aws for s3,
application default credentials for gs, AZURE_STORAGE_* for az, FSSPEC_* and ~/.config/fsspec for
all.  A URL contains none."""

from __future__ import annotations

import errno
import logging
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from probes_store.bundle import MAX_SMALL, SIGNATURE, Files, listed
from probes_store.errors import (
    BundleError,
    MissingFile,
    StoreRefused,
    StoreUnreachable,
    located,
    one_line,
)
from probes_store.index import INDEX, index_bytes, joined, offer_of, read_index
from probes_store.manifest import (
    EVALUATION,
    MANIFEST,
    Manifest,
    manifest_bytes,
)
from probes_store.remote import RemoteBackend
from probes_store.syntax import (
    ALIASES,
    EXTRAS,
    VERSION,
    check_url,
    moved,
    next_number,
    parse_aliases,
    parse_json,
    readable_json,
)

log = logging.getLogger("hallutracer")

TABLES, BLOBS = "aliases", "blobs"
EXCLUSIVE = ".exclusive"  # an object that tests whether the server honours a conditional create
# time limit of a write: seconds, plus its bytes at this rate
WRITE_S, WRITE_BYTES_S = 20.0, 100_000
# exception classes of botocore, aiohttp, azure and google.auth, which are not imported here
_NO_ANSWER = {
    "EndpointConnectionError",
    "ConnectTimeoutError",
    "HTTPClientError",
    "ClientConnectionError",
    "ServiceRequestError",
    "ServiceResponseError",
    "TransportError",
}
_BUSY = {
    errno.EBUSY,
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    getattr(errno, "EREMOTEIO", errno.EBUSY),  # of Linux alone
}
# A server that is down must not delay a start by minutes.
_S3_LIMITS = {"connect_timeout": 5, "read_timeout": 10, "retries": {"max_attempts": 1}}


class Bucket(RemoteBackend):
    """The bundles below a URL."""

    def __init__(self, url: str, cache: Path) -> None:
        self._objects = Objects(url)
        self.check_writable = self._objects.check_exclusive
        super().__init__(self._objects.url, cache)

    def children(self, *parts: str) -> list[str]:
        """Return the names below a path.  Nothing is under a number before its manifest."""
        return self._objects.children(*parts)

    def aliases(self, name: str) -> dict[str, int]:
        """Return the newest table."""
        return self._table(name)[1]

    def fetch(self, file: str, name: str = "", version: int = 0) -> bytes | None:
        """Read an object."""
        return self._objects.read(f"{name}/{version}/{file}" if name else file, MAX_SMALL)

    def files(self, manifest: Manifest) -> Files:
        """Read and verify the files that the manifest lists."""
        files = {}
        with located(f"{manifest.name}/{manifest.version}"):
            for name, record in manifest.files.items():
                data = self._objects.read(_blob(manifest.name, record.sha256), record.bytes)
                if data is None:
                    raise MissingFile(file=name)
                files[name] = listed(data, record, name)
        return files

    def mend(self, manifest: Manifest, version: int, files: Files) -> None:
        """Write the blobs that are missing or damaged."""
        self.check_writable()
        for name in manifest.files:
            data = files[name]
            path = _blob(manifest.name, manifest.files[name].sha256)
            if not self._objects.create(path, data) and self._objects.read(path, len(data)) != data:
                # Repair a damaged blob: its name is the hash of its content.
                self._objects.put(path, data)

    def set_alias(self, name: str, alias: str, version: int, keep_as: str | None = None) -> None:
        """Create the next revision of the table; if another process was faster, the one after
        it."""
        self._objects.check_exclusive()
        while True:
            revision, table = self._table(name)
            changed = moved(table, alias, version, keep_as)
            if changed == table:
                return
            following = next_number([revision], f"the alias table of {name}")
            if self._objects.create(f"{name}/{TABLES}/{following}.json", readable_json(changed)):
                return

    def write_signature(self, name: str, version: int, data: bytes) -> None:
        """Write the signature, over an older one."""
        self._objects.put(f"{name}/{version}/{SIGNATURE}", data)

    def _table(self, name: str) -> tuple[int, dict[str, int]]:
        """Return the highest revision and its table; else 0 and the aliases.json of a local store,
        if copied here."""
        revisions = [child.removesuffix(".json") for child in self._objects.children(name, TABLES)]
        revision = max((int(child) for child in revisions if VERSION.fullmatch(child)), default=0)
        path = f"{name}/{TABLES}/{revision}.json" if revision else f"{name}/{ALIASES}"
        data = self._objects.read(path, MAX_SMALL)
        with located(path):
            if data is None and revision:
                raise MissingFile("the alias table was removed", cure="Set the aliases again")
            return revision, {} if data is None else parse_aliases(data)

    def add(self, manifest: Manifest, files: Files) -> bool:
        """Write the blobs, create the manifest, which publishes the version, then write signature
        and index; return False if the version has another manifest.

        If the answer to a first attempt was lost, the object that a retry finds may be ours."""
        name = manifest.name
        version = manifest.version
        self.mend(manifest, version, files)
        data = manifest_bytes(manifest)
        created = self._objects.create(f"{name}/{version}/{MANIFEST}", data)
        if not created and self.manifest(name, version) != data:
            return False
        if SIGNATURE in files:
            self.write_signature(name, version, files[SIGNATURE])
        try:  # it is published without being listed, so an index that is refused is only warned of
            offer = offer_of(manifest, parse_json(files[EVALUATION]))
            offers = joined([*read_index(self.fetch(INDEX)), offer])
            self._objects.put(INDEX, index_bytes(offers))
        except BundleError as error:
            log.warning("%s is published, and not in %s: %s", manifest.reference, INDEX, error)
        return True


def _blob(name: str, sha256: str) -> str:
    return f"{name}/{BLOBS}/{sha256}"


class Objects:
    """The objects below one URL.  Every method raises StoreRefused, and StoreUnreachable if there
    is no answer."""

    def __init__(self, url: str) -> None:
        self.url = check_url(url)
        self._scheme, _, self._root = self.url.partition("://")

    @cached_property
    def _fs(self) -> Any:
        import fsspec
        from fsspec.config import conf

        options: dict[str, Any] = {}
        if self._scheme == "s3":
            configured = conf.get("s3", {}).get("config_kwargs", {})
            options["config_kwargs"] = _S3_LIMITS | configured
        try:
            opened = fsspec.filesystem(self._scheme, use_listings_cache=False, **options)
        except ImportError as error:
            raise StoreRefused(
                f"{self._scheme}:// lacks a package: {error}",
                cure=f"Run: pip install 'hallutracer[{EXTRAS[self._scheme]}]'",
            ) from error
        if self._scheme == "s3":
            opened.retries = 1  # s3fs retries around the retries of botocore
        return opened

    def children(self, *parts: str) -> list[str]:
        """Return the sorted names directly below a path; empty if there is nothing.

        For the root, a bucket that does not exist is an error and not an empty store."""
        path = self._path(*parts)
        with self._errors(path):
            try:
                listing = self._fs.ls(path, detail=False)
            except FileNotFoundError:
                container = self._root.partition("/")[0]
                if not parts and self._scheme != "memory" and not self._fs.exists(container):
                    raise StoreRefused(
                        f"there is no {container!r}", file=self.url, cure="Create it first"
                    ) from None
                return []
        below = map(PurePosixPath, listing)
        return sorted({entry.name for entry in below if str(entry.parent).strip("/") == path})

    def read(self, path: str, limit: int) -> bytes | None:
        """Return at most the first ``limit`` + 1 bytes of an object; None if there is none."""
        full = self._path(path)
        with self._errors(full):
            try:
                return bytes(self._fs.cat_file(full, start=0, end=limit + 1))
            except FileNotFoundError:
                return None
            except Exception as error:  # servers refuse a range of an empty object
                if not _no_answer(error) and self._fs.info(full)["size"] == 0:
                    return b""
                raise

    def put(self, path: str, data: bytes) -> None:
        """Write an object, over an existing one; a reader sees the old or the new bytes."""
        full = self._path(path)
        with self._errors(full):
            self._write(full, data)

    def create(self, path: str, data: bytes) -> bool:
        """Write an object unless there is one; of several callers one gets True.

        If an answer is lost, even the winner may get False: compare the object then."""
        full = self._path(path)
        for _ in range(8):
            with self._errors(full):
                try:
                    self._write(full, data, mode="create")
                except FileExistsError:
                    return False
                except OSError as error:
                    response = getattr(error.__cause__, "response", None)  # of S3
                    details = response.get("Error", {}) if isinstance(response, dict) else {}
                    if details.get("Code") == "PreconditionFailed":
                        return False
                    if details.get("Code") != "ConditionalRequestConflict":
                        raise
                    continue  # another create is in progress: try again
                return True
        raise StoreUnreachable(
            "others keep writing this object", file=full, cure="Run the command again"
        )

    def _write(self, full: str, data: bytes, **options: str) -> None:
        """Write within a time limit: botocore has none for "100 Continue", and aiohttp's is five
        minutes."""
        seconds = WRITE_S + len(data) / WRITE_BYTES_S
        try:
            self._fs.pipe_file(full, data, timeout=seconds, **options)
        except TimeoutError as error:
            raise TimeoutError(str(error) or f"none within {seconds:.0f} s") from error

    def check_exclusive(self) -> None:
        """Raise StoreRefused if the server accepts a second create of an object: then publishers
        would overwrite."""
        if all(self.create(EXCLUSIVE, secrets.token_bytes(8)) for _ in range(2)):
            raise StoreRefused(
                "the server ignores If-None-Match",
                file=self.url,
                cure="Use one with conditional writes: Amazon S3, GCS, Azure, MinIO, Ceph 20",
            )

    def _path(self, *parts: str) -> str:
        return "/".join((self._root, *filter(None, parts)))

    @contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        """Turn the errors of a file system into StoreRefused or StoreUnreachable, with a cure."""
        try:
            yield
        except (BundleError, FileExistsError):
            raise
        except Exception as error:  # the libraries behind the schemes share no base class
            message = one_line(error)
            where = f"{self._scheme}://{path}"
            if _no_answer(error):
                raise StoreUnreachable(
                    f"no answer: {message}", file=where, cure="Check connection and endpoint"
                ) from error
            raise StoreRefused(
                message,
                file=where,
                cure="Check the credentials, what they allow, the endpoint and the bucket's region",
            ) from error


def _no_answer(error: BaseException) -> bool:
    """Return whether the connection or the server failed, and not the request."""
    names = {kind.__name__ for kind in type(error).__mro__}
    statuses = [getattr(error, name, None) for name in ("status", "status_code", "code")]
    return (
        isinstance(error, TimeoutError | ConnectionError | socket.gaierror)
        or (isinstance(error, OSError) and error.errno in _BUSY)
        or not names.isdisjoint(_NO_ANSWER)
        or any(isinstance(status, int) and status >= 500 for status in statuses)
    )
