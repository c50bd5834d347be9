"""A worker's plan, the configurations it refuses, and its key in vLLM's compile cache."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from service.demo import MODEL_DIR
from service.engines.vllm import sites
from service.engines.vllm.reader import Reader, StageLink
from service.engines.vllm.sites import SiteReadout, TensorParallelRank
from service.engines.vllm.wire import KEY, Plan, probe_digest
from service.errors import EngineError
from service.readout import Geometry, Site
from tests.engines.vllm.installed import vllm_or_skip

vllm_or_skip()

from vllm.config import CUDAGraphMode  # noqa: E402
from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402

from service.engines.vllm import worker  # noqa: E402


def config(additional: dict[str, Any] | None = None) -> Any:
    """vLLM's configuration of the demo model."""
    return AsyncEngineArgs(
        model=str(MODEL_DIR), max_model_len=128, additional_config=additional or {}, kv_cache_memory_bytes=1 << 26
    ).create_engine_config()


def stand_in(**changed: Any) -> Any:
    """The parts of vLLM's configuration that ``refuse_unsupported`` checks."""
    parallel = {
        "use_ubatching": False,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "enable_batch_sharded_sampling": False,
    }
    model = {"runner_type": "generate", "enforce_eager": True}
    compilation = SimpleNamespace(
        cudagraph_mode=changed.pop("cudagraph_mode", CUDAGraphMode.FULL_AND_PIECEWISE),
        pass_config=SimpleNamespace(fuse_attn_quant=changed.pop("fuse_attn_quant", False)),
    )
    return SimpleNamespace(
        compilation_config=compilation,
        speculative_config=changed.pop("speculative_config", None),
        lora_config=changed.pop("lora_config", None),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=changed.pop("kv_sharing_fast_prefill", False)),
        model_config=SimpleNamespace(**{key: changed.pop(key, value) for key, value in model.items()}),
        parallel_config=SimpleNamespace(**parallel | changed),
    )


def test_a_plain_configuration_is_taken() -> None:
    worker.refuse_unsupported(stand_in())
    worker.refuse_unsupported(config())


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"speculative_config": object()}, "speculative decoding"),
        ({"lora_config": object()}, "LoRA"),
        ({"use_ubatching": True}, "dual-batch overlap or micro-batches"),
        ({"kv_sharing_fast_prefill": True}, "fast prefill"),
        ({"decode_context_parallel_size": 2}, "decode context parallelism"),
        ({"prefill_context_parallel_size": 2}, "prefill context parallelism"),
        ({"enable_batch_sharded_sampling": True}, "batch-sharded sampling"),
        ({"cudagraph_mode": CUDAGraphMode.FULL}, "cudagraph_mode FULL"),
        ({"fuse_attn_quant": True}, "fuse_attn_quant"),
        ({"runner_type": "pooling"}, "the pooling runner"),
        ({"pipeline_parallel_size": 2}, "pipeline stages with enforce_eager"),
    ],
)
def test_unsupported_features_are_refused(changed: dict[str, Any], what: str) -> None:
    with pytest.raises(EngineError, match=what):
        worker.refuse_unsupported(stand_in(**changed))


def test_pipeline_stages_are_refused_only_where_they_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    worker.refuse_unsupported(stand_in(pipeline_parallel_size=2, enforce_eager=False))
    monkeypatch.setattr(worker, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    worker.refuse_unsupported(stand_in(pipeline_parallel_size=2))


def test_the_plan_follows_additional_config() -> None:
    plan = worker.plan_of(config())
    assert (plan.sites, plan.slots, plan.activations) == (tuple(Site), worker.SLOTS, False)
    wanted = {"sites": ["residual_stream"], "slots": 2, "rows": True}
    plan = worker.plan_of(config({KEY: wanted, "others": 1}))
    assert (plan.sites, plan.slots, plan.activations) == ((Site.RESIDUAL_STREAM,), 2, True)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"sight": ["residual_stream"]}, "'sight'"),
        ({"sites": ["mlp"]}, "sites"),
        ({"sites": []}, "one site"),
        ({"slots": 0}, "one slot"),
        ({"slots": "4"}, "one slot"),
    ],
)
def test_an_invalid_plan_names_the_key(wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        worker.plan_of(config({KEY: wanted}))


def test_everything_that_changes_the_graph_changes_the_fingerprint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    plan = worker.plan_of(config())
    changed = [replace(plan, slots=7), replace(plan, activations=True), replace(plan, sites=(Site.ATTENTION_HEAD,))]
    fingerprints = {worker.fingerprint(variant) for variant in (plan, *changed)}
    monkeypatch.setattr(worker, "vllm_version", "0.32.1")
    fingerprints.add(worker.fingerprint(plan))
    monkeypatch.undo()
    edited = tmp_path / "sites.py"
    edited.write_text(f"{open(sites.__file__).read()}\n# another line\n")  # noqa: SIM115
    monkeypatch.setattr(sites, "__file__", str(edited))
    fingerprints.add(worker.fingerprint(plan))
    assert len(fingerprints) == 6


def test_the_fingerprint_is_in_the_key_of_vllms_compile_cache() -> None:
    """vLLM leaves the worker class out of that key: without the fingerprint our worker would get a bare graph."""
    bare, ours, fewer_slots = config(), config(), config()
    assert bare.compute_hash() == ours.compute_hash() == fewer_slots.compute_hash()
    bare.parallel_config.worker_cls = "vllm.v1.worker.cpu_worker.CPUWorker"
    ours.parallel_config.worker_cls = "service.engines.vllm.worker.Worker"
    assert bare.compute_hash() == ours.compute_hash(), "vLLM distinguishes worker classes now: remove the fingerprint"
    plan = worker.plan_of(ours)
    for variant, variant_plan in ((ours, plan), (fewer_slots, replace(plan, slots=1))):
        variant.additional_config[f"{KEY}_fingerprint"] = worker.fingerprint(variant_plan)
    assert len({variant.compute_hash() for variant in (bare, ours, fewer_slots)}) == 3


def test_a_slot_that_was_not_written_to_its_end_has_no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests for the old probe, and for the new one, then get no number."""
    plan = Plan(Geometry(2, 2, 4, 8), (Site.ATTENTION_HEAD,), 1, False)
    readout = SiteReadout(plan, Site.ATTENTION_HEAD, range(2), (0, 2), TensorParallelRank(0, 1), torch.device("cpu"))
    made = object.__new__(worker.Worker)
    made.hallutracer_reader = Reader(plan, {Site.ATTENTION_HEAD: readout}, StageLink(), torch.device("cpu"))
    numbers = np.ones((2, 6), np.float32).tobytes()
    made.hallutracer_write(0, "attention_head", [0, 1], numbers)
    assert made.hallutracer_reader.digests == {0: probe_digest("attention_head", [0, 1], numbers)}
    monkeypatch.setattr(readout, "write", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.hallutracer_write(0, "attention_head", [1, 1], numbers)
    assert made.hallutracer_reader.digests == {}
