"""What is stored of a scored prompt, what a caller says of its answer, and what became of that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Label = Literal["factual", "hallucinated", "unclear"]
LABELS: tuple[Label, ...] = get_args(Label)
Standing = Literal["new", "repeated", "changed"]
CONTINUE = "continue"  # the decision after which an answer of this model was given
_ROW_BYTES = 1_000  # of a waiting row without its prompt, roughly


@dataclass(frozen=True, slots=True)
class Answer:
    """One scored prompt.  A request of several has one for each, told apart by ``index``."""

    uid: str  # drawn here: a batch that is written twice is there once
    request_id: str
    index: int
    caller: str
    time: float  # Unix, seconds
    route: str
    model: str
    bundle: str  # name:version
    digest: str  # of the bundle
    probes: str  # sha256 of its probes: versions that share them share their signals
    policy: str
    threshold: float
    risk: float
    flagged: bool
    decision: str
    signals: Mapping[str, float]  # what the classifier read, by name
    mark: str  # digest of the prompt: tells repeats, and rows of training
    prompt: str | None = None  # as JSON; only where the operator asked for it
    drawn: bool = False  # at random, when it was given, of the answers that a guarantee is about

    @property
    def size(self) -> int:
        """Bytes that it takes while it waits, roughly."""
        return _ROW_BYTES + len(self.prompt or "")


@dataclass(frozen=True, slots=True)
class Given:
    """A label for the answer with this id, as a caller gave it."""

    request_id: str
    index: int
    caller: str
    others: bool  # whether the caller may label answers to other callers
    label: Label
    comment: str | None
    time: float

    @property
    def size(self) -> int:
        """Bytes that it takes while it waits, roughly."""
        return _ROW_BYTES + len(self.comment or "")


@dataclass(frozen=True, slots=True)
class Tally:
    """What labels say of a bundle's drawn answers: one for each different prompt, up to the newest with a label."""

    drawn: int
    labelled: int  # of these; unclear ones and those that callers disagree about count neither here nor as wrong
    wrong: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A label that is on disk, beside what was known of its answer."""

    standing: Standing  # of this caller's labels of this answer
    conflict: bool  # another caller says otherwise
    decision: str
    flagged: bool
    model: str
    bundle: str
    drawn: bool = False
    tally: Tally | None = None  # of the bundle's drawn answers, where this label is of one and says something new

    @property
    def answered(self) -> bool:
        """Whether there was an answer of this model to judge."""
        return self.decision == CONTINUE
