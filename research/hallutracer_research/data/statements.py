"""The statement sets (True-False, HaluEval 2.0, HELM): the prompt around a statement, and the training row.

The label belongs to a statement inside the prompt, so a probe trained on these sets tells true text from false text,
not a good answer from a bad one.  The papers that use the sets give no template; this one is IRIS's zero-shot prompt.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from hallutracer_research.data.files import Row

TEMPLATE = (
    "Determine whether the given statement is TRUE or FALSE. The Final Answer must only be either 'TRUE.' or 'FALSE.' "
    "only.\n\nStatement: {statement}\nFinal Answer: "
)


class Statement(NamedTuple):
    """One statement as a data set lists it; ``factual`` is independent of the file's own polarity."""

    id: str
    text: str
    factual: bool
    group: str
    kind: str

    def row(self) -> Row:
        """The training row; label 1 is factual."""
        prompt = TEMPLATE.format(statement=self.text)
        return {"id": self.id, "prompt": prompt, "label": int(self.factual), "group": self.group, "kind": self.kind}


def unambiguous_rows(statements: Sequence[Statement]) -> tuple[list[Row], dict[str, int]]:
    """Training rows, and counts {read, contradictory, repeated} of the statements read and of those left out.

    A text that carries both labels within its group is left out (contradictory); repeats within a kind are kept once.
    """
    labels: dict[tuple[str, str], set[bool]] = defaultdict(set)
    for statement in statements:
        labels[statement.group, statement.text].add(statement.factual)
    kept: dict[tuple[str, str, str], Row] = {}
    counts = Counter(read=len(statements), contradictory=0, repeated=0)
    for statement in statements:
        key = (statement.kind, statement.group, statement.text)
        if len(labels[statement.group, statement.text]) > 1:
            counts["contradictory"] += 1
        elif key in kept:
            counts["repeated"] += 1
        else:
            kept[key] = statement.row()
    return list(kept.values()), dict(counts)
