"""What the events of a stream mean: first the risk, then, where the gate is open, the answer piece by piece.

Knows no HTTP and no waiting; ``synchronous`` and ``asynchronous`` bring the events.
"""

from __future__ import annotations

from typing import TypeVar

import httpx

from service.client.errors import TransportError, Withheld
from service.client.results import Chunk, Completion, ErrorEnvelope, NotOurs, Risk, ScoreResult, Usage, parse
from service.client.wire import api_error, unexpected

T = TypeVar("T")
DONE = "[DONE]"


class AnswerBase:
    """An answer under way.  The risk is there from the beginning; the text comes by iterating.

    Iterating an answer that the gate withheld raises ``Withheld``, so that a forgotten look at ``gated`` cannot pass
    for an empty answer.
    """

    def __init__(self, response: httpx.Response, silence: str) -> None:
        self._response = response
        self._silence = silence  # the message of a timeout between two pieces
        self._score: ScoreResult | None = None
        self._pieces: list[str] = []
        self._finish_reason: str | None = None
        self._usage: Usage | None = None
        self._ended = False
        self._left = False  # its 'with' is over, and the connection closed

    @property
    def score(self) -> ScoreResult:
        """All that came before the first token: ids, bundle, policy, risk."""
        assert self._score is not None, "an answer is handed out only after its first event"
        return self._score

    @property
    def first(self) -> Risk:
        """The prompt's ``Risk`` in full."""
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
        """There will be no text."""
        return self.first.gated

    @property
    def message(self) -> str | None:
        """What to show instead of an answer, where the policy has such a text."""
        return self.first.message

    @property
    def completion(self) -> Completion | None:
        """The whole answer once it has ended; None before, and where the gate withheld it."""
        if not self._ended or self._finish_reason is None or self._usage is None:
            return None
        return Completion("".join(self._pieces), self._finish_reason, self._usage.completion_tokens)

    @property
    def usage(self) -> Usage:
        """Tokens so far; those of the answer are counted at its end."""
        return self._usage or self.score.usage

    def _begin(self, data: str | None) -> None:
        """Take the first event; None where the stream ended without one."""
        if data is None:
            raise self._broken()
        if data == DONE:
            raise unexpected(self._response, "the stream has no risk in it")
        self._score = self._read(ScoreResult, data)
        if len(self._score.data) != 1:
            raise unexpected(self._response, f"field 'data': {len(self._score.data)} risks in a stream of one prompt")

    def _require_open(self) -> None:
        if self.gated:
            raise Withheld(self.first)
        if self._left and not self._ended:
            raise RuntimeError("the stream was closed before its end: read it inside its 'with'")

    def _take(self, data: str | None) -> str | None:
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

    def _read(self, shape: type[T], data: str) -> T:
        try:
            return parse(shape, data)
        except NotOurs as error:
            problem = str(error)
        try:
            body = parse(ErrorEnvelope, data).error
        except NotOurs:
            raise unexpected(self._response, problem) from None
        raise api_error(body, None, self._response.headers.get("x-request-id"))

    def _broken(self) -> TransportError:
        return TransportError(f"the stream broke off after {len(self._pieces)} pieces, before its end was announced")


def check_stream(response: httpx.Response) -> None:
    """Refuse a 200 that is not an event stream.  Raises UnexpectedAnswer."""
    if response.headers.get("content-type", "").partition(";")[0].strip() != "text/event-stream":
        raise unexpected(response, "it is not an event stream")
