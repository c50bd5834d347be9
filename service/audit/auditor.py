"""The lines of the audit log, and the thread that writes them.

Changes are on disk before they begin, decisions are written in batches.  Nobody is told of a decision before its line
is written.  Where that fails, the decision goes on and is counted as missed; ``required`` refuses it instead.  A change
is always refused.  After refusals in a row ``refusing`` says why, until a line was written: where no other one comes,
the thread itself tries, every second, to write that lines are written again.  A disk that hangs refuses, too, after
``REQUIRED_WAIT_S``, until what it was given is written.

No line has a prompt, an answer or a key's secret, nor a prompt's digest, by which a guess could be confirmed.  Whatever
happened: ``event``, ``time``, and who it was: ``key`` (its name), ``address``, ``by``.  A decision (``event``
"decision"): ``request_id``, ``route``, ``model``, ``bundle``, ``digest`` (the bundle's), ``policy``, ``threshold`` and
``prompts``, each with ``index``, ``risk``, ``decision`` and ``flagged``.  A change: ``outcome`` and ``what``."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from service.audit.file import AuditFile, Line
from service.batch_writer import BatchWriter, Queued
from service.errors import AuditUnavailable

log = logging.getLogger("hallutracer")
MOST_WAITING = 10_000  # lines, those that are being written among them
BATCH = 256
WAIT_S = 1.0  # that a decision waits for its line, at most, unless it is required
REQUIRED_WAIT_S = 5.0  # that a required line or a change waits, and that a disk may hang before all of them are refused
CLOSING_S = 5.0
RETRY_S = 1.0  # until the thread tries by itself whether lines that are required can be written again
MOST_REFUSED = 3  # lines and tries in a row, before the log counts as refusing
Fate = Literal["written", "missed", "broken"]
Outcome = Literal["begun", "done", "failed"]
Waiting = list[Queued[tuple[Line, bool]]]  # a line, and whether it must be on disk


@dataclass(frozen=True, slots=True)
class Who:
    """Whose doing it is.  ``address`` is the connection's, of a proxy where there is one before the service."""

    key: str | None = None
    address: str | None = None
    by: str = "api"  # or "signal", "file", "alias", "service"


SERVICE = Who(by="service")


@dataclass(frozen=True, slots=True)
class JudgedEvent:
    """One prompt of a request."""

    index: int
    risk: float
    decision: str
    flagged: bool
    decided_by: str | None = None  # the default bundle, where its verdict and not the canary's decided


def decision(who: Who, *, prompts: Sequence[JudgedEvent], **said: str | float) -> Line:
    """Return the line that says what became of a request's prompts; ``said``: the other fields of a decision."""
    known = [{name: value for name, value in asdict(one).items() if value is not None} for one in prompts]
    return _line("decision", who, **said, prompts=known)


def change(who: Who, event: str, outcome: Outcome, what: Mapping[str, Any]) -> Line:
    """Return the line of something of the service that is another from then on."""
    return _line(event, who, outcome=outcome, what=dict(what))


def _hanging() -> str:
    return f"the disk of the audit log hangs, or is too slow: a line has waited {REQUIRED_WAIT_S:g} s for it"


def _resumed(refused: int) -> Line:
    """Return the line that says that lines are written again, and how many were refused before it."""
    return change(SERVICE, "audit.resume", "done", {"refused": refused})


def _line(event: str, who: Who, **fields: Any) -> Line:
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    return {"time": time, "event": event, **asdict(who), **fields}


class Auditor(BatchWriter[tuple[Line, bool]]):
    """The audit log of a service."""

    def __init__(
        self, path: Path, *, required: bool = False, count: Callable[[Fate, int], None] = lambda fate, number: None
    ) -> None:
        """Open the file and write that the service starts.  Raises AuditUnavailable.

        ``count`` is told how many lines were written or missed, on any thread; broken: written after changed ones."""
        self._file = AuditFile(path, on_break=lambda: count("broken", 1))
        self._required, self._count = required, count
        self._stuck, self._failing, self._missed = False, False, 0
        self._refused = self._tries = 0  # required lines, and own tries, that failed since the last line was written
        self._why = ""  # the newest of them failed
        self._began: float | None = None  # writing, what is being written; on the monotonic clock
        self._late = False  # some line was too late since the last one was written
        self._file.append([change(SERVICE, "service.start", "done", {})], sync=True)
        super().__init__("audit", most=MOST_WAITING, batch=BATCH, closing_s=CLOSING_S)

    async def decided(self, line: Line) -> None:
        """Return once the line is written, or counted as missed.  Raises AuditUnavailable where it is required."""
        if self._required:
            await self._on_disk(line)
        elif not self.put((line, False), done=(done := Future[None]())):
            self._miss(1)
        elif not self._stuck:
            heard, _ = await asyncio.wait([written := asyncio.wrap_future(done)], timeout=WAIT_S)
            self._stuck = not heard
            written.add_done_callback(lambda future: future.cancelled() or future.exception())  # a failure is counted

    @property
    def refusing(self) -> str | None:
        """Return why decisions are refused for want of a line; None where they are not, or not yet several in a row."""
        if self._required and self._hangs:
            return _hanging()
        return self._why if self._refused + self._tries >= MOST_REFUSED else None

    def wake_s(self) -> float | None:
        """Return when the thread tries whether required lines can be written again; None: nothing is refused."""
        return RETRY_S if self._refused else None

    def _refuse(self, lines: int, tries: int, why: str) -> None:
        if self._required:
            with self.changed:
                self._refused, self._tries, self._why = self._refused + lines, self._tries + tries, why

    @property
    def _hangs(self) -> bool:
        """Whether what is being written has been for ``REQUIRED_WAIT_S``."""
        began = self._began
        return began is not None and time.monotonic() - began >= REQUIRED_WAIT_S

    async def _on_disk(self, line: Line) -> None:
        """Return once the line is on disk.  Raises AuditUnavailable; a line that is too late may be written still."""
        if self._hangs:  # nothing more waits for it
            raise AuditUnavailable(_hanging())
        if not self.put((line, True), done=(done := Future[None]())):
            why = "too much waits for the audit log, or the service is shutting down"
            self._refuse(1, 0, why)
            raise AuditUnavailable(why)
        written = asyncio.wrap_future(done)
        written.add_done_callback(lambda future: future.cancelled() or future.exception())  # told, or too late to be
        if not (await asyncio.wait([written], timeout=REQUIRED_WAIT_S))[0]:
            if not self._late:
                log.error("%s; what has to be in it is refused", _hanging())
            self._late = True
            raise AuditUnavailable(_hanging())
        written.result()

    def close(self) -> None:
        """Write what waits and that the service stops."""
        self.put((change(SERVICE, "service.stop", "done", {}), True), done=Future[None]())
        self._settle(self.finish(), AuditUnavailable("the service is shutting down"))
        log.info("audit log: the last line's digest is sha256:%s", self._file.head)

    def release(self) -> None:
        """Close the file."""
        self._file.close()

    def write(self, batch: Waiting) -> Waiting:
        """Append the lines; those that could not be written are not tried again.  None: try whether one can be."""
        self._began = time.monotonic()
        try:
            self._write(batch)
        finally:
            self._began = None
        return []

    def _write(self, batch: Waiting) -> None:
        error: AuditUnavailable | None = None
        with self.changed:
            missed, self._missed = self._missed, 0
        try:
            items = [one.item for one in batch]
            lines, syncs = zip(*(items or [(_resumed(self._refused), True)]), strict=True)
            written = self._file.append(lines, sync=any(syncs), missed=missed)
            if written < len(lines):
                error = AuditUnavailable("the disk of the audit log is full")
        except Exception as failed:  # whatever it is, the thread goes on
            error = failed if isinstance(failed, AuditUnavailable) else AuditUnavailable(f"the audit log: {failed}")
            written = 0
        if written:
            self._count("written", written)
            self._late = False
            with self.changed:
                self._refused = self._tries = 0
        else:
            with self.changed:
                self._missed += missed
        if error is not None:
            self._refuse(len(batch) - written, not batch, str(error))
        if error is not None and not self._failing:
            log.error("%s; decisions are %s", error, "refused" if self._required else "not audited")
        elif error is None and self._failing:
            log.warning("the audit log is written again")
        self._failing, self._stuck = error is not None, False
        self._settle(batch[:written], None)
        self._settle(batch[written:], error)

    def _settle(self, batch: Waiting, error: AuditUnavailable | None) -> None:
        """Tell those who wait; with an error, decisions that nobody refuses for it are missed."""
        if error is not None:
            self._miss(sum(not sync for _, sync in (one.item for one in batch)))
        for one in batch:
            if one.done is None or not one.listens():
                continue
            if error is None:
                one.done.set_result(None)
            else:
                one.done.set_exception(error)

    def _miss(self, number: int) -> None:
        if number:
            with self.changed:
                self._missed += number
            self._count("missed", number)


@asynccontextmanager
async def recorded(
    auditor: Auditor | None, who: Who, event: str, what: Mapping[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """Have on disk what a change is to be before it begins, and afterwards what came of it.

    The block may add to the yielded outcome.  Raises AuditUnavailable before the block: then nothing may change."""
    found: dict[str, Any] = {}
    if auditor is None:
        yield found
        return
    await auditor._on_disk(change(who, event, "begun", what))
    outcome: Outcome = "failed"
    try:
        yield found
        outcome = "done"
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"[:500]
        raise
    finally:
        try:
            await auditor._on_disk(change(who, event, outcome, {**what, **found}))
        except AuditUnavailable as error:  # it cannot be undone; that it began is in the log
            log.error("%s %s, and the audit log has only that it began: %s", event, outcome, error)
