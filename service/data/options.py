"""Options of collection, labels and judges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ABSTAIN = (
    r"(?i)\b(i am|i'm|im)\s+(not\s+(entirely\s+|quite\s+|really\s+)?(sure|certain)|unsure|uncertain|unable to)\b"
    r"|\bi\s+(do\s+not|don't|dont|really don't|cannot|can't)\s+(know|recall|remember|say|answer|tell|determine)\b"
    r"|\b(no|not enough|insufficient)\s+(idea|information)\b|\bunknown to me\b"
    r"|\bi\s+(do\s+not|don't|dont)\s+have\s+((that|any|enough|this)\s+)?information\b"
)

BATCH_ROWS = 128  # prompts in one call of the engine: answers of fewer read all weights more often, to little use

Labels = Literal["given", "generate"]
TrainingLabels = Literal["given", "generate", "sample"]  # sample: K sampled answers beside the greedy one
JudgeName = Literal["exact", "contains", "regex", "openai", "similarity", "calls"]


@dataclass(frozen=True)
class JudgeOptions:
    """How a generated answer is compared with the accepted ones."""

    name: JudgeName = "contains"  # see data/judges.py
    base_url: str = ""  # openai: an endpoint up to and including /v1
    model: str = ""  # openai: the judging model
    api_key: str = ""  # openai: sent as a bearer token where not empty; never written to a file
    timeout_s: float = 60.0  # openai: per request
    answer_pattern: str = ""  # its first group is the answer inside the generated text; empty: the whole text
    retries: int = 3  # openai: further tries after a failure that may pass (connection, 429, 5xx, no yes or no)

    def described(self) -> str:
        """The manifest's record of the judge."""
        how = {"openai": self.model, "similarity": "rouge-l", "calls": "bfcl"}.get(self.name)
        name = f"{self.name}:{how}" if how else self.name
        return f"{name} of {self.answer_pattern}" if self.answer_pattern else name
