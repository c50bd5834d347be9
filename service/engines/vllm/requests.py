"""One vLLM request: its sampling parameters, and the prefill and answer in its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from service.engines.base import Completion, PrefillResult, Sampling
from service.engines.vllm.slots import Slots
from service.engines.vllm.wire import Directive, Payload, Plan
from service.errors import EngineError, ProbeReplaced


class ProbeLease:
    """Keeps a request's probes in their slots until its prefill has been read."""

    def __init__(self, directive: Directive, plan: Plan, columns: Sequence[int], slots: Slots) -> None:
        self.directive = directive
        self._plan = plan
        self._columns = list(columns)
        self._held = list(columns)
        self._slots = slots

    def prefill(self, output: Any, prompt_tokens: int) -> tuple[PrefillResult, bool]:
        """The result in the output with the first token, and whether the gate closed.  Frees the slots.

        Raises EngineError if the output has no payload, ProbeReplaced, and NonFiniteReadout if a number in it is a NaN
        or infinity.
        """
        try:
            payload = payload_of(output, self._plan, self.directive)
        except ProbeReplaced:
            self._slots.forget(self._columns)
            raise
        self.release()
        trajectories = tuple(payload.trajectories[column] for column in self._columns)
        return PrefillResult(trajectories, payload.first_token, prompt_tokens), payload.gated

    def release(self) -> None:
        """Free the slots.  Safe to call twice."""
        held, self._held = self._held, []
        self._slots.release(held)


class AnswerBuilder:
    """Assembles an answer from a request's outputs."""

    def __init__(self) -> None:
        self.steps = 0
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._finish_reason: str | None = None

    def add(self, output: Any) -> tuple[str, int]:
        """Append an output; return its new text and its number of tokens."""
        new = output.outputs[0]
        self.steps += 1
        self._text.append(new.text)
        self._tokens += list(new.token_ids)
        self._finish_reason = new.finish_reason
        return new.text, len(new.token_ids)

    def completion(self, other: str = "cancelled") -> Completion:
        """The answer so far; ``other``: why it ends, where vLLM has not ended it."""
        finish_reason = self._finish_reason if self._finish_reason in ("stop", "length") else other
        return Completion("".join(self._text), tuple(self._tokens), finish_reason)


def payload_of(output: Any, plan: Plan, directive: Directive) -> Payload:
    """Decode an output's payload.  Raises EngineError if it has none."""
    if getattr(output, "prompt_token_id_logprobs", None) is None:
        raise EngineError("vLLM's first token has no readout payload; start vLLM with HalluTracer's --worker-cls")
    return Payload.decode(output.prompt_token_id_logprobs, plan, directive)


def score_only(directive: Directive) -> Any:
    """Sampling parameters for a prefill only; the one token that vLLM samples is discarded."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=directive.encode(),
        skip_clone=True,
    )


def answering(sampling: Sampling, directive: Directive | None) -> Any:
    """Sampling parameters for an answer that is streamed."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        stop=list(sampling.stop) or None,
        output_kind=RequestOutputKind.DELTA,
        extra_args=None if directive is None else directive.encode(),
    )


def times(output: Any) -> tuple[float, float]:
    """Seconds in vLLM's queue, and from the first step to the first token, as measured by vLLM's core."""
    metrics = output.metrics
    if metrics is None or not metrics.first_token_ts:
        return 0.0, 0.0
    return max(0.0, metrics.scheduled_ts - metrics.queued_ts), max(0.0, metrics.first_token_ts - metrics.scheduled_ts)
