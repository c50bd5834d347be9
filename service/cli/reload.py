"""Bundles swapped on the running engine: at a SIGHUP, and where an alias has moved."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from service.cli.output import print_line

if TYPE_CHECKING:
    from probes_store.store import Store
    from service.serving.state import ServiceState

log = logging.getLogger("hallutracer")
_tasks: set[asyncio.Task[None]] = set()  # the event loop itself keeps none alive


def on_hangup(state: ServiceState) -> Callable[[], None]:
    """Reload on SIGHUP, and when the returned function is called.  Call on the service's event loop."""
    loop = asyncio.get_running_loop()

    def begin() -> None:
        _keep(loop.create_task(_reload(state)))

    loop.add_signal_handler(signal.SIGHUP, begin)
    return begin


def watch(state: ServiceState, resolve: Callable[[], object], seconds: float) -> None:
    """Reload where ``resolve``, asked every so many seconds, gives something else.  Call on the event loop."""

    async def look() -> None:
        before = await asyncio.to_thread(resolve)
        while not state.stopping:
            await asyncio.sleep(seconds)
            now = await asyncio.to_thread(resolve)
            if now != before or state.reload_error is not None:
                before = now
                await _reload(state)

    _keep(asyncio.get_running_loop().create_task(look()))


def replay(state: ServiceState, seconds: float) -> None:
    """Replay the golden prompts every so many seconds.  Call on the event loop."""

    async def again() -> None:
        while not state.stopping:
            await asyncio.sleep(seconds)
            try:
                await state.replay_golden()
            except Exception as error:  # the engine's own watch says what is wrong with it
                log.warning("the golden prompts were not replayed: %s", error)

    _keep(asyncio.get_running_loop().create_task(again()))


def resolved(store: Store, names: Sequence[str]) -> dict[str, str]:
    """Where each reference points now, or why it points nowhere."""
    from probes_store.errors import BundleError

    found = {}
    for name in names:
        try:
            found[name] = str(store.resolve(name))
        except BundleError as error:
            found[name] = str(error)
    return found


def _keep(task: asyncio.Task[None]) -> None:
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


async def _reload(state: ServiceState) -> None:
    assert state.load_again is not None
    try:
        await state.reload(state.load_again)
    except Exception as error:  # whatever is wrong with the new bundles, the loaded ones stay
        log.error("the bundles were not swapped: %s", error)
        return
    rollout, default = state.rollout, state.scorers[0]
    roles = ((scorer.bundle.reference, rollout.role(scorer, default)) for scorer in state.scorers)
    told = [name if role in ("default", "none") else f"{name} ({role})" for name, role in roles]
    print_line(f"read by {', '.join(told)} from now on")
