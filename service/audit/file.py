"""The audit log's file: JSON lines that are only ever appended, each with the digest of the line before it (``prev``).

Several processes may append to one file.  Renamed or emptied (logrotate), it is begun anew, and the chain goes on.
``.NAME.head`` notes the last line, from which every writer's next one goes on, and is the lock: it is never renamed.
Where lines were changed, the next one goes on from what had been written: the break shows (``verify``).

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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from service.errors import AuditUnavailable, HalluTracerError

log = logging.getLogger("hallutracer")
Line = Mapping[str, Any]
FIRST = "0" * 64  # ``prev`` of a chain's first line
CUT = b" (cut short)\n"  # ends a line that was, so that it cannot be read as one even where only its end is missing
_NOTED = re.compile(r"([0-9a-f]{64}) (\d{20}) (\d{20})\n")


@dataclass(frozen=True, slots=True)
class _Last:
    """A line: its digest, and the bytes that it takes in its file, with its end."""

    digest: str
    start: int
    end: int


class AuditFile:
    """Appends lines.  Not thread-safe."""

    def __init__(self, path: Path, *, on_break: Callable[[], None] = lambda: None) -> None:
        """Open the file, or make it, with mode 0600.  ``on_break`` is called where lines were changed.

        Raises AuditUnavailable."""
        self._path, self._on_break = path, on_break
        self._handle = self._lock = -1  # the log and its head file
        self._own: _Last | None = None  # the last line that was written here
        with self._told():
            try:
                os.close(_open_own(head_path(path)))
            except FileNotFoundError:
                if not os.access(folder := path.absolute().parent, os.W_OK | os.X_OK):
                    raise OSError(None, f"no file can be made in {folder}") from None
            self._open()

    @property
    def head(self) -> str:
        """The digest of the last line that was written here."""
        return FIRST if self._own is None else self._own.digest

    def append(self, lines: Sequence[Line], *, sync: bool = False, missed: int = 0) -> int:
        """Write one or more lines and return how many there are now; fewer where the disk is full.

        ``sync``: on disk when this returns.  ``missed``: so many were not written before, which the first one says.
        Raises AuditUnavailable where none was written, or ``sync`` failed."""
        with self._told(), self._locked():
            self._open()
            written = self._append(lines, missed)
            if sync:
                os.fsync(self._handle)
            if written and self._own is not None:
                os.pwrite(self._lock, f"{self._own.digest} {self._own.start:020} {self._own.end:020}\n".encode(), 0)
            if not written and lines:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written

    def close(self) -> None:
        """Close the file, which is not used afterwards."""
        for handle in (self._handle, self._lock):
            if handle >= 0:
                os.close(handle)
        self._handle = self._lock = -1

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise AuditUnavailable(f"cannot write the audit log {self._path}: {error.strerror or error}") from None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Let no other process write meanwhile."""
        while True:
            if self._lock < 0:
                self._lock = _open_own(head_path(self._path), os.O_CREAT)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if not _is_moved(self._lock, head_path(self._path)):
                break
            os.close(self._lock)
            self._lock = -1
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _open(self) -> None:
        """Open the file of this name, which may be another one by now."""
        if self._handle >= 0 and not _is_moved(self._handle, self._path):
            return
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1
        self._handle = _open_own(self._path, os.O_APPEND | os.O_CREAT)
        folder = os.open(self._path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)  # the name, too, outlives a power failure
        finally:
            os.close(folder)

    def _append(self, lines: Sequence[Line], missed: int) -> int:
        handle, size, noted = self._handle, os.fstat(self._handle).st_size, os.pread(self._lock, 4096, 0)
        known = _parse_head(noted)
        if noted and known is None:
            log.error("audit log: %s is no head file; it is made anew", head_path(self._path))
            os.ftruncate(self._lock, 0)
        digest, torn, whole = _follow(handle, known)
        head = digest or self.head
        notes: dict[str, Any] = {}  # what the next line has to say of those before it
        if torn:
            notes["after_torn"] = True
        if self._own is not None and self._own.digest != head:
            notes["own_prev"] = self._own.digest
        if known is None and size > 0:
            log.warning("audit log: %s had no head file; whether lines are gone from its end is not known", self._path)
            notes["no_head"] = True
        if missed:
            notes["missed"] = missed
        encoded = bytearray(CUT if size and os.pread(handle, 1, size - 1) != b"\n" else b"")
        ends: list[_Last] = []  # their places in what is written
        for line in lines:
            text = json.dumps({"prev": head, **line, **notes}, separators=(",", ":")).encode()
            head, notes, start = digest_of(text), {}, len(encoded)
            encoded += text + b"\n"
            ends.append(_Last(head, start, len(encoded)))
        there = 0
        while there < len(encoded):
            try:
                there += os.write(handle, memoryview(encoded)[there:])
            except OSError:
                if not there:
                    raise
                break  # the disk is full
        ends = [one for one in ends if one.end <= there]
        if ends:
            began = os.lseek(handle, 0, os.SEEK_CUR) - there  # where they are, whatever became of the file meanwhile
            self._own = _Last(ends[-1].digest, began + ends[-1].start, began + ends[-1].end)
            if not whole:
                log.error("audit log: lines of %s were changed or removed: run hallutracer audit verify", self._path)
                self._on_break()
        return len(ends)


def head_path(path: Path) -> Path:
    """Return the head file of a log, hidden, so that a pattern for logs to be rotated leaves it."""
    return path.with_name(f".{path.name}.head")


def _parse_head(content: bytes) -> _Last | None:
    found = _NOTED.fullmatch(content.decode("latin-1"))
    return found and _Last(found[1], int(found[2]), int(found[3]))


def _follow(handle: int, known: _Last | None) -> tuple[str | None, bool, bool]:
    """Return what the next line goes on from, whether a line was cut short, and whether nothing was changed.

    It goes on from the last whole line, from the ``known`` one where the log was changed or is another one by now;
    None: there is no line.  None known: the whole log is read, whatever it begins with."""
    digest, torn, whole, start = None if known is None else known.digest, False, True, 0
    if known is not None:
        text = os.pread(handle, known.end - known.start, known.start)
        start = known.end if text.endswith(b"\n") and digest_of(text) == known.digest else 0
    with open(handle, "rb", closefd=False) as file:
        file.seek(start)
        for text in file:
            line = _parse(text)
            torn = line is None
            if line is not None:
                whole = whole and digest in (None, line["prev"])
                digest = digest_of(text)
    return digest if whole or known is None else known.digest, torn, whole


def digest_of(text: bytes) -> str:
    """Return the digest of a line; its end has no part in it."""
    return hashlib.sha256(text.removesuffix(b"\n")).hexdigest()


def _parse(text: bytes) -> dict[str, Any] | None:
    """Return a line of the log; None where it was cut short."""
    try:
        own = json.loads(text) if text.endswith(b"\n") else None
    except ValueError:
        return None
    return own if isinstance(own, dict) and isinstance(own.get("prev"), str) and "event" in own else None


def _open_own(path: Path, flags: int = 0) -> int:
    """Open a file that nobody else may write to, with mode 0600 where ``flags`` make it.  Raises OSError."""
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode) or mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.close(handle)
        raise OSError(None, f"{path} is not a file, or others may write to it; run: chmod 600")
    return handle


def _is_moved(handle: int, path: Path) -> bool:
    """Return whether ``path`` is another file by now, or none."""
    try:
        return not os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return True


@dataclass
class Verified:
    """What the files hold, and what is wrong with them."""

    events: Counter[str] = field(default_factory=Counter)
    missed: int = 0  # decisions that were not written, as the lines after them say
    torn: int = 0  # lines that a crash or a full disk cut short
    no_head: int = 0  # times that the head file was gone when a line was written
    continues: bool = False  # the chain began in an earlier file
    end_known: bool = False  # a head file, or ``seen``, says which line was the last one
    head: str = FIRST  # the digest of the last line
    problems: list[str] = field(default_factory=list)

    @property
    def lines(self) -> int:
        """Lines that could be read."""
        return self.events.total()


def verify(paths: Sequence[Path], seen: str | None = None) -> Verified:
    """Find lines that were changed, removed or put in, in the files from the oldest on.

    ``seen``, a digest that was the last line's once, finds a head file that was changed, too.  Raises HalluTracerError
    for a file that cannot be read."""
    found, ends = Verified(), [(seen, "--seen")] if seen is not None else []
    last = cut = ""  # the place of the last line that could be read, and of the line after it, which was cut short
    digests: set[str] = set()  # of all lines, and of the one before the first
    for path in paths:
        try:
            if (noted := _noted_head(path)) is not None:  # before the log, to which more may be written meanwhile
                ends.append((noted, str(head_path(path))))
            with path.open("rb") as file:
                for number, text in enumerate(file, 1):
                    place, own = f"{path}, line {number}", _parse(text)
                    if own is None:
                        cut, found.torn = place, found.torn + 1
                        continue
                    found.problems += _broken(found, own, place, last, digests)
                    if cut and number > 1 and not own.get("after_torn"):
                        found.problems.append(f"{cut} cannot be read")
                    last, cut, found.head = place, "", digest_of(text)
                    digests.add(found.head)
                    found.events[str(own["event"])] += 1
                    found.missed += missed if isinstance(missed := own.get("missed"), int) else 0
                    found.no_head += own.get("no_head") is True
        except OSError as error:
            raise HalluTracerError(f"cannot read {path}: {error.strerror or error}") from None
        except ValueError as error:
            found.problems.append(str(error))
    found.end_known = bool(ends)
    if not digests and ends:  # the log was renamed or emptied, and nothing has been written since
        found.continues, found.head = True, ends[-1][0]
        digests.add(found.head)
    if cut:
        found.problems.append(f"{cut} cannot be read: it has no end; a crash left it so, or somebody cut it")
    for digest, place in ends:
        if digest not in digests and digest != FIRST:
            found.problems.append(
                f"no line has the digest of {place}, {digest}: lines were removed from the end or "
                "changed, or lost in a power failure"
            )
    return found


def _broken(found: Verified, own: dict[str, Any], place: str, last: str, digests: set[str]) -> Iterator[str]:
    """Yield where a line does not go on from what was read."""
    if not digests:
        found.continues = own["prev"] != FIRST
        digests.add(own["prev"])
    elif own["prev"] != found.head:
        yield f"{place} does not follow {last}: lines were changed, removed, put in, or lost in a power failure"
    if "own_prev" in own and own["own_prev"] not in digests and not found.continues:
        yield f"{place} was written by a process whose line before it is gone: the rest was fitted to what was changed"


def _noted_head(path: Path) -> str | None:
    """Return the digest of the last line of the log ``path``; None where none is noted.  Raises OSError, ValueError."""
    try:
        with head_path(path).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            content = file.read(4096)
    except FileNotFoundError:
        return None
    if content and (last := _parse_head(content)) is None:
        raise ValueError(f"{head_path(path)} is no head file: somebody changed it")
    return last.digest if content and last is not None else None
