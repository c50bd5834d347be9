"""The audit log's file: JSON lines that are only ever appended, each with the digest of the line before it (``prev``).

Several processes may append to one file.  Renamed or emptied (logrotate), it is begun anew at the next line, and
the chain goes on there.  Where lines were changed, the next one goes on from what had been written: the break shows.

Notes on a line: ``after_torn`` (one before it was cut short, by a crash or a full disk), ``missed``, ``own_prev`` (the
last line of the same process, where another one wrote since), ``no_head`` (nothing told whether lines are gone before).
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from service.audit.events import Line
from service.audit.head import FIRST, Followed, HeadFile, Last, digest_of, follow, is_moved, open_own
from service.errors import AuditUnavailable

log = logging.getLogger("hallutracer")
CUT = b" (cut short)\n"  # ends a line that was, so that it cannot be read as one even where only its end is missing


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
        """The file is not used afterwards."""
        if self._handle is not None:
            os.close(self._handle)
        self._handle = None
        self._heads.close()

    def _open(self) -> int:
        """The file of this name, which may be another one by now."""
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
        notes = self._notes(found, head, no_head=known is None and size > 0)
        if missed:
            notes["missed"] = missed
        encoded = bytearray(CUT if size and os.pread(handle, 1, size - 1) != b"\n" else b"")
        ends: list[tuple[str, int, int]] = []  # each line's digest, and its place in what is written
        for line in lines:
            text = json.dumps({"prev": head, **line, **notes}, separators=(",", ":")).encode()
            head, notes = digest_of(text), {}
            start = len(encoded)
            encoded += text + b"\n"
            ends.append((head, start, len(encoded)))
        there = _write(handle, encoded)
        whole = [one for one in ends if one[2] <= there]
        if whole:
            began = os.lseek(handle, 0, os.SEEK_CUR) - there  # where they are, whatever became of the file meanwhile
            digest, start, end = whole[-1]
            self._own = Last(digest, began + start, began + end)
            if not found.whole:
                log.error("audit log: lines of %s were changed or removed; the next one goes on from what had been "
                          "written: hallutracer audit verify shows where", self._path)  # fmt: skip
                self._on_break()
        return len(whole)

    def _notes(self, found: Followed, head: str, *, no_head: bool) -> dict[str, Any]:
        """What the next line, which goes on from ``head``, has to say of those before it."""
        notes: dict[str, Any] = {}
        if found.torn:
            notes["after_torn"] = True
        if self._own is not None and self._own.digest != head:
            notes["own_prev"] = self._own.digest
        if no_head:
            log.warning("audit log: %s had no head file; whether lines are gone from its end is not known", self._path)
            notes["no_head"] = True
        return notes


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
