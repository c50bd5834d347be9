"""``VllmEngine``: implements ``base.Engine`` on a vLLM client.

vLLM schedules: prompts arrive at any time and share steps; it caches, preempts and cancels them.  vLLM's client and
the coroutines here run on one event loop; the synchronous methods of ``base.Engine`` submit their work to it and wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from probes_store.bundle import Bundle
from service.engines import loading
from service.engines.base import (
    FIRST_COME,
    Completion,
    EngineOptions,
    Extraction,
    Gate,
    ModelIdentity,
    PrefillResult,
    Sampling,
    TokenIds,
    TracedAnswer,
    Turn,
    Update,
    prefill_of,
    unfinished,
)
from service.engines.bridge import Outboxes, gather_all, relay, run_on
from service.engines.checks import check_onset_only, check_prompts, check_sampling, refuse_tracing
from service.engines.families import text_config
from service.engines.identity import changed_at_load, folder_fingerprint, revision_of
from service.engines.tokens import Tokens
from service.engines.vllm import launch
from service.engines.vllm.client import Client
from service.engines.vllm.requests import AnswerBuilder, ProbeLease, answering, payload_of, score_only, times
from service.engines.vllm.self_test import self_test
from service.engines.vllm.slots import Slots
from service.engines.vllm.stages import say
from service.engines.vllm.wire import CONTEXT_NAMES, ContextTerms, Directive, Payload, Plan
from service.errors import EngineError
from service.readout import Geometry, Pooling, Probes, Site

T = TypeVar("T")
SLOTS = 4  # probe slots per site
MOST_PROBES = 1 + len(CONTEXT_NAMES)  # of one bundle
MAX_IN_FLIGHT = 256  # prompts of one synchronous call that are inside vLLM at a time


def slots_for(bundles: Iterable[Bundle]) -> int:
    """Probe slots per site: for the bundles, and for any that replace them while prompts of the old ones wait."""
    return max(SLOTS, sum(1 + bundle.manifest.context_probes + MOST_PROBES for bundle in bundles))


class VllmEngine:
    """One model on vLLM.  Implements ``base.Engine``."""

    scores_overtake_answers = False

    def __init__(self, client: Client, files: loading.ModelFiles) -> None:
        """See ``load`` and ``around``.  Raises EngineError if the worker is not ours or the self-test fails."""
        self.on_prefill: Callable[[int, int], None] = lambda prompts, tokens: None
        self._client = client
        self._outboxes = Outboxes()
        tokens = Tokens(files.tokenizer)
        self.tokenize, self.render_chat, self.detokenize = tokens.tokenize, tokens.render_chat, tokens.detokenize
        self.special_tokens = tokens.special_tokens
        self.counters = client.counters
        self.loop = client.loop
        self.torch_model = None  # the modules are in vLLM's processes
        self._vocabulary = int(text_config(files.config).vocab_size)
        # The token that a closed gate samples, which ends the request.
        self.end_token: int | None = getattr(files.tokenizer, "eos_token_id", None)
        config = client.config
        self.max_batch_tokens = int(config.scheduler_config.max_num_batched_tokens)
        described = run_on(client.loop, client.describe())
        self._plan = Plan(
            Geometry(*described["geometry"]),
            tuple(Site(name) for name in described["sites"]),
            int(described["slots"]),
            bool(described["rows"]),
        )
        self._slots = Slots(self._plan, self._client.write)
        self.identity = ModelIdentity(
            model=files.name,
            revision=revision_of(files.config),
            fingerprint=changed_at_load(folder_fingerprint(files.folder), launch.changes_at_load(config, files.config)),
            architecture=str((files.config.architectures or [type(files.config).__name__])[0]),
            model_type=str(files.config.model_type),
            tokenizer=tokens.digest,
            chat_template=tokens.chat_template_digest,
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            geometry=self._plan.geometry,
            max_tokens=int(config.model_config.max_model_len),
        )
        say("testing what is read")
        # Embedding rows beyond the tokenizer's vocabulary are often padding and identical.
        self_test(self, self._plan, min(self._vocabulary, len(files.tokenizer)))

    @classmethod
    def around(cls, async_llm: Any, loop: asyncio.AbstractEventLoop, generate: Any | None = None) -> VllmEngine:
        """An engine on an ``AsyncLLM`` that the caller has started on ``loop`` and will shut down.

        ``generate`` is vLLM's own method, where the caller has put another one in its place.

        Not to be called on that loop's thread.  Raises as ``load`` does.
        """
        launch.check_installed()
        config = async_llm.vllm_config.model_config
        options = EngineOptions(config.model, config.revision, trust_remote_code=config.trust_remote_code)
        return cls(Client(async_llm, loop, generate), loading.find_model_files(options))

    @classmethod
    def load(
        cls,
        options: EngineOptions,
        *,
        sites: Sequence[Site] = tuple(Site),
        slots: int = SLOTS,
        rows: bool = False,
        threads: int | None = None,
    ) -> VllmEngine:
        """Start vLLM on a model folder or hub name, on an event loop of its own, and run the self-test.

        sites, slots: what is compiled in; a site's slots bound how many probes can be read there at the same time.
        rows: also compile in the return of whole activations (``extract``), for training.
        threads: CPU threads, shared by all ranks.
        Raises ModelLoadError naming the cause, or UnknownFamily.
        """
        launch.check_installed()
        loading.check_options(replace(options, extra={}))
        files = loading.find_model_files(options)
        say("starting its processes")
        client = Client(launch.start(options, files, sites, slots, rows=rows, threads=threads))
        try:
            return cls(client, files)
        except BaseException:
            client.close()
            raise

    @property
    def alive(self) -> bool:
        """Whether vLLM is running."""
        return self._client.alive

    def check(self, prompts: Sequence[TokenIds]) -> None:
        """Raise EmptyPrompt, PromptTooLong or RequestError for the first prompt that vLLM cannot run.

        vLLM samples a token for every prompt, so the context must hold one token more than the prompt.
        """
        check_prompts(prompts, vocabulary=self._vocabulary, max_tokens=self.identity.max_tokens - 1)

    def score(
        self, prompts: Sequence[TokenIds], probes: Sequence[Probes], *, first_token: bool = False
    ) -> list[PrefillResult]:
        """Trajectories [m] (Eq. trajectory) at t*, one per probe and prompt.

        Raises as ``check`` does, NonFiniteReadout, and EngineError if the probes need more slots than are compiled in.
        """
        self._begin(prompts)

        async def prefill(prompt: TokenIds) -> PrefillResult:
            async with aclosing(self._answer(prompt, probes, first_token, None, None)) as updates:
                return prefill_of(await anext(updates, Update()))

        return self._run_all([prefill(prompt) for prompt in prompts])

    def extract(
        self,
        prompts: Sequence[TokenIds],
        sites: Sequence[Site],
        poolings: Sequence[Pooling] = (Pooling.LAST_1,),
        sampling: Sampling | None = None,
    ) -> Extraction:
        """Activations of every layer at t*, [n, m, width] float32 per site, and each prompt's first-token distribution.

        With ``sampling`` prefill and answer are one request.  Raises as ``score`` and ``check_sampling`` do, and
        EngineError if the engine was not loaded with ``rows`` and these sites, or for any pooling but last_1: tokens
        found in vLLM's prefix cache are not computed again.
        """
        check_onset_only(poolings, "vllm")
        if not self._plan.activations or not set(sites) <= set(self._plan.sites):
            raise EngineError(
                "this engine was started for scoring; start it for training (rows=True) to extract activations"
            )
        if sampling is not None:
            check_sampling(sampling)
        self._begin(prompts)
        directive = Directive(activations=True)
        parameters = partial(score_only, directive) if sampling is None else partial(answering, sampling, directive)

        async def extract_one(prompt: TokenIds) -> tuple[Payload, Completion]:
            payload, answer = None, AnswerBuilder()
            async with aclosing(self._client.outputs(prompt, parameters())) as outputs:
                async for output in outputs:
                    payload = payload or payload_of(output, self._plan, directive)
                    answer.add(output)
            if payload is None:
                raise unfinished()
            return payload, answer.completion()

        found = self._run_all([extract_one(prompt) for prompt in prompts])
        payloads = [payload for payload, _ in found]
        activations = {
            site: np.stack([payload.activations[site] for payload in payloads])
            if payloads
            else np.empty((0, self._plan.geometry.num_layers, self._plan.geometry.width(site)), np.float32)
            for site in sites
        }
        first_tokens = tuple(payload.first_token for payload in payloads if payload.first_token is not None)
        completions = () if sampling is None else tuple(completion for _, completion in found)
        return Extraction(activations, first_tokens, completions=completions)

    def generate(self, prompts: Sequence[TokenIds], sampling: Sampling) -> list[Completion]:
        """Answers, batched by vLLM.  Raises as ``check`` and ``check_sampling`` do."""
        check_sampling(sampling)
        self._begin(prompts)

        async def complete(prompt: TokenIds) -> Completion:
            answer = AnswerBuilder()
            async for output in self._client.outputs(prompt, answering(sampling, None)):
                answer.add(output)
            return answer.completion()

        return self._run_all([complete(prompt) for prompt in prompts])

    def sample(
        self, prompts: Sequence[TokenIds], sampling: Sampling, seeds: Sequence[Sequence[int]]
    ) -> list[list[TracedAnswer]]:
        """Raises EngineError: vLLM has no states of decoded tokens to give."""
        refuse_tracing("vllm")

    def next_token(self, prompts: Sequence[TokenIds], candidates: Sequence[int]) -> NDArray[np.float64]:
        """Raises EngineError: vLLM gives the most probable tokens only."""
        refuse_tracing("vllm")

    async def answer(
        self,
        prompt: TokenIds,
        probes: Sequence[Probes],
        *,
        first_token: bool = False,
        sampling: Sampling | None = None,
        gate: Gate | None = None,
        turn: Turn = FIRST_COME,
    ) -> AsyncGenerator[Update, None]:
        """As ``base.Engine.answer``; prefill and answer are one vLLM request.

        vLLM keeps the order of ``turn`` where its scheduling policy is "priority", as ``launch`` chooses.
        """
        if sampling is not None:
            check_sampling(sampling)
        running = asyncio.get_running_loop()
        make = partial(self._answer, prompt, probes, first_token, sampling, gate, turn)
        answer = make() if running is self.loop else relay(self.loop, self._outboxes.of(running), make)
        async with aclosing(answer) as updates:
            async for update in updates:
                yield update

    async def _answer(
        self,
        prompt: TokenIds,
        probes: Sequence[Probes],
        first_token: bool,
        sampling: Sampling | None,
        gate: Gate | None,
        turn: Turn = FIRST_COME,
    ) -> AsyncGenerator[Update, None]:
        """``answer`` on ``loop``."""
        lease = await self.lease(probes, first_token=first_token, gate=gate if sampling is not None else None)
        answer = AnswerBuilder()
        try:
            parameters = score_only(lease.directive) if sampling is None else answering(sampling, lease.directive)
            async with aclosing(self._client.outputs(prompt, parameters, turn.place)) as outputs:
                async for output in outputs:
                    piece, tokens = answer.add(output)
                    if answer.steps > 1:
                        ends = output.finished or (sampling is not None and time.monotonic() >= sampling.until)
                        yield Update(None, piece, tokens, answer.completion("length") if ends else None)
                        if ends:
                            return
                        continue
                    result, gated = lease.prefill(output, len(prompt))
                    continues = sampling is not None and not gated
                    queue_s, prefill_s = times(output)
                    self.on_prefill(1, len(prompt))
                    yield Update(
                        result,
                        piece if continues else "",
                        tokens if continues else 0,
                        answer.completion() if continues and output.finished else None,
                        cached_tokens=int(output.num_cached_tokens or 0),
                        queue_s=queue_s,
                        prefill_s=prefill_s,
                    )
        finally:
            lease.release()

    async def lease(
        self, probes: Sequence[Probes], *, first_token: bool = False, gate: Gate | None = None
    ) -> ProbeLease:
        """Keep the probes in their slots for one request, whose sampling parameters carry ``ProbeLease.directive``.

        Public for requests made elsewhere, such as by vLLM's own server.  Runs on ``loop``.
        """
        columns = await self._slots.hold(probes)
        gated = gate is not None and self.end_token is not None
        directive = Directive(
            first_token=first_token,
            slot=columns[0] if columns else 0,
            gate=gate if gated else None,
            end_token=self.end_token if gated else None,
            context=ContextTerms.made(None if gate is None else gate.context, columns[1:]),
            probes=self._slots.digests(columns),
        )
        return ProbeLease(directive, self._plan, columns, self._slots)

    def close(self) -> None:
        """End vLLM's processes.  Later calls raise EngineError."""
        self._client.close()

    def _run_all(self, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        return run_on(self.loop, gather_all(work, at_once=MAX_IN_FLIGHT))

    def _begin(self, prompts: Sequence[TokenIds]) -> None:
        self._client.check_open()
        self.check(prompts)
