"""A worker's plan, what it refuses, its key in vLLM's compile cache, and the rows of each runner's step."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from service.demo import MODEL_DIR
from service.engines.base import EngineGate
from service.engines.vllm import attach
from service.engines.vllm.attach import SiteReadout
from service.engines.vllm.reader import Reader, StageLink, onset_rows
from service.engines.vllm.wire import KEY, Directive, Plan, probe_digest
from service.errors import EngineError
from service.readout import Geometry, Site
from tests.engines.vllm.installed import vllm_or_skip

vllm_or_skip()

from vllm.config import CUDAGraphMode  # noqa: E402
from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402
from vllm.v1.worker.gpu.input_batch import InputBatch  # noqa: E402
from vllm.v1.worker.gpu.model_runner import BatchReqState  # noqa: E402
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2Runner  # noqa: E402
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker  # noqa: E402
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1Runner  # noqa: E402

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
    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(is_cpu=lambda: False))
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
    edited = tmp_path / "attach.py"
    edited.write_text(f"{open(attach.__file__).read()}\n# another line\n")  # noqa: SIM115
    monkeypatch.setattr(attach, "__file__", str(edited))
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
    readout = SiteReadout(plan, Site.ATTENTION_HEAD, range(2), (0, 2), leading=True, device=torch.device("cpu"))
    made = object.__new__(worker.Worker)
    made.hallutracer_reader = Reader(plan, {Site.ATTENTION_HEAD: readout}, StageLink(), torch.device("cpu"))
    numbers = np.ones((2, 6), np.float32).tobytes()
    made.hallutracer_write(0, "attention_head", [0, 1], numbers)
    assert made.hallutracer_reader.digests == {0: probe_digest("attention_head", [0, 1], numbers)}
    monkeypatch.setattr(readout, "write", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.hallutracer_write(0, "attention_head", [1, 1], numbers)
    assert made.hallutracer_reader.digests == {}


# The runners

OURS = Directive(first_token=True)
PLAN = Plan(Geometry(2, 2, 4, 8), tuple(Site), 2, False)
ARGS = OURS.encode()


@pytest.mark.parametrize(
    ("runner", "name", "parameters"),
    [
        (V1Runner, "execute_model", ["scheduler_output", "intermediate_tensors"]),
        (V1Runner, "_prepare_inputs", ["scheduler_output", "num_scheduled_tokens"]),
        (V1Runner, "_sample", ["logits", "spec_decode_metadata"]),
        (V1Runner, "sample_tokens", ["grammar_output"]),
        (V2Runner, "add_requests", ["scheduler_output"]),
        (V2Runner, "finish_requests", ["scheduler_output"]),
        (V2Runner, "execute_model", ["scheduler_output", "intermediate_tensors", "dummy_run"]),
        (V2Runner, "sample", ["hidden_states", "input_batch", "grammar_output"]),
        (V2Runner, "sample_tokens", ["grammar_output"]),
        (V2Runner, "gather_batch_req_state", ["scheduler_output", "dummy_run"]),
        (V2Runner, "prepare_inputs", ["scheduler_output", "batch_req_state"]),
        (
            PromptLogprobsWorker,
            "compute_prompt_token_id_logprobs",
            ["logits_fn", "hidden_states", "input_batch", "prompt_lens"],
        ),
    ],
)
def test_overridden_methods_have_the_expected_parameters(runner: type, name: str, parameters: list[str]) -> None:
    actual = list(inspect.signature(getattr(runner, name)).parameters)[1:]
    assert actual[: len(parameters)] == parameters


def test_v1_knows_the_rows_before_it_chooses_a_graph_and_runs_it() -> None:
    source = inspect.getsource(V1Runner.execute_model)
    order = ["self._prepare_inputs(", "self._determine_batch_execution_and_padding(", "self._model_forward("]
    assert sorted(map(source.index, order)) == [source.index(call) for call in order]
    assert "self._is_uniform_decode(" in inspect.getsource(V1Runner._determine_batch_execution_and_padding)


def test_v2_knows_the_rows_before_it_runs_and_chooses_a_graph_by_what_it_gathered() -> None:
    source = inspect.getsource(V2Runner.execute_model)
    order = ["batch_req_state, uniform_tok_count = self.gather_batch_req_state(", "dispatch_cg_and_sync_dp(",
             "self.prepare_inputs("]  # fmt: skip
    assert sorted(map(source.index, order)) == [source.index(call) for call in order]
    assert {"req_ids", "is_prefilling_np"} <= set(BatchReqState._fields)


def test_the_fields_that_are_read_exist() -> None:
    fields = {field.name for field in dataclasses.fields(InputBatch)}
    assert {"req_ids", "idx_mapping_np", "query_start_loc_np", "num_computed_tokens_np", "prefill_len_np"} <= fields
    assert "prompt_token_id_logprobs_dict" in {field.name for field in dataclasses.fields(ModelRunnerOutput)}
    source = inspect.getsource(V1Runner)
    for name in ("query_start_loc = ", "discard_request_mask = ", "requests: dict", "execute_model_state"):
        assert f"self.{name}" in source, name
    v2 = inspect.getsource(V2Runner)
    for name in ("self.prompt_logprobs_worker", "self.req_states", "self.model.compute_logits"):
        assert name in v2, name


def test_v2_samples_before_it_collects_payloads() -> None:
    """``gate`` and ``observe_logits`` have to come before ``payloads``."""
    source = inspect.getsource(V2Runner.sample_tokens)
    assert 0 < source.index("self.sample(") < source.index("compute_prompt_token_id_logprobs(")


# ---- V1


def v1(**rows: Any) -> Any:
    """A runner's state: name -> (directive's extra_args, tokens in this step, computed, prompt, discarded)."""
    made = object.__new__(type("Runner", (worker.V1Reading,), {}))
    counts = [row[1] for row in rows.values()]
    made.input_batch = SimpleNamespace(
        req_ids=list(rows),
        num_computed_tokens_cpu=np.array([row[2] for row in rows.values()] + [99] * 3),
        num_prompt_tokens=np.array([row[3] for row in rows.values()] + [99] * 3),
    )
    made.hallutracer = SimpleNamespace(plan=PLAN)
    made.requests = {
        name: SimpleNamespace(sampling_params=SimpleNamespace(extra_args=row[0])) for name, row in rows.items()
    }
    made.query_start_loc = SimpleNamespace(np=np.array([0, *np.cumsum(counts), 99]))
    made.discard_request_mask = SimpleNamespace(np=np.array([row[4] for row in rows.values()] + [False] * 3))
    return made


def test_v1s_rows() -> None:
    rows = {
        "decode": (ARGS, 1, 9, 9, False),
        "chunk": (ARGS, 5, 0, 20, True),
        "unrelated": (None, 4, 0, 4, False),
        "ends": (ARGS, 6, 14, 20, False),
        "resumed": (ARGS, 6, 14, 20, True),
    }
    runner = v1(**rows)
    del runner.requests["decode"], runner.requests["chunk"]  # only those of prompts that end are looked at
    [onset] = onset_rows(runner._step_layout(), runner._directive_of)
    assert (onset.request, onset.token_row, onset.request_row, onset.directive) == ("ends", 1 + 5 + 4 + 5, 3, OURS)


def test_v1_runs_no_whole_graph_where_a_prompts_last_token_is_alone() -> None:
    class Base:
        @staticmethod
        def _is_uniform_decode(max_num_scheduled_tokens: int, force_uniform_decode: bool | None = None) -> bool:
            return max_num_scheduled_tokens == 1

    runner = type("Runner", (worker.V1Reading, Base), {})()
    for keeps in (True, False):
        runner.hallutracer = SimpleNamespace(keeps=keeps)
        assert runner._is_uniform_decode(max_num_scheduled_tokens=1) is not keeps


# ---- V2


def batch(padded: int = 0, **rows: Any) -> Any:
    """An ``InputBatch`` of (tokens in this step, computed, prefill length, state's index), the rest left out.

    ``padded`` empty requests follow, as where a captured graph is larger than the batch.
    """
    fields = {field.name: None for field in dataclasses.fields(InputBatch)}
    counts = np.array([row[0] for row in rows.values()], np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return InputBatch(
        **fields
        | {
            "req_ids": list(rows),
            "num_reqs": len(rows),
            "num_scheduled_tokens": counts,
            "num_reqs_after_padding": len(rows) + padded,
            "query_start_loc_np": np.append(starts, np.full(padded, starts[-1], np.int32)),
            "num_computed_tokens_np": np.array([row[1] for row in rows.values()], np.int32),
            "prefill_len_np": np.array([row[2] for row in rows.values()], np.int32),
            "idx_mapping_np": np.array([row[3] for row in rows.values()], np.intp),
        }
    )


class Prepared:
    """The methods of V2's runner that the adapter calls."""

    def add_requests(self, scheduler_output: Any) -> None: ...

    def finish_requests(self, scheduler_output: Any) -> None: ...

    def prepare_inputs(self, prepared: Any) -> Any:
        return prepared

    def gather_batch_req_state(self, scheduler_output: Any, dummy_run: bool) -> Any:
        return (None, 1) if dummy_run else (scheduler_output, 1)


def v2(prompts: list[int]) -> Any:
    made = type("Runner", (worker.V2Reading, Prepared), {})()
    made.hallutracer_directives = {}
    made.req_states = SimpleNamespace(prompt_len=SimpleNamespace(np=np.array(prompts)))
    made.hallutracer = SimpleNamespace(calls=[], plan=PLAN)
    made.hallutracer.before = made.hallutracer.calls.append
    return made


def step(new: list[tuple[str, Any]], finished: tuple[str, ...] = (), preempted: tuple[str, ...] | None = None) -> Any:
    requests = [
        SimpleNamespace(req_id=name, sampling_params=None if args is None else SimpleNamespace(extra_args=args))
        for name, args in new
    ]
    preempted_ids = None if preempted is None else set(preempted)
    return SimpleNamespace(scheduled_new_reqs=requests, finished_req_ids=set(finished), preempted_req_ids=preempted_ids)


def test_v2s_rows_go_by_the_states_index_and_the_batchs_order() -> None:
    runner = v2([99, 20, 9, 99, 4, 12])
    runner.add_requests(
        step([(name, ARGS) for name in ("ends", "decode", "chunk")] + [("unrelated", {}), ("pool", None)])
    )
    made = batch(decode=(1, 9, 9, 2), unrelated=(4, 0, 4, 4), ends=(6, 14, 20, 1), chunk=(5, 0, 12, 5))
    assert runner.prepare_inputs(made) is made
    [rows] = runner.hallutracer.calls
    assert [(row.request, row.token_row, row.request_row, row.directive) for row in rows] == [("ends", 10, 2, OURS)]


@pytest.mark.parametrize("padded", [1, 3])
def test_v2s_batches_may_be_padded(padded: int) -> None:
    """As they are for every decode of 3, 5, 6, 7, 9 .. requests with full CUDA graphs, vLLM's default."""
    runner = v2([9, 9, 4])
    runner.add_requests(step([(name, ARGS) for name in ("a", "b", "ends")]))
    runner.prepare_inputs(batch(padded, a=(1, 9, 9, 0), b=(1, 12, 9, 1), ends=(1, 3, 4, 2)))
    [rows] = runner.hallutracer.calls
    assert [(row.request, row.token_row, row.request_row) for row in rows] == [("ends", 2, 2)]


@pytest.mark.parametrize(("reads", "uniform"), [(True, None), (False, 1)])
def test_v2_runs_no_whole_graph_where_a_prompts_last_token_is_alone(reads: bool, uniform: int | None) -> None:
    """As after a hit in the prefix cache, beside requests that decode: vLLM would take the step for a decode."""
    runner = v2([9, 9, 4])
    runner.add_requests(step([("decode", ARGS), ("unrelated", None), ("ends", ARGS)]))
    prefilling = np.array([False, True, reads])
    state = SimpleNamespace(req_ids=["decode", "unrelated", "ends"], is_prefilling_np=prefilling)
    assert runner.gather_batch_req_state(state, False) == (state, uniform)
    assert runner.gather_batch_req_state(state, True) == (None, 1)


def test_v2_drops_ended_requests_and_adds_preempted_ones_again() -> None:
    runner = v2([5])
    runner.add_requests(
        step(
            [
                ("a", ARGS),
                ("b", Directive(gate=EngineGate((1.0, 0.0, 0.0, 0.0, 0.0, 0.0), 0.0, 0.5), end_token=1).encode()),
            ]
        )
    )
    runner.finish_requests(step([], finished=("a",), preempted=("b",)))
    assert runner.hallutracer_directives == {}
    runner.add_requests(step([("b", ARGS)]))
    assert runner.hallutracer_directives == {"b": OURS}
    runner.finish_requests(step([], finished=("unknown",)))
    assert runner.hallutracer_directives == {"b": OURS}


def test_v2_reads_a_prompt_preempted_before_its_onset_and_not_one_preempted_after() -> None:
    """After its onset, a preempted request prefills the prompt and the answer so far."""
    runner = v2([10, 10])
    runner.add_requests(step([("before", ARGS), ("after", ARGS)]))
    runner.prepare_inputs(batch(before=(10, 0, 10, 0), after=(10, 0, 13, 1)))
    [rows] = runner.hallutracer.calls
    assert [row.request for row in rows] == ["before"]


# ---- either


def test_a_runner_that_is_neither_is_refused() -> None:
    with pytest.raises(EngineError, match="SimpleNamespace"):
        worker.adopt(SimpleNamespace(model=None), SimpleNamespace())  # type: ignore[arg-type]


@pytest.mark.parametrize(("attribute", "mixin"), [("execute_model_state", "V1Reading"), ("req_states", "V2Reading")])
def test_a_runner_is_adopted_by_its_attributes(attribute: str, mixin: str) -> None:
    class Runner:
        pass

    runner, shown = Runner(), []
    runner.execute_model_state = None  # both have it
    setattr(runner, attribute, None)
    logits = torch.ones(2, 3)
    runner.model = SimpleNamespace(compute_logits=lambda states: logits)
    worker.adopt(runner, SimpleNamespace(observe_logits=shown.append))  # type: ignore[arg-type]
    assert isinstance(runner, getattr(worker, mixin))
    assert isinstance(runner, Runner)
    assert runner.model.compute_logits(None) is logits
    assert len(shown) == 1
    assert shown[0] is logits
