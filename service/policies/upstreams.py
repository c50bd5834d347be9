"""Another OpenAI-compatible server, which answers what a policy with action ``fallback`` withholds here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from service.errors import HalluTracerError

KEYS = frozenset({"upstream", "upstream_model", "upstream_key_env", "upstream_timeout_s"})
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
        """Raises HalluTracerError where the key's variable is empty: never forward without the key it needs."""
        if self.key_env is None:
            return {}
        key = os.environ.get(self.key_env, "")
        if not key:
            raise HalluTracerError(f"the environment variable {self.key_env} holds no key for {self.host}")
        return {"authorization": f"Bearer {key}"}


def read_upstream(table: Mapping[str, Any], where: str) -> Upstream:
    """From a policy's table.  Raises HalluTracerError naming ``where`` and the key at fault."""
    for name in ("upstream", "upstream_model"):
        if not isinstance(table.get(name), str) or not table[name].strip():
            raise HalluTracerError(f"{where}: action 'fallback' needs {name}, a non-empty string")
    url, model = table["upstream"].rstrip("/"), table["upstream_model"]
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment:
        raise HalluTracerError(f"{where}: upstream must be an address up to /v1, such as https://api.example.com/v1")
    key_env, timeout = table.get("upstream_key_env"), table.get("upstream_timeout_s", TIMEOUT_S)
    if key_env is not None and (not isinstance(key_env, str) or not key_env):
        raise HalluTracerError(f"{where}: upstream_key_env must name an environment variable")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
        raise HalluTracerError(f"{where}: upstream_timeout_s must be a number of seconds above 0, not {timeout!r}")
    found = Upstream(url, model, key_env, float(timeout))
    try:
        found.headers()  # a key that is missing is told at start, not at the first withheld answer
    except HalluTracerError as error:
        raise HalluTracerError(f"{where}: {error}") from None
    return found
