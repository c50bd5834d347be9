"""The demo model's picture: the trajectories of a question that it can answer and of one that it cannot."""

from __future__ import annotations

from pathlib import Path

from probes_store.bundle import Bundle
from service.engines.base import Engine, Sampling
from service.library.plots import draw_trajectories
from service.policies.guard import GATE
from service.scoring import Scorer

KNOWN = "What is the capital of Italy?"
UNKNOWN = "What is the capital of the Solomon Islands?"


def draw_pair(engine: Engine, bundle: Bundle, path: Path) -> None:
    """Write a PNG with both, and the answers that the model gives without a gate."""
    scorer = Scorer(engine, bundle)
    ids = [scorer.render(prompt=text) for text in (KNOWN, UNKNOWN)]
    reports = scorer.score_or_continue(ids, Sampling(max_tokens=24), GATE.at(1.0))
    draw_trajectories(bundle, (KNOWN, UNKNOWN), reports, path)
