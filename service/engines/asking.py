"""Many answers of an OnlineEngine at once, for a caller who has no event loop.  Knows no risk and no policy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing

from service.engines.base import Completion, Onset, Sampling, TokenIds
from service.engines.online import Gate, OnlineEngine, Update
from service.errors import EngineError
from service.readout import Probes


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

    async def everyone() -> list[Completion | None]:
        tasks = [asyncio.ensure_future(one(place)) for place in range(len(prompts))]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asked = asyncio.run_coroutine_threadsafe(everyone(), engine.loop)
    try:
        return asked.result()
    finally:
        asked.cancel()  # where the caller was interrupted


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
