"""Many answers of an OnlineEngine at once, for a caller who is not on its event loop.  Knows no risk and no policy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from typing import Any, TypeVar

from service.engines.base import Completion, Onset, Sampling, TokenIds
from service.engines.online import Gate, OnlineEngine, Update
from service.errors import EngineError
from service.readout import Probes

T = TypeVar("T")


def ask_all(
    engine: OnlineEngine,
    prompts: Sequence[TokenIds],
    probes: Sequence[Probes],
    sampling: Sampling,
    *,
    first_token: bool,
    gate: Gate | None,
    goes_on: Callable[[int, Onset, Update], bool],
) -> list[Completion | None]:
    """All prompts' answers, None for those that ``goes_on(place, onset, update)`` ended at their onset.

    Not on ``engine.loop``'s thread; ``goes_on`` is called there.  The first failure ends them all and is raised.
    """

    async def one(place: int) -> Completion | None:
        answer = engine.answer(prompts[place], probes, first_token=first_token, sampling=sampling, gate=gate)
        begun = False
        async with aclosing(answer) as updates:
            async for update in updates:
                if not begun and not goes_on(place, onset_of(update), update):
                    return None
                begun = True
                if update.completion is not None:
                    return update.completion
        raise unfinished()

    return all_on(engine.loop, [one(place) for place in range(len(prompts))])


def run_on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Its result.  Where the caller is interrupted, it is cancelled.  Not on ``loop``'s thread."""
    future: Future[T] = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result()
    finally:
        future.cancel()


def all_on(
    loop: asyncio.AbstractEventLoop, work: Sequence[Coroutine[Any, Any, T]], at_once: int | None = None
) -> list[T]:
    """Every result in order, ``at_once`` at a time; the first failure ends them all and is raised."""
    room = asyncio.Semaphore(at_once or max(1, len(work)))

    async def one(item: Coroutine[Any, Any, T]) -> T:
        async with room:
            return await item

    async def everyone() -> list[T]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(item)) for item in work]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            for item in work:
                item.close()  # those that were never begun
        return [task.result() for task in tasks]

    return run_on(loop, everyone())


def onset_of(update: Update) -> Onset:
    """The onset of a prompt's first update.  Raises EngineError where there is none."""
    if update.onset is None:
        raise EngineError(
            "the engine told of an answer before its onset; this is a bug of the engine, please report it"
        )
    return update.onset


def unfinished() -> EngineError:
    """What a request gets whose news ended before its answer did."""
    return EngineError("the engine ended a request before its answer was whole; try again")
