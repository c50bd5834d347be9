"""From options to an engine and scorers.  Heavy imports happen inside: what can be refused before them is."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from probes_store.errors import WrongModel
from service.engines.places import place_of
from service.errors import ModelLoadError
from service.library.default_model import short_name
from service.progress import Report, note, progress
from service.settings import KV_TOKENS

if TYPE_CHECKING:
    from probes_store.bundle import Bundle
    from service.engines.base import Engine, EngineOptions
    from service.readout import Site


def load_engine(
    options: EngineOptions,
    *,
    bundles: Sequence[Bundle] = (),
    rows: Sequence[Site] = (),
    threads: int | None = None,
    max_kv_tokens: int = KV_TOKENS,
    max_wait_s: float = 0.002,
    report: Report = note,
) -> Engine:
    """Load the model: to be read by ``bundles``, or to give whole activations at the sites ``rows``, for training.

    The transformers engine can do either at any time; vLLM compiles in what it reads, so it must be known before.
    ``max_kv_tokens`` and ``max_wait_s`` (the batching delay) are for engines that do not schedule by themselves;
    ``report`` takes lines about what takes long.

    Raises WrongModel before the weights are read where the first bundle, the default, is another model's, and
    ModelLoadError; where a model is not to be had, it names the one that the bundle is for.
    """
    refuse_another_model(options, bundles)
    try:
        if options.engine == "vllm":
            return _vllm(options, bundles, rows, threads, report)
        with progress(f"loading {_shown(options)}", report):
            return _transformers(options, bundles, threads, max_kv_tokens, max_wait_s)
    except ModelLoadError as error:
        raise _with_owner(error, bundles) from error.__cause__


def _transformers(
    options: EngineOptions, bundles: Sequence[Bundle], threads: int | None, max_kv_tokens: int, max_wait_s: float
) -> Engine:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")  # of tqdm in a notebook; our bars are lines of text
        import torch
        from joblib import cpu_count  # of the affinity mask and the control group's quota; torch's knows no quota
        from transformers.utils import logging as transformers_logging

        from service.engines.scheduler import Scheduled
        from service.engines.transformers.engine import TransformersEngine
        from service.engines.transformers.threads import AdaptiveThreads

    _refuse_other_weights(options, bundles)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    adapt, most = threads is None and "OMP_NUM_THREADS" not in os.environ, threads or cpu_count()
    if threads is not None or adapt:
        torch.set_num_threads(most)
    batch = TransformersEngine.load(options)
    loaded = batch.torch_model
    if adapt and loaded is not None and loaded.device.type == "cpu" and most > 1:
        AdaptiveThreads(loaded.model, most)
    return Scheduled(batch, max_kv_tokens=max_kv_tokens, max_wait_s=max_wait_s)


def _vllm(
    options: EngineOptions, bundles: Sequence[Bundle], rows: Sequence[Site], threads: int | None, report: Report
) -> Engine:
    from service.engines.vllm.launch import stages

    with stages() as last, progress(f"loading {_shown(options)} with vllm", report, last):
        from service.engines.vllm.engine import VllmEngine, slots_for
        from service.readout import Site

        sites = {Site(bundle.manifest.readout.site) for bundle in bundles} | set(rows)
        return VllmEngine.load(options, sites=sorted(sites), slots=slots_for(bundles), rows=bool(rows), threads=threads)


def refuse_another_model(options: EngineOptions, bundles: Sequence[Bundle]) -> None:
    """What the name alone tells, before torch is imported: is the model to be had, and may it be the first bundle's?

    Raises ModelLoadError for a path where nothing is, and where the hub has no such model or cannot be reached;
    WrongModel for a model of the hub where the bundle was trained on a folder.
    """
    try:
        if place_of(options.model) is not None:
            return
        if bundles and bundles[0].manifest.model.revision == "local":
            why = f"{options.model!r} is no folder or GGUF file here, and a model of the hub is another"
            raise _wrong(bundles[0], why)
        from service.engines.places import reachable

        reachable(options.model, options.revision)
    except ModelLoadError as error:
        raise _with_owner(error, bundles) from None


def _refuse_other_weights(options: EngineOptions, bundles: Sequence[Bundle]) -> None:
    """Raise WrongModel where a folder's weights are not the bundle's: before they are read, which may take minutes."""
    from service.engines.loading import check_folder, folder_fingerprint

    place = place_of(options.model)
    if not bundles or place is None or not place.is_dir():
        return
    check_folder(place)
    if folder_fingerprint(place) != bundles[0].manifest.model.fingerprint:
        raise _wrong(bundles[0], f"{place.resolve().name} has other weights or another configuration")


def _wrong(bundle: Bundle, why: str) -> WrongModel:
    own = short_name(bundle.manifest.name)
    cure = f"Name the model {own}" if own else "Name that model"
    return WrongModel(
        f"{owner(bundle)}: {why}", cure=f"{cure}, or a bundle of the model that you name, or train one for it"
    )


def owner(bundle: Bundle) -> str:
    """Whose a bundle is: "bundle demo:1 is for hallutracer-demo"."""
    model = bundle.manifest.model
    at = "" if model.revision == "local" else f" at revision {model.revision}"
    return f"bundle {bundle.reference} is for {model.name}{at}"


def _with_owner(error: ModelLoadError, bundles: Sequence[Bundle]) -> ModelLoadError:
    """The error, with whom the bundle is for where the model is what is wrong."""
    if not bundles or error.param != "model":
        return error
    return ModelLoadError(f"{error.message}.  ({owner(bundles[0])})", param=error.param)


def _shown(options: EngineOptions) -> str:
    """The model as the user knows it: of a folder the name."""
    path = Path(options.model)
    return path.name if path.is_dir() else options.model
