"""The audit log's file: JSON lines that are only ever appended, each with the digest of the line before it (``prev``).

Several processes may append to one file.  Whoever renames it (logrotate) gets a new one at the next line, and the chain
goes on there.  A line that was cut short, by a crash or a full disk, stays; the one after it says ``after_torn``.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from service.audit.events import Line
from service.errors import AuditUnavailable

FIRST = "0" * 64  # ``prev`` of a chain's first line
_TAIL_BYTES = 2**14  # that are read first, to find the last line


class AuditFile:
    """Appends lines.  Not thread-safe."""

    def __init__(self, path: Path) -> None:
        """Open the file, or make it, with mode 0600.  Raises AuditUnavailable."""
        self._path = path
        self._handle: int | None = None
        self._size, self._head = -1, FIRST  # of the file after our last line, and that line's digest
        try:
            self._open()
        except OSError as error:
            raise AuditUnavailable(f"cannot write the audit log {path}: {error.strerror or error}") from None

    @property
    def head(self) -> str:
        """The digest of the last line that was written here."""
        return self._head

    def append(self, lines: Sequence[Line], *, sync: bool = False, missed: int = 0) -> int:
        """Write one or more lines and return how many there are now; fewer where the disk is full.

        ``sync``: on disk when this returns.  ``missed``: so many were not written before, which the first one says.
        Raises AuditUnavailable where none was written, or ``sync`` failed.
        """
        try:
            handle = self._open()
            fcntl.flock(handle, fcntl.LOCK_EX)
            try:
                written = self._append(handle, lines, missed)
                if sync:
                    os.fsync(handle)
            finally:
                fcntl.flock(handle, fcntl.LOCK_UN)
        except OSError as error:
            self._size = -1
            raise AuditUnavailable(f"cannot write the audit log {self._path}: {error.strerror or error}") from None
        if not written and lines:
            raise AuditUnavailable(f"cannot write the audit log {self._path}: {os.strerror(errno.ENOSPC)}")
        return written

    def close(self) -> None:
        """The file is not used afterwards."""
        if self._handle is not None:
            os.close(self._handle)
        self._handle = None

    def _open(self) -> int:
        """The file of this name, which may be another one by now."""
        if self._handle is not None and not self._moved(self._handle):
            return self._handle
        self.close()
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(self._path, flags, 0o600)
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode) or mode & (stat.S_IWGRP | stat.S_IWOTH):
            os.close(handle)
            raise OSError(None, "it is not a file, or others may write to it; run: chmod 600")
        folder = os.open(self._path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)  # the name, too, outlives a power failure
        finally:
            os.close(folder)
        self._handle, self._size = handle, -1
        return handle

    def _moved(self, handle: int) -> bool:
        ours = os.fstat(handle)
        try:
            now = os.stat(self._path)
        except FileNotFoundError:
            return True
        return (ours.st_dev, ours.st_ino) != (now.st_dev, now.st_ino)

    def _append(self, handle: int, lines: Sequence[Line], missed: int) -> int:
        size, torn = os.fstat(handle).st_size, False
        if size != self._size:
            torn = self._read_head(handle, size)
        encoded, head, ends = bytearray(b"\n" if torn else b""), self._head, []
        for number, line in enumerate(lines):
            notes: dict[str, int] = {"after_torn": True} if torn and number == 0 else {}
            if missed and number == 0:
                notes["missed"] = missed
            text = json.dumps({"prev": head, **line, **notes}, separators=(",", ":")).encode()
            head = hashlib.sha256(text).hexdigest()
            encoded += text + b"\n"
            ends.append(len(encoded))
        there = _write(handle, encoded)
        written = sum(end <= there for end in ends)
        if written == len(lines):
            self._head, self._size = head, size + there
        else:
            self._size = -1  # the next one reads where this one came to
        return written

    def _read_head(self, handle: int, size: int) -> bool:
        """The digest of the last line, whoever wrote it; whether it lacks its end.  Of an empty file: as before."""
        if size == 0:
            return False
        start, tail = size, b""
        while start and b"\n" not in tail[:-1]:
            start = max(0, size - 4 * len(tail) - _TAIL_BYTES)
            tail = os.pread(handle, size - start, start)
        torn = not tail.endswith(b"\n")
        last = tail.removesuffix(b"\n").rpartition(b"\n")[2]
        self._head = hashlib.sha256(last).hexdigest()
        return torn


def _write(handle: int, content: bytes | bytearray) -> int:
    """How many bytes are there now; not all where the disk is full.  Raises OSError where none is."""
    there = 0
    while there < len(content):
        try:
            there += os.write(handle, memoryview(content)[there:])
        except OSError:
            if not there:
                raise
            break
    return there
