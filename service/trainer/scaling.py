"""What evaluation.json says of the rule of ``--logit-scale``."""

from __future__ import annotations

import math
from typing import Any

from service.fitting.estimator import ScaledLogits
from service.fitting.nested_cv import rounded


def scaling_document(scaled: ScaledLogits) -> dict[str, Any]:
    """Return the layers' weights and how strongly each seed's were pulled to equal ones; empty without weights."""
    if not scaled.strengths:
        return {}
    return {
        "layer_weights": {
            "weight": rounded((1 / scaled.scale).tolist()),
            "pull_to_equal_weights": [None if math.isinf(strength) else strength for strength in scaled.strengths],
        }
    }
