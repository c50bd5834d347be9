"""``VllmEngine``: a vLLM client that knows what to ask for and what comes back.  Knows no bundle storage and no HTTP.

vLLM schedules: prompts come at any time, share steps, are cached, preempted and cancelled by it.  Everything here runs
on one event loop, on which vLLM's client lives too; the synchronous methods of ``base.Engine`` hand their work to it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from service.engines import loading
from service.engines.base import (
    Completion,
    Counters,
    EngineOptions,
    Extraction,
    Gate,
    ModelIdentity,
    PrefillResult,
    Sampling,
    TokenIds,
    Update,
    prefill_of,
)
from service.engines.bridge import Outboxes, gather_all, relay, run_on
from service.engines.checks import check_onset_only, check_prompts, check_sampling
from service.engines.families import text_config
from service.engines.identity import folder_fingerprint, revision_of
from service.engines.tokens import Tokens
from service.engines.vllm import launch as starting
from service.engines.vllm.client import Client
from service.engines.vllm.requests import Answer, ProbeLease, answering, payload_of, score_only, times
from service.engines.vllm.self_test import self_test
from service.engines.vllm.slots import Slots
from service.engines.vllm.wire import Directive, Payload, Plan
from service.errors import EngineError
from service.readout import Geometry, Pooling, Probes, Site

T = TypeVar("T")
SLOTS = 4
IN_FLIGHT = 256  # prompts of one synchronous call inside vLLM at a time


class VllmEngine:
    """One model on vLLM.  Implements ``base.Engine``."""

    scores_overtake_answers = False

    def __init__(self, client: Any, found: loading.Found, loop: asyncio.AbstractEventLoop, *, owns_loop: bool) -> None:
        """Take a started ``AsyncLLM``; ``load`` starts one.  ``loop`` is, or will be, where the client lives.

        Raises EngineError where the worker is not ours or the self-test fails.
        """
        self.on_prefill: Callable[[int, int], None] = lambda prompts, tokens: None
        self._client, self._owns_loop = Client(client, loop), owns_loop
        self._outboxes = Outboxes()
        self._tokens = Tokens(found.tokenizer)
        self._vocabulary = int(text_config(found.config).vocab_size)
        self._end_token = getattr(found.tokenizer, "eos_token_id", None)
        config = self._client.config
        described = run_on(loop, self._client.describe())
        self._plan = Plan(
            Geometry(*described["geometry"]),
            tuple(Site(name) for name in described["sites"]),
            int(described["slots"]),
            bool(described["rows"]),
        )
        self._slots = Slots(self._plan, self._client.write)
        self._identity = ModelIdentity(
            model=found.name,
            revision=revision_of(found.config),
            fingerprint=folder_fingerprint(found.folder),
            architecture=str((found.config.architectures or [type(found.config).__name__])[0]),
            model_type=str(found.config.model_type),
            tokenizer=self._tokens.digest,
            chat_template=self._tokens.chat_template_digest,
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            geometry=self._plan.geometry,
            max_tokens=int(config.model_config.max_model_len),
        )
        # Rows of the embedding beyond the tokenizer's tokens are often padding, all alike.
        self_test(self, self._plan, min(self._vocabulary, len(found.tokenizer)))

    @classmethod
    def around(cls, client: Any, loop: asyncio.AbstractEventLoop) -> VllmEngine:
        """An engine around a client that somebody else has started on ``loop`` and will end.

        Not to be called on that loop's thread.  Raises as ``load`` does.
        """
        starting.check_installed()
        config = client.vllm_config.model_config
        options = EngineOptions(config.model, config.revision, trust_remote_code=config.trust_remote_code)
        return cls(client, loading.find(options), loop, owns_loop=False)

    @classmethod
    def load(
        cls,
        options: EngineOptions,
        *,
        sites: Sequence[Site] = tuple(Site),
        slots: int = SLOTS,
        rows: bool = False,
        threads: int | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> VllmEngine:
        """Start vLLM on a model folder or hub name and test what it reads.  Not to be called on ``loop``'s thread.

        sites and slots: what is compiled in, and how many bundles can stand there at once.  rows: also take whole rows
        (``extract``), for training.  threads: CPU threads of all ranks together.  loop: a running one to live on; None:
        one of its own, in a thread.
        Raises ModelLoadError saying what was wrong, or UnknownFamily.
        """
        starting.check_installed()
        loading.check_options(replace(options, extra={}))
        found = loading.find(options)
        client = starting.start(options, found, sites, slots, rows=rows, threads=threads)
        try:
            return cls(client, found, loop or _own_loop(), owns_loop=loop is None)
        except BaseException:
            client.shutdown()
            raise

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Where vLLM's client lives."""
        return self._client.loop

    @property
    def identity(self) -> ModelIdentity:
        """Which model this is."""
        return self._identity

    @property
    def counters(self) -> Counters:
        """Work done so far."""
        return self._client.counters

    @property
    def alive(self) -> bool:
        """Whether vLLM still runs."""
        return self._client.alive

    @property
    def end_token(self) -> int | None:
        """What a closed gate samples: the tokenizer's end token, which ends any request."""
        return self._end_token

    @property
    def plan(self) -> Plan:
        """What is compiled in."""
        return self._plan

    @property
    def max_batch_tokens(self) -> int:
        """Tokens of one step, at most."""
        return int(self._client.config.scheduler_config.max_num_batched_tokens)

    @property
    def torch_model(self) -> None:
        """vLLM's processes hold them."""
        return None

    def tokenize(self, text: str) -> list[int]:
        """Plain text to ids, with the tokenizer's own special tokens.  Raises RequestError."""
        return self._tokens.tokenize(text)

    def render_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Messages to ids through the chat template, generation prompt included.  Raises RequestError."""
        return self._tokens.render_chat(messages)

    def detokenize(self, token_ids: TokenIds) -> str:
        """Ids to text, special tokens left out."""
        return self._tokens.detokenize(token_ids)

    def check(self, prompts: Sequence[TokenIds]) -> None:
        """Raise EmptyPrompt, PromptTooLong or RequestError for the first prompt that no step would take.

        vLLM samples a token of every prompt, so the context has to hold one more than the prompt.
        """
        check_prompts(prompts, vocabulary=self._vocabulary, max_tokens=self._identity.max_tokens - 1)

    def score(
        self, prompts: Sequence[TokenIds], probes: Sequence[Probes], *, first_token: bool = False
    ) -> list[PrefillResult]:
        """Trajectories (Eq. trajectory) at t*, one per probe and prompt.  Raises as ``check`` does, NonFiniteReadout,
        and EngineError where the probes need more slots than there are."""
        self._begin(prompts)

        async def prefill(prompt: TokenIds) -> PrefillResult:
            async with aclosing(self._answer(prompt, probes, first_token, None, None)) as updates:
                return prefill_of(await anext(updates, Update()))

        return self._run_all([prefill(prompt) for prompt in prompts])

    def extract(
        self, prompts: Sequence[TokenIds], sites: Sequence[Site], poolings: Sequence[Pooling] = (Pooling.LAST_1,)
    ) -> Extraction:
        """Rows of every layer at t*, [n, m, width] float32 per site, and each prompt's first-token distribution.

        Raises as ``score`` does, and EngineError where the engine was not loaded with ``rows`` and these sites, and
        for any pooling but last_1: vLLM may have a prompt's beginning cached and never compute it again.
        """
        check_onset_only(poolings, "vllm")
        if not self._plan.rows or not set(sites) <= set(self._plan.sites):
            raise EngineError("this engine was started for scoring; start it for training (rows=True) to extract rows")
        self._begin(prompts)
        directive = Directive(rows=True)

        async def one(prompt: TokenIds) -> Payload:
            async with aclosing(self._client.outputs(prompt, score_only(directive))) as outputs:
                return payload_of(await anext(outputs, None), self._plan, directive)

        found = self._run_all([one(prompt) for prompt in prompts])
        rows = {
            site: np.stack([payload.rows[site] for payload in found])
            if found
            else np.empty((0, self._plan.geometry.num_layers, self._plan.geometry.width(site)), np.float32)
            for site in sites
        }
        return Extraction(rows, tuple(payload.first_token for payload in found if payload.first_token is not None))

    def generate(self, prompts: Sequence[TokenIds], sampling: Sampling) -> list[Completion]:
        """Answers, batched by vLLM.  Raises as ``check`` and ``check_sampling`` do."""
        check_sampling(sampling)
        self._begin(prompts)

        async def one(prompt: TokenIds) -> Completion:
            answer = Answer()
            async for output in self._client.outputs(prompt, answering(sampling, None)):
                answer.take(output)
            return answer.completion()

        return self._run_all([one(prompt) for prompt in prompts])

    async def answer(
        self,
        prompt: TokenIds,
        probes: Sequence[Probes],
        *,
        first_token: bool = False,
        sampling: Sampling | None = None,
        gate: Gate | None = None,
    ) -> AsyncGenerator[Update, None]:
        """One prompt as ``base.Engine`` says, all of it one request of vLLM's."""
        if sampling is not None:
            check_sampling(sampling)
        here = asyncio.get_running_loop()

        def make() -> AsyncGenerator[Update, None]:
            return self._answer(prompt, probes, first_token, sampling, gate)

        answer = make() if here is self.loop else relay(self.loop, self._outboxes.of(here), make)
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
    ) -> AsyncGenerator[Update, None]:
        """On ``loop``."""
        lease = await self.lease(probes, first_token=first_token, gate=gate if sampling is not None else None)
        answer = Answer()
        try:
            parameters = score_only(lease.directive) if sampling is None else answering(sampling, lease.directive)
            async with aclosing(self._client.outputs(prompt, parameters)) as outputs:
                async for output in outputs:
                    piece, tokens = answer.take(output)
                    if answer.steps > 1:
                        yield Update(None, piece, tokens, answer.completion() if output.finished else None)
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
        """Hold the probes in their slots for one request; its sampling parameters carry ``ProbeLease.directive``.

        For requests that are not made here, such as those of vLLM's own server.  Runs on ``loop``.
        """
        columns = await self._slots.hold(probes)
        gated = gate is not None and self._end_token is not None
        directive = Directive(
            first_token=first_token,
            slot=columns[0] if columns else 0,
            gate=gate if gated else None,
            end_token=self._end_token if gated else None,
        )
        return ProbeLease(directive, self._plan, columns, self._slots.release)

    def close(self) -> None:
        """End vLLM's processes.  Later calls raise EngineError."""
        if self._client.close() and self._owns_loop:
            self.loop.call_soon_threadsafe(self.loop.stop)

    def _run_all(self, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        return run_on(self.loop, gather_all(work, at_once=IN_FLIGHT))

    def _begin(self, prompts: Sequence[TokenIds]) -> None:
        self._client.check_open()
        self.check(prompts)


def _own_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="vllm-client", daemon=True).start()
    return loop
