"""SIGHUP: look the bundles up again, since an alias may have moved, and swap them on the running engine."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from service.cli.output import print_line

if TYPE_CHECKING:
    from service.engines.base import Engine
    from service.scoring import Scorer
    from service.serving.state import ServiceState

log = logging.getLogger("hallutracer")


def on_hangup(state: ServiceState, load: Callable[[Engine], dict[str, Scorer]]) -> Callable[[], None]:
    """Reload on SIGHUP, and when the returned function is called.  Call on the service's event loop."""
    import asyncio

    loop = asyncio.get_running_loop()
    reloading = asyncio.Lock()
    tasks: set[asyncio.Task[None]] = set()

    async def reload() -> None:
        async with reloading:
            try:
                await state.reload(load)
            except Exception as error:  # whatever is wrong with the new bundles, the loaded ones stay
                log.error("the bundles were not swapped: %s", error)
                return
        print_line(f"read by {', '.join(scorer.bundle.reference for scorer in state.scorers)} from now on")

    def begin() -> None:
        tasks.add(task := loop.create_task(reload()))
        task.add_done_callback(tasks.discard)

    loop.add_signal_handler(signal.SIGHUP, begin)
    return begin
