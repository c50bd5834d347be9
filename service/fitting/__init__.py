"""Fits probes and a classifier on activations and labels; this file has the options' names and
needs no torch."""

from __future__ import annotations

from typing import Final, Literal

from probes_store.manifest import FIRST_TOKEN_SIGNALS

LogitScale = Literal["unit_norm", "standardized", "joint"]
ClassBalance = Literal["weights", "downsample"]

DEPTH_MEAN: Final = "depth_mean"
FIRST_TOKEN = FIRST_TOKEN_SIGNALS  # "first_token" on the command line
C_GRID = (0.01, 0.03, 0.1, 0.3, 1.0)
