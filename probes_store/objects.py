"""Objects below a URL, through fsspec: list, read, create, and what went wrong.

Credentials and endpoints are those of fsspec's implementations: AWS_* variables and ~/.aws for s3, application default
credentials for gs, AZURE_STORAGE_* for az, FSSPEC_* and ~/.config/fsspec for all.  A URL holds none.
"""

from __future__ import annotations

import errno
import re
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from probes_store.errors import BundleError, InvalidReference, StoreRefused, StoreUnreachable

EXTRAS = {"s3": "s3", "gs": "gs", "az": "az", "memory": ""}  # scheme -> our extra that brings what it needs
EXCLUSIVE = ".exclusive"  # an object that tells whether the server honours a conditional create
WRITE_S, WRITE_BYTES_S = 20.0, 100_000  # how long a write may take, and at what rate at least
_URL = re.compile(r"([a-z0-9]+)://((?!.*(?://|/\.))[A-Za-z0-9][A-Za-z0-9._/-]*)")
_NO_ANSWER = {  # classes of botocore, aiohttp, azure and google.auth, none of which is imported here
    "EndpointConnectionError", "ConnectTimeoutError", "HTTPClientError", "ClientConnectionError", "ServiceRequestError",
    "ServiceResponseError", "TransportError",
}  # fmt: skip
_BUSY = {errno.EBUSY, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, getattr(errno, "EREMOTEIO", errno.EBUSY)}
_OPTIONS: dict[str, dict[str, dict[str, Any]]] = {  # a server that is down must not hold a start up for minutes
    "s3": {"config_kwargs": {"connect_timeout": 5, "read_timeout": 10, "retries": {"max_attempts": 1}}}
}


def is_url(text: str) -> bool:
    """Whether a store is named by URL, rather than by its folder."""
    return "://" in text


def check_url(text: str) -> str:
    """A store's URL without a slash at its end.  Raises InvalidReference."""
    match = _URL.fullmatch(text.rstrip("/"))
    if match is None or match[1] not in EXTRAS:
        raise InvalidReference(
            "not the URL of a store",
            expected="s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, or hf://OWNER/NAME to read",
            found=ascii(text),
            cure="Of letters, digits and . _ - /; credentials come from the environment, not from the URL",
        )
    return match[0]


class Objects:
    """What lies below one URL.  Every method raises StoreRefused, and StoreUnreachable where there was no answer."""

    def __init__(self, url: str) -> None:
        self.url = check_url(url)
        self._scheme, _, self._root = self.url.partition("://")

    @cached_property
    def _fs(self) -> Any:
        import fsspec
        from fsspec.config import conf

        options: dict[str, Any] = {"use_listings_cache": False}
        for name, value in _OPTIONS.get(self._scheme, {}).items():
            options[name] = value | conf.get(self._scheme, {}).get(name, {})
        try:
            opened = fsspec.filesystem(self._scheme, **options)
        except ImportError as error:
            extra = EXTRAS[self._scheme]
            raise StoreRefused(
                f"{self._scheme}:// needs a package that is not installed: {error}",
                cure=f"Run: pip install 'hallutracer[{extra}]'",
            ) from error
        if self._scheme == "s3":
            opened.retries = 1  # s3fs's own, around botocore's one more try
        return opened

    def children(self, *parts: str) -> list[str]:
        """Names directly below a path, sorted; none where there is nothing.

        Below the root, a bucket that does not exist is an error rather than an empty store.
        """
        path = self._path(*parts)
        with self._errors(path):
            try:
                found = self._fs.ls(path, detail=False)
            except FileNotFoundError:
                container = self._root.partition("/")[0]
                if not parts and self._scheme != "memory" and not self._fs.exists(container):
                    raise StoreRefused(
                        f"there is no {container!r}", file=self.url, cure="Check the spelling, or create it first"
                    ) from None
                return []
        base = f"{path}/"
        below = (str(name).strip("/") for name in found)
        return sorted({name.removeprefix(base).partition("/")[0] for name in below if name.startswith(base)})

    def read(self, path: str, limit: int) -> bytes | None:
        """An object; None where there is none, and only the first ``limit`` + 1 bytes of a longer one."""
        full = self._path(path)
        with self._errors(full):
            try:
                return bytes(self._fs.cat_file(full, start=0, end=limit + 1))
            except FileNotFoundError:
                return None
            except Exception as error:
                if (
                    not _no_answer(error) and self._fs.info(full)["size"] == 0
                ):  # no range of an empty object can be asked for
                    return b""
                raise

    def put(self, path: str, data: bytes) -> None:
        """Write an object, over another if there is one; a reader sees the old or the new one."""
        full = self._path(path)
        with self._errors(full):
            self._write(full, data)

    def create(self, path: str, data: bytes) -> bool:
        """Write an object unless there is one: of several callers one gets True.

        An answer that was lost on its way may make the winner see False: compare what is there.
        """
        full = self._path(path)
        for _ in range(8):
            with self._errors(full):
                try:
                    self._write(full, data, mode="create")
                except FileExistsError:
                    return False
                except OSError as error:
                    if _code(error) == "ConditionalRequestConflict":  # another create is under way: ask again
                        continue
                    if _code(error) == "PreconditionFailed":
                        return False
                    raise
                return True
        raise StoreUnreachable("others keep writing this object", file=full, cure="Run the command again")

    def _write(self, full: str, data: bytes, **options: str) -> None:
        """Within a time: botocore has none for the server's "100 Continue", and aiohttp's is five minutes."""
        seconds = WRITE_S + len(data) / WRITE_BYTES_S
        try:
            self._fs.pipe_file(full, data, timeout=seconds, **options)
        except TimeoutError as error:
            raise TimeoutError(str(error) or f"none within {seconds:.0f} s") from error

    def check_exclusive(self) -> None:
        """Raise StoreRefused where the server takes a second create of one object for a first one.

        Two publishers would then both believe that they have a version, and the later one overwrites the other's.
        """
        if self.create(EXCLUSIVE, secrets.token_bytes(8)) and self.create(EXCLUSIVE, secrets.token_bytes(8)):
            raise StoreRefused(
                "the server ignores If-None-Match, so that one publisher could overwrite another's version",
                file=self.url,
                cure="Use a server with conditional writes (Amazon S3, GCS, Azure, MinIO, Ceph from 20 on), or publish "
                "into a folder and copy that",
            )

    def _path(self, *parts: str) -> str:
        return "/".join((self._root, *(part for part in parts if part)))

    @contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        """Turn what a file system raises into a StoreRefused or StoreUnreachable that says what to do."""
        try:
            yield
        except (BundleError, FileExistsError):
            raise
        except Exception as error:  # the libraries behind the schemes share no base class
            said, where = _line(error), f"{self._scheme}://{path}"
            if _no_answer(error):
                raise StoreUnreachable(
                    f"no answer: {said}", file=where, cure="Check the connection and the endpoint, or try again later"
                ) from error
            raise StoreRefused(
                said, file=where, cure="Check the credentials, what they allow, the endpoint and the bucket's region"
            ) from error


def _no_answer(error: BaseException) -> bool:
    """Whether it was the way or the server that failed, rather than the request."""
    names = {kind.__name__ for kind in type(error).__mro__}
    status = getattr(error, "status", None) or getattr(error, "status_code", None) or getattr(error, "code", None)
    return (
        isinstance(error, TimeoutError | ConnectionError)
        or bool(names & _NO_ANSWER)
        or (isinstance(error, OSError) and error.errno in _BUSY)
        or isinstance(error, socket.gaierror)
        or (isinstance(status, int) and status >= 500)
    )


def _code(error: BaseException) -> str | None:
    """S3's own word for an error."""
    response = getattr(error.__cause__, "response", None)
    return response.get("Error", {}).get("Code") if isinstance(response, dict) else None


def _line(error: object, limit: int = 300) -> str:
    """What a library says, as one printable line."""
    text = str(error) or type(error).__name__
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))[:limit].rstrip(".")
