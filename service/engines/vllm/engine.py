"""``VllmEngine``: implements ``base.Engine`` on vLLM's own client, ``AsyncLLM``.

vLLM schedules: prompts arrive at any time and share steps; it caches, preempts and cancels them.
Its client and the coroutines here run on one event loop; the synchronous methods of ``base.Engine``
submit their work to it and wait."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from probes_store.bundle import Bundle
from probes_store.records import TemplateArgument
from service.engines import adapters, base, checkpoint, loading
from service.engines.base import (
    Completion,
    EngineOptions,
    Extraction,
    PrefillResult,
    Prompts,
    Sampling,
    Update,
)
from service.engines.bridge import LoopThread, Outboxes, gather_all, relay, run_on
from service.engines.checks import (
    Tokens,
    WithTokens,
    check_onset_only,
    check_prompts,
    check_sampling,
    refuse_answer_reading,
    refuse_tracing,
)
from service.engines.families import check_sites, family_of, text_config
from service.engines.formats import MASKS, Format, Grammars
from service.engines.vllm import launch
from service.engines.vllm.client import (
    ProbeLease,
    Slots,
    keep_merged,
    parameters_for,
    payload_of,
    times,
)
from service.engines.vllm.self_test import self_test
from service.engines.vllm.wire import (
    CONTEXT_NAMES,
    Directive,
    Payload,
    Plan,
    context_terms,
    probe_digest,
)
from service.errors import (
    EngineBusy,
    EngineError,
    HalluTracerError,
    ModelLoadError,
    Overloaded,
    RequestError,
)
from service.readout import Geometry, Pooling, Probes, Site

T = TypeVar("T")
SLOTS = 4  # probe slots per site
MAX_IN_FLIGHT = 256  # prompts of one synchronous call that are inside vLLM at a time


def slots_for(bundles: Iterable[Bundle], *, answers: bool = False) -> int:
    """Return the probe slots per site for the bundles, and any that replace them while prompts of
    the old ones wait.

    ``answers``: and answers, which are read by probes of their own."""
    most = 1 + len(CONTEXT_NAMES) + answers  # of one bundle
    return max(
        SLOTS, sum(1 + bundle.manifest.context_probes + answers + most for bundle in bundles)
    )


class VllmEngine(WithTokens):
    """One model on a started ``AsyncLLM``, all of whose coroutines run on ``loop``.  Implements
    ``base.Engine``."""

    scores_overtake_answers = False
    waited_for_cpu_s = 0.0  # its processes are not looked at
    torch_model = None  # the modules are in vLLM's processes
    answer_bytes = 0  # vLLM allocates all keys and values when it starts
    _request_numbers = count()  # of all engines, several of which may be around one ``AsyncLLM``

    def __init__(
        self,
        async_llm: Any,
        files: loading.ModelFiles,
        loop: asyncio.AbstractEventLoop | None = None,
        generate: Any | None = None,
        adapter: str | None = None,
        template_arguments: Mapping[str, TemplateArgument] | None = None,
    ) -> None:
        """See ``load`` and ``around``; without ``loop`` it has one of its own and owns
        ``async_llm``."""
        self.on_prefill: Callable[[int, int], None] = lambda prompts, tokens: None
        self._own_loop: LoopThread | None = None
        if loop is None:
            self._own_loop = LoopThread("vllm-client")
            loop = self._own_loop.loop
        self.loop = loop
        self._async_llm, self._generate = async_llm, generate or async_llm.generate
        self._closed = False
        self._outboxes, self.counters = Outboxes(), base.Counters()
        self._adapter: Any = None  # ``LoRARequest`` of every request made here
        try:
            tokens, config = Tokens(files.tokenizer, template_arguments), async_llm.vllm_config
            super().__init__(tokens)
            self.encode_chat, self.special_token_in = tokens.encode_chat, tokens.special_token_in
            self._vocabulary = int(text_config(files.config).vocab_size)
            # The token that a closed gate samples, which ends the request.
            self.end_token: int | None = getattr(files.tokenizer, "eos_token_id", None)
            self._grammars = Grammars(files.tokenizer, self._vocabulary, frozenset(), masks=MASKS)
            self.max_batch_tokens = int(config.scheduler_config.max_num_batched_tokens)
            described = run_on(self.loop, self._describe())
            sites, slots, rows, answers = (
                described[name] for name in ("sites", "slots", "rows", "answers")
            )
            layout = Geometry(*described["geometry"]), tuple(map(Site, sites))
            self._plan = Plan(*layout, int(slots), bool(rows), bool(answers))
            self.reads_answers = self._plan.answers
            if self.reads_answers:
                keep_merged()
            self.slots, self._weights = Slots(self._plan, self._write), int(described["weights"])
            changes = launch.changes_at_load(config, files.config)
            self.identity = files.identity(
                tokens,
                fingerprint=checkpoint.changed_at_load(
                    checkpoint.folder_fingerprint(files.folder), changes
                ),
                geometry=self._plan.geometry,
                dtype=config.model_config.dtype,
                max_tokens=int(config.model_config.max_model_len),
                arguments=template_arguments or None,
            )
            if adapter is not None:
                self.identity = adapters.identity_with(self.identity, adapter)
                self._adapter = run_on(self.loop, self._load_adapter(Path(adapter).resolve()))
            launch.say("testing what is read")
            # Embedding rows beyond the tokenizer's vocabulary are often padding and identical.
            self_test(self, self._plan, min(self._vocabulary, len(files.tokenizer)))
        except BaseException:
            if self._own_loop is not None:
                self.close()
            raise

    @classmethod
    def around(
        cls,
        async_llm: Any,
        loop: asyncio.AbstractEventLoop | None,
        generate: Any | None = None,
        template_arguments: Mapping[str, TemplateArgument] | None = None,
    ) -> VllmEngine:
        """Return an engine on the caller's ``AsyncLLM``, which runs on ``loop``, None: any.  Raises
        as ``load`` does.

        ``generate``: vLLM's own method, if the caller has replaced it; ``template_arguments``: what
        vLLM gives the chat template for every chat.  Not to be called on ``loop``'s thread."""
        launch.check_installed()
        config = async_llm.vllm_config.model_config
        options = EngineOptions(
            config.model, config.revision, trust_remote_code=config.trust_remote_code
        )
        files = loading.find_model_files(options)
        return cls(async_llm, files, loop, generate, template_arguments=template_arguments)

    @classmethod
    def load(
        cls,
        options: EngineOptions,
        *,
        sites: Sequence[Site] | None = None,
        slots: int = SLOTS,
        rows: bool = False,
        threads: int | None = None,
        answers: bool = False,
    ) -> VllmEngine:
        """Start vLLM on a folder or hub name, and test it.  Raises ModelLoadError, UnknownFamily,
        EngineError.

        ``sites`` (None: the family's), ``slots``: compiled in; ``rows``: for training; ``threads``:
        of all ranks;
        ``answers``: it reads answers' own tokens, too."""
        launch.check_installed()
        loading.check_options(replace(options, extra={}))
        files = loading.find_model_files(options)
        sites = family_of(files.config).sites if sites is None else sites
        check_sites(str(files.config.model_type), sites)
        launch.say("starting its processes")
        # No name for it here: vLLM keeps this frame, and ``close`` has to free what it starts.
        return cls(
            launch.start(options, files, sites, slots, rows=rows, threads=threads, answers=answers),
            files,
            adapter=options.adapter,
            template_arguments=options.template_arguments,
        )

    def adapted(self, request: Any, digest: str) -> VllmEngine:
        """Return this engine for prompts that run with an adapter, a ``LoRARequest``: another
        model."""
        engine = copy(self)
        engine._adapter = request
        engine.on_prefill = lambda prompts, tokens: self.on_prefill(prompts, tokens)
        engine.identity = replace(self.identity, model=request.lora_name, adapter=digest)
        return engine

    @property
    def alive(self) -> bool:
        """Whether vLLM is running."""
        return not self._closed and not self._async_llm.errored

    def seconds_to_read(self, prompt: base.TokenIds) -> float | None:
        """Return None: what it finds in its cache, and which prompts share a step, vLLM decides."""
        return None

    def check(self, prompts: Prompts) -> None:
        """Raise RequestError for the first prompt that vLLM cannot run: it needs room for one
        sampled token, too."""
        check_prompts(prompts, vocabulary=self._vocabulary, max_tokens=self.identity.max_tokens - 1)

    def prepared(self, asked: Format, caller: str = "", seconds: float = math.inf) -> Format:
        """Return the format, which vLLM's own processes compile once more, without our limits.

        Raises as ``base.LoadedModel.prepared`` does."""
        self._grammars.prepared(asked, caller, seconds)
        return asked

    def score(
        self,
        prompts: Prompts,
        probes: Sequence[Probes],
        *,
        first_token: bool = False,
        last: Sequence[int] = (),
    ) -> list[PrefillResult]:
        """Return trajectories [m] (Eq. trajectory) at t* by prompt and probe.  Raises EngineError,
        NonFiniteReadout.

        With ``last``, each of these tokens is read as the end of a prompt of its own: of a whole
        one, what is cached or in another chunk has no row to read."""
        if last:
            return self._score_last(prompts, probes, last)
        self._begin(prompts)

        async def prefill(prompt: base.TokenIds) -> PrefillResult:
            async with aclosing(self._answer(prompt, probes, first_token, None, None)) as updates:
                return base.prefill_of(await anext(updates, Update()))

        return self._run_all([prefill(prompt) for prompt in prompts])

    def _score_last(
        self, prompts: Prompts, probes: Sequence[Probes], last: Sequence[int]
    ) -> list[PrefillResult]:
        pairs = zip(prompts, last, strict=True)
        ends = [prompt[: len(prompt) - left] for prompt, tokens in pairs for left in range(tokens)]
        read, results = iter(self.score(ends, probes)), []
        for tokens in last:
            whole, *others = (next(read) for _ in range(tokens))
            parts = zip(*(result.trajectories for result in (whole, *others)), strict=True)
            results.append(
                replace(whole, trajectories=tuple(np.mean(part, axis=0) for part in parts))
            )
        return results

    def extract(
        self,
        prompts: Prompts,
        sites: base.Sites,
        poolings: Sequence[Pooling] = (),
        sampling: Sampling | None = None,
        answer_site: Site | None = None,
        last: Sequence[int] = (),
    ) -> Extraction:
        """Return ``base.LoadedModel.extract``'s.  Raises EngineError unless loaded with ``rows``
        and these sites."""
        check_onset_only(poolings)
        if answer_site is not None or last:
            refuse_answer_reading("vllm")
        if not self._plan.activations or not set(sites) <= set(self._plan.sites):
            raise EngineError(
                "this engine was started for scoring; start it with rows=True to extract"
                " activations"
            )
        if sampling is not None:
            check_sampling(sampling)
        answered = self._answers(
            prompts, sampling, Directive(activations=True, weights=self._weights)
        )
        payloads = [payload for payload, _ in answered if payload is not None]
        if len(payloads) < len(prompts):
            raise base.unfinished()
        geometry, activations = self._plan.geometry, {}
        for site in sites:
            rows = np.array([payload.activations[site] for payload in payloads], np.float32)
            activations[site] = rows.reshape(
                len(prompts), geometry.num_layers, geometry.width(site)
            )
        first_tokens = tuple(
            payload.first_token for payload in payloads if payload.first_token is not None
        )
        completions = () if sampling is None else tuple(completion for _, completion in answered)
        return Extraction(activations, first_tokens, completions=completions)

    def generate(self, prompts: Prompts, sampling: Sampling) -> list[Completion]:
        """Decode an answer to each prompt, batched by vLLM.  Raises as ``check`` and
        ``check_sampling`` do."""
        check_sampling(sampling)
        return [completion for _, completion in self._answers(prompts, sampling, None)]

    def _answers(
        self, prompts: Prompts, sampling: Sampling | None, directive: Directive | None
    ) -> list[tuple[Payload | None, Completion]]:
        """Run one request for each prompt; a payload where ``directive`` asks for one."""
        self._begin(prompts)

        async def complete(prompt: base.TokenIds) -> tuple[Payload | None, Completion]:
            payload, answer = None, _Answer()
            async with aclosing(
                self._outputs(prompt, parameters_for(sampling, directive))
            ) as outputs:
                async for output in outputs:
                    if directive is not None:
                        payload = payload or payload_of(output, self._plan, directive)
                    answer.add(output)
            return payload, answer.completion()

        return self._run_all([complete(prompt) for prompt in prompts])

    def read_answers(self, prompts: Prompts, probes: Probes, sampling: Sampling) -> list[Update]:
        """Decode an answer to each prompt; return its last update, with what ``probes`` read of its
        own tokens."""
        self._begin(prompts)

        async def last(prompt: base.TokenIds) -> Update:
            async with aclosing(
                self._answer(prompt, [], False, sampling, None, answer_probes=probes)
            ) as updates:
                return [update async for update in updates][-1]

        return self._run_all([last(prompt) for prompt in prompts])

    def sample(
        self, prompts: Prompts, sampling: Sampling, seeds: base.Seeds
    ) -> list[list[base.TracedAnswer]]:
        """Raise EngineError: vLLM has no states of decoded tokens to give."""
        refuse_tracing("vllm")

    def next_token(self, prompts: Prompts, candidates: Sequence[int]) -> NDArray[np.float64]:
        """Raise EngineError: vLLM gives the most probable tokens only."""
        refuse_tracing("vllm")

    async def answer(
        self,
        prompt: base.TokenIds,
        probes: Sequence[Probes],
        *,
        first_token: bool = False,
        sampling: Sampling | None = None,
        gate: base.EngineGate | None = None,
        turn: base.Turn = base.FIRST_COME,
        answer_probes: Probes | None = None,
    ) -> AsyncGenerator[Update, None]:
        """Yield ``base.Engine.answer``'s updates of one vLLM request; ``turn`` needs the policy
        "priority"."""
        if sampling is not None:
            check_sampling(sampling)
        running = asyncio.get_running_loop()
        make = partial(
            self._answer, prompt, probes, first_token, sampling, gate, turn, answer_probes
        )
        answer = (
            make() if running is self.loop else relay(self.loop, self._outboxes.of(running), make)
        )
        async with aclosing(answer) as updates:
            async for update in updates:
                yield update

    async def _answer(
        self,
        prompt: base.TokenIds,
        probes: Sequence[Probes],
        first_token: bool,
        sampling: Sampling | None,
        gate: base.EngineGate | None,
        turn: base.Turn = base.FIRST_COME,
        answer_probes: Probes | None = None,
    ) -> AsyncGenerator[Update, None]:
        if sampling is None:
            gate = answer_probes = None
        elif gate is not None and sampling.format is not None:
            # A closed gate samples the end token, which no format begins with: vLLM would report a
            # fault. So the prompt is read first; what may begin finds it in the prefix cache.
            async with aclosing(self._answer(prompt, probes, True, None, None, turn)) as updates:
                first = await anext(updates)
            if gate.closes(base.prefill_of(first)):
                yield first
                return
            gate = None
        lease = await self.lease(
            probes, first_token=first_token, gate=gate, answer_probes=answer_probes
        )
        answer = _Answer()
        try:
            parameters = parameters_for(sampling, lease.directive)
            async with aclosing(self._outputs(prompt, parameters, turn.place)) as outputs:
                async for output in outputs:
                    piece, tokens = answer.add(output)
                    if answer.steps > 1:
                        ends = output.finished or (
                            sampling is not None and time.monotonic() >= sampling.until
                        )
                        read = lease.answer(output, answer.tokens)
                        yield Update(
                            None,
                            piece,
                            tokens,
                            answer.completion("length") if ends else None,
                            answer=read,
                        )
                        if ends:
                            return
                        continue
                    result, gated = lease.prefill(output, len(prompt))
                    ends = output.finished and sampling is not None and not gated
                    if sampling is None or gated:
                        piece, tokens = "", 0
                    self.on_prefill(1, len(prompt))
                    completion = answer.completion() if ends else None
                    cached = int(output.num_cached_tokens or 0)
                    read = None if gated else lease.answer(output, answer.tokens, first=True)
                    yield Update(result, piece, tokens, completion, cached, *times(output), read)
        finally:
            lease.release()

    async def lease(
        self,
        probes: Sequence[Probes],
        *,
        first_token: bool = False,
        gate: base.EngineGate | None = None,
        answer_probes: Probes | None = None,
    ) -> ProbeLease:
        """Keep the probes in their slots for one request, made here or by vLLM's own server.  Runs
        on ``loop``."""
        reads = [] if answer_probes is None or not self.reads_answers else [answer_probes]
        held = await self.slots.hold([*probes, *reads])
        columns, answer = held[: len(probes)], held[len(probes) :]
        gate = gate if self.end_token is not None else None
        directive = Directive(
            first_token=first_token,
            slot=columns[0] if columns else 0,
            gate=gate,
            end_token=None if gate is None else self.end_token,
            context=context_terms(None if gate is None else gate.context, columns[1:]),
            probes=self.slots.digests(columns),
            answer=next(iter(self.slots.digests(answer)), None),
            weights=self._weights,
        )
        return ProbeLease(directive, self._plan, columns, self.slots, answer)

    def close(self) -> None:
        """End all requests and vLLM's processes.  Not to be called on ``loop``; later calls raise
        EngineError."""
        if self._closed:
            return
        self._closed = True
        if (grammars := getattr(self, "_grammars", None)) is not None:
            grammars.close()
        # vLLM's output handler is cancelled before the processes end: it would report their end as
        # a failure.
        if self._own_loop is not None:
            self._own_loop.close()
        elif (handler := self._async_llm.output_handler) is not None:
            self.loop.call_soon_threadsafe(handler.cancel)
            run_on(self.loop, asyncio.wait([handler]))
        self._async_llm.shutdown()
        # ``AsyncLLM.__del__`` fails during interpreter exit, when vLLM's modules are gone already:
        # free it now.
        self._async_llm = self._generate = None

    async def _outputs(
        self, prompt: base.TokenIds, parameters: Any, priority: int = 0
    ) -> AsyncGenerator[Any, None]:
        """Yield ``RequestOutput``s; closing cancels the request.

        Raises EngineError if vLLM failed (EngineBusy: on this request alone), Overloaded,
        RequestError."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        self._check_open()
        self.counters.open_continuations += 1
        first = True
        name = f"hallutracer-{next(self._request_numbers)}"
        stream = self._generate(
            tokens_input([*prompt]), parameters, name, priority=priority, lora_request=self._adapter
        )
        try:
            async for output in stream:
                decoded = 0 if first else len(output.outputs[0].token_ids)
                self.counters.prefills += first
                self.counters.decode_steps += decoded
                self.counters.forward_tokens += (
                    len(prompt) - int(output.num_cached_tokens or 0) if first else decoded
                )
                first = False
                yield output
        except EngineDeadError as error:
            raise EngineError(
                f"vLLM has ended ({error}); its own messages say why.  Restart the service"
            ) from error
        except VLLMClientError as error:
            raise RequestError(f"vLLM refuses this request: {error}") from error
        except EngineGenerateError as error:  # without a text of its own
            raise _failure(error.__cause__ or error) from error
        except Exception as error:
            raise _failure(error) from error
        finally:
            self.counters.open_continuations -= 1
            await stream.aclose()

    async def _load_adapter(self, folder: Path) -> Any:
        """Load an adapter into vLLM; return its ``LoRARequest``.  Raises ModelLoadError for one
        that vLLM refuses."""
        from vllm.lora.request import LoRARequest

        request = LoRARequest(folder.name, 1, str(folder))
        try:
            await self._async_llm.add_lora(request)
        except Exception as error:
            raise ModelLoadError(
                f"vLLM cannot run the adapter {folder}: {error}", param="adapter"
            ) from error
        return request

    async def _describe(self) -> dict[str, Any]:
        """Return the first worker's description of its readout.  Raises EngineError if the worker
        class is not ours."""
        try:
            return dict((await self._async_llm.collective_rpc("hallutracer_describe"))[0])
        except Exception as error:
            raise EngineError(
                f"vLLM runs a worker without the readout ({error}); start it with --worker-cls"
                f" {launch.WORKER}"
            ) from error

    async def _write(self, slot: int, probes: Probes) -> str:
        """Write probes into a slot of their site on every worker; return their digest."""
        table = np.concatenate(
            [probes.direction, probes.bias[:, None], probes.scale[:, None]], axis=1
        )
        head = [int(value) for value in probes.head]
        numbers = np.ascontiguousarray(table, np.float32).tobytes()
        await self._async_llm.collective_rpc(
            "hallutracer_write", args=(slot, str(probes.site), head, numbers)
        )
        return probe_digest(str(probes.site), head, numbers)

    def _begin(self, prompts: Prompts) -> None:
        self._check_open()
        self.check(prompts)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("this engine is closed; load the model again")

    def _run_all(self, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        return run_on(self.loop, gather_all(work, at_once=MAX_IN_FLIGHT))


def _failure(cause: BaseException) -> HalluTracerError:
    """Return our error for what failed in vLLM on a request: its own exceptions may name an HTTP
    status."""
    if getattr(cause, "http_status", None) in (
        429,
        503,
    ):  # ``GracefulHTTPError``: its admission control
        return Overloaded(
            f"vLLM takes no more requests now ({cause}); try again in {Overloaded.retry_after_s} s"
        )
    if getattr(cause, "status_code", None) == 503:  # ``RetryableRequestError``
        return EngineBusy(
            f"vLLM gave this request up ({cause}); try again in {EngineBusy.retry_after_s} s"
        )
    return EngineError(f"vLLM failed on this prompt: {cause}")


class _Answer:
    def __init__(self) -> None:
        self.steps = 0
        self._text, self._tokens = "", list[int]()
        self._finish_reason: str | None = None
        self._stop: str | None = None

    def add(self, output: Any) -> tuple[str, int]:
        """Append an output; return its new text and its number of tokens."""
        new = output.outputs[0]
        self.steps += 1
        self._text += new.text
        self._tokens += new.token_ids
        self._finish_reason = new.finish_reason
        # a number is an end token's
        self._stop = new.stop_reason if isinstance(new.stop_reason, str) else None
        return new.text, len(new.token_ids)

    @property
    def tokens(self) -> int:
        """Number of tokens so far."""
        return len(self._tokens)

    def completion(self, other: str = "cancelled") -> Completion:
        """Return the answer so far; ``other``: why it ends, where vLLM has not ended it."""
        finish_reason = self._finish_reason if self._finish_reason in ("stop", "length") else other
        return Completion(self._text, tuple(self._tokens), finish_reason, stop=self._stop)
