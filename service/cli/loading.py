"""From options to an engine, a store and scorers.  Heavy imports happen inside, after the command line was parsed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from probes_store.bundle import Bundle
    from probes_store.store import Store
    from service.engines.base import Engine, EngineOptions
    from service.scoring import Scorer

DEMO_BUNDLES = ("demo", "demo-fused")


def open_store(root: Path) -> Store:
    """The user's store, with the shipped bundles behind it."""
    from probes_store.store import SHIPPED, Store

    return Store(root, fallbacks=[SHIPPED])


def engine_options(
    model: str | None, revision: str | None, dtype: str, device: str, max_batch_tokens: int | None
) -> EngineOptions:
    """Engine options; without a model, the demo model."""
    from service.demo import MODEL_DIR
    from service.engines.base import EngineOptions

    return EngineOptions(
        model=model if model is not None else str(MODEL_DIR),
        revision=revision,
        dtype=dtype,
        device=device,
        max_batch_tokens=max_batch_tokens,
    )


def bundle_names(model: str | None, given: Sequence[str], *, all_demo: bool = False) -> list[str]:
    """Which bundles to load; the demo model has its own, any other model must name one."""
    if given:
        return list(given)
    if model is None:
        return list(DEMO_BUNDLES if all_demo else DEMO_BUNDLES[:1])
    raise typer.BadParameter(
        f"which bundle reads {model}?  Name one with --bundle (see 'hallutracer bundle list'), "
        "or make one with 'hallutracer train'",
        param_hint="--bundle",
    )


def load_engine(options: EngineOptions, threads: int | None) -> Engine:
    """Load the model."""
    import torch
    from transformers.utils import logging as transformers_logging

    from service.engines.transformers_engine import TransformersEngine

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if threads is not None:
        torch.set_num_threads(threads)
    return TransformersEngine.load(options)


def load_scorers(engine: Engine, bundles: Sequence[Bundle]) -> list[Scorer]:
    """Match each bundle with the model and replay its golden prompts."""
    from service.scoring import Scorer

    return [Scorer(engine, bundle) for bundle in bundles]
