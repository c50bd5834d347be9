"""Another OpenAI-compatible server, which answers what a policy with action ``fallback`` withholds here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from service.errors import HalluTracerError

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Upstream:
    """Where a withheld prompt is sent instead, and as what."""

    url: str  # up to and with /v1
    model: str
    key_env: str | None = None  # the environment variable that holds its bearer key
    timeout_s: float = TIMEOUT_S  # until it begins to answer, and between two pieces of a stream

    @property
    def host(self) -> str:
        """Host and port, for messages: the address may hold a password."""
        parts = urlsplit(self.url)
        return parts.hostname + (f":{parts.port}" if parts.port else "") if parts.hostname else self.url

    def headers(self) -> dict[str, str]:
        """Return the headers that it needs.  Raises HalluTracerError where the key's variable is empty."""
        if self.key_env is None:
            return {}
        key = os.environ.get(self.key_env, "")
        if not key:
            raise HalluTracerError(f"the environment variable {self.key_env} holds no key for {self.host}")
        return {"authorization": f"Bearer {key}"}
