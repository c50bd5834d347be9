"""EigenScore: how far apart the states of several answers are (Chen et al. 2024, "INSIDE: LLMs' Internal States Retain
the Power of Hallucination Detection").

Z [d, K] are the residual-stream states of the last token of K sampled answers, at the middle layer:

    Sigma = Z^T J_d Z,  J_d = I - 1 1^T / d        score = log det(Sigma + alpha I) / K,  alpha = 0.001

It rises with the answers' diversity, and so with hallucination.  Two things differ from the paper: answers are the same
as for semantic entropy (there temperature 0.5, top-p 0.99, top-k 5), and its clipping of extreme features while the
model decodes is left out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ALPHA = 1e-3


def middle(layers: int) -> int:
    """The layer that is read, of so many."""
    return layers // 2


def eigen_score(states: NDArray[np.floating]) -> float:
    """The score of states [K, d]; finite for every finite input, since Sigma has no negative eigenvalue."""
    z = np.asarray(states, np.float64)
    z = z - z.mean(axis=1, keepdims=True)
    eigenvalues = np.maximum(np.linalg.eigvalsh(z @ z.T), 0.0)
    return float(np.log(eigenvalues + ALPHA).mean())
