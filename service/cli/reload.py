"""Bundles swapped on the running engine: at a SIGHUP, and where an alias has moved."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from service.cli.loading import LeaveOut, load_bundles, load_scorers
from service.cli.output import print_line

if TYPE_CHECKING:
    from probes_store.store import Store
    from service.engines.base import Engine
    from service.scoring import Scorer
    from service.serving.state import ServiceState

log = logging.getLogger("hallutracer")
Stamps = Mapping[str, str | None]
_tasks: set[asyncio.Task[None]] = set()  # the event loop itself keeps none alive


def on_hangup(state: ServiceState) -> Callable[[], None]:
    """Reload on SIGHUP, and when the returned function is called.  Call on the service's event loop."""
    loop = asyncio.get_running_loop()

    def begin() -> None:
        _keep(loop.create_task(_reload(state)))

    loop.add_signal_handler(signal.SIGHUP, begin)
    return begin


def watch(state: ServiceState, look: Callable[[], Stamps], before: Stamps, seconds: float) -> None:
    """Reload where ``look``, called every so many seconds, gives something else.  Call on the event loop.

    ``before``: what it gave before the loaded bundles were read.  A reload that failed is tried again each time.
    """
    from service.serving.state import in_own_thread

    async def again() -> None:
        seen = before
        while not state.stopping:
            await asyncio.sleep(seconds)
            try:
                now = await asyncio.wrap_future(in_own_thread(look))  # a store that hangs must not hold the stop up
            except Exception:
                log.exception("the store was not looked at")
                continue
            if now != seen or None in now.values() or state.reload_error is not None:
                seen = now
                await _reload(state, again=True)

    _keep(asyncio.get_running_loop().create_task(again()))


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


def load_again(
    state: ServiceState, engine: Engine, store: Store, names: Sequence[str], may: Collection[str]
) -> dict[str, Scorer]:
    """What the references mean now, on the running engine; ``may`` be left out, as far as the store answers."""
    again = LeaveOut(may, must_answer=True)
    scorers = load_scorers(engine, load_bundles(store.answering(), names, again), log.info, again)
    state.left_out = again.reasons
    return scorers


def stamps(store: Store, names: Sequence[str]) -> Stamps:
    """What each reference means now, or why it means nothing; None where the store gives no answer."""
    store = store.answering()
    from probes_store.errors import BundleError, StoreUnreachable

    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = store.stamp(name)
        except StoreUnreachable:
            return dict.fromkeys(names)  # each further question could wait for its timeout
        except BundleError as error:
            found[name] = str(error)
    return found


def _keep(task: asyncio.Task[None]) -> None:
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


async def _reload(state: ServiceState, *, again: bool = False) -> None:
    """``again``: what was said of the last one is not said again."""
    assert state.load_again is not None
    said = state.reload_error
    try:
        await state.reload(state.load_again)
    except Exception as error:  # whatever is wrong with the new bundles, the loaded ones stay
        if not again or str(error) != said:
            log.error("the bundles were not swapped, those that are loaded stay: %s", error)
        return
    rollout, default = state.rollout, state.scorers[0]
    roles = ((scorer.bundle.reference, rollout.role(scorer, default)) for scorer in state.scorers)
    told = [name if role in ("default", "none") else f"{name} ({role})" for name, role in roles]
    print_line(f"read by {', '.join(told)} from now on")
