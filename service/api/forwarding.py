"""What a policy with action ``fallback`` withholds, answered by another OpenAI-compatible server."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
from httpx_sse import EventSource, SSEError

from service.errors import HalluTracerError, UpstreamFailed
from service.serving.metrics import Metrics, Outcome
from service.upstreams import Upstream

if TYPE_CHECKING:
    from service.serving.spans import RequestTrace, UpstreamCall

CONNECT_S = 10.0
MOST_BYTES = 16 * 2**20  # of a whole answer


class Forwarder:
    """One pool of connections for all upstreams."""

    def __init__(self, metrics: Metrics) -> None:
        self._client = httpx.AsyncClient(follow_redirects=False)
        self._metrics = metrics

    async def close(self) -> None:
        """End what is under way."""
        await self._client.aclose()

    async def whole(
        self, upstream: Upstream, route: str, body: Mapping[str, Any], trace: RequestTrace | None = None
    ) -> dict[str, Any]:
        """The upstream's answer: ``model``, ``choices`` and ``usage``.  Raises UpstreamFailed."""
        call = None if trace is None else trace.upstream(upstream, route)
        async with self._counted(call), self._response(upstream, route, body, call) as response:
            content = bytearray()
            async for part in response.aiter_bytes():
                content += part
                if len(content) > MOST_BYTES:
                    raise UpstreamFailed(f"{upstream.host} sent more than {MOST_BYTES} bytes")
            return _document(upstream, content.decode("utf-8", "replace"), call)

    async def stream(
        self, upstream: Upstream, route: str, body: Mapping[str, Any], trace: RequestTrace | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Its chunks likewise.  Raises UpstreamFailed, also where the stream ends without [DONE]."""
        call = None if trace is None else trace.upstream(upstream, route)
        async with self._counted(call), self._response(upstream, route, body, call) as response:
            async for event in EventSource(response).aiter_sse():
                if event.data == "[DONE]":
                    return
                yield _document(upstream, event.data, call)
            raise UpstreamFailed(f"{upstream.host} closed its stream before the end")

    @asynccontextmanager
    async def _response(
        self, upstream: Upstream, route: str, body: Mapping[str, Any], call: UpstreamCall | None
    ) -> AsyncIterator[httpx.Response]:
        address = upstream.url + route.removeprefix("/v1")
        timeout = httpx.Timeout(upstream.timeout_s, connect=min(CONNECT_S, upstream.timeout_s))
        content, headers = {**body, "model": upstream.model}, upstream.headers()
        headers |= {} if call is None else call.headers
        try:
            async with self._client.stream("POST", address, json=content, headers=headers, timeout=timeout) as response:
                if response.status_code != httpx.codes.OK:
                    raise UpstreamFailed(f"{upstream.host} answered with status {response.status_code}")
                yield response
        except httpx.TimeoutException:
            raise UpstreamFailed(f"{upstream.host} took longer than {upstream.timeout_s:g} s") from None
        except (httpx.HTTPError, SSEError) as error:
            raise UpstreamFailed(f"{upstream.host} could not be reached or read: {type(error).__name__}") from None

    @asynccontextmanager
    async def _counted(self, call: UpstreamCall | None) -> AsyncIterator[None]:
        outcome: Outcome = "given_up"  # the client left, or the deadline passed
        code: str | None = outcome
        try:
            yield
            outcome, code = "answered", None
        except HalluTracerError as error:
            outcome, code = "failed", error.code
            raise
        finally:
            self._metrics.upstream(outcome)
            if call is not None:
                call.end(code)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _document(upstream: Upstream, text: str, call: UpstreamCall | None) -> dict[str, Any]:
    """What is passed on of it, and nothing that an upstream may add."""
    try:
        found = json.loads(text, parse_constant=_refuse)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("choices"), list):
        raise UpstreamFailed(f"{upstream.host} sent something else than an answer")
    if call is not None:
        call.note(found)
    usage = found.get("usage")
    return {"model": upstream.model, "choices": found["choices"]} | ({"usage": usage} if usage else {})
