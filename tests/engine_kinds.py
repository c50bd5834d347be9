"""The scripted engine as the service sees it: scheduled, on the caller's event loop or on a loop of
its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import Any

from service.engines.base import Update
from service.engines.bridge import Outboxes, relay
from service.engines.scheduler import Scheduled
from tests.scripted_engine import ScriptedEngine

KINDS = ["scheduled", "own loop"]


class OnOwnLoop(Scheduled):
    """Answers on a loop in a thread of its own, as an engine that schedules by itself does."""

    def __init__(self, script: ScriptedEngine, **options: Any) -> None:
        super().__init__(script, **options)
        self.loop = asyncio.new_event_loop()
        self._relayed = Outboxes()
        self._loop_thread = threading.Thread(
            target=self.loop.run_forever, name="own loop", daemon=True
        )
        self._loop_thread.start()

    async def answer(self, *arguments: Any, **options: Any) -> AsyncGenerator[Update, None]:
        def make() -> AsyncGenerator[Update, None]:
            return super(OnOwnLoop, self).answer(*arguments, **options)

        async for update in relay(self.loop, self._relayed.of(asyncio.get_running_loop()), make):
            yield update

    def end_loop(self) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._loop_thread.join(20)
            self.loop.close()

    def close(self) -> None:
        super().close()
        self.end_loop()


def engine_of(script: ScriptedEngine, kind: str = "scheduled", **options: Any) -> Scheduled:
    assert kind in KINDS
    return Scheduled(script, **options) if kind == "scheduled" else OnOwnLoop(script, **options)
