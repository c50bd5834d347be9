"""The events of a stream: first the risk, then, unless gated, the answer piece by piece.

No I/O: ``synchronous`` and ``asynchronous`` supply the events.
"""

from __future__ import annotations

from typing import TypeVar

import httpx

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
from hallutracer_client.wire import api_error, unexpected

T = TypeVar("T")
DONE = b"[DONE]"


class BaseAnswer:
    """A streamed answer.  The risk is known from the start; iterating gives the text.

    Iterating a gated answer raises ``Withheld``, so a missing check of ``gated`` cannot pass for an empty answer.
    """

    def __init__(self, response: httpx.Response, timeout_message: str) -> None:
        self._response = response
        self._timeout_message = timeout_message
        self._score: ScoreResult | None = None
        self._pieces: list[str] = []
        self._finish_reason: str | None = None
        self._usage: Usage | None = None
        self._ended = False
        self._closed = False

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
        """``continue``, ``abstain`` or ``block``."""
        return self.first.decision

    @property
    def gated(self) -> bool:
        """The gate withholds the text."""
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
        """Take the first event; None if the stream ended without one."""
        if data is None:
            raise self._broken()
        if data == DONE:
            raise unexpected(self._response, "the stream has no risk")
        self._score = self._read(ScoreResult, data)
        if len(self._score.data) != 1:
            raise unexpected(self._response, f"field 'data': {len(self._score.data)} risks in a stream of one prompt")

    def _require_open(self) -> None:
        if self.gated:
            raise Withheld(self.first)
        if self._closed and not self._ended:
            raise RuntimeError("the stream was closed before its end: read it inside its 'with'")

    def _accept(self, data: bytes | None) -> str | None:
        """The next event's text, perhaps empty; None at the end of the stream."""
        if data is None:
            raise self._broken()
        if data == DONE:
            if self._finish_reason is None or self._usage is None:
                raise unexpected(self._response, "the answer ended without 'finish_reason' and 'usage'")
            self._ended = True
            return None
        chunk = self._read(Chunk, data)
        self._pieces.append(chunk.delta.text)
        self._finish_reason = chunk.finish_reason or self._finish_reason
        self._usage = chunk.usage or self._usage
        return chunk.delta.text

    def _read(self, shape: type[T], data: bytes) -> T:
        try:
            return parse(shape, data)
        except InvalidBody as error:
            problem = str(error)
        try:
            body = parse(ErrorEnvelope, data).error
        except InvalidBody:
            raise unexpected(self._response, problem) from None
        raise api_error(body, None, self._response.headers.get("x-request-id"))

    def _broken(self) -> TransportError:
        return TransportError(f"the stream broke off after {len(self._pieces)} pieces, before its end")
