"""A streamed answer: events from bytes, first the risk, then, unless withheld, the answer piece by
piece."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from inspect import isawaitable
from typing import Any, TypeVar

import httpx

from hallutracer_client import results, wire
from hallutracer_client.errors import TransportError
from hallutracer_client.results import (
    Chunk,
    Completion,
    ErrorEnvelope,
    InvalidBody,
    Risk,
    ScoreResult,
    Usage,
    Withheld,
    parse,
)

T = TypeVar("T")
DONE = b"[DONE]"
_END = re.compile(
    rb"\r\n|\n|\r"
)  # bytes.splitlines knows more; a separator inside a text, U+2028 say, ends no line


async def done(step: Any) -> Any:
    """Return what a step of a client gives; that of an asyncio client is waited for."""
    return await step if isawaitable(step) else step


def now(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a blocking client's work: none of its steps waits for an event loop."""
    try:
        work.send(None)
    except StopIteration as ended:
        return ended.value  # type: ignore[no-any-return]
    raise AssertionError("a blocking step waited for an event loop")


class EventReader:
    """Server-sent events from bytes that come in any pieces; of an event's fields only ``data`` is
    read.

    https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation"""

    def __init__(self) -> None:
        self._rest = b""  # of a line that has not ended
        self._after_return = (
            False  # a line feed that comes next belongs to the carriage return before it
        )
        self._data: list[bytes] = []  # lines of the event that has not ended

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yield the data of each event that ``piece`` completes, but for empty ones."""
        if self._after_return and piece:
            piece = piece.removeprefix(b"\n")
            self._after_return = False
        if not piece:
            return
        self._after_return = piece.endswith(b"\r")
        *lines, self._rest = _END.split(self._rest + piece)
        for line in lines:
            field, _, value = line.partition(b":")
            if field == b"data":
                self._data.append(value.removeprefix(b" "))
            elif not line:
                data, self._data = b"\n".join(self._data), []
                if data:
                    yield data


class BaseAnswer(results.OfOneRisk):
    """A streamed answer: check ``gated``, then iterate over pieces of text.  The risk is known from
    the start.

    Iterating a withheld answer raises ``Withheld``, so a missing check of ``gated`` cannot pass for
    an empty answer."""

    _advance: Any  # next or anext
    _events: Any

    def __init__(self, response: httpx.Response, timeout_s: float) -> None:
        self._response, self._timeout_s = response, timeout_s
        self._score: ScoreResult | None = None
        self._pieces: list[str] = []
        self._finish_reason: str | None = None
        self._usage: Usage | None = None
        self._last: Chunk | None = None
        self._ended = self._closed = False

    @property
    def score(self) -> ScoreResult:
        """The first event: ids, bundle, policy, risk."""
        assert self._score is not None, "set by _begin"
        return self._score

    @property
    def only(self) -> Risk:
        """The prompt's ``Risk``."""
        return self.score.only

    first = only

    @property
    def message(self) -> str | None:
        """The policy's text to show instead of an answer, if it has one."""
        return self.only.message

    @property
    def completion(self) -> Completion | None:
        """The whole answer after the end of the stream; None before, or if withheld."""
        if not self._ended or self._finish_reason is None or self._usage is None:
            return None
        return Completion("".join(self._pieces), self._finish_reason, self._usage.completion_tokens)

    @property
    def answer_risk(self) -> float | None:
        """The risk of the whole answer, by its own tokens; with ``include=["answer_risk"]`` of the
        answer so far.

        None before it is known, and where nothing reads answers."""
        return self.only.answer_risk if self._last is None else self._last.answer_risk

    @property
    def answer_flagged(self) -> bool | None:
        """Whether that risk reached the bundle's threshold for answers; None where there is
        none."""
        return self.only.answer_flagged if self._last is None else self._last.answer_flagged

    @property
    def usage(self) -> Usage:
        """Token counts; those of the answer are known at its end."""
        return self._usage or self.score.usage

    async def _next(self) -> bytes:
        with wire.transport_errors(
            self._response.url, f"the stream was silent for {self._timeout_s:g} s"
        ):
            data: bytes | None = await done(self._advance(self._events, None))
        if data is None:
            raise TransportError(
                f"the stream broke off after {len(self._pieces)} pieces, before its end"
            )
        return data

    async def _begin(self) -> None:
        # The request was sent with the time its attempt had left; from here on every gap may last
        # the whole timeout. httpcore reads this entry when it begins to read the body.
        if (
            self._response.headers.get("content-type", "").partition(";")[0].strip()
            != "text/event-stream"
        ):
            raise wire.unexpected(self._response, "it is not an event stream")
        self._response.request.extensions["timeout"]["read"] = self._timeout_s
        if (first := await self._next()) == DONE:
            raise wire.unexpected(self._response, "the stream has no risk")
        self._score = self._read(ScoreResult, first)
        if len(self._score.data) != 1:
            problem = f"field 'data': {len(self._score.data)} risks in a stream of one prompt"
            raise wire.unexpected(self._response, problem)

    async def _piece(self) -> str:
        """Return the next piece of text; "" at the end."""
        if self.gated:
            raise Withheld(self.only)
        if self._closed and not self._ended:
            raise RuntimeError("the stream was closed before its end: read it inside its 'with'")
        while not self._ended:
            if (event := await self._next()) == DONE:
                if self._finish_reason is None or self._usage is None:
                    raise wire.unexpected(
                        self._response, "the answer ended without 'finish_reason' and 'usage'"
                    )
                self._ended = True
                break
            chunk = self._read(Chunk, event)
            self._pieces.append(chunk.delta.text)
            self._finish_reason = chunk.finish_reason or self._finish_reason
            self._usage = chunk.usage or self._usage
            self._last = chunk
            if chunk.delta.text:
                return chunk.delta.text
        return ""

    def _read(self, shape: type[T], data: bytes) -> T:
        try:
            return parse(shape, data)
        except InvalidBody as error:
            problem = str(error)
        try:
            body = parse(ErrorEnvelope, data).error
        except InvalidBody:
            raise wire.unexpected(self._response, problem) from None
        raise wire.api_error(body, None, self._response.headers.get("x-request-id"))


class Answer(BaseAnswer):
    """``BaseAnswer`` of a ``Client``."""

    _advance = staticmethod(next)

    def __init__(self, response: httpx.Response, timeout_s: float) -> None:
        super().__init__(response, timeout_s)
        reader = EventReader()
        self._events = (data for piece in response.iter_bytes() for data in reader.feed(piece))

    def __iter__(self) -> Iterator[str]:
        """Yield non-empty pieces of text.  Raises Withheld, APIError, TransportError,
        UnexpectedAnswer."""
        while piece := now(self._piece()):
            yield piece


class AsyncAnswer(BaseAnswer):
    """``BaseAnswer`` of an ``AsyncClient``."""

    _advance = staticmethod(anext)

    def __init__(self, response: httpx.Response, timeout_s: float) -> None:
        super().__init__(response, timeout_s)
        reader = EventReader()
        self._events = (
            data async for piece in response.aiter_bytes() for data in reader.feed(piece)
        )

    async def __aiter__(self) -> AsyncIterator[str]:
        """Yield non-empty pieces of text.  Raises Withheld, APIError, TransportError,
        UnexpectedAnswer."""
        while piece := await self._piece():
            yield piece


class Stream(AbstractContextManager[Answer]):
    """A stream that has not been asked for: ``with`` gives its ``Answer``; iterating gives the
    pieces of its text."""

    def __init__(self, begin: Callable[[], AbstractContextManager[Answer]]) -> None:
        self._begin, self._begun = begin, begin()

    def __enter__(self) -> Answer:
        return self._begun.__enter__()

    def __exit__(self, *raised: Any) -> bool | None:
        return self._begun.__exit__(*raised)

    def __iter__(self) -> Iterator[str]:
        """Ask, yield non-empty pieces of text, and close the connection.  Raises as ``Answer``
        does."""
        with self._begin() as answer:
            yield from answer


class AsyncStream(AbstractAsyncContextManager[AsyncAnswer]):
    """``Stream`` of an ``AsyncClient``."""

    def __init__(self, begin: Callable[[], AbstractAsyncContextManager[AsyncAnswer]]) -> None:
        self._begin, self._begun = begin, begin()

    async def __aenter__(self) -> AsyncAnswer:
        return await self._begun.__aenter__()

    async def __aexit__(self, *raised: Any) -> bool | None:
        return await self._begun.__aexit__(*raised)

    async def __aiter__(self) -> AsyncIterator[str]:
        """Do as ``Stream.__iter__``."""
        async with self._begin() as answer:
            async for piece in answer:
                yield piece
