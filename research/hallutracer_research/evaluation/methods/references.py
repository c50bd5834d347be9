"""Methods that fit no probe: one number for each row.

Of first-token maximum probability, first-token entropy and prompt length the sign is fitted, by the AUROC on the
training rows, as the trainer's own evaluation does: on sets whose statement stands in the prompt the sign is not known
beforehand.  Scores of answers keep the sign of their papers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hallutracer_research.evaluation.methods.base import Floats, Index, MethodInputs
from service.errors import TrainingError
from service.fitting.scores import risk_auroc

Fit = Callable[[MethodInputs, Index, Index, int, int | None], Floats]


def _with_fitted_sign(read: Callable[[MethodInputs], Floats]) -> Fit:
    def fit(inputs: MethodInputs, train: Index, test: Index, seed: int = 0, jobs: int | None = None) -> Floats:
        values = read(inputs)
        return -values[test] if risk_auroc(inputs.label[train], values[train]) < 0.5 else values[test]

    return fit


def _of_answer(name: str, sign: float, read: Callable[[MethodInputs], Floats | None]) -> Fit:
    """Return a method whose number rises (1) or falls (-1) with hallucination; it raises TrainingError without one."""

    def fit(inputs: MethodInputs, train: Index, test: Index, seed: int = 0, jobs: int | None = None) -> Floats:
        if (scores := read(inputs)) is None:
            raise TrainingError(
                f"{name} scores finished answers, and none were computed: read them first (transformers engine only), "
                "or leave the method out",
                param="methods",
            )
        return sign * scores[test]

    return fit


first_token_max_prob = _with_fitted_sign(lambda inputs: inputs.first_token[:, 0])  # its logarithm, which ranks like it
first_token_entropy = _with_fitted_sign(lambda inputs: inputs.first_token[:, 1])
prompt_length = _with_fitted_sign(lambda inputs: inputs.prompt_tokens.astype(np.float64))
halluguard = _of_answer("halluguard", -1.0, lambda inputs: inputs.halluguard)
perplexity = _of_answer("perplexity", -1.0, lambda inputs: inputs.answers.log_prob)  # ranks like exp(- log_prob)
p_true = _of_answer("p-true", -1.0, lambda inputs: inputs.answers.true)
semantic_entropy = _of_answer("semantic-entropy", 1.0, lambda inputs: inputs.answers.entropy_weighted)
semantic_entropy_discrete = _of_answer("semantic-entropy-discrete", 1.0, lambda inputs: inputs.answers.entropy)
eigenscore = _of_answer("eigenscore", 1.0, lambda inputs: inputs.answers.eigenscore)
