"""Reads an audit log and finds lines that were changed, removed or put in."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from service.audit.file import FIRST
from service.errors import HalluTracerError


@dataclass
class Verified:
    """What the files hold, and what is wrong with them."""

    events: Counter[str] = field(default_factory=Counter)
    missed: int = 0  # decisions that were not written, as the lines after them say
    torn: int = 0  # lines that a crash or a full disk cut short
    continues: bool = False  # the chain began in an earlier file
    head: str = FIRST  # the digest of the last line
    problems: list[str] = field(default_factory=list)

    @property
    def lines(self) -> int:
        """Lines that could be read."""
        return self.events.total()


def verify(paths: Sequence[Path], seen: str | None = None) -> Verified:
    """Follow the chain through the files, oldest first; ``seen``: a digest that was the last line's once.

    What comes after the last line cannot be told from the file alone, so note its digest elsewhere.
    Raises HalluTracerError for a file that cannot be read.
    """
    found, before, cut = Verified(), "", False
    started, has_seen = False, seen in (None, FIRST)
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise HalluTracerError(f"cannot read {path}: {error.strerror or error}") from None
        if content and not content.endswith(b"\n"):
            found.problems.append(f"{path}: its last line has no end: a crash left it so, or somebody cut it")
        for number, line in enumerate(content.removesuffix(b"\n").split(b"\n") if content else (), 1):
            place, own = f"{path}, line {number}", _parsed(line)
            if own is None:
                if cut:
                    found.problems.append(f"{before} cannot be read")
                started, cut, before = True, True, place
                found.head, found.torn = hashlib.sha256(line).hexdigest(), found.torn + 1
                continue
            if not started:
                found.continues = own["prev"] != FIRST
            elif own["prev"] != found.head:
                found.problems.append(f"{place} does not follow {before}: that one was changed, or others between them "
                                      "were removed or put in")  # fmt: skip
            started, cut, before = True, False, place
            found.head = hashlib.sha256(line).hexdigest()
            found.events[str(own["event"])] += 1
            found.missed += missed if isinstance(missed := own.get("missed"), int) else 0
            has_seen = has_seen or found.head == seen
    if cut:
        found.problems.append(f"{before} cannot be read")
    if not has_seen:
        found.problems.append(
            f"no line has the digest {seen}: lines were removed from the end, or the log was rewritten"
        )
    return found


def _parsed(line: bytes) -> dict[str, object] | None:
    try:
        own = json.loads(line)
    except ValueError:
        return None
    return own if isinstance(own, dict) and isinstance(own.get("prev"), str) and "event" in own else None
