"""Frozen settings, and the names of the environment variables behind every command-line flag.

The command line's parser is the only reader of the environment: it takes each name from ``env`` below.  Nothing else
in the project looks at ``os.environ``.
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


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """How the service listens and what it refuses."""

    host: str = "127.0.0.1"  # loopback: opening up is a decision
    port: int = 8765
    max_body_bytes: int = 4 * 1024 * 1024
    max_prompts: int = 256  # prompts in one request
    max_new_tokens: int = 1024  # ceiling on generate.max_tokens
    threshold: float | None = None  # None: each bundle's own
