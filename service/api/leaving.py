"""A server that says that it leaves before it does.

uvicorn closes its socket and its idle connections at once when it is told to stop.  A request that is on its way then
meets a reset, and whoever sent it, a balancer for one, cannot know whether it was begun and must not send it again.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import uvicorn

LEAVING_S = 1.0  # long enough for what was sent before the first refusal was read, on a busy machine too


class LeavingServer(uvicorn.Server):
    """Where it has clients it refuses new work for ``LEAVING_S``, a connection after the other, and then stops.

    ``leave`` is called when it is told to stop; from then on the app answers 503, which a balancer takes elsewhere.
    """

    def __init__(self, config: uvicorn.Config, leave: Callable[[], None]) -> None:
        super().__init__(config)
        self._leave = leave

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse, then close; a second Ctrl-C ends the refusing."""
        self._leave()
        if self.server_state.connections:
            setattr(self.config.http_protocol_class, "leaving", True)  # noqa: B010  (a Connection: listening.py)
            end = asyncio.get_running_loop().time() + LEAVING_S
            while asyncio.get_running_loop().time() < end and not self.force_exit:
                await asyncio.sleep(0.05)
        await super().shutdown(sockets)
