"""Access: the keys in force, read again while the service runs, and what their callers may choose."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from service.access.callers import OWNERS, Caller, Key, on_loopback
from service.access.keys import KeyRing
from service.audit.auditor import Auditor, recorded
from service.audit.events import Who
from service.errors import AuditUnavailable, HalluTracerError
from service.serving.metrics import Metrics
from service.settings import ServiceSettings

log = logging.getLogger("hallutracer")
WATCH_S = 1.0
WATCH = Who(by="file")


@dataclass(frozen=True, eq=False)
class Access:
    """Who may call the service, and what each caller may loosen."""

    settings: ServiceSettings
    keys: KeyRing  # none: open to all that reach the port
    metrics: Metrics
    audit: Auditor | None

    @property
    def owned(self) -> bool:
        """Return whether this machine's programs and pages may choose what an operator may.

        Only they reach the service, which asks for no key, and the operator has not said what callers may.
        """
        return not (self.settings.callers_may or self.keys.closed) and on_loopback(self.settings.host)

    def caller(self, key: Key | None, address: str | None, *, here: bool) -> Caller:
        """Return the key's owner; without a key, whoever has the address, ``here``: of this machine."""
        everyone = frozenset(self.settings.callers_may)
        if key is not None:
            return Caller(key.name, everyone | key.may, key.policies)
        return Caller(address or "", OWNERS if self.owned and here else everyone)

    async def watch(self) -> None:
        """Read the file of named keys again whenever it changes, for as long as the service runs."""
        refused = False  # by the audit log, which may be written again soon
        while True:
            await asyncio.sleep(WATCH_S)
            if not (await asyncio.to_thread(self.keys.changed_on_disk) or refused):
                continue
            try:
                refused = not await self.reload(WATCH)
            except Exception:  # whatever it is, a key that is revoked later must be heard of
                log.exception("the keys could not be read again")
                refused = True

    async def reload(self, who: Who) -> bool:
        """Put the file's keys in force.  Whatever is wrong with it, those in force stay.

        Returns False where only the audit log is to blame: nothing is then added; what the file takes away is gone all
        the same.
        """
        async with self.keys.reading:
            try:
                keys, changes = await asyncio.to_thread(self.keys.read)
            except HalluTracerError as error:
                self._note(who, f"the keys in force stay: {error}")
                return True
            if any(changes):
                try:
                    async with recorded(self.audit, who, "keys.reload", changes._asdict()):
                        self.keys.use(keys)
                except AuditUnavailable as error:
                    self.keys.keep_common(keys)
                    self._note(who, f"no key was added or changed: {error}")
                    return False
                names = (", ".join(names) or "none" for names in changes)
                log.info("keys: added %s, removed %s, changed %s", *names)
            self._note(who, None)
            return True

    def _note(self, who: Who, problem: str | None) -> None:
        if problem is not None and (who != WATCH or problem != self.keys.problem):
            log.error("%s", problem)
        self.keys.problem = problem
        self.metrics.keys_stale(problem is not None)
