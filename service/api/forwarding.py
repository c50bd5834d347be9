"""What a policy with action ``fallback`` withholds, answered by another OpenAI-compatible
server."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import httpx
from httpx_sse import EventSource, SSEError

from service.errors import HalluTracerError, UpstreamFailed
from service.json_limits import excess
from service.policies.guard import Upstream
from service.proxies import AsyncProxyTransport, Proxies
from service.serving.metrics import Metrics, UpstreamOutcome

if TYPE_CHECKING:
    from service.serving.hooks import RequestTrace, UpstreamCall

CONNECT_S = 10.0
MOST_BYTES = 16 * 2**20  # of a whole answer, or of one event of a stream


class Forwarder:
    """One pool of connections for all upstreams."""

    def __init__(self, metrics: Metrics) -> None:
        self._proxies, self._metrics = Proxies.of_environment(), metrics
        self._client = httpx.AsyncClient(
            transport=AsyncProxyTransport(self._proxies), follow_redirects=False
        )

    async def close(self) -> None:
        """End what is under way."""
        await self._client.aclose()

    async def whole(
        self,
        upstream: Upstream,
        route: str,
        body: Mapping[str, Any],
        trace: RequestTrace | None = None,
    ) -> dict[str, Any]:
        """Return the upstream's answer: ``model``, ``choices`` and ``usage``.  Raises
        UpstreamFailed."""
        async with self._response(upstream, route, body, trace) as (response, call):
            return _document(upstream, await response.aread(), call)

    async def stream(
        self,
        upstream: Upstream,
        route: str,
        body: Mapping[str, Any],
        trace: RequestTrace | None = None,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield its chunks likewise.  Raises UpstreamFailed, also where the stream ends without
        [DONE]."""
        async with self._response(upstream, route, body, trace) as (response, call):
            async for event in EventSource(response).aiter_sse():
                if event.data == "[DONE]":
                    return
                response.stream.kept = 0  # type: ignore[union-attr]
                yield _document(upstream, event.data.encode(), call)
            raise UpstreamFailed(f"{upstream.host} closed its stream before the end")

    @asynccontextmanager
    async def _response(
        self, upstream: Upstream, route: str, body: Mapping[str, Any], trace: RequestTrace | None
    ) -> AsyncIterator[tuple[httpx.Response, UpstreamCall | None]]:
        call = None if trace is None else trace.upstream(upstream, route)
        timeout = httpx.Timeout(upstream.timeout_s, connect=min(CONNECT_S, upstream.timeout_s))
        address = upstream.url + route.removeprefix("/v1")
        named = upstream.host + self._proxies.described(httpx.URL(address))
        outcome: UpstreamOutcome = "given_up"  # the client left, or the deadline passed
        code: str | None = outcome
        try:
            headers = (
                upstream.headers()
                | {"accept-encoding": "identity"}
                | ({} if call is None else call.headers)
            )
            content = {**body, "model": upstream.model}
            async with self._client.stream(
                "POST", address, json=content, headers=headers, timeout=timeout
            ) as response:
                if response.status_code != httpx.codes.OK:
                    raise UpstreamFailed(f"{named} answered with status {response.status_code}")
                if response.headers.get("content-encoding", "").strip().lower() not in (
                    "",
                    "identity",
                ):
                    raise UpstreamFailed(
                        f"{upstream.host} sent a compressed answer, though asked for a plain one"
                    )
                response.stream = _Bounded(upstream, response.stream)
                yield response, call
            outcome, code = "answered", None
        except (httpx.HTTPError, SSEError, HalluTracerError) as error:
            if isinstance(error, httpx.TimeoutException):
                error = UpstreamFailed(f"{named} took longer than {upstream.timeout_s:g} s")
            elif not isinstance(error, HalluTracerError):
                why = f": {error}" if isinstance(error, httpx.ProxyError) else ""
                error = UpstreamFailed(
                    f"{named} could not be reached or read: {type(error).__name__}{why}"
                )
            outcome, code = "failed", error.code
            raise error from None
        finally:
            self._metrics.count("upstream_requests_total", outcome)
            if call is not None:
                call.end(code)


class _Bounded(httpx.AsyncByteStream):
    """What an upstream sends; no more of it than ``MOST_BYTES`` is kept, be it a line, an event or
    an answer."""

    def __init__(
        self, upstream: Upstream, stream: httpx.SyncByteStream | httpx.AsyncByteStream
    ) -> None:
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
    """Return what is passed on of it, and nothing that an upstream may add."""
    document = None
    if excess(content) is None:
        with suppress(ValueError, RecursionError):
            document = json.loads(content.decode("utf-8", "replace"), parse_constant=_refuse)
    if not isinstance(document, dict) or not isinstance(document.get("choices"), list):
        raise UpstreamFailed(f"{upstream.host} sent something else than an answer")
    if call is not None:
        call.note(document)
    usage = document.get("usage")
    return {"model": upstream.model, "choices": document["choices"]} | (
        {"usage": usage} if usage else {}
    )
