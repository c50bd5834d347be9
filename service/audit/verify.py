"""The check of an audit log: it finds lines that were changed, removed or put in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from service.audit.file import FIRST, digest_of, head_path, noted_head, parsed
from service.errors import HalluTracerError


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


@dataclass
class _Chain:
    """Where the reading is."""

    found: Verified
    place: str = ""  # of the last line that could be read
    cut: str = ""  # the line after it, which was cut short
    digests: set[str] = field(default_factory=set)  # of all lines, and of the one before the first

    def read(self, place: str, text: bytes, *, begins: bool) -> None:
        """Follow one line; ``begins``: the first of its file."""
        found, own = self.found, parsed(text)
        if own is None:
            self.cut, found.torn = place, found.torn + 1
            return
        if not self.digests:
            found.continues = own["prev"] != FIRST
            self.digests.add(own["prev"])
        elif own["prev"] != found.head:
            found.problems.append(f"{place} does not follow {self.place}: that one was changed, or others between them "
                                  "were removed, put in, or lost in a power failure")  # fmt: skip
        if self.cut and not begins and not own.get("after_torn"):
            found.problems.append(f"{self.cut} cannot be read")
        if "own_prev" in own and own["own_prev"] not in self.digests and not found.continues:
            found.problems.append(f"{place} was written by a process whose line before it is gone: lines were changed "
                                  "or removed, and the rest was fitted to it")  # fmt: skip
        self.place, self.cut, found.head = place, "", digest_of(text)
        self.digests.add(found.head)
        found.events[str(own["event"])] += 1
        found.missed += missed if isinstance(missed := own.get("missed"), int) else 0
        found.no_head += own.get("no_head") is True


def verify(paths: Sequence[Path], seen: str | None = None) -> Verified:
    """Follow the chain through the files, oldest first; ``seen``: a digest that was the last line's once.

    The last line of a log is also noted in its head file.  ``seen`` finds who changed that, too.
    Raises HalluTracerError for a file that cannot be read.
    """
    found = Verified()
    chain, ends = _Chain(found), [(seen, "--seen")] if seen is not None else []
    for path in paths:
        try:
            if (noted := noted_head(path)) is not None:  # before the log, to which more may be written meanwhile
                ends.append((noted, str(head_path(path))))
            with path.open("rb") as file:
                for number, text in enumerate(file, 1):
                    chain.read(f"{path}, line {number}", text, begins=number == 1)
        except OSError as error:
            raise HalluTracerError(f"cannot read {path}: {error.strerror or error}") from None
        except ValueError as error:
            found.problems.append(str(error))
    found.end_known = bool(ends)
    if not chain.digests and ends:  # the log was renamed or emptied, and nothing has been written since
        found.continues, found.head = True, ends[-1][0]
        chain.digests.add(found.head)
    if chain.cut:
        found.problems.append(f"{chain.cut} cannot be read: it has no end; a crash left it so, or somebody cut it")
    for digest, place in ends:
        if digest not in chain.digests and digest != FIRST:
            found.problems.append(f"no line has the digest of {place}, {digest}: lines were removed from the end or "
                                  "changed there, lost in a power failure, or the log was rewritten")  # fmt: skip
    return found
