"""A server that says that it leaves before it does.

uvicorn closes its socket and its idle connections at once when it is told to stop.  A request that is on its way then
meets a reset, and whoever sent it, a balancer for one, cannot know whether it was begun and must not send it again.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import uvicorn

LEAVING_S = 1.0  # without a request: longer than what was sent before a refusal was read takes, on a busy machine too
# With requests: nginx.conf lets a replica rest for 5 s that has come back, and asks this one until then.
MOST_S = 7.0


class LeavingServer(uvicorn.Server):
    """Where it has clients it refuses new work until none has come for ``LEAVING_S``, and then stops.

    ``leave`` is called when it is told to stop; from then on the app answers 503, which a balancer takes elsewhere, and
    each connection ends with its answer.
    """

    def __init__(self, config: uvicorn.Config, leave: Callable[[], None]) -> None:
        super().__init__(config)
        self._leave = leave

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse, then close; a second Ctrl-C ends the refusing."""
        self._leave()
        if self.server_state.connections:
            setattr(self.config.http_protocol_class, "leaving", True)  # noqa: B010  (a Connection: listening.py)
            await self._refuse()
        await super().shutdown(sockets)

    async def _refuse(self) -> None:
        """Until no request was answered for ``LEAVING_S``, at most ``MOST_S``."""
        clock = asyncio.get_running_loop().time
        start = last = now = clock()
        answered = self.server_state.total_requests
        while now - last < LEAVING_S and now - start < MOST_S and not self.force_exit:
            await asyncio.sleep(0.05)
            now = clock()
            if self.server_state.total_requests != answered:
                answered, last = self.server_state.total_requests, now
