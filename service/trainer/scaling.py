"""What each layer's logit is divided by before the mean over depth is taken: the rules of ``--logit-scale``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from service.fitting.calibration import OutOfFold
from service.fitting.fit import Floats, ProbeFit
from service.fitting.layer_weights import fit_layer_weights
from service.fitting.nested_cv import Inputs, rounded
from service.trainer.options import TrainOptions


@dataclass(frozen=True, eq=False)
class Scaling:
    """One rule, fitted."""

    out_of_fold: Floats  # [seeds, n, m] scaled trajectories; nothing of it was fitted on the row's own fold
    scale: Floats  # [m] of the served probes
    document: dict[str, Any] = field(default_factory=dict)  # what evaluation.json says of it


def scale_logits(inputs: Inputs, crossed: OutOfFold, final: ProbeFit, options: TrainOptions) -> Scaling:
    """``crossed``: the cross-fit over ``options.folds`` and its seeds; ``final``: the served probes."""
    if options.logit_scale == "unit_norm":
        return Scaling(crossed.unit_norm, np.ones_like(final.scale))
    if options.logit_scale == "standardized":
        return Scaling(crossed.standardized, final.scale)
    fits = [
        fit_layer_weights(
            of_seed, inputs.label, inputs.group, folds=options.folds, seed=seed, share=inputs.readouts.share
        )
        for seed, of_seed in zip(options.shuffles, crossed.unit_norm, strict=True)
    ]
    weight = np.mean([fit.weight for fit in fits], axis=0)
    document = {
        "layer_weights": {
            "weight": rounded(weight.tolist()),
            "pull_to_equal_weights": [None if math.isinf(fit.strength) else fit.strength for fit in fits],
        }
    }
    return Scaling(np.stack([fit.out_of_fold for fit in fits]), 1 / weight, document)
