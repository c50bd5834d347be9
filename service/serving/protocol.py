"""What the rooms have in common: what the API asks of one, whom they tell, and when they give an engine up.

Knows no engine and no queue.
"""

from __future__ import annotations

from typing import Protocol

from service.errors import EngineError, NonFiniteReadout, NotReady, RequestError
from service.serving.deadline import Deadline
from service.serving.job import Ticket

MOST_FAILURES = 32  # prompts in a row


class Observer(Protocol):
    """Who is told about batches and queues; called from one thread, the engine's or the loop's."""

    def batch(self, prompts: int, tokens: int) -> None:
        """A forward pass over ``prompts`` prompts of ``tokens`` real tokens ended well."""
        ...

    def queue(self, waiting: int, decoding: int) -> None:
        """How many prompts wait and how many answers are being decoded."""
        ...


class Room(Protocol):
    """Where tickets are submitted: on the event loop, which is told there what became of them."""

    @property
    def alive(self) -> bool:
        """Whether work is still being done."""
        ...

    def check_space(self, prompts: int, deadline: Deadline, *, continues: bool = False) -> None:
        """Raise Overloaded, or NotReady after ``close``: call it before a request's prompts are tokenized."""
        ...

    def check_not_full(self) -> None:
        """Raise Overloaded where not even one more prompt may wait: cheap enough to ask before a body is read."""
        ...

    def submit(self, ticket: Ticket) -> None:
        """Let a ticket's jobs in, all of them or none; events reach it from here on.  Raises as ``check_space``."""
        ...

    def close(self) -> None:
        """Refuse everything with NotReady, and leave the engine idle.  Call from another thread than the loop's."""
        ...


class Failures:
    """Prompts that failed since the last one that did not, by no fault of theirs."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def reset(self) -> None:
        """One went well."""
        self._in_a_row = 0

    def count(self, error: BaseException, most: int = MOST_FAILURES) -> None:
        """One failed.  Raises EngineError at the ``most``-th in a row."""
        # A device in an error state (CUDA keeps one until the process ends) fails every prompt for ever.
        self._in_a_row += not isinstance(error, RequestError | NonFiniteReadout)
        if self._in_a_row >= most:
            raise EngineError(f"{self._in_a_row} prompts in a row failed; the last: {error}") from error


def shutting_down() -> NotReady:
    """What those get who wait when a room closes, and those who come later."""
    return NotReady("the service is shutting down")
