"""Methods that fit no probe: first-token maximum probability, first-token entropy, prompt length, HalluGuard's scores.

The first three are one number per row.  Only the sign is fitted, by the AUROC on the training rows, as the trainer's
own evaluation does: on sets whose statement stands in the prompt the sign is not known beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from service.errors import TrainingError
from service.evaluation.methods.base import Floats, Index, MethodInputs
from service.fitting.scores import risk_auroc

COLUMNS: Mapping[str, Callable[[MethodInputs], Floats]] = {
    "first-token-max-prob": lambda inputs: inputs.first_token[:, 0],  # the logarithm ranks like the probability
    "first-token-entropy": lambda inputs: inputs.first_token[:, 1],
    "prompt-length": lambda inputs: inputs.prompt_tokens.astype(np.float64),
}


def reference(name: str, inputs: MethodInputs, train: Index, test: Index) -> Floats:
    """Scores of the test rows, [n_test].  Raises TrainingError where HalluGuard's were not computed."""
    if name != "halluguard":
        values = COLUMNS[name](inputs)
        return -values[test] if risk_auroc(inputs.label[train], values[train]) < 0.5 else values[test]
    if inputs.halluguard is None:
        raise TrainingError(
            "halluguard scores finished answers, and none were computed: call halluguard_scores first (transformers "
            "engine only), or leave the method out",
            param="methods",
        )
    return -inputs.halluguard[test]
