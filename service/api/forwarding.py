"""What a policy with action ``fallback`` withholds, answered by another OpenAI-compatible server."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
from httpx_sse import EventSource, SSEError

from service.api.body import too_many_containers
from service.errors import HalluTracerError, UpstreamFailed
from service.policies.guard import Upstream
from service.serving.metrics import Metrics, Outcome

if TYPE_CHECKING:
    from service.serving.tracing import RequestTrace, UpstreamCall

CONNECT_S = 10.0
MOST_BYTES = 16 * 2**20  # of a whole answer, or of one event of a stream


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
            response.stream = _Bounded(upstream, response.stream)
            return _document(upstream, await response.aread(), call)

    async def stream(
        self, upstream: Upstream, route: str, body: Mapping[str, Any], trace: RequestTrace | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Its chunks likewise.  Raises UpstreamFailed, also where the stream ends without [DONE]."""
        call = None if trace is None else trace.upstream(upstream, route)
        async with self._counted(call), self._response(upstream, route, body, call) as response:
            response.stream = bounded = _Bounded(upstream, response.stream)
            async for event in EventSource(response).aiter_sse():
                if event.data == "[DONE]":
                    return
                bounded.kept = 0
                yield _document(upstream, event.data.encode(), call)
            raise UpstreamFailed(f"{upstream.host} closed its stream before the end")

    @asynccontextmanager
    async def _response(
        self, upstream: Upstream, route: str, body: Mapping[str, Any], call: UpstreamCall | None
    ) -> AsyncIterator[httpx.Response]:
        address = upstream.url + route.removeprefix("/v1")
        timeout = httpx.Timeout(upstream.timeout_s, connect=min(CONNECT_S, upstream.timeout_s))
        content, headers = {**body, "model": upstream.model}, upstream.headers() | {"accept-encoding": "identity"}
        headers |= {} if call is None else call.headers
        try:
            async with self._client.stream("POST", address, json=content, headers=headers, timeout=timeout) as response:
                if response.status_code != httpx.codes.OK:
                    raise UpstreamFailed(f"{upstream.host} answered with status {response.status_code}")
                if response.headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
                    raise UpstreamFailed(
                        f"{upstream.host} sent a compressed answer, though it was asked for a plain one"
                    )
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


class _Bounded(httpx.AsyncByteStream):
    """What an upstream sends; no more of it than ``MOST_BYTES`` is kept, be it a line, an event or an answer."""

    def __init__(self, upstream: Upstream, stream: httpx.SyncByteStream | httpx.AsyncByteStream) -> None:
        assert isinstance(stream, httpx.AsyncByteStream)
        self._upstream, self._stream = upstream, stream
        self.kept = 0  # bytes that whoever reads still holds

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self.kept += len(part)
            if self.kept > MOST_BYTES:
                raise UpstreamFailed(f"{self._upstream.host} sent more than {MOST_BYTES} bytes")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _document(upstream: Upstream, content: bytes, call: UpstreamCall | None) -> dict[str, Any]:
    """What is passed on of it, and nothing that an upstream may add."""
    found = None
    try:
        if not too_many_containers(content):
            found = json.loads(content.decode("utf-8", "replace"), parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    if not isinstance(found, dict) or not isinstance(found.get("choices"), list):
        raise UpstreamFailed(f"{upstream.host} sent something else than an answer")
    if call is not None:
        call.note(found)
    usage = found.get("usage")
    return {"model": upstream.model, "choices": found["choices"]} | ({"usage": usage} if usage else {})
