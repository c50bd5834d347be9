"""From options to an engine, a store and scorers.  Heavy imports happen inside, after the command line was parsed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from probes_store.bundle import Bundle
    from probes_store.store import Store
    from service.engines.base import Engine, EngineName, EngineOptions
    from service.readout import Site
    from service.scoring import Scorer

DEMO_BUNDLES = ("demo", "demo-fused")


def open_store(root: Path) -> Store:
    """The user's store, with the shipped bundles behind it."""
    from probes_store.store import SHIPPED, Store

    return Store(root, fallbacks=[SHIPPED])


def engine_options(
    model: str | None,
    revision: str | None,
    dtype: str,
    device: str,
    max_batch_tokens: int | None,
    engine: EngineName = "transformers",
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    engine_args: Sequence[str] | None = None,
) -> EngineOptions:
    """Engine options; without a model, the demo model.  Raises BadParameter for an argument that is not NAME=VALUE."""
    from service.demo import MODEL_DIR
    from service.engines.base import EngineOptions

    extra: dict[str, str] = {}
    for argument in engine_args or ():
        name, equals, value = argument.partition("=")
        if not (name and equals):
            raise typer.BadParameter(f"{argument!r} is not NAME=VALUE", param_hint="--engine-arg")
        extra[name] = value
    for flag, size in (("tensor_parallel_size", tensor_parallel), ("pipeline_parallel_size", pipeline_parallel)):
        if size > 1 and engine != "vllm":
            raise typer.BadParameter("needs --engine vllm", param_hint=f"--{flag.replace('_', '-')}")
        if size > 1:
            extra[flag] = str(size)
    return EngineOptions(
        model=model if model is not None else str(MODEL_DIR),
        revision=revision,
        dtype=dtype,
        device=device,
        max_batch_tokens=max_batch_tokens,
        engine=engine,
        extra=extra,
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


def load_engine(
    options: EngineOptions, threads: int | None, *, bundles: Sequence[Bundle] = (), rows: Sequence[Site] = ()
) -> Engine:
    """Load the model: to be read by ``bundles``, or to give whole rows at the sites ``rows``, for training.

    The transformers engine can do either at any time; what vLLM compiles in has to be said before.
    """
    if options.engine == "vllm":
        return _load_vllm(options, threads, bundles, rows)
    import torch
    from transformers.utils import logging as transformers_logging

    from service.engines.scheduler import Scheduled
    from service.engines.transformers.engine import TransformersEngine

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if threads is not None:
        torch.set_num_threads(threads)
    return Scheduled(TransformersEngine.load(options))


def _load_vllm(options: EngineOptions, threads: int | None, bundles: Sequence[Bundle], rows: Sequence[Site]) -> Engine:
    from service.engines.vllm.engine import SLOTS, VllmEngine
    from service.readout import Site

    sites = {Site(bundle.manifest.readout.site) for bundle in bundles} | set(rows)
    return VllmEngine.load(
        options, sites=sorted(sites), slots=max(SLOTS, len(bundles)), rows=bool(rows), threads=threads
    )


def load_scorers(engine: Engine, bundles: Sequence[Bundle]) -> list[Scorer]:
    """Match each bundle with the model and replay its golden prompts."""
    from service.scoring import Scorer

    return [Scorer(engine, bundle) for bundle in bundles]
