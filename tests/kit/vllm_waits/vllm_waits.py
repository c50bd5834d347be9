"""A plugin of vLLM's, for tests: its processes wait for one another without keeping a core busy.

For a second after each message they look for the next one again and again, which makes a step
shorter by a fraction of a millisecond where each process has a core.  Tests run side by side on two
cores: there, most of an answer's time would be a wait for processes that wait."""

from __future__ import annotations

import time

EVERY_S = 0.0002  # a step of the tests' models takes ten times as long and more


def load() -> None:
    """Have this process sleep between two looks at what the others write."""
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(EVERY_S)
