"""The request side of vLLM: which probe is in which slot of its workers, one request's parameters
and outputs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from service.engines.base import AnswerReading, PrefillResult, Sampling
from service.engines.checks import check_probe
from service.engines.vllm.wire import Directive, Payload, Plan, answer_read
from service.errors import EngineError, ProbeReplaced, WeightsChanged
from service.readout import Probes, Site


@dataclass
class _Slot:
    site: Site
    index: int  # among its site's slots
    probes: Probes | None = None
    digest: str = ""
    users: int = 0
    last_used: int = 0


class Slots:
    """Leases of the workers' probe slots, on one event loop; a slot is overwritten only while no
    request uses it."""

    def __init__(self, plan: Plan, write: Callable[[int, Probes], Awaitable[str]]) -> None:
        """``write(index, probes)`` writes a probe into a slot of its site on every rank, and
        returns its digest."""
        self._plan, self._write = plan, write
        # a request was not read: the weights have changed
        self.on_changed: Callable[[], None] = lambda: None
        self._slots = [_Slot(site, index) for site in plan.sites for index in range(plan.slots)]
        self._lock = asyncio.Lock()
        self._clock = count(1)

    async def hold(self, probes: Sequence[Probes]) -> list[int]:
        """Return each probe's column in a payload, kept until ``release``.  Raises EngineError
        without site or slot."""
        held: list[int] = []
        try:
            for probe in probes:
                column = self._find(probe)
                if column is None:
                    async with self._lock:
                        column = self._find(probe)
                        if column is None:
                            column = await self._put(probe)
                self._slots[column].users += 1
                self._slots[column].last_used = next(self._clock)
                held.append(column)
        except BaseException:
            self.release(held)
            raise
        return held

    def release(self, columns: Sequence[int]) -> None:
        """Free the slots of a request whose prefill has been read or that has ended."""
        for column in columns:
            self._slots[column].users -= 1

    def digests(self, columns: Sequence[int]) -> tuple[tuple[int, str], ...]:
        """Return each column with the digest of its probe."""
        return tuple((column, self._slots[column].digest) for column in columns)

    def forget(self, columns: Sequence[int]) -> None:
        """Have the next request write these slots' probes again, because another server has written
        into one."""
        for column in columns:
            self._slots[column].probes = None

    def _find(self, probe: Probes) -> int | None:
        return next(
            (column for column, slot in enumerate(self._slots) if slot.probes is probe), None
        )

    async def _put(self, probe: Probes) -> int:
        if probe.site not in self._plan.sites:
            raise EngineError(
                f"this engine was started without the site {probe.site}; restart it with such a"
                " bundle"
            )
        check_probe(probe, self._plan.geometry)
        free = [
            column
            for column, slot in enumerate(self._slots)
            if slot.site is probe.site and not slot.users
        ]
        if not free:
            raise EngineError(
                f"all {self._plan.slots} probe slots at {probe.site} are in use; load fewer bundles"
                " (one with context probes needs up to four), or give more: 'slots' of the key"
                " 'hallutracer' in vLLM's --additional-config"
            )
        column = min(free, key=lambda column: self._slots[column].last_used)
        slot = self._slots[column]
        slot.probes = None  # invalid until fully written
        slot.users += 1
        try:
            slot.digest = await self._write(slot.index, probe)
        finally:
            slot.users -= 1
        slot.probes = probe
        return column


class ProbeLease:
    """Keeps a request's probes in their slots until its prefill has been read, its answer's until
    the answer ends."""

    def __init__(
        self,
        directive: Directive,
        plan: Plan,
        columns: Sequence[int],
        slots: Slots,
        answer: Sequence[int] = (),
    ) -> None:
        self.directive = directive
        self._plan = plan
        self._columns = list(columns)
        self._slots = slots
        self._held, self._answer = list(columns), list(answer)
        self._sum, self._tokens = np.zeros(plan.geometry.num_layers), 0

    def prefill(self, output: Any, prompt_tokens: int) -> tuple[PrefillResult, bool]:
        """Return the result and whether the gate closed; free the slots.  Raises EngineError and
        its kinds."""
        with self._told():
            payload = payload_of(output, self._plan, self.directive)
        held, self._held = self._held, []
        self._slots.release(held)
        return self._result(payload, prompt_tokens), payload.gated

    def result(self, wire: Any, prompt_tokens: int) -> PrefillResult:
        """Return what a worker's payload says; the slots stay held.  Raises what ``Payload.decode``
        raises."""
        return self._result(Payload.decode(wire, self._plan, self.directive), prompt_tokens)

    def answer(self, output: Any, decoded: int, *, first: bool = False) -> AnswerReading | None:
        """Return what was read of an answer that has so many tokens with ``output``; None: nothing,
        or not asked for.

        To be called with each output in turn, the ``first`` of which has the prefill.  Raises
        EngineError, its kinds.
        """
        if self.directive.answer is None:
            return None
        with self._told():
            for wire in (
                *(() if first else (output.prompt_token_id_logprobs,)),
                *getattr(output, MERGED),
            ):
                if wire is None:  # no token came with it
                    continue
                self._sum = self._sum + answer_read(wire, self._plan)
                self._tokens += 1
        if self._tokens != max(0, decoded - 1):
            raise EngineError(
                f"{self._tokens} of an answer's tokens were read where the model went on from"
                f" {max(0, decoded - 1)}; please report this bug of the engine"
            )
        return AnswerReading(self._tokens, self._sum / self._tokens) if self._tokens else None

    def _result(self, payload: Payload, prompt_tokens: int) -> PrefillResult:
        trajectories = tuple(payload.trajectories[column] for column in self._columns)
        return PrefillResult(trajectories, payload.first_token, prompt_tokens)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except ProbeReplaced:
            self._slots.forget([*self._columns, *self._answer])
            raise
        except WeightsChanged:
            self._slots.on_changed()
            raise

    def release(self) -> None:
        """Free the slots.  Safe to call twice."""
        held = self._held + self._answer
        self._held = []
        self._answer = []
        self._slots.release(held)


MERGED = "hallutracer_merged"  # of an output: what came with those that vLLM has added to it


def keep_merged() -> None:
    """Have an output keep what comes with outputs that vLLM adds to it, where it is not taken in
    time.

    vLLM keeps the first one's, as it has log probabilities of a prompt come once."""
    from vllm.outputs import RequestOutput

    add = RequestOutput.add
    if hasattr(RequestOutput, MERGED):
        return
    setattr(RequestOutput, MERGED, ())

    def added(output: Any, later: Any, aggregate: bool) -> None:
        add(output, later, aggregate)
        setattr(output, MERGED, (*getattr(output, MERGED), later.prompt_token_id_logprobs))

    RequestOutput.add = added


def payload_of(output: Any, plan: Plan, directive: Directive) -> Payload:
    """Decode an output's payload.  Raises EngineError if it has none."""
    if getattr(output, "prompt_token_id_logprobs", None) is None:
        raise EngineError(
            "vLLM's first token has no readout payload; start vLLM with HalluTracer's --worker-cls"
        )
    return Payload.decode(output.prompt_token_id_logprobs, plan, directive)


def parameters_for(sampling: Sampling | None, directive: Directive | None) -> Any:
    """Return sampling parameters for a streamed answer; without ``sampling`` for a prefill, its
    token discarded."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    chosen = sampling or Sampling(max_tokens=1)
    return SamplingParams(
        max_tokens=chosen.max_tokens,
        temperature=chosen.temperature,
        top_p=chosen.top_p,
        seed=chosen.seed,
        stop=list(chosen.stop) or None,
        detokenize=sampling is not None,
        output_kind=RequestOutputKind.DELTA,
        extra_args=None if directive is None else directive.encode(),
        skip_clone=sampling is None,
        structured_outputs=(
            None if chosen.format is None else StructuredOutputsParams(json=chosen.format.schema)
        ),
    )


def times(output: Any) -> tuple[float, float]:
    """Return seconds in vLLM's queue, and from the first step to the first token, as measured by
    vLLM's core."""
    metrics = output.metrics
    if metrics is None or not metrics.first_token_ts:
        return 0.0, 0.0
    return max(0.0, metrics.scheduled_ts - metrics.queued_ts), max(
        0.0, metrics.first_token_ts - metrics.scheduled_ts
    )
