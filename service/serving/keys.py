"""Reads the file of named keys again while the service runs: when it changes, and when told to."""

from __future__ import annotations

import asyncio
import logging

from service.audit.auditor import recorded
from service.audit.events import Who
from service.errors import AuditUnavailable, HalluTracerError
from service.serving.state import ServiceState

log = logging.getLogger("hallutracer")
WATCH_S = 1.0
WATCH = Who(by="file")


async def watch_keys(state: ServiceState) -> None:
    """For as long as the service runs."""
    refused = False  # by the audit log, which may be written again soon
    while True:
        await asyncio.sleep(WATCH_S)
        if not (await asyncio.to_thread(state.keys.changed_on_disk) or refused):
            continue
        try:
            refused = not await reload_keys(state, WATCH)
        except Exception:  # whatever it is, a key that is revoked later must be heard of
            log.exception("the keys could not be read again")
            refused = True


async def reload_keys(state: ServiceState, who: Who) -> bool:
    """Put the file's keys in force.  Whatever is wrong with it, those in force stay: false where only the audit log is.

    Where the change cannot be audited, nothing is added; what the file takes away is gone all the same.
    """
    async with state.keys.reading:
        return await _reload(state, who)


async def _reload(state: ServiceState, who: Who) -> bool:
    ring = state.keys
    try:
        keys, changes = await asyncio.to_thread(ring.read)
    except HalluTracerError as error:
        _say(state, who, f"the keys in force stay: {error}")
        return True
    if any(changes):
        try:
            async with recorded(state.audit, who, "keys.reload", changes._asdict()):
                ring.use(keys)
        except AuditUnavailable as error:
            ring.keep_common(keys)
            _say(state, who, f"no key was added or changed: {error}")
            return False
        log.info("keys: added %s, removed %s, changed %s", *(", ".join(names) or "none" for names in changes))
    _say(state, who, None)
    return True


def _say(state: ServiceState, who: Who, problem: str | None) -> None:
    if problem is not None and (who != WATCH or problem != state.keys.problem):
        log.error("%s", problem)
    state.keys.problem = problem
    state.metrics.keys_stale(problem is not None)
