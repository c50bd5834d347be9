"""The reference engine and the embedded default: any transformers causal language model of ``families.py``.

A call checks the prompts, runs micro-batches with hooks, and returns numpy arrays in the caller's order.  ``hooks``
reads activations, ``batching`` pads, ``kv`` decodes, ``loading`` loads the model.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from service.engines import loading
from service.engines.base import (
    Completion,
    Counters,
    EngineOptions,
    Extraction,
    FirstToken,
    ModelIdentity,
    PrefillResult,
    Sampling,
    TokenIds,
    TorchModel,
    TracedAnswer,
)
from service.engines.checks import beyond_onset, check_prompts, check_sampling
from service.engines.families import ModelModules, locate
from service.engines.identity import memory_fingerprint, revision_of
from service.engines.tokens import Tokens
from service.engines.transformers.batching import Batch, micro_batches, pad
from service.engines.transformers.generation import Begun, decode_batch, joined
from service.engines.transformers.hooks import (
    ActivationBuffer,
    LastReadout,
    OnsetIndex,
    ProbeStack,
    Sink,
    StatesSink,
    TruthLogits,
    reading,
)
from service.engines.transformers.kv import KvContinuation, split_cache
from service.engines.transformers.model_facts import (
    context_length,
    depends_on_longest,
    end_tokens,
    tokens_worth_the_weights,
)
from service.engines.transformers.pooling import ContentWords, PooledBuffer, windows
from service.engines.transformers.prefix import Prefix, chat_prefix, has_windows
from service.engines.transformers.results import (
    Prefilled,
    first_tokens,
    prefill_results,
    refuse_non_finite,
    summarise,
)
from service.engines.transformers.together import next_logits
from service.engines.transformers.tracing import Tracer
from service.errors import EngineError
from service.readout import Pooling, Probes, Site

Tensor = torch.Tensor
MAX_PROBE_STACKS = 8
# Measured: larger batches overflow a CPU's caches and are slower.
BATCH_TOKENS = {"cpu": 512}


class TransformersEngine:
    """Runs one model.  Implements ``base.BatchEngine``.

    Synchronous, for one thread at a time; a call during another thread's call raises EngineError.  Hooks exist only
    during a call.  A prompt's readout does not depend on the other prompts of its batch: to 1e-5 in float32, and in
    half types to the rounding of their kernels, which differs with the batch's shape.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, options: EngineOptions | None = None, fingerprint: str | None = None
    ) -> None:
        """Use a loaded model and tokenizer; ``load`` makes them from options.

        Raises UnknownFamily, and ModelLoadError if the config has no context length.
        """
        self._options = options or EngineOptions(model=str(getattr(model.config, "_name_or_path", "") or "in-memory"))
        loading.check_options(self._options)
        self._model = model.eval().requires_grad_(False)
        self._tokens = tokens = Tokens(tokenizer)
        self.tokenize, self.render_chat, self.detokenize = tokens.tokenize, tokens.render_chat, tokens.detokenize
        self.special_tokens = tokens.special_tokens
        self._content_words = ContentWords(self._tokens)
        self._modules = locate(model)
        self._head = model.get_output_embeddings()
        embedding = model.get_input_embeddings()
        self._vocabulary = int(embedding.num_embeddings)
        self._device = embedding.weight.device
        self.max_batch_tokens = self._options.max_batch_tokens or BATCH_TOKENS.get(self._device.type, 8192)
        self.max_decode_tokens = max(self.max_batch_tokens, tokens_worth_the_weights(model))
        self.end_tokens = end_tokens(model)
        self._equal_lengths = depends_on_longest(model.config)
        self._windows = has_windows(model.config)
        shares = self._options.padding_side == "right" and not self._equal_lengths and not self._windows
        self._prefix = Prefix(chat_prefix(self.render_chat) if shares else ())
        self._busy = threading.Lock()
        self._stacks: OrderedDict[tuple[int, ...], ProbeStack] = OrderedDict()
        self.counters = Counters()
        self.identity = ModelIdentity(
            model=self._options.model,
            revision=revision_of(model.config),
            fingerprint=fingerprint or memory_fingerprint(model),
            architecture=type(model).__name__,
            model_type=str(model.config.model_type),
            tokenizer=self._tokens.digest,
            chat_template=self._tokens.chat_template_digest,
            dtype=str(embedding.weight.dtype).removeprefix("torch."),
            geometry=self._modules.geometry,
            max_tokens=context_length(model.config),
        )
        self.max_tokens = self.identity.max_tokens

    @classmethod
    def load(cls, options: EngineOptions) -> TransformersEngine:
        """Load a model folder or hub name.  Raises ModelLoadError naming the cause, or UnknownFamily."""
        loaded = loading.load(options)
        named = replace(options, model=loaded.name)
        return cls(loaded.model, loaded.tokenizer, options=named, fingerprint=loaded.fingerprint)

    @property
    def torch_model(self) -> TorchModel | None:
        """The model's modules; None after ``close``."""
        return None if self._model is None else TorchModel(self._model, self._head, self._modules.blocks, self._device)

    def check(self, prompts: Sequence[TokenIds]) -> None:
        """Raise EmptyPrompt, PromptTooLong or RequestError for the first invalid prompt."""
        check_prompts(prompts, vocabulary=self._vocabulary, max_tokens=self.max_tokens)

    def score(
        self, prompts: Sequence[TokenIds], probes: Sequence[Probes], *, first_token: bool = False
    ) -> list[PrefillResult]:
        """Trajectories [m] (Eq. trajectory) at t*, one per probe and prompt.

        Without ``first_token`` the forward pass ends at the last readout.  With it the language-model head runs on one
        position per prompt.  Raises EmptyPrompt, PromptTooLong, RequestError and NonFiniteReadout.
        """
        with self._running(prompts):
            stack = self._stack(probes)
            full = first_token or not probes
            done: list[Prefilled] = []
            for batch in self._batches(prompts):
                sink = TruthLogits(stack, len(batch.index), self._device)
                logits = self._prefill(batch, sink, full=full)
                done.append(Prefilled(batch, sink, summarise(logits) if first_token and logits is not None else None))
            return prefill_results(stack, done)

    def begin(self, prompts: Sequence[TokenIds], probes: Sequence[Probes]) -> list[KvContinuation]:
        """Prefill and keep one KV cache per prompt.  Raises as ``score`` does, and keeps no cache then."""
        with self._running(prompts):
            stack = self._stack(probes)
            done: list[Prefilled] = []
            caches: dict[int, tuple[Any, Tensor]] = {}
            for batch in self._batches(prompts):
                sink = TruthLogits(stack, len(batch.index), self._device)
                cache = self._new_cache(batch)
                logits = self._prefill(batch, sink, full=True, cache=cache)
                assert logits is not None
                done.append(Prefilled(batch, sink, summarise(logits)))
                for row, own in enumerate(split_cache(cache, batch, self._model.config)):
                    caches[batch.index[row]] = (own, logits[row].clone())
            return [
                KvContinuation(self, result, *caches[index])
                for index, result in enumerate(prefill_results(stack, done))
            ]

    def extract(
        self,
        prompts: Sequence[TokenIds],
        sites: Sequence[Site],
        poolings: Sequence[Pooling] = (Pooling.LAST_1,),
        sampling: Sampling | None = None,
    ) -> Extraction:
        """Activations of every layer at t*, [n, m, width] float32 per site, and each prompt's first-token distribution.

        Other ``poolings`` come from the same forward passes and do not change the activations at t*.  With ``sampling``
        each prompt is answered from the same prefill; an answer equals the one that its prompt gets alone, and sampled
        ones share the seed.  Raises as ``score`` does.
        """
        geometry = self._modules.geometry
        shapes = {site: (len(prompts), geometry.num_layers, geometry.width(site)) for site in sites}
        activations = {site: np.empty(shape, np.float32) for site, shape in shapes.items()}
        others = beyond_onset(poolings)
        pooled = {(site, pooling): np.empty(shapes[site], np.float32) for site in shapes for pooling in others}
        first: dict[int, FirstToken] = {}
        answers: dict[int, Completion] = {}

        def read(batch: Batch, cache: Any, rows: Sequence[int]) -> Tensor:
            """Run a batch of prompts, of which prompt i is ``rows[i]`` of all, and keep what was read."""
            index = [rows[place] for place in batch.index]
            sink = ActivationBuffer(list(shapes), geometry, len(index), self._device)
            pooled_sink = None
            if others:
                counted = windows(batch, [prompts[row] for row in rows], others, self._content_words)
                pooled_sink = PooledBuffer(sink.sites, geometry, batch, counted, self._device)
            logits = self._prefill(batch, sink, full=True, cache=cache, states_sink=pooled_sink)
            assert logits is not None
            for site, buffer in sink.buffers.items():
                _scatter(buffer, index, activations[site], site)
            for (site, pooling), buffer in (pooled_sink.buffers if pooled_sink else {}).items():
                _scatter(buffer, index, pooled[site, pooling], f"{site}, {pooling}")
            first.update(zip(index, first_tokens(summarise(logits).cpu().numpy()), strict=True))
            return logits

        with self._running(prompts):
            if sampling is None:
                for batch in self._batches(prompts, shared=not others):
                    read(batch, None, range(len(prompts)))
            else:
                check_sampling(sampling)
                for group in self._answered_together(prompts, sampling):
                    own = [prompts[row] for row in group]
                    begun = self._begin_together(own, partial(read, rows=group), shared=not others)
                    answers |= zip(group, decode_batch(self, self._model, begun, sampling), strict=True)
        inorder = range(len(prompts))
        completions = tuple(answers[row] for row in inorder) if sampling is not None else ()
        return Extraction(activations, tuple(first[row] for row in inorder), pooled, completions)

    def generate(self, prompts: Sequence[TokenIds], sampling: Sampling) -> list[Completion]:
        """The answers of ``extract``."""
        return list(self.extract(prompts, (), sampling=sampling).completions)

    def sample(
        self, prompts: Sequence[TokenIds], sampling: Sampling, seeds: Sequence[Sequence[int]]
    ) -> list[list[TracedAnswer]]:
        """As ``base.LoadedModel.sample``.  Raises EngineError unless each prompt has as many seeds as the others."""
        check_sampling(sampling)
        times = {len(of_prompt) for of_prompt in seeds}
        if len(seeds) != len(prompts) or len(times) > 1 or 0 in times:
            raise EngineError(f"{len(prompts)} prompts need as many lists of seeds, none empty and all of one length")
        with self._running(prompts):
            answers: dict[int, list[TracedAnswer]] = {}
            for group in self._answered_together(prompts, sampling, max(times, default=1)):
                onset: dict[int, Tensor] = {}
                begun = self._begin_together([prompts[index] for index in group], partial(self._onset_states, onset))
                states = torch.stack([onset[place] for place in range(len(group))], dim=1)
                count = len(seeds[group[0]])
                tracer = Tracer(self._modules, self._head, states.repeat_interleave(count, dim=1))
                own = [seed for index in group for seed in seeds[index]]
                done = decode_batch(self, self._model, begun.repeated(count), sampling, own, tracer)
                traced = tracer.answers(done)
                answers |= {index: traced[place * count : (place + 1) * count] for place, index in enumerate(group)}
            return [answers[index] for index in sorted(answers)]

    def next_token(self, prompts: Sequence[TokenIds], candidates: Sequence[int]) -> NDArray[np.float64]:
        """As ``base.LoadedModel.next_token``."""
        check_prompts([[*candidates]], vocabulary=self._vocabulary, max_tokens=self._vocabulary)
        found = np.empty((len(prompts), len(candidates)))
        with self._running(prompts):
            for batch in self._batches(prompts):
                logits = self._first_logits(batch).double()
                chosen = logits[:, list(candidates)] - logits.logsumexp(dim=-1, keepdim=True)
                found[list(batch.index)] = chosen.cpu().numpy()
        return found

    def step_together(self, continuations: Sequence[KvContinuation]) -> None:
        """Run the last tokens of all that wait for it in one forward pass."""
        waiting = [continuation for continuation in continuations if continuation.waits]
        groups = [[one] for one in waiting] if self._equal_lengths else [waiting] if waiting else []
        for group in groups:
            with self._running(()):
                logits = next_logits(self._model, group, self._device)
                self.counters.forward_tokens += len(group)
                self.counters.decode_steps += len(group)
                for continuation, row in zip(group, logits, strict=True):
                    continuation.go_on(row)

    def close(self) -> None:
        """Free the model.  Later calls raise EngineError."""
        self._model = self._head = None
        self._modules = ModelModules(self._modules.geometry, (), ())  # the modules hold the weights
        self._stacks.clear()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @contextmanager
    def _running(self, prompts: Sequence[TokenIds]) -> Iterator[None]:
        if self._model is None:
            raise EngineError("this engine is closed; load the model again")
        if not self._busy.acquire(blocking=False):
            raise EngineError("this engine is running another call; use it from one thread at a time")
        try:
            self.check(prompts)
            with torch.inference_mode():
                yield
        finally:
            self._busy.release()

    def _filler(self) -> int:
        pad_token = self._tokens.pad_token_id
        return pad_token if pad_token is not None and 0 <= pad_token < self._vocabulary else 0

    def _batches(self, prompts: Sequence[TokenIds], *, shared: bool = True) -> Iterator[Batch]:
        """``shared``: what chats begin with is not run again."""
        prefixes = [len(self._prefix.tokens) if shared and self._prefix.begins(prompt) else 0 for prompt in prompts]
        for prefix in sorted(set(prefixes)):
            rows = [row for row, own in enumerate(prefixes) if own == prefix]
            lengths = [len(prompts[row]) - prefix for row in rows]
            for group in micro_batches(lengths, self.max_batch_tokens, equal_lengths=self._equal_lengths):
                index = [rows[place] for place in group]
                yield pad(prompts, index, self._options.padding_side, self._filler(), self._device, prefix)

    def _answered_together(self, prompts: Sequence[TokenIds], sampling: Sampling, times: int = 1) -> list[list[int]]:
        """The prompts in groups whose answers, ``times`` of each, are decoded together."""
        budgets = [len(prompt) + min(sampling.max_tokens, self.max_tokens) for prompt in prompts]
        return micro_batches(budgets, self.max_decode_tokens // times, equal_lengths=self._equal_lengths)

    def _begin_together(
        self, prompts: Sequence[TokenIds], read: Callable[[Batch, Any], Tensor], *, shared: bool = True
    ) -> Begun:
        """Prefill prompts for ``decode_batch``, in micro-batches where their caches can be joined afterwards.

        ``read`` runs a batch into a cache and returns its logits at t*.
        """
        if self._windows:
            batch = pad(prompts, range(len(prompts)), "left", self._filler(), self._device)
            cache = DynamicCache(config=self._model.config)
            return Begun(batch.lengths, cache, read(batch, cache), batch.attention_mask)
        parts = [(self._new_cache(batch), batch) for batch in self._batches(prompts, shared=shared)]
        logits = torch.cat([read(batch, cache) for cache, batch in parts])
        order = torch.tensor([index for _, batch in parts for index in batch.index], device=self._device).argsort()
        return joined(parts, logits[order])

    def _onset_states(self, onset: dict[int, Tensor], batch: Batch, cache: Any) -> Tensor:
        """``read`` of ``_begin_together``: ``onset`` gets the residual stream at t*, [m, hidden_size], by prompt."""
        sink = ActivationBuffer([Site.RESIDUAL_STREAM], self._modules.geometry, len(batch.index), self._device)
        logits = self._prefill(batch, sink, full=True, cache=cache)
        assert logits is not None
        onset.update(zip(batch.index, sink.buffers[Site.RESIDUAL_STREAM].unbind(1), strict=True))
        return logits

    def _first_logits(self, batch: Batch) -> Tensor:
        """Float32 logits at t* [batch, vocab]."""
        sink = ActivationBuffer([], self._modules.geometry, len(batch.index), self._device)
        logits = self._prefill(batch, sink, full=True)
        assert logits is not None
        return logits

    def _new_cache(self, batch: Batch) -> Any:
        """What the batch's forward pass reads its shared first tokens from and writes its own to."""
        if batch.prefix:
            return self._prefix.cache(self._model, len(batch.index), self._device)
        # The model's native kind for one prompt, full-length layers for several.
        return DynamicCache(config=self._model.config) if len(batch.index) == 1 else DynamicCache()

    def _prefill(
        self, batch: Batch, sink: Sink, *, full: bool, cache: Any = None, states_sink: StatesSink | None = None
    ) -> Tensor | None:
        """Run a batch with the sinks attached: float32 logits at t* [batch, vocab], or None if not ``full``."""
        self.counters.forward_tokens += sum(batch.lengths)
        self.counters.prefills += len(batch.index)
        onset = OnsetIndex(batch.onsets, self._device)
        if batch.prefix and cache is None:
            cache = self._new_cache(batch)
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": cache is not None}
        if cache is not None:
            inputs["past_key_values"] = cache
        if batch.attention_mask is not None:
            inputs |= {"attention_mask": batch.attention_mask, "position_ids": batch.position_ids}
        with reading(self._modules, self._head, sink, onset, stop=not full, states_sink=states_sink):
            try:
                logits = self._model(**inputs).logits
            except LastReadout:
                return None
        if logits.shape[1] != 1:
            raise EngineError("this model is not supported: its language-model head is not get_output_embeddings()")
        return cast(Tensor, logits[:, 0].float())

    def _stack(self, probes: Sequence[Probes]) -> ProbeStack:
        key = tuple(id(probe) for probe in probes)  # a stack holds its probes, so their ids are not reused
        stack = self._stacks.pop(key, None) or ProbeStack(probes, self._modules.geometry, self._device)
        self._stacks[key] = stack
        while len(self._stacks) > MAX_PROBE_STACKS:
            self._stacks.popitem(last=False)
        return stack


def _scatter(buffer: Tensor, rows: Sequence[int], target: NDArray[np.float32], what: str) -> None:
    """Write activations [m, batch, width] into ``rows`` of ``target`` [n, m, width].  Raises NonFiniteReadout."""
    activations = buffer.cpu().numpy()
    refuse_non_finite(activations, rows, what)
    target[list(rows)] = activations.swapaxes(0, 1)
