"""Which probe is in which slot of the workers, tracked on the request side.

A slot keeps its probe until the prefills of all prompts that use it have been read.  Other slots can be overwritten:
a bundle replaces another one without a restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from service.engines.transformers.hooks import check_probe
from service.engines.vllm.wire import Plan
from service.errors import EngineError
from service.readout import Probes, Site

WriteProbe = Callable[[int, Probes], Awaitable[str]]


@dataclass
class _Slot:
    site: Site
    index: int  # among its site's slots
    probes: Probes | None = None
    digest: str = ""
    users: int = 0
    last_used: int = 0


class Slots:
    """Leases slots to requests.  To be used on one event loop only."""

    def __init__(self, plan: Plan, write: WriteProbe) -> None:
        """``write(index, probes)`` writes a probe into a slot of its site on every rank, and returns its digest."""
        self._plan = plan
        self._write = write
        self._slots = [_Slot(site, index) for site in plan.sites for index in range(plan.slots)]
        self._lock = asyncio.Lock()
        self._clock = 0

    async def hold(self, probes: Sequence[Probes]) -> list[int]:
        """Each probe's column in a payload; its slot is kept until ``release``.

        Raises EngineError if a site is not compiled in or all of its slots are in use.
        """
        held: list[int] = []
        try:
            for probe in probes:
                column = self._find(probe)
                if column is None:
                    async with self._lock:
                        column = self._find(probe)
                        if column is None:
                            column = await self._put(probe)
                slot = self._slots[column]
                slot.users += 1
                self._clock += 1
                slot.last_used = self._clock
                held.append(column)
        except BaseException:
            self.release(held)
            raise
        return held

    def release(self, columns: Sequence[int]) -> None:
        """Free the slots of a request whose prefill has been read or that has ended."""
        for column in columns:
            self._slots[column].users -= 1

    def digests(self, columns: Sequence[int]) -> tuple[tuple[int, str], ...]:
        """Each column with the digest of its probe."""
        return tuple((column, self._slots[column].digest) for column in columns)

    def forget(self, columns: Sequence[int]) -> None:
        """Another server has written into one of these slots: the next request writes its probe again."""
        for column in columns:
            self._slots[column].probes = None

    def _find(self, probe: Probes) -> int | None:
        return next((column for column, slot in enumerate(self._slots) if slot.probes is probe), None)

    async def _put(self, probe: Probes) -> int:
        if probe.site not in self._plan.sites:
            raise EngineError(
                f"this engine was started without the site {probe.site}; restart it with a bundle that reads this site"
            )
        check_probe(probe, self._plan.geometry)
        free = [column for column, slot in enumerate(self._slots) if slot.site is probe.site and not slot.users]
        if not free:
            raise EngineError(
                f"all {self._plan.slots} probe slots at {probe.site} are in use; load fewer bundles (one with context "
                "probes needs up to four), or start with more: 'slots' of the key 'hallutracer' in vLLM's "
                "--additional-config, or VllmEngine.load(slots=...)"
            )
        column = min(free, key=lambda column: self._slots[column].last_used)
        slot = self._slots[column]
        slot.probes = None  # invalid until fully written
        slot.users += 1
        try:
            slot.digest = await self._write(slot.index, probe)
        finally:
            slot.users -= 1
        slot.probes = probe
        return column
