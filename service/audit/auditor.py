"""Makes the lines of the audit log and writes them in a thread.

The line of a change is on disk before the change begins; decisions are written in batches.  A
decision is sent only after its line is written.  If that fails, the decision is sent and counted as
missed; with ``required`` it is refused instead.  A change is always refused then.  After several
refusals in a row ``refusing`` gives the reason, until a line is written.  If no other line comes,
the thread tries every second to write a line about that.  A disk that hangs for ``REQUIRED_WAIT_S``
causes refusals, too, until it has written its data.

No line has a prompt, an answer or a key's secret, nor a prompt's digest, which could confirm a
guess.  Every line has ``event``, ``time``, and who it was: ``key`` (its name), ``address``,
``by``.  A decision (``event`` "decision") has ``request_id``, ``route``, ``model``, ``bundle``,
``digest`` (the bundle's), ``policy``, ``threshold`` and ``prompts``, each with ``index``, ``risk``,
``decision`` and ``flagged``.  A change has ``outcome`` and ``what``."""

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
MOST_WAITING = 10_000  # lines, including those that are being written
BATCH = 256
WAIT_S = 1.0  # longest wait of a decision for its line, unless it is required
REQUIRED_WAIT_S = 5.0  # longest wait of a required line or a change, also for a disk that hangs
CLOSING_S = 5.0
RETRY_S = 1.0  # interval at which the thread tries to write again
MOST_REFUSED = 3  # refused lines and failed tries in a row until the log counts as refusing
Fate = Literal["written", "missed", "broken"]
Outcome = Literal["begun", "done", "failed"]
Waiting = list[Queued[tuple[Line, bool]]]  # a line, and whether it must be on disk


@dataclass(frozen=True, slots=True)
class Who:
    """The author of an event.  ``address`` is that of the connection, so it is a proxy's if there
    is one."""

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
    decided_by: str | None = None  # the default bundle, if its verdict decided and not the canary's


def decision(who: Who, *, prompts: Sequence[JudgedEvent], **fields: str | float) -> Line:
    """Build the line of a decision about a request's prompts; ``fields`` are the other fields of a
    decision."""
    return _line("decision", who, **fields, prompts=list(map(_known_fields, prompts)))


def _known_fields(prompt: JudgedEvent) -> dict[str, Any]:
    return {name: value for name, value in asdict(prompt).items() if value is not None}


def change(who: Who, event: str, outcome: Outcome, what: Mapping[str, Any]) -> Line:
    """Build the line of a configuration change."""
    return _line(event, who, outcome=outcome, what=dict(what))


def _hanging() -> str:
    return (
        f"the disk of the audit log hangs, or is too slow: a line has waited {REQUIRED_WAIT_S:g} s"
        " for it"
    )


def _resumed(refused: int) -> Line:
    """Build the line that says that lines are written again, and how many were refused before."""
    return change(SERVICE, "audit.resume", "done", {"refused": refused})


def _line(event: str, who: Who, **fields: Any) -> Line:
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    return {"time": time, "event": event, **asdict(who), **fields}


class Auditor(BatchWriter[tuple[Line, bool]]):
    """The audit log of a service."""

    def __init__(
        self,
        path: Path,
        *,
        required: bool = False,
        count: Callable[[Fate, int], None] = lambda fate, number: None,
    ) -> None:
        """Open the file and write that the service starts.  Raises AuditUnavailable.

        It calls ``count``, on any thread, with numbers of lines: written, missed, or broken (after
        changed lines)."""
        self._file = AuditFile(path, on_break=lambda: count("broken", 1))
        self._required, self._count = required, count
        self._stuck = self._failing = False
        self._missed = 0
        self._refused = self._tries = (
            0  # failures since the last written line: required lines, and own tries
        )
        self._why = ""  # reason of the newest failure
        self._began: float | None = None  # monotonic time when the current write began
        self._late = False  # whether a line was too late since the last written line
        self._file.append([change(SERVICE, "service.start", "done", {})], sync=True)
        super().__init__("audit", most=MOST_WAITING, batch=BATCH, closing_s=CLOSING_S)

    async def decided(self, line: Line) -> None:
        """Return once the line is written or counted as missed.  Raises AuditUnavailable if it is
        required."""
        if self._required:
            await self._on_disk(line)
        elif not self.put((line, False), done=(done := Future[None]())):
            self._miss(1)
        elif not self._stuck:
            heard, _ = await asyncio.wait([written := asyncio.wrap_future(done)], timeout=WAIT_S)
            self._stuck = not heard
            written.add_done_callback(
                lambda future: future.cancelled() or future.exception()
            )  # counted elsewhere

    @property
    def refusing(self) -> str | None:
        """Return why decisions are refused without a line; None if they are not, or not yet several
        in a row."""
        if self._required and self._hangs:
            return _hanging()
        return self._why if self._refused + self._tries >= MOST_REFUSED else None

    def wake_s(self) -> float | None:
        """Return the seconds until the thread tries to write again; None if nothing is refused."""
        return RETRY_S if self._refused else None

    def _refuse(self, lines: int, tries: int, why: str) -> None:
        if self._required:
            with self.changed:
                self._refused += lines
                self._tries += tries
                self._why = why

    @property
    def _hangs(self) -> bool:
        """Whether the current write has lasted ``REQUIRED_WAIT_S``."""
        began = self._began
        return began is not None and time.monotonic() - began >= REQUIRED_WAIT_S

    async def _on_disk(self, line: Line) -> None:
        """Return once the line is on disk.  Raises AuditUnavailable; a line that is too late may
        still be written."""
        if self._hangs:  # do not wait behind it
            raise AuditUnavailable(_hanging())
        if not self.put((line, True), done=(done := Future[None]())):
            why = "too much waits for the audit log, or the service is shutting down"
            self._refuse(1, 0, why)
            raise AuditUnavailable(why)
        written = asyncio.wrap_future(done)
        written.add_done_callback(
            lambda future: future.cancelled() or future.exception()
        )  # raised here, or too late
        if not (await asyncio.wait([written], timeout=REQUIRED_WAIT_S))[0]:
            if not self._late:
                log.error("%s; what has to be in it is refused", _hanging())
            self._late = True
            raise AuditUnavailable(_hanging())
        written.result()

    def close(self) -> None:
        """Write the waiting lines and that the service stops."""
        self.put((change(SERVICE, "service.stop", "done", {}), True), done=Future[None]())
        self._settle(self.finish(), AuditUnavailable("the service is shutting down"))
        log.info("audit log: the last line's digest is sha256:%s", self._file.head)

    def release(self) -> None:
        """Close the file."""
        self._file.close()

    def write(self, batch: Waiting) -> Waiting:
        """Append the lines, without a retry.  An empty batch tries whether lines can be written
        again."""
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
            items = [queued.item for queued in batch]
            lines, syncs = zip(*(items or [(_resumed(self._refused), True)]), strict=True)
            written = self._file.append(lines, sync=any(syncs), missed=missed)
            if written < len(lines):
                error = AuditUnavailable("the disk of the audit log is full")
        except Exception as failed:  # keep the thread alive on any error
            error = (
                failed
                if isinstance(failed, AuditUnavailable)
                else AuditUnavailable(f"the audit log: {failed}")
            )
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
        """Answer the waiting callers.  With an error, decisions that are not required are counted
        as missed."""
        if error is not None:
            self._miss(sum(not queued.item[1] for queued in batch))
        for queued in batch:
            if queued.done is None or not queued.listens():
                continue
            if error is None:
                queued.done.set_result(None)
            else:
                queued.done.set_exception(error)

    def _miss(self, number: int) -> None:
        if number:
            with self.changed:
                self._missed += number
            self._count("missed", number)


@asynccontextmanager
async def recorded(
    auditor: Auditor | None, who: Who, event: str, what: Mapping[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """Write a line on disk before a change begins, and another with its result.

    The block makes the change and may add to the yielded result.  Raises AuditUnavailable before
    the block; then nothing may change."""
    result: dict[str, Any] = {}
    if auditor is None:
        yield result
        return
    await auditor._on_disk(change(who, event, "begun", what))
    outcome: Outcome = "failed"
    try:
        yield result
        outcome = "done"
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"[:500]
        raise
    finally:
        try:
            await auditor._on_disk(change(who, event, outcome, {**what, **result}))
        except AuditUnavailable as error:  # the change cannot be undone; the log has its beginning
            log.error("%s %s, and the audit log has only that it began: %s", event, outcome, error)
