"""A stream without its connection: events from bytes, first the risk, then, unless gated, the answer piece by piece."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeVar

import httpx

from hallutracer_client import wire
from hallutracer_client.errors import TransportError, Withheld
from hallutracer_client.results import Chunk, Completion, ErrorEnvelope, InvalidBody, Risk, ScoreResult, Usage, parse

T = TypeVar("T")
DONE = b"[DONE]"
_END = re.compile(rb"\r\n|\n|\r")  # bytes.splitlines knows more; a separator inside a text, U+2028 say, ends no line


class EventReader:
    """Server-sent events from bytes that come in any pieces; of an event's fields only ``data`` is read.

    https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
    """

    def __init__(self) -> None:
        self._rest = b""  # of a line that has not ended
        self._after_return = False  # a line feed that comes next belongs to the carriage return before it
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


class BaseAnswer:
    """A streamed answer.  The risk is known from the start; iterating gives the text.

    Iterating a gated answer raises ``Withheld``, so a missing check of ``gated`` cannot pass for an empty answer.
    """

    def __init__(self, response: httpx.Response, timeout_message: str) -> None:
        self._response, self._timeout_message = response, timeout_message
        self._score: ScoreResult | None = None
        self._pieces: list[str] = []
        self._finish_reason: str | None = None
        self._usage: Usage | None = None
        self._ended = self._closed = False

    @property
    def score(self) -> ScoreResult:
        """The first event: ids, bundle, policy, risk."""
        assert self._score is not None, "set by _begin"
        return self._score

    @property
    def first(self) -> Risk:
        """The prompt's ``Risk``."""
        return self.score.only

    @property
    def risk(self) -> float:
        """P(hallucinated), known before the first token."""
        return self.first.risk

    @property
    def decision(self) -> str:
        """The decision on the prompt."""
        return self.first.decision

    @property
    def gated(self) -> bool:
        """Whether the gate withholds the text."""
        return self.first.gated

    @property
    def message(self) -> str | None:
        """The policy's text to show instead of an answer, if it has one."""
        return self.first.message

    @property
    def completion(self) -> Completion | None:
        """The whole answer after the end of the stream; None before, or if gated."""
        if not self._ended or self._finish_reason is None or self._usage is None:
            return None
        return Completion("".join(self._pieces), self._finish_reason, self._usage.completion_tokens)

    @property
    def usage(self) -> Usage:
        """Token counts; those of the answer are known at its end."""
        return self._usage or self.score.usage

    def _begin(self, data: bytes | None) -> None:
        if (first := self._there(data)) == DONE:
            raise wire.unexpected(self._response, "the stream has no risk")
        self._score = self._read(ScoreResult, first)
        if len(self._score.data) != 1:
            problem = f"field 'data': {len(self._score.data)} risks in a stream of one prompt"
            raise wire.unexpected(self._response, problem)

    def _require_open(self) -> None:
        if self.gated:
            raise Withheld(self.first)
        if self._closed and not self._ended:
            raise RuntimeError("the stream was closed before its end: read it inside its 'with'")

    def _accept(self, data: bytes | None) -> str:
        """Return the next event's text, perhaps empty."""
        if (event := self._there(data)) == DONE:
            if self._finish_reason is None or self._usage is None:
                raise wire.unexpected(self._response, "the answer ended without 'finish_reason' and 'usage'")
            self._ended = True
            return ""
        chunk = self._read(Chunk, event)
        self._pieces.append(chunk.delta.text)
        self._finish_reason = chunk.finish_reason or self._finish_reason
        self._usage = chunk.usage or self._usage
        return chunk.delta.text

    def _there(self, data: bytes | None) -> bytes:
        if data is None:
            raise TransportError(f"the stream broke off after {len(self._pieces)} pieces, before its end")
        return data

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
