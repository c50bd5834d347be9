"""What a service calls, and what only some services have: an annex fills these protocols."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from service.feedback.rows import Tally
from service.policies.guard import Upstream
from service.serving.judgement import AnswerEnd, Judgement, StoredPrompt


class AnswerStore(Protocol):
    """What keeps answers, and what is said of them."""

    def stored(self, content: Mapping[str, Any]) -> StoredPrompt:
        """Return what is stored of a prompt; slow for a long one."""

    def record(self, judgement: Judgement) -> None:
        """Keep what was judged.  Raises nothing: the answer does not wait for it."""

    def tally(self, digest: str) -> Tally:
        """Return what labels say of a bundle's drawn answers; slow.  Raises FeedbackUnavailable."""

    def close(self) -> None:
        """Write what waits."""


class UpstreamCall(Protocol):
    """A prompt that is sent on to the server that a policy falls back on."""

    headers: dict[str, str]  # that the request to it has

    def note(self, document: Mapping[str, Any]) -> None:
        """Take over usage and finish reasons of an answer or a chunk."""

    def end(self, code: str | None) -> None:
        """Note that it ended; ``code``: why without an answer."""


class RequestTrace(Protocol):
    """The trace of one request."""

    id: str | None  # of the request's log line

    def upstream(self, upstream: Upstream, route: str) -> UpstreamCall:
        """Note that a prompt is sent on."""

    def end(
        self,
        request_id: str,
        route: str | None,
        status: int,
        code: str | None,
        judgement: Judgement | None = None,
        answers: Sequence[AnswerEnd] = (),
    ) -> None:
        """Note how the request ended; ``code`` is the error's, ``route`` None where there is
        none."""


class Tracing(Protocol):
    """Traces of all requests."""

    def request(self, headers: Mapping[str, str], method: str) -> RequestTrace:
        """Begin the trace of a request."""

    def close(self) -> None:
        """Send what is left."""
