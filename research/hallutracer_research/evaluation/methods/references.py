"""Methods that fit no probe: one number for each row.

Of first-token maximum probability, first-token entropy and prompt length the sign is fitted, by the AUROC on the
training rows, as the trainer's own evaluation does: on sets whose statement stands in the prompt the sign is not known
beforehand.  Scores of answers keep the sign of their papers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from hallutracer_research.evaluation.methods.base import Floats, Index, MethodInputs
from service.errors import TrainingError
from service.fitting.scores import risk_auroc

COLUMNS: Mapping[str, Callable[[MethodInputs], Floats]] = {
    "first-token-max-prob": lambda inputs: inputs.first_token[:, 0],  # the logarithm ranks like the probability
    "first-token-entropy": lambda inputs: inputs.first_token[:, 1],
    "prompt-length": lambda inputs: inputs.prompt_tokens.astype(np.float64),
}
OF_ANSWERS: Mapping[str, tuple[float, Callable[[MethodInputs], Floats | None]]] = {
    "halluguard": (-1.0, lambda inputs: inputs.halluguard),
    "perplexity": (-1.0, lambda inputs: inputs.answers.log_prob),  # ranks like exp(- log_prob)
    "p-true": (-1.0, lambda inputs: inputs.answers.true),
    "semantic-entropy": (1.0, lambda inputs: inputs.answers.entropy_weighted),
    "semantic-entropy-discrete": (1.0, lambda inputs: inputs.answers.entropy),
    "eigenscore": (1.0, lambda inputs: inputs.answers.eigenscore),
}
"""Name -> whether it rises (1) or falls (-1) with hallucination, and the numbers."""


def reference(name: str, inputs: MethodInputs, train: Index, test: Index) -> Floats:
    """Scores of the test rows, [n_test].  Raises TrainingError where a score of answers was not computed."""
    if name in COLUMNS:
        values = COLUMNS[name](inputs)
        return -values[test] if risk_auroc(inputs.label[train], values[train]) < 0.5 else values[test]
    sign, read = OF_ANSWERS[name]
    if (scores := read(inputs)) is None:
        raise TrainingError(
            f"{name} scores finished answers, and none were computed: read them first (transformers engine only), or "
            "leave the method out",
            param="methods",
        )
    return sign * scores[test]
