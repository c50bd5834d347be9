"""From options to an engine, a store and scorers.  Heavy imports happen inside, after the command line was parsed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from service.cli.default_model import SHIPPED, default_model
from service.cli.options import BundleOptions, EngineChoice, StoreOptions, UsageError
from service.cli.output import Report, note, progress
from service.settings import KV_TOKENS

if TYPE_CHECKING:
    from probes_store.bundle import Bundle
    from probes_store.store import Store
    from service.engines.base import Engine
    from service.readout import Site
    from service.scoring import Scorer

log = logging.getLogger("hallutracer")
T = TypeVar("T")


def open_store(options: StoreOptions) -> Store:
    """The user's store, with the shipped bundles behind it."""
    from probes_store.store import SHIPPED, Store

    return Store(options.store.expanduser(), fallbacks=[SHIPPED])


def bundle_names(model: str | None, options: BundleOptions) -> tuple[str, ...]:
    """Which bundles to load; shipped models have their own, any other model must name one.  Raises UsageError."""
    if options.bundle:
        return options.bundle
    if (model or default_model()) in SHIPPED:
        return SHIPPED[model or default_model()]
    raise UsageError(
        "--bundle",
        f"which bundle reads {model}?  Name one (see 'hallutracer bundle list'), or make one with 'hallutracer train'",
    )


def load_engine(
    choice: EngineChoice,
    *,
    bundles: Sequence[Bundle] = (),
    rows: Sequence[Site] = (),
    max_kv_tokens: int = KV_TOKENS,
    max_wait_s: float = 0.002,
    report: Report = note,
) -> Engine:
    """Load the model: to be read by ``bundles``, or to give whole activations at the sites ``rows``, for training.

    The transformers engine can do either at any time; vLLM compiles in what it reads, so it must be known before.
    ``max_kv_tokens`` and ``max_wait_s`` (the batching delay) are for engines that do not schedule by themselves;
    ``report`` takes lines about what takes long.
    """
    options = choice.options_for([bundle.manifest.name for bundle in bundles])
    if options.engine == "vllm":
        from service.engines.vllm.engine import SLOTS, VllmEngine
        from service.readout import Site

        sites = {Site(bundle.manifest.readout.site) for bundle in bundles} | set(rows)
        with progress(
            f"loading {options.model} with vllm; it compiles and tests itself, which takes minutes at first", report
        ):
            return VllmEngine.load(
                options, sites=sorted(sites), slots=max(SLOTS, len(bundles)), rows=bool(rows), threads=choice.threads
            )
    with progress(f"loading {options.model}", report):
        import torch
        from transformers.utils import logging as transformers_logging

        from service.engines.scheduler import Scheduled
        from service.engines.transformers.engine import TransformersEngine

        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        if choice.threads is not None:
            torch.set_num_threads(choice.threads)
        batch = TransformersEngine.load(options)
        return Scheduled(batch, max_kv_tokens=max_kv_tokens, max_wait_s=max_wait_s)


def load_bundles(store: Store, names: Sequence[str], *, leave_out: bool = False) -> dict[str, Bundle]:
    """The bundle of each reference.

    With ``leave_out`` a bundle that cannot be used is logged and left out, but not the first: it is the default, and
    another would judge in its place.
    """
    return _usable(names, store.load, leave_out)


def load_scorers(
    engine: Engine, bundles: Mapping[str, Bundle], report: Report = note, *, leave_out: bool = False
) -> dict[str, Scorer]:
    """Match each bundle with the model and replay its golden prompts; ``leave_out`` as for ``load_bundles``."""
    from service.scoring import Scorer

    with progress("replaying the bundles' golden prompts", report):
        return _usable(tuple(bundles), lambda name: Scorer(engine, bundles[name]), leave_out)


def _usable(names: Sequence[str], load: Callable[[str], T], leave_out: bool) -> dict[str, T]:
    from probes_store.errors import BundleError

    usable: dict[str, T] = {}
    for name in names:
        try:
            usable[name] = load(name)
        except BundleError as error:
            if not leave_out or name == names[0]:
                raise
            log.error("bundle %s is left out: %s", name, error)
    return usable
