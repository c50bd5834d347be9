"""vLLM's engine process ends with the process that started it, however that one ended.

A parent that is killed cannot end its children, and an engine that nobody can ask any more would keep its memory.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from typing import Any

FOLLOW = "_HALLUTRACER_FOLLOW"  # set by the parent, inherited by its children


def follow_parent() -> None:
    """Watch the parent from a thread; does nothing in a process that asked for no following, or has no parent."""
    parent = multiprocessing.parent_process()
    if parent is not None and os.environ.get(FOLLOW):
        threading.Thread(target=_end_after, args=(parent,), name="follow-parent", daemon=True).start()


def _end_after(parent: Any) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)  # nobody is left to hear why
