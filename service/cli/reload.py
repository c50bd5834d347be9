"""Bundles swapped on the running engine: at a SIGHUP, which reads the keys again, too, and where an alias has moved."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from service.cli.loading import LeaveOut, load_bundles, load_scorers
from service.cli.output import print_line

if TYPE_CHECKING:
    from probes_store.store import Store
    from service.engines.base import Engine
    from service.scoring import Scorer
    from service.serving.service import Service

log = logging.getLogger("hallutracer")
Stamps = Mapping[str, str | None]
SELDOM_S = 300.0
_tasks: set[asyncio.Task[None]] = set()  # the event loop itself keeps none alive


def on_hangup(service: Service) -> Callable[[], None]:
    """Reload on SIGHUP, and when the returned function is called.  Call on the service's event loop."""
    from service.audit.events import Who

    loop = asyncio.get_running_loop()

    async def hangup() -> None:
        _, error = await service.reload(Who(by="signal"))  # which logs what is wrong with the keys
        _report(service, error)

    def begin() -> None:
        _keep(loop.create_task(hangup()))

    loop.add_signal_handler(signal.SIGHUP, begin)
    return begin


def watch(service: Service, look: Callable[[], Stamps], before: Stamps, seconds: float) -> None:
    """Reload where ``look``, called every so many seconds, gives something else.  Call on the event loop.

    ``before``: what it gave before the loaded bundles were read.  Where the store gives no answer, or a reload failed,
    it is tried again, ever less often, for each time is in the audit log.
    """
    from service.audit.events import Who
    from service.serving.service import in_own_thread

    async def again() -> None:
        seen, wait, again_at = before, seconds, 0.0
        while not service.lifecycle.stopping:
            await asyncio.sleep(seconds)
            try:
                now = await asyncio.wrap_future(in_own_thread(look))  # a store that hangs must not hold the stop up
            except Exception:
                log.exception("the store was not looked at")
                continue
            moved, failing = now != seen, None in now.values() or service.lifecycle.reload_error is not None
            if moved or (failing and time.monotonic() >= again_at):
                seen, said = now, service.lifecycle.reload_error
                error = await service.lifecycle.reload_bundles(Who(by="alias"))
                if error is None or str(error) != said:  # what was said of the last one is not said again
                    _report(service, error)
                wait = seconds if moved else min(2 * wait, max(seconds, SELDOM_S))
                again_at = time.monotonic() + wait

    _keep(asyncio.get_running_loop().create_task(again()))


def replay(service: Service, seconds: float) -> None:
    """Replay the golden prompts every so many seconds.  Call on the event loop."""

    async def again() -> None:
        while not service.lifecycle.stopping:
            await asyncio.sleep(seconds)
            try:
                await service.catalogue.replay_golden()
            except Exception as error:  # the engine's own watch says what is wrong with it
                log.warning("the golden prompts were not replayed: %s", error)

    _keep(asyncio.get_running_loop().create_task(again()))


def load_again(
    left_out: dict[str, str], engine: Engine, store: Store, names: Sequence[str], may: Collection[str]
) -> dict[str, Scorer]:
    """Return what the references mean now, on the running engine; ``may`` be left out, as far as the store answers.

    ``left_out`` then has the reasons of those that were.
    """
    again = LeaveOut(may, must_answer=True)
    scorers = load_scorers(engine, load_bundles(store.answering(), names, again), log.info, again)
    left_out.clear()
    left_out.update(again.reasons)
    return scorers


def stamps(store: Store, names: Sequence[str]) -> Stamps:
    """What each reference means now, or why it means nothing; None where the store gives no answer."""
    from probes_store.errors import BundleError, StoreUnreachable

    store = store.answering()
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


def _report(service: Service, error: Exception | None) -> None:
    if error is not None:
        log.error("the bundles were not swapped, those that are loaded stay: %s", error)
        return
    rollout, default = service.catalogue.rollout, service.catalogue.scorers[0]
    roles = ((scorer.bundle.reference, rollout.role(scorer, default)) for scorer in service.catalogue.scorers)
    told = [name if role in ("default", "none") else f"{name} ({role})" for name, role in roles]
    print_line(f"read by {', '.join(told)} from now on")
