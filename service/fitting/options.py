"""Names and values that a fit knows: signals, logit scale, class balance, the grid of C."""

from __future__ import annotations

from typing import Literal

DEPTH_MEAN, LOG_MAX_PROB, ENTROPY = "depth_mean", "log_max_prob", "entropy"
FIRST_TOKEN = (LOG_MAX_PROB, ENTROPY)  # what "first_token" on the command line stands for
C_GRID = (0.01, 0.03, 0.1, 0.3, 1.0)

LogitScale = Literal["unit_norm", "standardized"]
ClassBalance = Literal["weights", "downsample"]
