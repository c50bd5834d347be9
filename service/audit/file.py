"""The audit log's file: JSON lines that are only ever appended, each with the digest of the line before it (``prev``).

Several processes may append to one file.  Renamed or emptied (logrotate), it is begun anew at the next line, and
the chain goes on there.  Its last line is noted beside it in ``.NAME.head``, so that every writer, also a new process
and one that comes first after a rotation, knows what its line goes on from; the head file is the lock, too: it is never
renamed.  Where lines were changed, the next one goes on from what had been written: the break shows.

Notes on a line: ``after_torn`` (one before it was cut short, by a crash or a full disk), ``missed``, ``own_prev`` (the
last line of the same process, where another one wrote since), ``no_head`` (nothing told whether lines are gone before).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.audit.events import Line
from service.errors import AuditUnavailable

log = logging.getLogger("hallutracer")
FIRST = "0" * 64  # ``prev`` of a chain's first line
CUT = b" (cut short)\n"  # ends a line that was, so that it cannot be read as one even where only its end is missing
_NOTED = re.compile(r"([0-9a-f]{64}) (\d{20}) (\d{20})\n")


class AuditFile:
    """Appends lines.  Not thread-safe."""

    def __init__(self, path: Path, *, on_break: Callable[[], None] = lambda: None) -> None:
        """Open the file, or make it, with mode 0600.  ``on_break`` is called where lines were changed.

        Raises AuditUnavailable.
        """
        self._path, self._on_break = path, on_break
        self._handle: int | None = None
        self._own: Last | None = None  # the last line that was written here
        try:
            self._heads = HeadFile(path)
            self._open()
        except OSError as error:
            raise AuditUnavailable(f"cannot write the audit log {path}: {error.strerror or error}") from None

    @property
    def head(self) -> str:
        """The digest of the last line that was written here."""
        return FIRST if self._own is None else self._own.digest

    def append(self, lines: Sequence[Line], *, sync: bool = False, missed: int = 0) -> int:
        """Write one or more lines and return how many there are now; fewer where the disk is full.

        ``sync``: on disk when this returns.  ``missed``: so many were not written before, which the first one says.
        Raises AuditUnavailable where none was written, or ``sync`` failed.
        """
        try:
            with self._heads.locked():
                handle = self._open()
                written = self._append(handle, lines, missed)
                if sync:
                    os.fsync(handle)
                if written and self._own is not None:
                    self._heads.write(self._own)
        except OSError as error:
            raise AuditUnavailable(f"cannot write the audit log {self._path}: {error.strerror or error}") from None
        if not written and lines:
            raise AuditUnavailable(f"cannot write the audit log {self._path}: {os.strerror(errno.ENOSPC)}")
        return written

    def close(self) -> None:
        """Close the file, which is not used afterwards."""
        if self._handle is not None:
            os.close(self._handle)
        self._handle = None
        self._heads.close()

    def _open(self) -> int:
        """Return the file of this name, which may be another one by now."""
        if self._handle is not None and not is_moved(self._handle, self._path):
            return self._handle
        if self._handle is not None:
            os.close(self._handle)
        self._handle = None
        handle = open_own(self._path, os.O_APPEND | os.O_CREAT)
        folder = os.open(self._path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)  # the name, too, outlives a power failure
        finally:
            os.close(folder)
        self._handle = handle
        return handle

    def _append(self, handle: int, lines: Sequence[Line], missed: int) -> int:
        size, known = os.fstat(handle).st_size, self._heads.read()
        found = follow(handle, known)
        head = found.digest or self.head
        notes: dict[str, Any] = {}  # what the next line has to say of those before it
        if found.torn:
            notes["after_torn"] = True
        if self._own is not None and self._own.digest != head:
            notes["own_prev"] = self._own.digest
        if known is None and size > 0:
            log.warning("audit log: %s had no head file; whether lines are gone from its end is not known", self._path)
            notes["no_head"] = True
        if missed:
            notes["missed"] = missed
        encoded = bytearray(CUT if size and os.pread(handle, 1, size - 1) != b"\n" else b"")
        ends: list[Last] = []  # their places in what is written
        for line in lines:
            text = json.dumps({"prev": head, **line, **notes}, separators=(",", ":")).encode()
            head, notes, start = digest_of(text), {}, len(encoded)
            encoded += text + b"\n"
            ends.append(Last(head, start, len(encoded)))
        there = _write(handle, encoded)
        whole = [one for one in ends if one.end <= there]
        if whole:
            began = os.lseek(handle, 0, os.SEEK_CUR) - there  # where they are, whatever became of the file meanwhile
            self._own = Last(whole[-1].digest, began + whole[-1].start, began + whole[-1].end)
            if not found.whole:
                log.error("audit log: lines of %s were changed or removed; the next one goes on from what had been "
                          "written: hallutracer audit verify shows where", self._path)  # fmt: skip
                self._on_break()
        return len(whole)


def _write(handle: int, content: bytes | bytearray) -> int:
    """Return how many bytes are there now; not all where the disk is full.  Raises OSError where none is."""
    there = 0
    while there < len(content):
        try:
            there += os.write(handle, memoryview(content)[there:])
        except OSError:
            if not there:
                raise
            break
    return there


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
        """Make nothing yet.  Raises OSError where it could not be made, or others may write to it."""
        self._path, self._handle = head_path(path), -1
        try:
            os.close(open_own(self._path))
        except FileNotFoundError:
            if not os.access(folder := self._path.absolute().parent, os.W_OK | os.X_OK):
                raise OSError(None, f"no file can be made in {folder}") from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let no other process write meanwhile."""
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
        """Return the noted line; None where there is none that can be read.  Only while locked."""
        content = os.pread(self._handle, 4096, 0)
        if content and (last := _noted(content)) is not None:
            return last
        if content:
            log.error("audit log: %s is no head file; it is made anew", self._path)
            os.ftruncate(self._handle, 0)
        return None

    def write(self, last: Last) -> None:
        """Note the last line.  Only while locked."""
        os.pwrite(self._handle, f"{last.digest} {last.start:020} {last.end:020}\n".encode(), 0)

    def close(self) -> None:
        """Close the file; it may be used again."""
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1


def head_path(path: Path) -> Path:
    """Return the head file of a log, hidden, so that a pattern for logs to be rotated leaves it."""
    return path.with_name(f".{path.name}.head")


def noted_head(path: Path) -> str | None:
    """Return the digest of the last line of the log ``path``; None where none is noted.  Raises OSError, ValueError."""
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
    """Return what the log ends with, by its ``known`` last line, and those of a writer that was killed.

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
    """Return the digest of a line; its end has no part in it."""
    return hashlib.sha256(text.removesuffix(b"\n")).hexdigest()


def parsed(text: bytes) -> dict[str, Any] | None:
    """Return a line of the log; None where it was cut short."""
    try:
        own = json.loads(text) if text.endswith(b"\n") else None
    except ValueError:
        return None
    return own if isinstance(own, dict) and isinstance(own.get("prev"), str) and "event" in own else None


def open_own(path: Path, flags: int = 0) -> int:
    """Open a file that nobody else may write to, with mode 0600 where ``flags`` make it.  Raises OSError."""
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode) or mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.close(handle)
        raise OSError(None, f"{path} is not a file, or others may write to it; run: chmod 600")
    return handle


def is_moved(handle: int, path: Path) -> bool:
    """Return whether ``path`` is another file by now, or none."""
    ours = os.fstat(handle)
    try:
        now = os.stat(path)
    except FileNotFoundError:
        return True
    return (ours.st_dev, ours.st_ino) != (now.st_dev, now.st_ino)
