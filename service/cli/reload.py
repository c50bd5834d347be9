"""SIGHUP: look the bundles up again, an alias may have moved, and swap them on the running engine."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from service.engines.base import Engine
    from service.scoring import Scorer
    from service.serving.state import ServiceState

log = logging.getLogger("hallutracer")


def on_hangup(state: ServiceState, load: Callable[[Engine], list[Scorer]]) -> None:
    """Call on the service's event loop."""
    loop = asyncio.get_running_loop()
    busy = asyncio.Lock()
    running: set[asyncio.Task[None]] = set()

    async def swap() -> None:
        async with busy:
            try:
                await state.reload(load)
            except Exception as error:  # whatever is wrong with the new ones, the old ones go on
                log.error("the bundles were not swapped: %s", error)
                return
        typer.echo(f"read by {', '.join(scorer.bundle.reference for scorer in state.scorers)} from now on")

    def begin() -> None:
        running.add(task := loop.create_task(swap()))
        task.add_done_callback(running.discard)

    loop.add_signal_handler(signal.SIGHUP, begin)
