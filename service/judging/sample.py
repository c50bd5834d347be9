"""A bundle's sample: held-out questions with their accepted answers, so that a stranger can see what the risk is worth.

``train`` draws it before any risk is known (service.trainer.training_set) and keeps it in evaluation.json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from probes_store.bundle import Bundle

KEY: Final = "sample"  # of evaluation.json
MOST_TOKENS: Final = 64  # of an answer, whatever the file says


@dataclass(frozen=True, slots=True)
class SampleQuestion:
    """One question that no fit has seen."""

    prompt: str
    answers: tuple[str, ...]  # accepted; one at least
    kind: str  # "" where the row names none


@dataclass(frozen=True, slots=True)
class Sample:
    """All of them, in the order that they were drawn in: the first n are a sample, too."""

    file: str  # that the rows come from
    judge: str  # "contains" or "exact": how an answer is compared
    abstain_pattern: str  # answers that match it are neither right nor wrong
    max_tokens: int  # of an answer, as in training
    questions: tuple[SampleQuestion, ...]

    def document(self) -> dict[str, Any]:
        """For evaluation.json."""
        return {
            "file": self.file,
            "judge": self.judge,
            "abstain_pattern": self.abstain_pattern,
            "max_tokens": self.max_tokens,
            "questions": [
                {"prompt": one.prompt, "answers": list(one.answers), "kind": one.kind} for one in self.questions
            ],
        }


def sample_of(bundle: Bundle) -> Sample | None:
    """None where the bundle keeps none, or none that reads as our trainer's.

    Raises a subclass of BundleDamaged where the file changed since the bundle was loaded.
    """
    found = bundle.evaluation().get(KEY)
    try:
        return None if found is None else _read(found)
    except (KeyError, TypeError, ValueError, AttributeError, re.error):
        return None


def _read(found: Mapping[str, Any]) -> Sample:
    questions = tuple(
        SampleQuestion(_text(one["prompt"]), tuple(_text(answer) for answer in one["answers"]), str(one["kind"]))
        for one in found["questions"]
    )
    if not questions or not all(one.answers for one in questions) or found["judge"] not in ("contains", "exact"):
        raise ValueError("no questions, or none that can be judged")
    length = min(int(found["max_tokens"]), MOST_TOKENS)
    if length < 1:
        raise ValueError("no room for an answer")
    re.compile(_text(found["abstain_pattern"]))
    return Sample(str(found["file"]), found["judge"], found["abstain_pattern"], length, questions)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value
