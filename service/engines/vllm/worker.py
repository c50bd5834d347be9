"""The worker class that vLLM loads, its own worker with the readout in the model, and adapters to
its two runners.

    vllm serve MODEL --worker-cls service.engines.vllm.worker.Worker

The readout is added before anything is compiled, warmed up or captured.  A built runner, V1 or V2,
becomes an instance of a subclass of its own class, which makes five calls (see ``reader``) where it
allows it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import __version__ as vllm_version
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors
from vllm.v1.outputs import ModelRunnerOutput

from service.engines import families
from service.engines.vllm import attach
from service.engines.vllm.launch import RANGE, WORKER, refuse_unsupported, say
from service.engines.vllm.reader import Reader, StepLayout, answer_rows, onset_rows
from service.engines.vllm.wire import CHANGES, GATED, KEY, Directive, Plan, probe_digest
from service.errors import EngineError
from service.readout import Probes, Site
from service.settings import env

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as VllmWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as VllmWorker

Tensor = torch.Tensor
SLOTS = 4
STAGE_KEY = (  # readouts of earlier pipeline stages, among the tensors that stages pass on
    "hallutracer"
)


class Worker(VllmWorker):  # type: ignore[misc]
    """vLLM's worker of one rank, with the readout."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        """Raise EngineError for unsupported configurations, and add the readout to the key of
        vLLM's compile cache."""
        refuse_unsupported(vllm_config)
        refuse_ungated(vllm_config)
        self.hallutracer_plan = plan = plan_of(vllm_config)
        additional = vllm_config.additional_config
        if not all(
            families.SITES[site].is_input for site in plan.sites
        ):  # inputs are not read in the graph
            if isinstance(
                additional, dict
            ):  # hashed into vLLM's compile cache's key, which ignores worker classes
                additional[f"{KEY}_fingerprint"] = fingerprint(plan)
            if pieces := vllm_config.compilation_config.splitting_ops:
                pieces.append(attach.KEEP)  # between CUDA graphs, like attention
        super().__init__(vllm_config, *args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, then add the readout to it and to its runner."""
        say("loading the weights")
        super().load_model(*args, **kwargs)
        config = self.vllm_config.model_config
        plan = self.hallutracer_plan
        group = get_tp_group()
        family = families.family_of(config.hf_config)
        rank = group.rank_in_group
        ranks = group.world_size
        rows = self.vllm_config.scheduler_config.max_num_seqs if plan.answers else 0
        readouts = attach.install(
            self.model_runner.model, family, plan, rank, ranks, self.device, config.dtype, rows
        )
        self.hallutracer_reader = Reader(plan, readouts, group if ranks > 1 else None, self.device)
        adopt(self.model_runner, self.hallutracer_reader)
        self.hallutracer_servers = set[int]()

    def determine_available_memory(self) -> Any:
        """Say that the model is compiled, which vLLM does here."""
        say("compiling the model, which later starts take from vLLM's cache")
        return super().determine_available_memory()

    def compile_or_warm_up_model(self) -> Any:
        """Say that vLLM warms up."""
        say("warming up")
        return super().compile_or_warm_up_model()

    def hallutracer_describe(self) -> dict[str, Any]:
        """Return this rank's readout; called through vLLM's ``collective_rpc``."""
        plan = self.hallutracer_plan
        return {
            "sites": [str(site) for site in plan.sites],
            "slots": plan.slots,
            "rows": plan.activations,
            "answers": plan.answers,
            "answering": len(self.hallutracer_reader.answering),
            "weights": self.hallutracer_reader.weights,
            "geometry": [*astuple(plan.geometry)],
            "runner": "V2" if isinstance(self.model_runner, V2Reading) else "V1",
        }

    def hallutracer_ready(self, server: int) -> int:
        """Note that one of the engine's API servers, by its index, is ready, and return how many
        are."""
        self.hallutracer_servers.add(server)
        return len(self.hallutracer_servers)

    def hallutracer_read_all(self, directive: dict[str, Any] | None) -> None:
        """Read every request as an encoded directive says, whatever the request itself asks for;
        None: as it asks."""
        self.hallutracer_reader.for_all = Directive.decode(directive, self.hallutracer_plan)

    def hallutracer_write(self, slot: int, site: str, head: list[int], numbers: bytes) -> None:
        """Write a probe into a slot of its site; ``numbers`` is float32 [m, dim + 2]: direction,
        bias, scale."""
        reader = self.hallutracer_reader
        readout, column = reader.sites[Site(site)], reader.plan.column(Site(site), slot)
        reader.digests.pop(column, None)  # nothing until it is written
        table = np.frombuffer(numbers, np.float32).reshape(len(head), readout.dim + 2)
        direction = table[:, :-2].copy()
        bias = table[:, -2].copy()
        scale = table[:, -1].copy()
        with torch.inference_mode():
            readout.write(slot, Probes(Site(site), np.asarray(head), direction, bias, scale))
        reader.digests[column] = probe_digest(site, head, numbers)


def refuse_ungated(config: VllmConfig) -> None:
    """Raise EngineError where nothing judges what this worker reads: its class was named, and the
    guard not loaded."""
    additional = config.additional_config
    # False: the engine's core judges
    gated = additional.get(GATED) if isinstance(additional, dict) else None
    if gated is None or not (gated or os.environ.get(env("bundle"))):
        raise EngineError(
            f"nothing judges what {WORKER} reads: {env('bundle')} is not set in each process, or"
            " vLLM has not loaded the plugin hallutracer (VLLM_PLUGINS leaves it out, or vLLM's"
            " log says why)"
        )


def _change(worker: Worker, name: str, *args: Any, **kwargs: Any) -> Any:
    # first: whatever becomes of it, nothing is read that was asked for before
    worker.hallutracer_reader.weights += 1
    return getattr(VllmWorker, name)(worker, *args, **kwargs)


for _name in CHANGES:
    if hasattr(VllmWorker, _name):
        setattr(Worker, _name, partialmethod(_change, _name))


def plan_of(config: VllmConfig) -> Plan:
    """Return what ``additional_config``'s key "hallutracer" (sites, slots, rows, answers) has.
    Raises EngineError."""
    additional = config.additional_config
    given = additional.get(KEY, {}) if isinstance(additional, dict) else {}
    model = config.model_config.hf_config
    wanted, slots = given.get("sites", families.family_of(model).sites), given.get("slots", SLOTS)
    sites = tuple(site for site in Site if site in wanted)
    rows, stages = bool(given.get("rows", False)), config.parallel_config.pipeline_parallel_size > 1
    for wrong, problem in (
        (
            set(given) - {"sites", "slots", "rows", "answers"},
            f"takes sites, slots, rows and answers, not {[*given]}",
        ),
        (set(wanted) - set(sites), f"has sites other than {', '.join(Site)}: {wanted}"),
        (
            not sites or not isinstance(slots, int) or slots < 1,
            f"needs at least one site and one slot, not {given}",
        ),
        (
            rows and stages,
            (
                "cannot have rows, for training, across pipeline stages; use tensor parallelism"
                " instead"
            ),
        ),
    ):
        if wrong:
            raise EngineError(f"additional_config.{KEY} {problem}")
    families.check_sites(str(model.model_type), sites)
    return Plan(families.geometry(model), sites, slots, rows, bool(given.get("answers", False)))


def fingerprint(plan: Plan) -> str:
    """Return sha256 of all that could change the compiled graph: our code, the plan, vLLM's and
    torch's versions."""
    code = b"".join(Path(module.__file__ or "").read_bytes() for module in (attach, families))
    facts = json.dumps([repr(plan), vllm_version, torch.__version__]).encode()
    return hashlib.sha256(code + facts).hexdigest()


def adopt(runner: Any, reader: Reader) -> None:
    """Add the readout to a built runner.  Raises EngineError for one that is neither V1 nor V2."""
    if hasattr(runner, "req_states"):
        mixin: type = V2Reading
    elif hasattr(runner, "execute_model_state"):
        mixin = V1Reading
    else:
        raise EngineError(
            f"{type(runner).__name__} is neither of vLLM's model runners; install vLLM {RANGE}"
        )
    runner.__class__ = type(f"Reading{type(runner).__name__}", (mixin, type(runner)), {})
    runner.hallutracer = reader
    runner.hallutracer_directives = {}
    runner.hallutracer_earlier = None
    # Both runners compute the step's logits before a sampler may change them in place.
    compute: Callable[..., Tensor | None] = runner.model.compute_logits

    def compute_logits(*args: Any, **kwargs: Any) -> Tensor | None:
        logits = compute(*args, **kwargs)
        reader.observe_logits(logits)
        return logits

    runner.model.compute_logits = compute_logits


def _take_earlier(intermediate: Any) -> Tensor | None:
    return None if intermediate is None else intermediate.tensors.pop(STAGE_KEY, None)


class V1Reading:
    """``vllm.v1.worker.gpu_model_runner.GPUModelRunner`` and its CPU subclass."""

    hallutracer: Reader
    hallutracer_earlier: Tensor | None
    hallutracer_payloads: dict[str, Tensor]

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        """Remove the earlier stages' readouts before the runner copies the tensors that it
        knows."""
        self.hallutracer_earlier = _take_earlier(intermediate_tensors)
        self.hallutracer.finished(scheduler_output.finished_req_ids)
        return super().execute_model(scheduler_output, intermediate_tensors)  # type: ignore[misc]

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``before``: the step's rows are known, and which graph will run is not decided
        yet."""
        prepared = super()._prepare_inputs(*args, **kwargs)  # type: ignore[misc]
        layout, reader = self._step_layout(prepared[1]), self.hallutracer
        reader.before(onset_rows(layout, self._directive_of), answer_rows(layout, reader.answering))
        return prepared

    def _is_uniform_decode(self, *args: Any, **kwargs: Any) -> bool:
        """Return False for a step with an onset, whatever its tokens, where a whole graph keeps
        nothing."""
        if self.hallutracer.needs_pieces:
            return False
        is_uniform: bool = super()._is_uniform_decode(*args, **kwargs)  # type: ignore[misc]
        return is_uniform

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super()._model_forward(*args, **kwargs)  # type: ignore[misc]
        values, self.hallutracer_earlier = self.hallutracer.after(self.hallutracer_earlier), None
        if values is not None and not get_pp_group().is_last_rank:
            output.tensors[STAGE_KEY] = values
        return output

    def _step_layout(self, speculation: Any) -> StepLayout:
        runner: Any = self
        batch = runner.input_batch
        count = len(batch.req_ids)
        computed, prompts = batch.num_computed_tokens_cpu[:count], batch.num_prompt_tokens[:count]
        starts = runner.query_start_loc.np[: count + 1]
        emits = ~runner.discard_request_mask.np[:count]
        drafts = (
            np.zeros_like(prompts)
            if speculation is None
            else np.array(speculation.num_draft_tokens, np.int32)
        )
        return StepLayout(batch.req_ids, starts, computed, prompts, emits, drafts)

    def _directive_of(self, request: str) -> Directive | None:
        runner: Any = self
        return self.hallutracer.directive_of(runner.requests[request].sampling_params)

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        """Call ``gate`` and ``payloads``: the tokens are sampled, and not used yet."""
        output = super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]
        self.hallutracer.gate(output.sampled_token_ids)
        # Copies start before the runner records the event that its own asynchronous output waits
        # for.
        self.hallutracer_payloads = self.hallutracer.payloads()
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Attach the payloads to the output that has the first tokens."""
        self.hallutracer_payloads = {}
        with self._generators_kept():
            output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        inner = (
            output
            if isinstance(output, ModelRunnerOutput)
            else getattr(output, "_model_runner_output", None)
        )
        if inner is not None and self.hallutracer_payloads:
            inner.prompt_token_id_logprobs_dict = self.hallutracer_payloads
        return output

    @contextmanager
    def _generators_kept(self) -> Iterator[None]:
        """On a CPU, keep vLLM from the seeded random generators of requests whose prompt is not
        read to its end.

        It drops their token and winds the generator back, which raises on a CPU and ends the
        engine."""
        runner: Any = self
        generators, dropped = runner.input_batch.generators, runner.discard_request_mask.np
        kept = [row for row in generators if dropped[row]] if runner.device.type == "cpu" else []
        aside = {row: generators.pop(row) for row in kept}
        try:
            yield
        finally:
            generators.update(aside)


class V2Reading:
    """``vllm.v1.worker.gpu.model_runner.GPUModelRunner``, the default on CUDA."""

    hallutracer: Reader
    hallutracer_directives: dict[str, Directive]
    hallutracer_earlier: Tensor | None

    def add_requests(self, scheduler_output: Any) -> None:
        """Keep the directives: this runner does not keep sampling parameters by request."""
        for request in scheduler_output.scheduled_new_reqs:
            if (directive := self.hallutracer.directive_of(request.sampling_params)) is not None:
                self.hallutracer_directives[request.req_id] = directive
        super().add_requests(scheduler_output)  # type: ignore[misc]

    def finish_requests(self, scheduler_output: Any) -> None:
        """Drop directives of ended requests, and of preempted ones, which ``add_requests`` brings
        back."""
        for request in (
            *scheduler_output.finished_req_ids,
            *(scheduler_output.preempted_req_ids or ()),
        ):
            self.hallutracer_directives.pop(request, None)
        self.hallutracer.finished(scheduler_output.finished_req_ids)
        super().finish_requests(scheduler_output)  # type: ignore[misc]

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``before``: the step's rows are known."""
        batch = super().prepare_inputs(*args, **kwargs)  # type: ignore[misc]
        layout, reader = self._step_layout(batch), self.hallutracer
        reader.before(
            onset_rows(layout, self.hallutracer_directives.get),
            answer_rows(layout, reader.answering),
        )
        return batch

    def gather_batch_req_state(self, *args: Any, **kwargs: Any) -> Any:
        """Return no uniform decode where a prompt with a directive may end and a whole graph keeps
        nothing."""
        state, uniform = super().gather_batch_req_state(*args, **kwargs)  # type: ignore[misc]
        if (
            state is not None
            and not self.hallutracer.plan.answers
            and any(
                reads and request in self.hallutracer_directives
                for request, reads in zip(state.req_ids, state.is_prefilling_np, strict=True)
            )
        ):
            uniform = None
        return state, uniform

    def execute_model(
        self, scheduler_output: Any, intermediate_tensors: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Call ``after``: the same for a compiled, an eager and a captured forward pass."""
        earlier = _take_earlier(intermediate_tensors)
        self.hallutracer.before([])  # a step without inputs prepares none
        output = super().execute_model(  # type: ignore[misc]
            scheduler_output, intermediate_tensors, *args, **kwargs
        )
        values = self.hallutracer.after(earlier)
        if values is not None and isinstance(output, IntermediateTensors):
            output.tensors[STAGE_KEY] = values
        return output

    def _step_layout(self, batch: Any) -> StepLayout:
        runner: Any = self
        prompts = runner.req_states.prompt_len.np[batch.idx_mapping_np]
        # a captured batch is padded with empty requests
        starts = batch.query_start_loc_np[: batch.num_reqs + 1]
        drafts, computed = np.diff(batch.cu_num_logits_np) - 1, batch.num_computed_tokens_np
        # Known tokens beyond the prompt were sampled before a preemption: a step that ends before
        # them samples none.
        emits = computed + np.diff(starts) - drafts >= batch.prefill_len_np
        return StepLayout(batch.req_ids, starts, computed, prompts, emits, drafts)

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``gate``: the tokens are sampled, and not used yet."""
        output = super().sample(*args, **kwargs)  # type: ignore[misc]
        self.hallutracer.gate(output[0].sampled_token_ids)
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Call ``payloads``: this runner copies the field to the host together with the sampled
        tokens."""
        runner: Any = self
        worker = getattr(runner, "prompt_logprobs_worker", None)
        if worker is not None and not hasattr(worker, "hallutracer"):
            worker.hallutracer = True
            compute = worker.compute_prompt_token_id_logprobs

            def with_payloads(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
                return {**compute(*args, **kwargs), **self.hallutracer.payloads()}

            worker.compute_prompt_token_id_logprobs = with_payloads
        return super().sample_tokens(grammar_output)  # type: ignore[misc]
