"""Threads and event loops: batched delivery to a loop, generators of another loop, synchronous
waiting."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, TypeVar

from service.errors import EngineError

T = TypeVar("T")
MAX_ITEMS_PER_TURN = 64


def fulfil(done: Future[T], work: Callable[[], T]) -> None:
    """Give a future what ``work`` returns, or raises."""
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)


class Outbox:
    """Items for consumers on one event loop, sent from another thread with one wake-up of the loop
    for many items."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._items: deque[tuple[asyncio.Queue[Any], Any]] = deque()
        self._scheduled = False

    def put(self, inbox: asyncio.Queue[Any], item: object) -> None:
        """Add an item; it is delivered after the next ``flush``."""
        self._items.append((inbox, item))

    def flush(self) -> None:
        """Deliver all items on the loop."""
        if self._scheduled or not self._items:
            return
        self._scheduled = True
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed, and every consumer with it
            self._items.clear()

    def _deliver(self) -> None:
        self._scheduled = False  # before reading: later items need another wake-up
        while self._items:
            inbox, item = self._items.popleft()
            inbox.put_nowait(item)


class Outboxes:
    """One outbox for each event loop with consumers.  Thread-safe."""

    def __init__(self) -> None:
        self._all: tuple[Outbox, ...] = ()
        self._lock = threading.Lock()

    def of(self, loop: asyncio.AbstractEventLoop) -> Outbox:
        """Return the loop's outbox.  Those of closed loops are dropped."""
        with self._lock:
            if (outbox := next((known for known in self._all if known.loop is loop), None)) is None:
                outbox = Outbox(loop)
                self._all = (*(known for known in self._all if not known.loop.is_closed()), outbox)
        return outbox

    def flush(self) -> None:
        """Deliver all items of all outboxes."""
        for outbox in self._all:
            outbox.flush()


async def receive(inbox: asyncio.Queue[T | BaseException | None]) -> AsyncGenerator[T, None]:
    """Yield the items of an inbox up to None.  Raises the errors among them."""
    received = 0
    while (item := await inbox.get()) is not None:
        if isinstance(item, BaseException):
            raise item
        yield item
        received += 1
        if received % MAX_ITEMS_PER_TURN == 0:
            # a queue with items does not suspend: let other tasks run
            await asyncio.sleep(0)


async def relay(
    loop: asyncio.AbstractEventLoop, outbox: Outbox, make: Callable[[], AsyncGenerator[T, None]]
) -> AsyncGenerator[T, None]:
    """Yield here what ``make()`` yields on ``loop``; closing cancels it.  Raises EngineError if
    ``loop`` is closed."""
    inbox: asyncio.Queue[T | BaseException | None] = asyncio.Queue()

    def send(item: object) -> None:
        outbox.put(inbox, item)
        outbox.flush()

    async def pump() -> None:
        ended: BaseException | None = EngineError("the engine cancelled a request; try again")
        try:
            async with aclosing(make()) as items:
                async for item in items:
                    send(item)
            ended = None
        except Exception as error:
            ended = error
        finally:
            send(ended)

    work = pump()
    try:
        future = asyncio.run_coroutine_threadsafe(work, loop)
    except RuntimeError:
        work.close()
        raise EngineError("the engine's event loop has closed; restart the service") from None
    try:
        async with aclosing(receive(inbox)) as items:
            async for item in items:
                yield item
    finally:
        if not future.done() and not loop.is_closed():
            future.cancel()


class LoopThread:
    """An event loop that runs in a thread of its own until ``close``."""

    def __init__(self, name: str) -> None:
        started: Future[asyncio.AbstractEventLoop] = Future()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run(started)), name=name, daemon=True
        )
        self._thread.start()
        self.loop = started.result()

    async def _run(self, started: Future[asyncio.AbstractEventLoop]) -> None:
        started.set_result(asyncio.get_running_loop())
        await self._stopping.wait()

    def close(self) -> None:
        """Cancel every task on the loop, close the loop and join the thread.  Not to be called on
        the loop's thread."""
        self.loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()


def run_on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Wait for ``work`` on ``loop``; an interrupted caller cancels it.  Not to be called on
    ``loop``'s thread."""
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result()
    finally:
        future.cancel()


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on an event loop of its own and wait; from a notebook, whose loop is running, in
    a thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(asyncio.run, work).result()


async def gather_all(work: Sequence[Coroutine[Any, Any, T]], at_once: int | None = None) -> list[T]:
    """Return every result in order, ``at_once`` at a time; the first failure cancels the rest and
    is raised."""
    slots = asyncio.Semaphore(at_once or max(1, len(work)))

    async def bounded(item: Coroutine[Any, Any, T]) -> T:
        async with slots:
            return await item

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(bounded(item)) for item in work]
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
    finally:
        for item in work:
            item.close()  # those that were not started
    return [task.result() for task in tasks]
