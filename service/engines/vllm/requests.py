"""One request to vLLM: what is asked for, and what its outputs say.  Knows no client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from service.engines.base import Completion, PrefillResult, Sampling
from service.engines.vllm.wire import Directive, Payload, Plan
from service.errors import EngineError


class ProbeLease:
    """A request's probes, kept in their slots until its prefill has been read."""

    def __init__(
        self, directive: Directive, plan: Plan, columns: Sequence[int], release: Callable[[Sequence[int]], None]
    ) -> None:
        self.directive = directive
        self._plan = plan
        self._columns = list(columns)
        self._held = list(columns)
        self._release = release

    def prefill(self, output: Any, prompt_tokens: int) -> tuple[PrefillResult, bool]:
        """What the output with the first token brought, and whether the gate closed.  Frees the slots.

        Raises EngineError where it brought nothing, NonFiniteReadout rather than a NaN.
        """
        payload = payload_of(output, self._plan, self.directive)
        self.release()
        trajectories = tuple(payload.trajectories[column] for column in self._columns)
        return PrefillResult(trajectories, payload.first_token, prompt_tokens), payload.gated

    def release(self) -> None:
        """Free the slots.  Safe to call twice."""
        held, self._held = self._held, []
        self._release(held)


class Answer:
    """One request's outputs, put together."""

    def __init__(self) -> None:
        self.steps = 0
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._reason: str | None = None

    def take(self, output: Any) -> tuple[str, int]:
        """One output's new text and how many tokens it brought."""
        new = output.outputs[0]
        self.steps += 1
        self._text.append(new.text)
        self._tokens += list(new.token_ids)
        self._reason = new.finish_reason
        return new.text, len(new.token_ids)

    def completion(self) -> Completion:
        """The answer so far."""
        reason = self._reason if self._reason in ("stop", "length") else "cancelled"
        return Completion("".join(self._text), tuple(self._tokens), reason)


def payload_of(output: Any, plan: Plan, directive: Directive) -> Payload:
    """The reading that came with an output.  Raises EngineError where there is none."""
    if getattr(output, "prompt_token_id_logprobs", None) is None:
        raise EngineError("vLLM's first token came without a reading; is its worker class hallutracer's?")
    return Payload.decode(output.prompt_token_id_logprobs, plan, directive)


def score_only(directive: Directive) -> Any:
    """One step: the token that vLLM samples there is thrown away."""
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
    """An answer, piece by piece."""
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
    """Seconds in vLLM's queue and from its first step to the first token, as vLLM's core has measured them."""
    metrics = output.metrics
    if metrics is None or not metrics.first_token_ts:
        return 0.0, 0.0
    return max(0.0, metrics.scheduled_ts - metrics.queued_ts), max(0.0, metrics.first_token_ts - metrics.scheduled_ts)
