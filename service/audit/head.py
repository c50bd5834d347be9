"""Where an audit log ends: its last line, noted beside it in ``.NAME.head``, and whether it still stands in the log.

So every writer, also a new process and one that comes first after a rotation, knows what its line goes on from.  The
head file is the lock, too: it is never renamed, as the log is.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger("hallutracer")
FIRST = "0" * 64  # ``prev`` of a chain's first line
_NOTED = re.compile(r"([0-9a-f]{64}) (\d{20}) (\d{20})\n")


@dataclass(frozen=True, slots=True)
class Last:
    """A line: its digest, and the bytes that it takes in its file, with its end."""

    digest: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Followed:
    """What the next line goes on from: the last whole line, or the one that was known where the log was changed."""

    digest: str | None  # None: there is no line
    torn: bool  # a line was cut short after it
    whole: bool  # nothing was changed, as far as this log and its head file tell


class HeadFile:
    """The last line of the log ``path``, for all processes that write it.  Every method may raise OSError."""

    def __init__(self, path: Path) -> None:
        """Make nothing; OSError where it could not be made, or others may write to it."""
        self._path, self._handle = head_path(path), -1
        try:
            os.close(open_own(self._path))
        except FileNotFoundError:
            if not os.access(folder := self._path.absolute().parent, os.W_OK | os.X_OK):
                raise OSError(None, f"no file can be made in {folder}") from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other process writes meanwhile."""
        while True:
            if self._handle < 0:
                self._handle = open_own(self._path, os.O_CREAT)
            fcntl.flock(self._handle, fcntl.LOCK_EX)
            if not is_moved(self._handle, self._path):
                break
            self.close()
        try:
            yield
        finally:
            fcntl.flock(self._handle, fcntl.LOCK_UN)

    def read(self) -> Last | None:
        """None where nothing is noted, or nothing that can be read.  Only while locked."""
        content = os.pread(self._handle, 4096, 0)
        if content and (last := _noted(content)) is not None:
            return last
        if content:
            log.error("audit log: %s is no head file; it is made anew", self._path)
            os.ftruncate(self._handle, 0)
        return None

    def write(self, last: Last) -> None:
        """Only while locked."""
        os.pwrite(self._handle, f"{last.digest} {last.start:020} {last.end:020}\n".encode(), 0)

    def close(self) -> None:
        """It may be used again."""
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1


def head_path(path: Path) -> Path:
    """The head file of a log.  Its name begins with a dot, so that a pattern for logs to be rotated leaves it."""
    return path.with_name(f".{path.name}.head")


def noted_head(path: Path) -> str | None:
    """The digest of the last line of the log ``path``; None where nobody noted it.  Raises OSError, ValueError."""
    try:
        with head_path(path).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            content = file.read(4096)
    except FileNotFoundError:
        return None
    if content and (last := _noted(content)) is None:
        raise ValueError(f"{head_path(path)} is no head file: somebody changed it")
    return last.digest if content and last is not None else None


def _noted(content: bytes) -> Last | None:
    found = _NOTED.fullmatch(content.decode("latin-1"))
    return found and Last(found[1], int(found[2]), int(found[3]))


def follow(handle: int, known: Last | None) -> Followed:
    """What the log ends with, by the line that is known to be its last one, and those of a writer that was killed.

    Where the known line does not stand in the log, the log is another one, renamed or emptied, and goes on from it.
    None known: the whole log is read, whatever it begins with.
    """
    digest, torn, whole = None if known is None else known.digest, False, True
    with open(handle, "rb", closefd=False) as file:
        file.seek(known.end if known is not None and _stands(handle, known) else 0)
        for text in file:
            line = parsed(text)
            torn = line is None
            if line is not None:
                whole = whole and digest in (None, line["prev"])
                digest = digest_of(text)
    return Followed(digest if whole or known is None else known.digest, torn, whole)


def _stands(handle: int, known: Last) -> bool:
    text = os.pread(handle, known.end - known.start, known.start)
    return text.endswith(b"\n") and digest_of(text) == known.digest


def digest_of(text: bytes) -> str:
    """Of a line; its end has no part in it."""
    return hashlib.sha256(text.removesuffix(b"\n")).hexdigest()


def parsed(text: bytes) -> dict[str, Any] | None:
    """A line of the log; None where it was cut short."""
    try:
        own = json.loads(text) if text.endswith(b"\n") else None
    except ValueError:
        return None
    return own if isinstance(own, dict) and isinstance(own.get("prev"), str) and "event" in own else None


def open_own(path: Path, flags: int = 0) -> int:
    """A file that nobody else may write to, with mode 0600 where ``flags`` make it.  Raises OSError."""
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode) or mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.close(handle)
        raise OSError(None, f"{path} is not a file, or others may write to it; run: chmod 600")
    return handle


def is_moved(handle: int, path: Path) -> bool:
    """Whether ``path`` is another file by now, or none."""
    ours = os.fstat(handle)
    try:
        now = os.stat(path)
    except FileNotFoundError:
        return True
    return (ours.st_dev, ours.st_ino) != (now.st_dev, now.st_ino)
