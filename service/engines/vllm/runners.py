"""Adapters to vLLM's two model runners, V1 and V2: which row of a step belongs to which request.

A built runner becomes an instance of a subclass of its own class.  Both subclasses make the same five calls (see
``reader``) at the points where their runner allows it.  Written against vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.sequence import IntermediateTensors
from vllm.v1.outputs import ModelRunnerOutput

from service.engines.vllm.reader import Reader, StageLink, StepLayout, onset_rows
from service.engines.vllm.wire import Directive
from service.errors import EngineError

Tensor = torch.Tensor
STAGE_KEY = "hallutracer"  # readouts of earlier pipeline stages, among the tensors that stages pass on


class TensorParallelLink(StageLink):
    """Combines tensor-parallel ranks through vLLM's own group."""

    def sum(self, values: Tensor) -> Tensor:
        """One all-reduce of the selected truth logits, not of activations."""
        return get_tp_group().all_reduce(values.contiguous())  # type: ignore[no-any-return]

    def join(self, activations: Tensor) -> Tensor:
        """Each rank holds its own heads."""
        return get_tp_group().all_gather(activations.contiguous(), dim=-1)  # type: ignore[no-any-return]


def link() -> StageLink:
    """The link for this process's tensor-parallel group."""
    return TensorParallelLink() if get_tp_group().world_size > 1 else StageLink()


def adopt(runner: Any, reader: Reader) -> None:
    """Add the readout to a built runner.  Raises EngineError for one that is neither V1 nor V2."""
    if hasattr(runner, "req_states"):
        mixin: type = V2Reading
    elif hasattr(runner, "execute_model_state"):
        mixin = V1Reading
    else:
        raise EngineError(f"{type(runner).__name__} is neither of vLLM 0.32's model runners; install vllm==0.32.0")
    runner.__class__ = type(f"Reading{type(runner).__name__}", (mixin, type(runner)), {})
    runner.hallutracer = reader
    runner.hallutracer_directives = {}
    runner.hallutracer_earlier = None
    _watch_logits(runner.model, reader)


def _watch_logits(model: Any, reader: Reader) -> None:
    """Observe the step's logits, which both runners compute before a sampler may change them in place."""
    compute: Callable[..., Tensor | None] = model.compute_logits

    def compute_logits(*args: Any, **kwargs: Any) -> Tensor | None:
        logits = compute(*args, **kwargs)
        reader.observe_logits(logits)
        return logits

    model.compute_logits = compute_logits


def _take_earlier(intermediate: Any) -> Tensor | None:
    """Remove the readouts of earlier stages from the tensors that they passed on."""
    if intermediate is None:
        return None
    return intermediate.tensors.pop(STAGE_KEY, None)  # type: ignore[no-any-return]


class V1Reading:
    """``vllm.v1.worker.gpu_model_runner.GPUModelRunner`` and its CPU subclass."""

    hallutracer: Reader
    hallutracer_earlier: Tensor | None
    hallutracer_payloads: dict[str, Tensor]

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        """Remove the earlier stages' readouts before the runner copies the tensors that it knows."""
        self.hallutracer_earlier = _take_earlier(intermediate_tensors)
        return super().execute_model(scheduler_output, intermediate_tensors)  # type: ignore[misc]

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """``before``: the step's rows are known, and which graph will run is not decided yet."""
        prepared = super()._prepare_inputs(*args, **kwargs)  # type: ignore[misc]
        self.hallutracer.before(onset_rows(self._step_layout(), self._directive_of))
        return prepared

    def _is_uniform_decode(self, *args: Any, **kwargs: Any) -> bool:
        """A step with an onset is none, though each request may have one token: a whole graph keeps nothing."""
        return not self.hallutracer.keeps and super()._is_uniform_decode(*args, **kwargs)  # type: ignore[misc]

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        """``after``."""
        output = super()._model_forward(*args, **kwargs)  # type: ignore[misc]
        values = self.hallutracer.after(self.hallutracer_earlier)
        self.hallutracer_earlier = None
        if values is not None and not get_pp_group().is_last_rank:
            output.tensors[STAGE_KEY] = values
        return output

    def _step_layout(self) -> StepLayout:
        runner: Any = self
        batch = runner.input_batch
        count = len(batch.req_ids)
        return StepLayout(
            requests=batch.req_ids,
            starts=runner.query_start_loc.np[: count + 1],
            computed=batch.num_computed_tokens_cpu[:count],
            prompts=batch.num_prompt_tokens[:count],
            emits=~runner.discard_request_mask.np[:count],
        )

    def _directive_of(self, request: str) -> Directive | None:
        runner: Any = self
        parameters = runner.requests[request].sampling_params
        return None if parameters is None else Directive.decode(parameters.extra_args, self.hallutracer.plan)

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        """``gate`` and ``payloads``: the tokens are sampled, and not used yet."""
        output = super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]
        self.hallutracer.gate(output.sampled_token_ids)
        # Copies start before the runner records the event that its own asynchronous output waits for.
        self.hallutracer_payloads = self.hallutracer.payloads()
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Attach the payloads to the output that has the first tokens."""
        self.hallutracer_payloads = {}
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        inner = output if isinstance(output, ModelRunnerOutput) else getattr(output, "_model_runner_output", None)
        if inner is not None and self.hallutracer_payloads:
            inner.prompt_token_id_logprobs_dict = self.hallutracer_payloads
        return output


class V2Reading:
    """``vllm.v1.worker.gpu.model_runner.GPUModelRunner``, the default on CUDA."""

    hallutracer: Reader
    hallutracer_directives: dict[str, Directive]
    hallutracer_earlier: Tensor | None

    def add_requests(self, scheduler_output: Any) -> None:
        """Keep the directives: this runner does not keep sampling parameters by request."""
        for request in scheduler_output.scheduled_new_reqs:
            parameters = request.sampling_params
            directive = None if parameters is None else Directive.decode(parameters.extra_args, self.hallutracer.plan)
            if directive is not None:
                self.hallutracer_directives[request.req_id] = directive
        super().add_requests(scheduler_output)  # type: ignore[misc]

    def finish_requests(self, scheduler_output: Any) -> None:
        """Drop directives of ended requests, and of preempted ones, which ``add_requests`` brings back."""
        for request in (*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())):
            self.hallutracer_directives.pop(request, None)
        super().finish_requests(scheduler_output)  # type: ignore[misc]

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """``before``: the step's rows are known."""
        batch = super().prepare_inputs(*args, **kwargs)  # type: ignore[misc]
        onsets = onset_rows(self._step_layout(batch), self.hallutracer_directives.get)
        self.hallutracer.before(onsets)
        return batch

    def gather_batch_req_state(self, *args: Any, **kwargs: Any) -> Any:
        """A step in which a prompt with a directive may end is no decode: a whole graph keeps nothing."""
        state, uniform = super().gather_batch_req_state(*args, **kwargs)  # type: ignore[misc]
        if state is not None and any(
            reads and request in self.hallutracer_directives
            for request, reads in zip(state.req_ids, state.is_prefilling_np, strict=True)
        ):
            uniform = None
        return state, uniform

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        """``after``: the same for a compiled, an eager and a captured forward pass."""
        earlier = _take_earlier(intermediate_tensors)
        self.hallutracer.before([])  # a step without inputs prepares none
        output = super().execute_model(scheduler_output, intermediate_tensors, *args, **kwargs)  # type: ignore[misc]
        values = self.hallutracer.after(earlier)
        if values is not None and isinstance(output, IntermediateTensors):
            output.tensors[STAGE_KEY] = values
        return output

    def _step_layout(self, batch: Any) -> StepLayout:
        runner: Any = self
        prompts = runner.req_states.prompt_len.np[batch.idx_mapping_np]
        return StepLayout(
            requests=batch.req_ids,
            starts=batch.query_start_loc_np[: batch.num_reqs + 1],  # a captured batch is padded with empty requests
            computed=batch.num_computed_tokens_np,
            prompts=prompts,
            # Known tokens beyond the prompt were sampled before a preemption: this step does not sample at t*.
            emits=batch.prefill_len_np <= prompts,
        )

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """``gate``: the tokens are sampled, and not used yet."""
        output = super().sample(*args, **kwargs)  # type: ignore[misc]
        self.hallutracer.gate(output[0].sampled_token_ids)
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """``payloads``: this runner copies the field to the host together with the sampled tokens."""
        runner: Any = self
        worker = getattr(runner, "prompt_logprobs_worker", None)
        if worker is not None and not hasattr(worker, "hallutracer"):
            worker.hallutracer = True
            compute = worker.compute_prompt_token_id_logprobs

            def with_payloads(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
                return {**compute(*args, **kwargs), **self.hallutracer.payloads()}

            worker.compute_prompt_token_id_logprobs = with_payloads
        return super().sample_tokens(grammar_output)  # type: ignore[misc]
