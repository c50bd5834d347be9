"""One thread that writes the audit log: changes are on disk before they begin, decisions are written in batches.

Nobody is told of a decision before its line is written.  Where that fails, the decision goes on and is counted as
missed; ``required`` refuses it instead.  A change is always refused.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from service.audit.events import SERVICE, Line, Outcome, Who, change
from service.audit.file import AuditFile
from service.errors import AuditUnavailable

log = logging.getLogger("hallutracer")
MOST_WAITING = 10_000
BATCH = 256
WAIT_S = 1.0  # that a decision waits for its line, at most, unless it is required
CLOSING_S = 5.0
Fate = Literal["written", "missed", "broken"]


@dataclass(frozen=True, eq=False)
class _Waiting:
    line: Line
    sync: bool
    done: Future[None] = field(default_factory=Future)


class Auditor:
    """``count`` is told how many lines were written or missed, on any thread; broken: written after changed ones."""

    def __init__(
        self, path: Path, *, required: bool = False, count: Callable[[Fate, int], None] = lambda fate, number: None
    ) -> None:
        """Open the file and write that the service starts.  Raises AuditUnavailable."""
        self._file = AuditFile(path, on_break=lambda: count("broken", 1))
        self._required, self._count = required, count
        self._queue: deque[_Waiting] = deque()
        self._changed = threading.Condition()
        self._closing, self._stuck, self._failing, self._missed = False, False, False, 0
        self._file.append([change(SERVICE, "service.start", "done", {})], sync=True)
        self._thread = threading.Thread(target=self._work, name="audit", daemon=True)
        self._thread.start()

    async def decided(self, line: Line) -> None:
        """Return once the line is written, or counted as missed.  Raises AuditUnavailable where it is required."""
        waiting = self._put(line, sync=self._required)
        if self._required:
            await asyncio.wrap_future(_taken(waiting))
        elif waiting is None:
            self._miss(1)
        elif not self._stuck:
            done, _ = await asyncio.wait([written := asyncio.wrap_future(waiting)], timeout=WAIT_S)
            self._stuck = not done
            written.add_done_callback(lambda future: future.cancelled() or future.exception())  # a failure is counted

    async def change(self, who: Who, event: str, outcome: Outcome, what: Mapping[str, Any]) -> None:
        """Return once the line is on disk.  Raises AuditUnavailable."""
        await asyncio.wrap_future(_taken(self._put(change(who, event, outcome, what), sync=True)))

    def close(self) -> None:
        """Write what waits and that the service stops."""
        self._put(change(SERVICE, "service.stop", "done", {}), sync=True)
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSING_S)
        log.info("audit log: the last line's digest is sha256:%s", self._file.head)

    def _put(self, line: Line, *, sync: bool) -> Future[None] | None:
        with self._changed:
            if len(self._queue) < MOST_WAITING and not self._closing:
                self._queue.append(waiting := _Waiting(line, sync))
                self._changed.notify()
                return waiting.done
        return None

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
            if not batch:
                break
            self._write(batch)
        self._file.close()

    def _write(self, batch: list[_Waiting]) -> None:
        heard = [waiting.done.set_running_or_notify_cancel() for waiting in batch]  # from here on nobody can leave
        error: AuditUnavailable | None = None
        with self._changed:
            missed, self._missed = self._missed, 0
        try:
            written = self._file.append([one.line for one in batch], sync=any(o.sync for o in batch), missed=missed)
            if written < len(batch):
                error = AuditUnavailable("the disk of the audit log is full")
        except Exception as failed:  # whatever it is, the thread goes on
            error = failed if isinstance(failed, AuditUnavailable) else AuditUnavailable(f"the audit log: {failed}")
            written = 0
        if written:
            self._count("written", written)
        else:
            with self._changed:
                self._missed += missed
        if error is not None:
            self._miss(sum(not one.sync for one in batch[written:]))  # the others are refused
            if not self._failing:
                log.error("%s; decisions are %s", error, "refused" if self._required else "not audited")
        elif self._failing:
            log.warning("the audit log is written again")
        self._failing, self._stuck = error is not None, False
        for number, (waiting, listens) in enumerate(zip(batch, heard, strict=True)):
            if not listens:
                continue
            if error is None or number < written:
                waiting.done.set_result(None)
            else:
                waiting.done.set_exception(error)

    def _miss(self, number: int) -> None:
        with self._changed:
            self._missed += number
        if number:
            self._count("missed", number)


def _taken(waiting: Future[None] | None) -> Future[None]:
    if waiting is None:
        raise AuditUnavailable("too much waits for the audit log, or the service is shutting down")
    return waiting


@asynccontextmanager
async def recorded(
    auditor: Auditor | None, who: Who, event: str, what: Mapping[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """Around a change: what is asked for is on disk before it begins, and afterwards what came of it.

    The block may add to the yielded outcome.  Raises AuditUnavailable before the block: then nothing may change.
    """
    found: dict[str, Any] = {}
    if auditor is None:
        yield found
        return
    await auditor.change(who, event, "begun", what)
    outcome: Outcome = "failed"
    try:
        yield found
        outcome = "done"
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"[:500]
        raise
    finally:
        try:
            await auditor.change(who, event, outcome, {**what, **found})
        except AuditUnavailable as error:  # it cannot be undone; that it began is in the log
            log.error("%s %s, and the audit log has only that it began: %s", event, outcome, error)
