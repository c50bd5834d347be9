"""The gate inside vLLM's engine, for front ends that know nothing of it: ``LLM``, Ray Serve,
run-batch, gRPC.

``open_gate`` runs where an engine's core does, before it takes requests: the engine is tested, the
golden prompts replay, the worker is told to read every request, and the scheduler asks ``Gate``
about each request's first output. An answer that the policy withholds ends there, without a token;
its ``stop_reason`` says why."""

from __future__ import annotations

import asyncio
import functools
import logging
import queue
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from probes_store.errors import BundleError
from service.engines.bridge import run_on
from service.engines.vllm.client import ProbeLease
from service.engines.vllm.engine import VllmEngine
from service.engines.vllm.wire import CHANGES
from service.errors import HalluTracerError
from service.judging.guarantee import UNKNOWN, Standing, shape_of
from service.policies.guard import Policy
from service.readout import Probes
from service.scoring import Scorer
from service.serving.adapters import Adapters
from service.serving.catalogue import untemplated
from service.serving.service import in_own_thread
from service.settings import env
from service.turn import Turn
from service.vllm_plugin.options import PluginOptions

log = logging.getLogger("hallutracer")
OWN_ADAPTERS = 1 << 30  # numbers that no front end gives


@dataclass(frozen=True)
class Gate:
    """One bundle and policy for every request of an engine."""

    scorer: Scorer
    policy: Policy
    lease: ProbeLease
    # Of each scorer's first trajectory in what is read of every request.
    offsets: Mapping[Scorer, int]
    adapters: Adapters
    refusals: frozenset[str]  # what stands in for withheld answers, as ``asks_of`` takes it

    def reason(self, request: Any, wire: Any) -> str | None:
        """Return why the answer to a vLLM ``Request`` ends before its first token; None: it goes
        on.

        ``wire``: the worker's payload for this request, None where it sent none."""
        scorer = self.scorer
        policy = self.policy
        prompt = request.prompt_token_ids
        try:
            if request.lora_request is not None:
                scorer = self.adapters.scorer(request.lora_request)
            problem = unreadable(request)
            if policy.action.withholds:
                problem = problem or foretold(request.sampling_params)
            if problem:
                raise HalluTracerError(problem)
            if wire is None:
                raise HalluTracerError("the worker did not read its prompt")
            chat = scorer.prompt_format == "chat"
            ends = not chat or tuple(prompt[-len(scorer.chat_ending) :]) == scorer.chat_ending
            # images, audio: training had text
            as_trained = ends and not getattr(request, "mm_features", None)
            if not as_trained:
                policy = untemplated(scorer, policy)
            standing = self.standing(prompt) if chat and as_trained else UNKNOWN
            result = self.lease.result(wire.numpy(), len(prompt))
            report = scorer.judge(
                result, policy, standing=standing, first_trajectory=self.offsets[scorer]
            )
        except HalluTracerError as error:
            log.warning("request %s has no risk: %s", request.request_id, error)
            return f"hallutracer: withheld, since {error}" if policy.action.withholds else None
        turn = Turn(policy, report.verdict, applies=report.context.applies)
        if not list(turn.begin()):  # it has not ended: the answer may begin
            return None
        why = (
            ", outside training" if report.uncertain.outside and not report.verdict.flagged else ""
        )
        return f"hallutracer: withheld, risk {report.risk:.3f}{why}"

    def standing(self, prompt: Sequence[int]) -> Standing:
        """Return what is known of a prompt that ends as the chat template ends a question."""
        messages = self.scorer.conversations.read(prompt)
        if messages is None:
            return Standing(other_rendering=True)
        return Standing(shape_of(messages, self.refusals))


def unreadable(request: Any) -> str | None:
    """Return what in a vLLM ``Request`` keeps its prompt from being read; None where nothing
    does."""
    if request.prompt_embeds is not None:
        return "prompt embeddings are not read: send text or token ids"
    if request.resumable:
        return "a prompt that arrives in pieces is not read: send it whole"
    taken = request.sampling_params.prompt_logprob_token_ids
    return "prompt_logprob_token_ids: the gate needs that channel" if taken else None


def foretold(parameters: Any) -> str | None:
    """Return what in vLLM's parameters has a response tell how the model goes on within the prompt;
    None where nothing does.

    0 does, too: the rank of each of the prompt's own tokens says whether a guessed answer is the
    model's."""
    if parameters.prompt_logprobs is None:
        return None
    return (
        "'prompt_logprobs' tells what the model would say at each place of the prompt, as behind an"
        " earlier question, whatever the verdict: leave it out, and so 'echo' beside log"
        " probabilities"
    )


class Judging:
    """What a core does besides: its scheduler ends withheld requests with their first output."""

    def __init__(self, core: Any, opened: Callable[[], Gate]) -> None:
        """``opened`` tests the engine, replays the golden prompts and returns the gate, or
        raises."""
        scheduler, executor = core.scheduler, core.model_executor
        self._core = core
        self._opened = opened
        self._requests = scheduler.requests
        self._gate: Gate | None = None  # while ``opened`` runs
        self._changed = False  # whether the weights may have, since
        self._update = scheduler.update_from_output
        self._update_request = scheduler._update_request_with_output
        self._rpc, executor.collective_rpc = executor.collective_rpc, self.rpc
        self._withheld: dict[str, str] = {}  # request -> reason, of this step
        scheduler.update_from_output = self.update
        scheduler._update_request_with_output = self.update_request
        self._add = scheduler.add_request
        scheduler.add_request = self.add
        self._add_lora = core.add_lora
        # vLLM decodes what it is given by its signature.
        core.add_lora = functools.wraps(self._add_lora)(lambda request: self.add_lora(request))

    def add(self, request: Any) -> None:
        """Take a request, after which earlier ones of an adapter that it replaces are no longer
        read."""
        if self._gate is not None:
            self._gate.adapters.note(request.lora_request)
        self._add(request)

    def add_lora(self, request: Any) -> Any:
        """Load an adapter; the same holds for what it replaces."""
        if self._gate is not None:
            self._gate.adapters.note(request)
        return self._add_lora(request)

    def rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a method of every worker."""
        # a function may do anything
        self._changed |= not isinstance(method, str) or method in CHANGES
        return self._rpc(method, *args, **kwargs)

    def open(self) -> None:
        """Judge every request from now on.  Raises what ``opened`` does; where a gate was open
        before, it stays, and nothing is read."""
        gate = self._gate
        self._gate = None
        self._changed = False
        directive = None if gate is None else replace(gate.lease.directive, weights=-1)
        self._core.collective_rpc("hallutracer_read_all", args=(None,))
        self._core.reset_prefix_cache()
        try:
            gate = self._opened()
            directive = gate.lease.directive
        finally:
            self._gate = gate
            self._core.reset_prefix_cache()
            if directive is not None:
                self._core.collective_rpc("hallutracer_read_all", args=(directive.encode(),))

    def open_again(self) -> None:
        """Open the gate again after a change of the weights, while nothing else runs: no request is
        read before."""
        idle = not (self._requests or self._core.is_sleeping())
        # the others step along
        alone = self._core.vllm_config.parallel_config.data_parallel_size == 1
        if self._gate is None or not (self._changed and idle and alone):
            return
        try:
            self.open()
            log.warning(
                "hallutracer: the golden prompts were replayed after a change of the weights"
            )
        except (HalluTracerError, BundleError) as error:
            log.critical(
                "hallutracer: the weights have changed, and no request is read any more: %s", error
            )

    def in_words(self) -> str:
        """Return which bundle judges by which policy, and where it reads; the gate is open."""
        assert self._gate is not None
        return self._gate.scorer.in_words(self._gate.policy)

    def update(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Judge the step's first outputs; the payloads go no further."""
        if self._gate is None:
            return self._update(scheduler_output, model_runner_output)
        wires = model_runner_output.prompt_token_id_logprobs_dict
        sampled = model_runner_output.sampled_token_ids
        self._withheld = {}
        for name in scheduler_output.num_scheduled_tokens:
            request, row = self._requests.get(name), model_runner_output.req_id_to_index.get(name)
            read = request is None or request.sampling_params.prompt_logprob_token_ids is None
            wire = wires.pop(name, None) if read else None  # else it is what the caller asked for
            if (
                request is None
                or request.num_output_tokens
                or row is None
                or not (sampled and sampled[row])
            ):
                continue
            if reason := self._gate.reason(request, wire):
                self._withheld[name] = reason
                # Its response holds no log probabilities of the prompt, either.
                wires.pop(name, None)
                model_runner_output.prompt_logprobs_dict.pop(name, None)
        return self._update(scheduler_output, model_runner_output)

    def update_request(
        self, request: Any, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> Any:
        """Return no token of a withheld answer, and that it has stopped."""
        if (reason := self._withheld.pop(request.request_id, None)) is None:
            return self._update_request(request, new_token_ids, *args, **kwargs)
        from vllm.v1.request import RequestStatus

        request.status = RequestStatus.FINISHED_STOPPED
        request.stop_reason = reason
        request.resumable = False
        return [], True


class _Core:
    """An engine's core before it takes requests, as the ``AsyncLLM`` that ``VllmEngine`` asks.

    All calls of the core are made on the thread that is in ``serve``: the one that made it, as vLLM
    makes them."""

    errored, output_handler = False, None

    def __init__(self, core: Any) -> None:
        self.vllm_config, self._core = core.vllm_config, core
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._outputs: defaultdict[str, deque[Any]] = defaultdict(deque)

    def serve(self, work: Callable[[], Any]) -> Any:
        """Return what ``work`` returns, in a thread of its own."""
        result = in_own_thread(work)
        result.add_done_callback(lambda _: self._calls.put(None))
        while (call := self._calls.get()) is not None:
            try:
                call[1].set_result(call[0]())
            except Exception as error:  # whatever it is, it is raised where the call was made
                call[1].set_exception(error)
        return result.result()

    async def _call(self, call: Callable[[], Any]) -> Any:
        done: Future[Any] = Future()
        self._calls.put((call, done))
        return await asyncio.wrap_future(done)

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> Any:
        """Call a method of every worker."""
        return await self._call(lambda: list(self._core.collective_rpc(method, args=args)))

    async def generate(
        self,
        prompt: Mapping[str, Any],
        parameters: Any,
        name: str,
        priority: int,
        lora_request: Any,
    ) -> AsyncGenerator[Any, None]:
        """Yield a request's outputs as vLLM's own client would."""
        from vllm.v1.engine import EngineCoreRequest

        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=list(prompt["prompt_token_ids"]),
            mm_features=None,
            sampling_params=parameters,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=lora_request,
            cache_salt=None,
            data_parallel_rank=None,
            priority=priority,
        )
        await self._call(
            lambda: self._core.add_request(*self._core.preprocess_add_request(request))
        )
        while True:
            while not self._outputs[name]:
                await self._call(self._step)
            output = self._outputs[name].popleft()
            wire, reason = output.prompt_token_id_logprobs, output.finish_reason
            yield SimpleNamespace(
                outputs=[
                    SimpleNamespace(
                        text="",
                        token_ids=output.new_token_ids,
                        finish_reason=None if reason is None else str(reason),
                        stop_reason=output.stop_reason,
                    )
                ],
                finished=reason is not None,
                num_cached_tokens=0,
                metrics=None,
                prompt_token_id_logprobs=None if wire is None else wire.numpy(),
            )
            if reason is not None:
                return

    def _step(self) -> None:
        outputs, executed = self._core.step_fn()
        self._core.post_step(executed)
        for of_client in (outputs or {}).values():
            for output in of_client.outputs:
                self._outputs[output.request_id].append(output)

    def shutdown(self) -> None:
        """Do nothing: whoever made the core shuts it down."""


def open_gate(core: Any, options: PluginOptions) -> Judging:
    """Put the first bundle's gate into a vLLM ``EngineCore``.  Raises what is wrong with engine,
    bundle or options."""
    settings, bundle = options.settings, next(iter(options.bundles.values()))
    if options.audit_log is not None:
        raise HalluTracerError(
            f"{env('audit-log')} needs `vllm serve` or HalluTracer's own service: unset it here"
        )
    policy = options.policies.named[settings.policy]
    if field := policy.reads_answers_for:
        raise HalluTracerError(
            f"policy {policy.name!r}: {field} needs `vllm serve` or HalluTracer's own service"
        )
    policy = policy.at(settings.threshold if policy.threshold is None else None)
    client = _Core(core)
    from vllm.lora.request import LoRARequest
    from vllm.lora.utils import get_adapter_absolute_path

    replaced: set[int] = set()  # remembered when the gate opens again

    def opened() -> Gate:
        engine = VllmEngine.around(
            client, None, template_arguments=bundle.manifest.chat_template.arguments
        )
        try:
            scorers = [Scorer(engine, bundle)]
            adapters = Adapters(options.bundles, get_adapter_absolute_path, replaced)
            for number, folder in enumerate(options.adapters, 1):
                request = LoRARequest(folder.name, OWN_ADAPTERS + number, str(folder.resolve()))
                scorers += adapters.load(engine, request).values()
            for waiting in adapters.waiting:
                log.warning(
                    "bundle %s reads an adapter that %s does not name", waiting, env("adapters")
                )
            # Made while the engine renders.
            assert all(scorer.chat_ending is not None for scorer in scorers)
            assert scorers[0].conversations is not None
            probes, offsets = list[Probes](), dict[Scorer, int]()
            for scorer in scorers:
                offsets[scorer] = len(probes)
                probes += scorer.probes
            lease = engine.lease(
                probes, first_token=any(scorer.needs_first_token for scorer in scorers)
            )
            held = run_on(engine.loop, lease)
            refusals = options.policies.refusals
            return Gate(scorers[0], policy, held, offsets, adapters, refusals)
        finally:
            engine.close()

    judging = Judging(core, lambda: client.serve(opened))
    judging.open()
    log.info("hallutracer ready, for every request of this engine: %s", judging.in_words())
    return judging
