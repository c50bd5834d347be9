"""Names of signals, logit scales and class balances, and the default grid of C."""

from __future__ import annotations

from typing import Final, Literal

from probes_store.manifest import FIRST_TOKEN_SIGNALS
from probes_store.manifest import LogitScale as LogitScale

DEPTH_MEAN: Final = "depth_mean"
FIRST_TOKEN = FIRST_TOKEN_SIGNALS  # "first_token" on the command line
SEVERAL = (2, 4, 8)  # heads of a layer whose mean logit is compared with the paper's one head
C_GRID = (0.01, 0.03, 0.1, 0.3, 1.0)

ClassBalance = Literal["weights", "downsample"]
