"""Frozen settings, and the names of the environment variables behind every command-line flag.

The command line's parser is the only reader of the environment: it takes each name from ``env`` below.  Nothing else
in the project looks at ``os.environ``, but for ``PROMETHEUS_MULTIPROC_DIR``, which is the metrics library's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PREFIX = "HALLUTRACER_"


def env(flag: str) -> str:
    """The variable that stands for ``--flag``: ``max-batch-tokens`` -> ``HALLUTRACER_MAX_BATCH_TOKENS``."""
    return PREFIX + flag.replace("-", "_").upper()


DEFAULT_STORE = Path("~/.hallutracer/probes").expanduser()
"""Where bundles are published and looked up first; the bundles shipped with the package come second."""


KV_TOKENS = 16_384
"""Prompt and answer tokens of all answers under way, unless said otherwise: each holds its keys and values."""


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """How the service listens, how much it takes on, and what it refuses."""

    host: str = "127.0.0.1"  # loopback: opening up is a decision
    port: int = 8765
    max_body_bytes: int = 4 * 1024 * 1024
    max_prompts: int = 256  # prompts in one request
    max_new_tokens: int = 1024  # ceiling on generate.max_tokens
    max_kv_tokens: int = KV_TOKENS
    max_queue: int = 1024  # prompts that may wait
    max_wait_ms: float = 2.0  # how long a batch waits for company, when there was some last time
    deadline_s: float = 30.0  # a request's longest time, its own deadline_ms included
    drain_s: float = 30.0  # how long running requests may go on once the service is asked to stop
    threshold: float | None = None  # for policies that name none; None: each bundle's own
    policy: str = "gate"  # for requests that name none
    api_keys: tuple[str, ...] = ()  # none: open to whoever reaches the port
    protect_metrics: bool = False
    cors_origins: tuple[str, ...] = ()  # none: no cross-origin page may read an answer
