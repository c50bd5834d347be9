"""The request side of vLLM: its client, which probe is in which slot of its workers, and one request's outputs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from service.engines.base import Counters, PrefillResult, Sampling, TokenIds
from service.engines.bridge import LoopThread, run_on
from service.engines.checks import check_probe
from service.engines.vllm.launch import WORKER
from service.engines.vllm.wire import Directive, Payload, Plan, probe_digest
from service.errors import EngineError, ProbeReplaced, RequestError
from service.readout import Probes, Site


class Client:
    """One started ``AsyncLLM``, vLLM's own client, on one event loop, where all coroutines run."""

    def __init__(
        self, async_llm: Any, loop: asyncio.AbstractEventLoop | None = None, generate: Any | None = None
    ) -> None:
        """Use the running ``loop``; None starts one in a thread, which ``close`` ends.

        ``generate`` is vLLM's own method, where ``async_llm`` has another one in its place.
        """
        self._own_loop: LoopThread | None = None
        if loop is None:
            self._own_loop = LoopThread("vllm-client")
            loop = self._own_loop.loop
        self.loop = loop
        self.config = async_llm.vllm_config  # the ``VllmConfig`` that vLLM was started with
        self.counters = Counters()
        self._async_llm = async_llm
        self._generate = generate or async_llm.generate
        self._request_numbers = count()
        self._closed = False

    @property
    def alive(self) -> bool:
        """Whether vLLM is running."""
        return not self._closed and not self._async_llm.errored

    def check_open(self) -> None:
        """Raise EngineError after ``close``."""
        if self._closed:
            raise EngineError("this engine is closed; load the model again")

    async def outputs(self, prompt: TokenIds, parameters: Any, priority: int = 0) -> AsyncGenerator[Any, None]:
        """Yield ``RequestOutput``s; closing cancels the request.  Raises EngineError if vLLM failed, RequestError."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        self.check_open()
        self.counters.open_continuations += 1
        first = True
        name = f"hallutracer-{next(self._request_numbers)}"
        stream = self._generate(tokens_input(list(prompt)), parameters, name, priority=priority)
        try:
            async for output in stream:
                decoded = 0 if first else len(output.outputs[0].token_ids)
                self.counters.prefills += first
                self.counters.decode_steps += decoded
                self.counters.forward_tokens += len(prompt) - int(output.num_cached_tokens or 0) if first else decoded
                first = False
                yield output
        except EngineDeadError as error:
            raise EngineError(f"vLLM has ended ({error}); its own messages say why.  Restart the service") from error
        except EngineGenerateError as error:
            raise EngineError(f"vLLM failed on this prompt: {error.__cause__ or error}") from error
        except VLLMClientError as error:
            raise RequestError(f"vLLM refuses this request: {error}") from error
        finally:
            self.counters.open_continuations -= 1
            await stream.aclose()

    async def describe(self) -> dict[str, Any]:
        """Return the first worker's description of its readout.  Raises EngineError if the worker class is not ours."""
        try:
            return dict((await self._async_llm.collective_rpc("hallutracer_describe"))[0])
        except Exception as error:
            raise EngineError(
                f"vLLM runs a worker without the readout ({error}); start it with --worker-cls {WORKER}"
            ) from error

    async def write(self, slot: int, probes: Probes) -> str:
        """Write probes into a slot of their site on every worker; return their digest."""
        table = np.concatenate([probes.direction, probes.bias[:, None], probes.scale[:, None]], axis=1)
        head = [int(value) for value in probes.head]
        numbers = np.ascontiguousarray(table, np.float32).tobytes()
        await self._async_llm.collective_rpc("hallutracer_write", args=(slot, str(probes.site), head, numbers))
        return probe_digest(str(probes.site), head, numbers)

    def close(self) -> None:
        """Cancel all requests and end vLLM's processes.  Not to be called on the loop.  Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        # vLLM's output handler is cancelled before the processes end: it would report their end as a failure.
        if self._own_loop is not None:
            self._own_loop.close()
        elif (handler := self._async_llm.output_handler) is not None:
            self.loop.call_soon_threadsafe(handler.cancel)
            run_on(self.loop, asyncio.wait([handler]))
        self._async_llm.shutdown()
        # ``AsyncLLM.__del__`` fails during interpreter exit, when vLLM's modules are gone already: free it now.
        self._async_llm = self._generate = None


@dataclass
class _Slot:
    site: Site
    index: int  # among its site's slots
    probes: Probes | None = None
    digest: str = ""
    users: int = 0
    last_used: int = 0


class Slots:
    """Leases the workers' probe slots to requests.  To be used on one event loop only.

    A slot keeps its probe until the prefills of all prompts that use it have been read.  Other slots can be
    overwritten: a bundle replaces another one without a restart.
    """

    def __init__(self, plan: Plan, write: Callable[[int, Probes], Awaitable[str]]) -> None:
        """``write(index, probes)`` writes a probe into a slot of its site on every rank, and returns its digest."""
        self._plan, self._write = plan, write
        self._slots = [_Slot(site, index) for site in plan.sites for index in range(plan.slots)]
        self._lock = asyncio.Lock()
        self._clock = count(1)

    async def hold(self, probes: Sequence[Probes]) -> list[int]:
        """Return each probe's column in a payload, kept until ``release``.  Raises EngineError without site or slot."""
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
        """Have the next request write these slots' probes again, because another server has written into one."""
        for column in columns:
            self._slots[column].probes = None

    def _find(self, probe: Probes) -> int | None:
        return next((column for column, slot in enumerate(self._slots) if slot.probes is probe), None)

    async def _put(self, probe: Probes) -> int:
        if probe.site not in self._plan.sites:
            raise EngineError(
                f"this engine was started without the site {probe.site}; restart it with a bundle that reads this site"
            )
        check_probe(probe, self._plan.geometry)
        free = [column for column, slot in enumerate(self._slots) if slot.site is probe.site and not slot.users]
        if not free:
            raise EngineError(
                f"all {self._plan.slots} probe slots at {probe.site} are in use; load fewer bundles (one with context "
                "probes needs up to four), or start with more: 'slots' of the key 'hallutracer' in vLLM's "
                "--additional-config, or VllmEngine.load(slots=...)"
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
    """Keeps a request's probes in their slots until its prefill has been read."""

    def __init__(self, directive: Directive, plan: Plan, columns: Sequence[int], slots: Slots) -> None:
        self.directive = directive
        self._plan, self._columns, self._slots = plan, list(columns), slots
        self._held = list(columns)

    def prefill(self, output: Any, prompt_tokens: int) -> tuple[PrefillResult, bool]:
        """Return the result and whether the gate closed; free the slots.  Raises EngineError, ProbeReplaced."""
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


def payload_of(output: Any, plan: Plan, directive: Directive) -> Payload:
    """Decode an output's payload.  Raises EngineError if it has none."""
    if getattr(output, "prompt_token_id_logprobs", None) is None:
        raise EngineError("vLLM's first token has no readout payload; start vLLM with HalluTracer's --worker-cls")
    return Payload.decode(output.prompt_token_id_logprobs, plan, directive)


def parameters_for(sampling: Sampling | None, directive: Directive | None) -> Any:
    """Return sampling parameters for a streamed answer; without ``sampling`` for a prefill, its token discarded."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

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
    )


def times(output: Any) -> tuple[float, float]:
    """Return seconds in vLLM's queue, and from the first step to the first token, as measured by vLLM's core."""
    metrics = output.metrics
    if metrics is None or not metrics.first_token_ts:
        return 0.0, 0.0
    return max(0.0, metrics.scheduled_ts - metrics.queued_ts), max(0.0, metrics.first_token_ts - metrics.scheduled_ts)
