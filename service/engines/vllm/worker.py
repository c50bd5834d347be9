"""The worker class that vLLM loads: its own worker, with the readout in the model.

    vllm serve MODEL --worker-cls service.engines.vllm.worker.Worker

It loads the model as vLLM does, then adds the readout before anything is compiled, warmed up or captured.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import __version__ as vllm_version
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.platforms import current_platform

from service.engines import families
from service.engines.vllm import attach, runners, sites
from service.engines.vllm.reader import Reader
from service.engines.vllm.stages import say
from service.engines.vllm.wire import KEY, Plan, probe_digest
from service.errors import EngineError
from service.readout import Probes, Site

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as VllmWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as VllmWorker

SLOTS = 4


class Worker(VllmWorker):  # type: ignore[misc]
    """vLLM's worker of one rank, with the readout."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        """Raise EngineError for unsupported configurations, and add the readout to the key of vLLM's compile cache."""
        refuse_unsupported(vllm_config)
        self.hallutracer_plan = plan = plan_of(vllm_config)
        additional = vllm_config.additional_config
        if Site.RESIDUAL_STREAM in plan.sites:  # the other site is not in the graph
            if isinstance(additional, dict):  # hashed into vLLM's compile cache's key, which ignores worker classes
                additional[f"{KEY}_fingerprint"] = fingerprint(plan)
            if pieces := vllm_config.compilation_config.splitting_ops:
                pieces.append(sites.KEEP)  # between CUDA graphs, like attention
        super().__init__(vllm_config, *args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, then add the readout to it and to its runner."""
        say("loading the weights")
        super().load_model(*args, **kwargs)
        config = self.vllm_config.model_config
        group = get_tp_group()
        installed = attach.install(
            self.model_runner.model,
            families.family_of(config.hf_config),
            self.hallutracer_plan,
            sites.TensorParallelRank(group.rank_in_group, group.world_size),
            self.device,
            config.dtype,
        )
        self.hallutracer_reader = Reader(self.hallutracer_plan, installed, runners.link(), self.device)
        runners.adopt(self.model_runner, self.hallutracer_reader)

    def determine_available_memory(self) -> Any:
        """As vLLM does it; this is where the model is compiled."""
        say("compiling the model, which later starts take from vLLM's cache")
        return super().determine_available_memory()

    def compile_or_warm_up_model(self) -> Any:
        """As vLLM does it."""
        say("warming up")
        return super().compile_or_warm_up_model()

    def hallutracer_describe(self) -> dict[str, Any]:
        """This rank's readout; called through vLLM's ``collective_rpc``."""
        plan, reader = self.hallutracer_plan, self.hallutracer_reader
        return {
            "layers": [next(iter(reader.sites.values())).layers.start, next(iter(reader.sites.values())).layers.stop],
            "sites": [str(site) for site in plan.sites],
            "slots": plan.slots,
            "rows": plan.activations,
            "geometry": [plan.geometry.num_layers, plan.geometry.num_heads, plan.geometry.head_dim,
                         plan.geometry.hidden_size],
            "runner": "V2" if isinstance(self.model_runner, runners.V2Reading) else "V1",
            "fingerprint": fingerprint(plan),
        }  # fmt: skip

    def hallutracer_write(self, slot: int, site: str, head: list[int], numbers: bytes) -> None:
        """Write a probe into a slot of its site; ``numbers`` is float32 [m, dim + 2]: direction, bias, scale."""
        reader = self.hallutracer_reader
        readout, column = reader.sites[Site(site)], reader.plan.column(Site(site), slot)
        reader.digests.pop(column, None)  # nothing until it is written
        table = np.frombuffer(numbers, np.float32).reshape(len(head), readout.dim + 2)
        with torch.inference_mode():
            readout.write(
                slot,
                Probes(Site(site), np.asarray(head), table[:, :-2].copy(), table[:, -2].copy(), table[:, -1].copy()),
            )
        reader.digests[column] = probe_digest(site, head, numbers)


def refuse_unsupported(config: VllmConfig) -> None:
    """Raise EngineError for configurations that the readout does not support."""
    parallel = config.parallel_config
    for unsupported, feature in (
        (config.speculative_config is not None, "speculative decoding"),
        (config.lora_config is not None, "LoRA adapters"),
        (parallel.use_ubatching, "dual-batch overlap or micro-batches"),
        (config.cache_config.kv_sharing_fast_prefill, "fast prefill with a shared KV cache"),
        (getattr(parallel, "decode_context_parallel_size", 1) > 1, "decode context parallelism"),
        (getattr(parallel, "prefill_context_parallel_size", 1) > 1, "prefill context parallelism"),
        (
            config.compilation_config.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL,
            "one CUDA graph for prefills (cudagraph_mode FULL; FULL_AND_PIECEWISE is read)",
        ),
        (config.compilation_config.pass_config.fuse_attn_quant, "attention fused with quantization (fuse_attn_quant)"),
        # Each rank would have the logits of its own requests only.
        (getattr(parallel, "enable_batch_sharded_sampling", False), "batch-sharded sampling"),
        (config.model_config.runner_type != "generate", f"the {config.model_config.runner_type} runner"),
    ):
        if unsupported:
            raise EngineError(f"the readout does not support {feature}; start vLLM without it")
    if current_platform.is_cpu() and parallel.pipeline_parallel_size > 1 and config.model_config.enforce_eager:
        raise EngineError(
            "vLLM's CPU build cannot run pipeline stages with enforce_eager (it skips the warm-up that allocates their "
            "buffers); remove enforce_eager, or use tensor parallelism instead"
        )


def plan_of(config: VllmConfig) -> Plan:
    """What to read, from ``--additional-config '{"hallutracer": {"sites": [...], "slots": 4, "rows": false}}'``.

    Raises EngineError naming the invalid key.
    """
    additional = config.additional_config
    given = additional.get(KEY, {}) if isinstance(additional, dict) else {}
    if unknown := sorted(set(given) - {"sites", "slots", "rows"}):
        raise EngineError(f"additional_config.{KEY} has no {unknown[0]!r}; it takes sites, slots and rows")
    try:
        sites = tuple(site for site in Site if site in {Site(name) for name in given.get("sites", list(Site))})
    except ValueError as error:
        raise EngineError(f"additional_config.{KEY}.sites: {error}; sites are {', '.join(Site)}") from None
    slots = given.get("slots", SLOTS)
    if not sites or not isinstance(slots, int) or slots < 1:
        raise EngineError(f"additional_config.{KEY} needs at least one site and one slot, not {given}")
    plan = Plan(families.geometry(config.model_config.hf_config), sites, slots, bool(given.get("rows", False)))
    if plan.activations and config.parallel_config.pipeline_parallel_size > 1:
        raise EngineError(
            "activations for training cannot be extracted across pipeline stages; use tensor parallelism instead"
        )
    return plan


def fingerprint(plan: Plan) -> str:
    """sha256 of everything that could change the compiled graph: our code, the plan, vLLM's and torch's versions."""
    code = b"".join(Path(module.__file__ or "").read_bytes() for module in (attach, sites, families))
    facts = json.dumps([repr(plan), vllm_version, torch.__version__]).encode()
    return hashlib.sha256(code + facts).hexdigest()
