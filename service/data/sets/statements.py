"""What the statement sets share: the question put to the model, and the row.

In True-False, HaluEval 2.0 and HELM the statement stands inside the prompt and the label is the data set's own: a probe
trained on them tells true text from false text, not a good answer from a bad one.  The papers that use these sets give
no template; this one is IRIS's zero-shot prompt.
"""

from __future__ import annotations

from typing import Any

TEMPLATE = (
    "Determine whether the given statement is TRUE or FALSE. The Final Answer must only be either 'TRUE.' or 'FALSE.' "
    "only.\n\nStatement: {statement}\nFinal Answer: "
)


def statement_row(identifier: str, statement: str, factual: bool, group: str, kind: str) -> dict[str, Any]:
    """One training row; label 1 is factual."""
    return {
        "id": identifier,
        "prompt": TEMPLATE.format(statement=statement),
        "label": int(factual),
        "group": group,
        "kind": kind,
    }
