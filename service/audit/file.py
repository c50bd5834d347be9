"""Appends JSON lines to the audit log's file, each with the digest of the previous line (``prev``),
and verifies them.

Several processes may append to one file.  If it is renamed or emptied (logrotate), a new file
continues the chain. ``.NAME.head`` records the last line, which every writer's next line continues,
and is the lock; it is never renamed. If lines were changed, the next line still continues the
original chain, so ``verify`` finds the break.

Notes on a line: ``after_torn`` (the line before was cut short, by a crash or a full disk),
``missed`` (decisions that were not written), ``own_prev`` (the last line of the same process, if
another process wrote since), ``no_head`` (there was no head file, so lines before may have been
removed).
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
# ends a torn line, so that it cannot be parsed even if only its end is missing
CUT = b" (cut short)\n"
_NOTED = re.compile(r"([0-9a-f]{64}) (\d{20}) (\d{20})\n")


@dataclass(frozen=True, slots=True)
class _Last:
    """The digest of a line, and its byte positions in its file, including the newline."""

    digest: str
    start: int
    end: int


class AuditFile:
    """Appends lines.  Not thread-safe."""

    def __init__(self, path: Path, *, on_break: Callable[[], None] = lambda: None) -> None:
        """Open the file, or make it with mode 0600.  ``on_break`` is called if lines were changed.

        Raises AuditUnavailable."""
        self._path, self._on_break = path, on_break
        self._handle = self._lock = -1  # the log and its head file
        self._own: _Last | None = None  # the last line that this object wrote
        with self._unavailable():
            try:
                os.close(_open_own(head_path(path)))
            except FileNotFoundError:
                if not os.access(folder := path.absolute().parent, os.W_OK | os.X_OK):
                    raise OSError(None, f"no file can be made in {folder}") from None
            self._open()

    @property
    def head(self) -> str:
        """The digest of the last line that this object wrote."""
        return FIRST if self._own is None else self._own.digest

    def append(self, lines: Sequence[Line], *, sync: bool = False, missed: int = 0) -> int:
        """Write lines and return how many were written; fewer if the disk is full.

        ``sync``: the lines are on disk when this returns.  ``missed``: number of earlier lines that
        were not written, which the first line records.  Raises AuditUnavailable if none was
        written, or if ``sync`` failed."""
        with self._unavailable(), self._locked():
            self._open()
            written = self._append(lines, missed)
            if sync:
                os.fsync(self._handle)
            if written and self._own is not None:
                os.pwrite(
                    self._lock,
                    f"{self._own.digest} {self._own.start:020} {self._own.end:020}\n".encode(),
                    0,
                )
            if not written and lines:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written

    def close(self) -> None:
        """Close the file; this object cannot be used afterwards."""
        for handle in (self._handle, self._lock):
            if handle >= 0:
                os.close(handle)
        self._handle = self._lock = -1

    @contextmanager
    def _unavailable(self) -> Iterator[None]:
        """Turn an OSError in the block into AuditUnavailable."""
        try:
            yield
        except OSError as error:
            raise AuditUnavailable(
                f"cannot write the audit log {self._path}: {error.strerror or error}"
            ) from None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes from writing during the block."""
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
        """Open the file, or reopen it if its name now belongs to another file."""
        if self._handle >= 0 and not _is_moved(self._handle, self._path):
            return
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1
        self._handle = _open_own(self._path, os.O_APPEND | os.O_CREAT)
        folder = os.open(self._path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)  # so that the name survives a power failure, too
        finally:
            os.close(folder)

    def _append(self, lines: Sequence[Line], missed: int) -> int:
        handle = self._handle
        size = os.fstat(handle).st_size
        noted = os.pread(self._lock, 4096, 0)
        known = _parse_head(noted)
        if noted and known is None:
            log.error("audit log: %s is no head file; it is made anew", head_path(self._path))
            os.ftruncate(self._lock, 0)
        digest, torn, whole = _follow(handle, known)
        head = digest or self.head
        notes: dict[str, Any] = {}  # the next line's notes about the lines before it
        if torn:
            notes["after_torn"] = True
        if self._own is not None and self._own.digest != head:
            notes["own_prev"] = self._own.digest
        if known is None and size > 0:
            log.warning(
                "audit log: %s had no head file; whether lines are gone from its end is not known",
                self._path,
            )
            notes["no_head"] = True
        if missed:
            notes["missed"] = missed
        encoded = bytearray(CUT if size and os.pread(handle, 1, size - 1) != b"\n" else b"")
        ends: list[_Last] = []  # positions of the lines in ``encoded``
        for line in lines:
            text = json.dumps({"prev": head, **line, **notes}, separators=(",", ":")).encode()
            head = digest_of(text)
            notes = {}
            start = len(encoded)
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
        ends = [end for end in ends if end.end <= there]
        if ends:
            began = (
                os.lseek(handle, 0, os.SEEK_CUR) - there
            )  # the actual position, even if the file was emptied
            self._own = _Last(ends[-1].digest, began + ends[-1].start, began + ends[-1].end)
            if not whole:
                log.error(
                    "audit log: lines of %s were changed or removed: run hallutracer audit verify",
                    self._path,
                )
                self._on_break()
        return len(ends)


def head_path(path: Path) -> Path:
    """Return the head file of a log; it is hidden, so that patterns of logrotate do not match
    it."""
    return path.with_name(f".{path.name}.head")


def _parse_head(content: bytes) -> _Last | None:
    match = _NOTED.fullmatch(content.decode("latin-1"))
    return match and _Last(match[1], int(match[2]), int(match[3]))


def _follow(handle: int, known: _Last | None) -> tuple[str | None, bool, bool]:
    """Return the digest that the next line continues, whether the last line is torn, and whether
    nothing was changed.

    It is that of the last whole line, or of the ``known`` line if the log was changed or replaced;
    None if there is no line.  If no line is known, the whole log is read, with any beginning."""
    digest = None if known is None else known.digest
    torn, whole = False, True
    start = 0
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
    """Return the digest of a line without its newline."""
    return hashlib.sha256(text.removesuffix(b"\n")).hexdigest()


def _parse(text: bytes) -> dict[str, Any] | None:
    """Parse a line of the log; return None if it was cut short."""
    try:
        line = json.loads(text) if text.endswith(b"\n") else None
    except ValueError:
        return None
    return (
        line
        if isinstance(line, dict) and isinstance(line.get("prev"), str) and "event" in line
        else None
    )


def _open_own(path: Path, flags: int = 0) -> int:
    """Open a file that nobody else may write to; a new file gets mode 0600.  Raises OSError."""
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode) or mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.close(handle)
        raise OSError(None, f"{path} is not a file, or others may write to it; run: chmod 600")
    return handle


def _is_moved(handle: int, path: Path) -> bool:
    """Return whether ``path`` is now another file, or none."""
    try:
        return not os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return True


@dataclass
class Verified:
    """The content of the files, and their problems."""

    events: Counter[str] = field(default_factory=Counter)
    missed: int = 0  # decisions that were not written, according to the lines after them
    torn: int = 0  # lines that a crash or a full disk cut short
    no_head: int = 0  # lines that were written while the head file was missing
    continues: bool = False  # the chain began in an earlier file
    end_known: bool = False  # a head file, or ``seen``, names the last line
    head: str = FIRST  # the digest of the last line
    problems: list[str] = field(default_factory=list)

    @property
    def lines(self) -> int:
        """Number of lines that could be read."""
        return self.events.total()


def verify(paths: Sequence[Path], seen: str | None = None) -> Verified:
    """Find lines that were changed, removed or inserted, in the files in order of age, the oldest
    first.

    ``seen`` is an earlier digest of the last line, which also reveals a changed head file.  Raises
    HalluTracerError for a file that cannot be read."""
    verified, ends = Verified(), [(seen, "--seen")] if seen is not None else []
    last = cut = ""  # the position of the last line that could be read, and of a torn line after it
    digests: set[str] = set()  # of all lines, and of the line before the first
    for path in paths:
        try:
            if (
                noted := _noted_head(path)
            ) is not None:  # read before the log, which may grow meanwhile
                ends.append((noted, str(head_path(path))))
            with path.open("rb") as file:
                for number, text in enumerate(file, 1):
                    position, line = f"{path}, line {number}", _parse(text)
                    if line is None:
                        cut, verified.torn = position, verified.torn + 1
                        continue
                    verified.problems += _broken(verified, line, position, last, digests)
                    if cut and number > 1 and not line.get("after_torn"):
                        verified.problems.append(f"{cut} cannot be read")
                    last, cut = position, ""
                    verified.head = digest_of(text)
                    digests.add(verified.head)
                    verified.events[str(line["event"])] += 1
                    verified.missed += (
                        missed if isinstance(missed := line.get("missed"), int) else 0
                    )
                    verified.no_head += line.get("no_head") is True
        except OSError as error:
            raise HalluTracerError(f"cannot read {path}: {error.strerror or error}") from None
        except ValueError as error:
            verified.problems.append(str(error))
    verified.end_known = bool(ends)
    if not digests and ends:  # the log was renamed or emptied, and nothing was written since
        verified.continues, verified.head = True, ends[-1][0]
        digests.add(verified.head)
    if cut:
        verified.problems.append(
            f"{cut} cannot be read: it has no end; a crash left it so, or somebody cut it"
        )
    for digest, source in ends:
        if digest not in digests and digest != FIRST:
            verified.problems.append(
                f"no line has the digest of {source}, {digest}: lines were removed from the end or "
                "changed, or lost in a power failure"
            )
    return verified


def _broken(
    verified: Verified, line: dict[str, Any], position: str, last: str, digests: set[str]
) -> Iterator[str]:
    """Yield a problem if a line breaks the hash chain."""
    if not digests:
        verified.continues = line["prev"] != FIRST
        digests.add(line["prev"])
    elif line["prev"] != verified.head:
        yield (
            f"{position} does not follow {last}: lines were changed, removed, put in, or lost in a"
            " power failure"
        )
    if "own_prev" in line and line["own_prev"] not in digests and not verified.continues:
        yield (
            f"{position} was written by a process whose line before it is gone: the rest was fitted"
            " to what was changed"
        )


def _noted_head(path: Path) -> str | None:
    """Return the recorded digest of the last line of the log ``path``, or None.  Raises OSError,
    ValueError."""
    try:
        with head_path(path).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            content = file.read(4096)
    except FileNotFoundError:
        return None
    if content and (last := _parse_head(content)) is None:
        raise ValueError(f"{head_path(path)} is no head file: somebody changed it")
    return last.digest if content and last is not None else None
