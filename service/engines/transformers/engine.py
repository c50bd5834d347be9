"""The reference engine and the embedded default: any transformers causal language model of
``families.py``.

A call checks the prompts, runs micro-batches with hooks, and returns numpy arrays in the caller's
order.  ``hooks`` reads activations, ``batching`` pads, ``decoding`` answers, ``loading`` loads the
model."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from service.engines import adapters, base, checkpoint, families, loading
from service.engines.base import (
    EngineOptions,
    Extraction,
    PrefillResult,
    Prompts,
    Sampling,
    Seeds,
    TracedAnswer,
)
from service.engines.checks import (
    Tokens,
    WithTokens,
    check_onset_only,
    check_prompts,
    check_sampling,
    first_token_of,
    summarise,
)
from service.engines.families import ModelModules, check_sites, family_of, locate
from service.engines.formats import Grammars
from service.engines.transformers import decoding, hooks
from service.engines.transformers.decoding import KvContinuation
from service.engines.transformers.hooks import (
    ActivationBuffer,
    Batch,
    Prefilled,
    ProbeStack,
    TruthLogits,
)
from service.errors import EngineError
from service.readout import Pooling, Probes, Site

Tensor = torch.Tensor
MAX_PROBE_STACKS = 8
BATCH_TOKENS = {"cpu": 512}  # measured: larger batches overflow a CPU's caches and are slower


class TransformersEngine(WithTokens):
    """Runs one model (``base.BatchEngine``); a call during another thread's raises EngineError.

    A prompt's readout is independent of its batch: to 1e-5 in float32, in half types to the
    rounding of their kernels.
    """

    reads_answers = True

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        options: EngineOptions | None = None,
        fingerprint: str | None = None,
        config: Any | None = None,
        revision: str = "local",
    ) -> None:
        """Use a loaded model and tokenizer.  Raises EngineError, and ModelLoadError without a
        context length.

        ``config``: the checkpoint's own, where the model is its language side; ``revision``: the
            hub's commit."""
        self._options = options or EngineOptions(
            model=str(getattr(model.config, "_name_or_path", "") or "in-memory")
        )
        loading.check_options(self._options)
        self._model = model.eval().requires_grad_(False)
        tokens = Tokens(tokenizer, self._options.template_arguments)
        super().__init__(tokens)
        self._modules, family = locate(model), family_of(model.config)
        self._head = model.get_output_embeddings()
        embedding = model.get_input_embeddings()
        self._vocabulary = int(embedding.num_embeddings)
        padding = tokens.pad_token_id
        self._filler = padding if padding is not None and 0 <= padding < self._vocabulary else 0
        self._device = embedding.weight.device
        self.max_batch_tokens = self._options.max_batch_tokens or BATCH_TOKENS.get(
            self._device.type, 8192
        )
        self.max_decode_tokens = max(self.max_batch_tokens, hooks.tokens_worth_the_weights(model))
        self.answer_bytes = self.max_decode_tokens * hooks.kv_bytes(model)
        self.end_tokens = hooks.end_tokens(model)
        self._grammars = Grammars(tokenizer, self._vocabulary, self.end_tokens)
        self.prepared = self._grammars.prepared
        if not family.projection:  # not one of those whose every number is compared in tests
            hooks.check_decoder(model, self._modules, family.name, self._device)
        self._alone = family.alone
        recurrent = family.notes == families.UNKNOWN and hooks.is_recurrent(model.config)
        self._longest_in_chunks = hooks.longest_in_chunks(
            model.config, whole=family.whole or recurrent
        )
        self._pass_cost = hooks.pass_cost(self._modules, self._device)
        self._equal_lengths = self._alone or hooks.depends_on_longest(model.config)
        self._windows = hooks.has_windows(model.config)
        shares = not (self._equal_lengths or self._windows)
        self._prefix = hooks.Prefix(hooks.chat_prefix(self.render_chat) if shares else ())
        self._busy = threading.Lock()
        self._stacks: OrderedDict[tuple[int, ...], ProbeStack] = OrderedDict()
        self.counters = base.Counters()
        settings = config or model.config
        self.identity = base.ModelIdentity(
            model=self._options.model,
            revision=revision,
            model_type=str(settings.model_type),
            fingerprint=fingerprint or loading.memory_fingerprint(model),
            tokenizer=tokens.digest,
            architecture=str((settings.architectures or [type(model).__name__])[0]),
            chat_template=tokens.chat_template_digest,
            geometry=self._modules.geometry,
            dtype=str(embedding.weight.dtype).removeprefix("torch."),
            max_tokens=hooks.context_length(model.config),
            template_arguments=self._options.template_arguments or None,
        )
        self.max_tokens = self.identity.max_tokens

    @classmethod
    def load(cls, options: EngineOptions, sites: base.Sites = ()) -> TransformersEngine:
        """Load a model folder or hub name, to be read at ``sites``.  Raises ModelLoadError,
        EngineError."""
        model, files = loading.load(options, sites)
        named = replace(options, model=files.name)
        fingerprint = checkpoint.folder_fingerprint(files.folder)
        engine = cls(
            model,
            files.tokenizer,
            options=named,
            fingerprint=fingerprint,
            config=files.config,
            revision=files.revision,
        )
        if options.adapter is not None:
            engine.identity = adapters.identity_with(engine.identity, options.adapter)
        return engine

    @property
    def torch_model(self) -> base.TorchModel | None:
        """The model's modules; None after ``close``."""
        if self._model is None:
            return None
        return base.TorchModel(self._model, self._head, self._modules.blocks, self._device)

    def check(self, prompts: Prompts) -> None:
        """Raise EmptyPrompt, PromptTooLong or RequestError for the first invalid prompt."""
        check_prompts(prompts, vocabulary=self._vocabulary, max_tokens=self.max_tokens)

    def score(
        self,
        prompts: Prompts,
        probes: Sequence[Probes],
        *,
        first_token: bool = False,
        last: Sequence[int] = (),
    ) -> list[PrefillResult]:
        """Return trajectories [m] (Eq. trajectory) at t* by prompt and probe.  Raises
        NonFiniteReadout."""
        with self._running(prompts):
            stack = self._stack(probes)
            done: list[Prefilled] = []
            for batch in self._batches(prompts, whole=bool(last)):
                sink = TruthLogits(stack, len(batch.index), self._device)
                counts = [last[index] for index in batch.index] if last else ()
                full = not last and (first_token or not probes)
                logits = self._prefill(batch, sink, full=full, last=counts)
                done.append(
                    (batch, sink, None if logits is None or not first_token else summarise(logits))
                )
            return hooks.prefill_results(stack, done)

    def begin(self, prompts: Prompts, probes: Sequence[Probes]) -> list[KvContinuation]:
        """Prefill and keep one KV cache per prompt.  Raises as ``score`` does, and keeps no cache
        then."""
        with self._running(prompts):
            stack = self._stack(probes)
            done: list[Prefilled] = []
            cached: dict[int, tuple[Any, Tensor]] = {}
            for batch in self._batches(prompts, kept=True):
                sink = TruthLogits(stack, len(batch.index), self._device)
                logits, caches = self._prefill_kept(batch, sink)
                done.append((batch, sink, summarise(logits)))
                cached |= {
                    index: (caches[row], logits[row].clone())
                    for row, index in enumerate(batch.index)
                }
            results = hooks.prefill_results(stack, done)
            return [
                KvContinuation(self, result, *cached[index]) for index, result in enumerate(results)
            ]

    def in_chunks(
        self,
        prompt: base.TokenIds,
        probes: Sequence[Probes],
        *,
        first_token: bool = False,
        kept: bool = False,
    ) -> Generator[PrefillResult | base.Continuation | None, None, None]:
        """Prefill as ``base.BatchEngine.in_chunks``."""
        with self._running([prompt]):
            stack = self._stack(probes)
            [batch] = self._batches([prompt], kept=kept)
            *before, last = (
                [batch]
                if self._takes_one_pass(prompt)
                else hooks.chunks(batch, self.max_batch_tokens, self._pass_cost)
            )
            cache = self._new_cache(batch) if before or kept or batch.prefix else None
        for chunk in before:
            with self._running(()), hooks.ended_after(self._modules.blocks[-1]):
                self.counters.forward_tokens += sum(chunk.lengths)
                with suppress(hooks.LastReadout):
                    self._model(**hooks.inputs_of(self._model, chunk, cache))
            yield None
        with self._running(()):
            sink = TruthLogits(stack, 1, self._device)
            logits = self._prefill(last, sink, full=kept or first_token or not probes, cache=cache)
            summary = None if logits is None or not (kept or first_token) else summarise(logits)
            [result] = hooks.prefill_results(stack, [(last, sink, summary)])
            if kept:
                assert logits is not None
                continuation = KvContinuation(self, result, cache, logits[0].clone())
        yield continuation if kept else result

    def pass_costs(self, prompt: base.TokenIds) -> list[float]:
        """Return the costs of ``base.BatchEngine.pass_costs``, by the model's shape."""
        prefix = self._prefix_of(prompt)
        columns = len(prompt) - prefix
        ends = [0, columns]
        if not self._takes_one_pass(prompt):
            ends = hooks.pass_ends(columns, prefix, self.max_batch_tokens, self._pass_cost)
        return [
            self._pass_cost.of_pass(end - start, prefix + start) for start, end in pairwise(ends)
        ]

    def extract(
        self,
        prompts: Prompts,
        sites: base.Sites,
        poolings: Sequence[Pooling] = (),
        sampling: Sampling | None = None,
        answer_site: Site | None = None,
        last: Sequence[int] = (),
    ) -> Extraction:
        """Return activations at t*, [n, m, width] float32 per site; each answer is what its prompt
        gets alone."""
        check_onset_only(poolings)
        if sampling is not None:
            check_sampling(sampling)
        shape = len(prompts), self._modules.geometry.num_layers
        activations = {
            site: np.empty((*shape, self._modules.geometry.width(site)), np.float32)
            for site in sites
        }
        first: dict[int, base.FirstToken] = {}
        answered: dict[int, KvContinuation] = {}
        with self._running(prompts):
            groups = (
                [list(range(len(prompts)))]
                if sampling is None
                else self._answered_together(prompts, sampling)
            )
            for group in groups:
                group_prompts = [prompts[row] for row in group]
                begun: dict[int, KvContinuation] = {}
                for batch in self._batches(
                    group_prompts, kept=sampling is not None, whole=bool(last)
                ):
                    rows = [group[index] for index in batch.index]
                    sink = self._buffer(sites, len(rows))
                    caches: list[Any] = []
                    logits: Any = ()
                    if last:
                        self._prefill(batch, sink, full=False, last=[last[row] for row in rows])
                    elif sampling is None:
                        logits = self._logits(batch, sink)
                    else:
                        logits, caches = self._prefill_kept(batch, sink)
                    for site, buffer in sink.buffers.items():  # [m, batch, width]
                        values = buffer.cpu().numpy()
                        hooks.refuse_non_finite(values, rows, str(site))
                        activations[site][rows] = values.swapaxes(0, 1)
                    if not last:
                        first.update(
                            zip(
                                rows,
                                map(first_token_of, summarise(logits).cpu().numpy()),
                                strict=True,
                            )
                        )
                    for row, cache, own_logits in zip(rows, caches, logits, strict=False):
                        prefill = PrefillResult((), first[row], len(prompts[row]))
                        begun[row] = KvContinuation(self, prefill, cache, own_logits, answer_site)
                if sampling is not None:
                    self._answer(begun.values(), [sampling] * len(begun))
                    answered |= begun
        ended = [answered[row] for row in sorted(answered)]
        answers = None
        if answer_site is not None:
            answers = np.zeros((*shape, self._modules.geometry.width(answer_site)), np.float32)
            for row, answer in enumerate(ended):
                if answer.mean is not None:
                    answers[row] = answer.mean.cpu().numpy()
            hooks.refuse_non_finite(
                answers.swapaxes(0, 1), range(len(prompts)), f"{answer_site} of the answer"
            )
        return Extraction(
            activations,
            tuple(first[row] for row in sorted(first)),
            answers=answers,
            completions=tuple(cast(base.Completion, answer.completion) for answer in ended),
        )

    def generate(self, prompts: Prompts, sampling: Sampling) -> list[base.Completion]:
        """Return the answers of ``extract``."""
        return list(self.extract(prompts, (), sampling=sampling).completions)

    def sample(
        self, prompts: Prompts, sampling: Sampling, seeds: Seeds
    ) -> list[list[TracedAnswer]]:
        """Decode as ``base.LoadedModel.sample``.  Raises EngineError unless all prompts have as
        many seeds."""
        check_sampling(sampling)
        times = {len(of_prompt) for of_prompt in seeds}
        if len(seeds) != len(prompts) or len(times) > 1 or 0 in times:
            raise EngineError(
                f"{len(prompts)} prompts need as many lists of seeds, none empty and all of one"
                " length"
            )
        answers: dict[int, list[TracedAnswer]] = {}
        with self._running(prompts):
            for group in self._answered_together(prompts, sampling, max(times, default=1)):
                begun: dict[int, list[KvContinuation]] = {}
                for batch in self._batches([prompts[row] for row in group], kept=True):
                    sink = self._buffer([Site.RESIDUAL_STREAM], len(batch.index))
                    logits, caches = self._prefill_kept(batch, sink)
                    states = sink.buffers[Site.RESIDUAL_STREAM].unbind(1)  # at t*
                    for index, cache, own_logits, state in zip(
                        batch.index, caches, logits, states, strict=True
                    ):
                        row = group[index]
                        prefill = PrefillResult((), None, len(prompts[row]))
                        copies = [cache, *(copy.deepcopy(cache) for _ in seeds[row][1:])]
                        site = Site.RESIDUAL_STREAM
                        begun[row] = [
                            KvContinuation(self, prefill, copy_of_cache, own_logits, site, state)
                            for copy_of_cache in copies
                        ]
                seeded = [replace(sampling, seed=seed) for row in begun for seed in seeds[row]]
                self._answer(list(chain.from_iterable(begun.values())), seeded)
                for row, of_prompt in begun.items():
                    answers[row] = [answer.traced() for answer in of_prompt]
        return [answers[row] for row in sorted(answers)]

    def next_token(self, prompts: Prompts, candidates: Sequence[int]) -> NDArray[np.float64]:
        """Return log-probabilities as ``base.LoadedModel.next_token``."""
        check_prompts([[*candidates]], vocabulary=self._vocabulary, max_tokens=self._vocabulary)
        log_probs = np.empty((len(prompts), len(candidates)))
        with self._running(prompts):
            for batch in self._batches(prompts):
                logits = self._logits(batch, self._buffer((), len(batch.index))).double()
                chosen = logits[:, list(candidates)] - logits.logsumexp(dim=-1, keepdim=True)
                log_probs[list(batch.index)] = chosen.cpu().numpy()
        return log_probs

    def step_together(self, continuations: Sequence[KvContinuation]) -> None:
        """Run the last tokens of all that wait for it in one forward pass."""
        with self._running(()):
            self._step(continuations)

    def close(self) -> None:
        """Free the model.  Later calls raise EngineError."""
        self._grammars.close()
        self._model = self._head = None
        self._modules = ModelModules(self._modules.geometry, (), {})  # the modules hold the weights
        self._stacks.clear()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @contextmanager
    def _running(self, prompts: Prompts) -> Iterator[None]:
        if self._model is None:
            raise EngineError("this engine is closed; load the model again")
        if not self._busy.acquire(blocking=False):
            raise EngineError(
                "this engine is running another call; use it from one thread at a time"
            )
        try:
            self.check(prompts)
            with torch.inference_mode():
                yield
        finally:
            self._busy.release()

    def _batches(
        self, prompts: Prompts, *, kept: bool = False, whole: bool = False
    ) -> Iterator[Batch]:
        """Yield micro-batches, whose caches are ``kept``; what chats begin with is not run again,
        unless ``whole``."""
        prefixes = [0 if whole else self._prefix_of(prompt) for prompt in prompts]
        for prefix in sorted(set(prefixes)):
            rows = [row for row, prefix_of_row in enumerate(prefixes) if prefix_of_row == prefix]
            lengths = [len(prompts[row]) - prefix for row in rows]
            # a cache that cannot be split: one prompt
            budget = 0 if kept and self._alone else self.max_batch_tokens
            for group in hooks.micro_batches(lengths, budget, equal_lengths=self._equal_lengths):
                index = [rows[number] for number in group]
                yield hooks.pad(prompts, index, self._filler, self._device, prefix)

    def _prefix_of(self, prompt: base.TokenIds) -> int:
        """Return how many of a prompt's first tokens are not run again."""
        return len(self._prefix.tokens) if self._prefix.begins(prompt) else 0

    def _takes_one_pass(self, prompt: base.TokenIds) -> bool:
        """Return whether a prompt has to be read in one pass, however long it is."""
        return len(prompt) > self._longest_in_chunks

    def _answered_together(
        self, prompts: Prompts, sampling: Sampling, times: int = 1
    ) -> list[list[int]]:
        """Group the prompts whose answers, ``times`` of each, are decoded together."""
        budgets = [len(prompt) + min(sampling.max_tokens, self.max_tokens) for prompt in prompts]
        return hooks.micro_batches(budgets, self.max_decode_tokens // times)

    def _answer(self, begun: Collection[KvContinuation], samplings: Sequence[Sampling]) -> None:
        try:
            running = [
                (continuation, continuation.decode(sampling))
                for continuation, sampling in zip(begun, samplings, strict=True)
            ]
            while running:
                running = [
                    (continuation, pieces)
                    for continuation, pieces in running
                    if next(pieces, None) is not None
                ]
                self._step([continuation for continuation, _ in running])
        finally:
            for answer in begun:
                answer.close()

    def _step(self, continuations: Sequence[KvContinuation]) -> None:
        waiting = [continuation for continuation in continuations if continuation.waits]
        alone = [[continuation] for continuation in waiting]
        for group in alone if self._equal_lengths else filter(None, [waiting]):
            windows = [
                decoding.windows_of(continuation.cache) if self._windows else ()
                for continuation in group
            ]
            for continuation in group:
                if continuation.failure is not None:
                    raise continuation.failure
            try:
                logits, read = self._decode_step(group)
            except Exception as error:
                for continuation, before in zip(group, windows, strict=True):
                    continuation.restore(before, error)
                raise
            self.counters.forward_tokens += len(group)
            self.counters.decode_steps += len(group)
            for continuation, row, wanted in zip(group, logits, read, strict=True):
                continuation.go_on(row, wanted)

    def _decode_step(self, group: Sequence[KvContinuation]) -> tuple[Tensor, Sequence[Any]]:
        """Return the next logits, [vocab] of each row, and what each wants read of its last token,
        in one pass."""

        def stepped(sink: hooks.Sink) -> Tensor:
            with hooks.reading(
                self._modules, self._head, sink, hooks.at_onsets([0], self._device), stop=False
            ):
                return decoding.next_logits(self._model, group, self._device)

        if (site := group[0].site) is not None:  # then all are read there
            buffer = self._buffer([site], len(group))
            return stepped(buffer), buffer.buffers[site].unbind(1)
        probes = {
            id(continuation.answer_probes): continuation.answer_probes
            for continuation in group
            if continuation.answer_probes is not None
        }
        if not probes:
            return decoding.next_logits(self._model, group, self._device), [None] * len(group)
        keys = sorted(probes)  # in a fixed order, because stacks are kept
        stack = self._stack([probes[key] for key in keys])
        sink = TruthLogits(stack, len(group), self._device)
        logits = stepped(sink)
        # [m, rows, P]
        truth = stack.finish({key: sums.cpu().numpy() for key, sums in sink.buffers.items()})
        return logits, [
            (
                None
                if continuation.answer_probes is None
                else truth[:, row, keys.index(id(continuation.answer_probes))]
            )
            for row, continuation in enumerate(group)
        ]

    def _buffer(self, sites: base.Sites, rows: int) -> ActivationBuffer:
        check_sites(self.identity.model_type, sites)
        return ActivationBuffer(sites, self._modules.geometry, rows, self._device)

    def _logits(self, batch: Batch, sink: hooks.Sink, cache: Any = None) -> Tensor:
        """Run a batch with the sink attached: float32 logits at t* [batch, vocab]."""
        return cast(Tensor, self._prefill(batch, sink, full=True, cache=cache))

    def _prefill_kept(self, batch: Batch, sink: hooks.Sink) -> tuple[Tensor, list[Any]]:
        """Run as ``_logits``; return each row's cache, too."""
        cache = self._new_cache(batch)
        logits = self._logits(batch, sink, cache)
        return logits, decoding.split_cache(cache, batch, self._model.config)

    def _new_cache(self, batch: Batch) -> Any:
        """Return what the batch's forward pass reads its shared first tokens from and writes its
        own to."""
        if batch.prefix:
            return self._prefix.cache(self._model, len(batch.index), self._device)
        # The model's native kind for one prompt, full-length layers for several.
        return DynamicCache(config=self._model.config) if len(batch.index) == 1 else DynamicCache()

    def _prefill(
        self,
        batch: Batch,
        sink: hooks.Sink,
        *,
        full: bool,
        cache: Any = None,
        last: Sequence[int] = (),
    ) -> Tensor | None:
        """Run as ``_logits``; None if not ``full``, which ends at the last readout.

        ``last``: the sink gets means over so many last tokens; only where it ends there."""
        self.counters.forward_tokens += sum(batch.lengths)
        self.counters.prefills += len(batch.index)
        onset = (
            hooks.over_last(batch.onsets, last)
            if last
            else hooks.at_onsets(batch.onsets, self._device)
        )
        if batch.prefix and cache is None:
            cache = self._new_cache(batch)
        with hooks.reading(self._modules, self._head, sink, onset, stop=not full):
            try:
                logits = self._model(**hooks.inputs_of(self._model, batch, cache)).logits
            except hooks.LastReadout:
                return None
        if logits.shape[1] != 1:
            raise EngineError(
                "this model is not supported: its language-model head is not"
                " get_output_embeddings()"
            )
        return cast(Tensor, logits[:, 0].float())

    def _stack(self, probes: Sequence[Probes]) -> ProbeStack:
        check_sites(self.identity.model_type, [probe.site for probe in probes])
        # a stack holds its probes, so their ids are not reused
        key = tuple(id(probe) for probe in probes)
        stack = self._stacks.pop(key, None) or ProbeStack(
            probes, self._modules.geometry, self._device
        )
        self._stacks[key] = stack
        while len(self._stacks) > MAX_PROBE_STACKS:
            self._stacks.popitem(last=False)
        return stack
