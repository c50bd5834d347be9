"""Decoding: one answer's tokens and text, answers that come and go at any step, and batches for labelling.

``Answer`` chooses tokens from logits, whoever computes them.  ``KvContinuation`` is one prompt that is served: the
linear layers of a step run on all rows together (``next_logits``), which reads the weights once, and attention row by
row on the row's own keys and values, so that nothing is padded or copied and a row may come and go.  ``decode_batch``
answers prompts that begin together from one cache padded on the left.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np
import torch
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import Cache

from service.engines.base import Completion, Counters, PrefillResult, Sampling, TracedAnswer
from service.engines.checks import check_sampling
from service.engines.families import ModelModules, text_config
from service.engines.transformers.batching import Batch
from service.engines.transformers.hooks import ActivationBuffer, OnsetIndex, reading
from service.errors import EngineError, NonFiniteReadout
from service.readout import Site

Tensor = torch.Tensor
GREEDY_BELOW = 1e-6  # smaller temperatures overflow float32; their limit is the greedy token
INCOMPLETE = "\ufffd"  # what a tokenizer decodes the bytes of an incomplete character to


def generator_for(sampling: Sampling, device: torch.device) -> torch.Generator | None:
    """Return a seeded generator for sampled decoding; None for greedy decoding."""
    if sampling.temperature < GREEDY_BELOW:
        return None
    generator = torch.Generator(device=device)
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed)
    return generator


def pick(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> int:
    """Return the next token for float32 logits [vocab]: greedy without a generator, else from the nucleus of top_p."""
    if generator is None:
        return int(logits.argmax())
    # The largest is subtracted first, so that a tiny temperature cannot overflow.
    probabilities = torch.softmax((logits - logits.max()) / sampling.temperature, dim=-1)
    if sampling.top_p < 1.0:
        # All smaller ones together are less than 1 - top_p: sorting the rest, a tenth of a large vocabulary, suffices.
        likely = (probabilities >= (1.0 - sampling.top_p) / 2 / len(probabilities)).nonzero()[:, 0]
        ordered, order = probabilities[likely].sort(descending=True)
        outside = ordered.cumsum(dim=-1) - ordered >= sampling.top_p  # the token that crosses top_p is kept
        outside[0] = False  # also if top_p is zero in float32
        probabilities = torch.zeros_like(probabilities).scatter(0, likely[order], ordered.masked_fill(outside, 0.0))
    return int(torch.multinomial(probabilities, 1, generator=generator))


def refuse_nan(logits: Tensor) -> Tensor:
    """Return a decode step's logits, or raise NonFiniteReadout."""
    if bool(torch.isnan(logits).any()):
        raise NonFiniteReadout(
            "the logits of a decode step hold a NaN; the model overflowed: load it with dtype bfloat16 or float32"
        )
    return logits


class TextStream:
    """Incremental decoding whose joined pieces equal the tokenizer's decoding of all tokens.

    Text that ends in an incomplete character, or that may be the start of a stop string, is held back until the next
    token.  A stop string itself is never returned.
    """

    def __init__(self, detokenize: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._detokenize, self._stop = detokenize, tuple(stop)
        self._ids: list[int] = []
        # A short window of ids is decoded again at each step, because a token's text may depend on the token before it
        # (SentencePiece drops the first space): the text of ids[_window:_done] has been returned already.
        self._window = self._done = 0
        self._held = self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add one token; return the text that is complete now, possibly ""."""
        self._ids.append(token)
        text = self._fresh()
        if not text or text.endswith(INCOMPLETE):
            return ""
        self._window, self._done = self._done, len(self._ids)
        return self._release(text)

    def finish(self) -> str:
        """Return the rest of the text at the end of the answer, without the bytes of an incomplete character."""
        if self.stopped:
            return ""
        rest = self._release(self._fresh().rstrip(INCOMPLETE))
        held, self._held = self._held, ""  # no more tokens can complete a stop string
        self.text += held
        return rest + held

    def _fresh(self) -> str:
        returned = self._detokenize(self._ids[self._window : self._done])
        return self._detokenize(self._ids[self._window :])[len(returned) :]

    def _release(self, text: str) -> str:
        self._held += text
        stops = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if stops:
            out, self._held, self.stopped = self._held[: min(stops)], "", True
        else:  # what may begin a stop string is held back
            begins = (n for stop in self._stop for n in range(1, len(stop)) if self._held.endswith(stop[:n]))
            cut = len(self._held) - max(begins, default=0)
            out, self._held = self._held[:cut], self._held[cut:]
        self.text += out
        return out


class Decoder(Protocol):
    """The part of an engine that decoding uses."""

    counters: Counters
    end_tokens: frozenset[int]  # tokens that end an answer
    max_tokens: int  # longest prompt plus answer

    def step_together(self, continuations: Sequence[Any]) -> None:
        """Run a step as ``base.BatchEngine.step_together``."""

    def detokenize(self, token_ids: Any) -> str:
        """Decode ids."""


class Answer:
    """One answer as it is decoded.  It ends with ``length`` where it fills the model's context."""

    def __init__(self, decoder: Decoder, prompt_tokens: int, sampling: Sampling, device: torch.device) -> None:
        self._end_tokens, self._sampling, self._prompt_tokens = decoder.end_tokens, sampling, prompt_tokens
        self._limit = min(sampling.max_tokens, decoder.max_tokens - prompt_tokens)
        self._stream = TextStream(decoder.detokenize, sampling.stop)
        self._generator = generator_for(sampling, device)
        self.ids: list[int] = []
        self.finish = "length" if self._limit <= 0 else ""  # why it has ended; "" while it goes on

    def choose(self, logits: Tensor) -> int:
        """Return the next token for float32 logits [vocab]."""
        return pick(logits, self._sampling, self._generator)

    def add(self, token: int) -> str:
        """Append a token; return the text that is complete now, possibly ""."""
        self.ids.append(token)
        if token in self._end_tokens:
            self.finish = "stop"
            return ""
        piece = self._stream.push(token)
        if self._stream.stopped:
            self.finish = "stop"
        elif len(self.ids) >= self._limit:
            self.finish = "length"
        return piece

    def rest(self) -> str:
        """End the text and return what was held back of it."""
        rest = self._stream.finish()
        if self._stream.stopped:
            self.finish = "stop"
        return rest

    @property
    def last(self) -> tuple[int, int]:
        """The last token and its position."""
        return self.ids[-1] if self.ids else 0, self._prompt_tokens + len(self.ids) - 1

    def completion(self, finish: str = "cancelled") -> Completion:
        """Return the answer so far; ``finish``: why it ends, where it has not ended by itself."""
        return Completion(self._stream.text, tuple(self.ids), self.finish or finish)


class KvContinuation:
    """A prefilled prompt that can be decoded.  Implements ``base.Continuation``."""

    def __init__(self, decoder: Decoder, prefill: PrefillResult, cache: Any, logits: Tensor) -> None:
        self._decoder = decoder
        self.prefill = prefill
        self.cache: Any = cache  # None once it is closed
        self._ahead: Tensor | None = logits  # the next token's; None where they are still to be computed
        self._answer: Answer | None = None
        decoder.counters.open_continuations += 1

    @property
    def completion(self) -> Completion | None:
        """The answer so far; None before ``decode``."""
        return None if self._answer is None else self._answer.completion()

    def decode(self, sampling: Sampling, cancelled: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """Yield each token's text as it is decoded from the prefill's cache, without running the prompt again.

        A piece can be empty or hold the text of several tokens; the joined pieces are the answer.
        Raises RequestError for invalid sampling options and EngineError after ``close`` or a first ``decode``.
        """
        check_sampling(sampling)
        if self._answer is not None and self.cache is not None:
            raise EngineError("this continuation is already being decoded; call begin again for another answer")
        if self.cache is None or self._ahead is None:
            raise EngineError("this continuation is closed; call begin again")
        self._answer = Answer(self._decoder, self.prefill.prompt_tokens, sampling, self._ahead.device)
        return self._decode(self._answer, sampling.until, cancelled)

    def _decode(self, answer: Answer, until: float, cancelled: Callable[[], bool]) -> Iterator[str]:
        try:
            while not answer.finish:
                if cancelled():
                    return
                if answer.ids and time.monotonic() >= until:
                    answer.finish = "length"
                    break
                if self.cache is None:
                    return  # closed while decoding
                if self._ahead is None:
                    self._decoder.step_together([self])
                logits, self._ahead = cast(Tensor, self._ahead), None
                piece = answer.add(answer.choose(refuse_nan(logits) if answer.ids else logits))
                if answer.ids[-1] not in self._decoder.end_tokens:
                    yield piece
            if rest := answer.rest():
                yield rest
        finally:
            self.close()

    @property
    def waits(self) -> bool:
        """Whether its next token needs a forward pass over its last one."""
        return self.cache is not None and self._ahead is None and self._answer is not None and not self._answer.finish

    @property
    def last(self) -> tuple[int, int]:
        """The last token and its position."""
        assert self._answer is not None
        return self._answer.last

    def go_on(self, logits: Tensor) -> None:
        """Take the next token's logits [vocab] float32."""
        self._ahead = logits

    def close(self) -> None:
        """Free the KV cache.  Safe to call twice."""
        if self.cache is not None:
            self._decoder.counters.open_continuations -= 1
        self.cache = self._ahead = None


def split_cache(cache: Any, batch: Batch, config: Any) -> list[Any]:
    """Copy a batch's cache, full also in layers with windows, into one unpadded native cache per row."""
    if len(batch.index) == 1:
        return [cache]
    rows = []
    for row, (start, length) in enumerate(zip(batch.starts, batch.prompt_tokens, strict=True)):
        own = DynamicCache(config=config)
        for layer, full in enumerate(cache.layers):
            span = (slice(row, row + 1), slice(None), slice(start, start + length))
            own.update(full.keys[span], full.values[span], layer)  # update concatenates, which copies
        rows.append(own)
    return rows


# A step of answers that come and go.  transformers has a place for both of its parts: a cache whose ``update`` hands on
# what it likes, and registered attention functions.

NAME = "hallutracer_rows"
_implementation: ContextVar[str] = ContextVar("the model's own attention")


def next_logits(model: Any, rows: Sequence[KvContinuation], device: torch.device) -> Tensor:
    """Read each row's last token: float32 logits [rows, vocab].  The caches are extended in place."""
    tokens, positions = zip(*(row.last for row in rows), strict=True)
    inputs = {
        "input_ids": torch.tensor(tokens, device=device)[:, None],
        "position_ids": torch.tensor(positions, device=device)[:, None],
        "use_cache": True,
    }
    if len(rows) == 1:
        output = model(past_key_values=rows[0].cache, **inputs)
    else:
        with _row_by_row(model):
            output = model(past_key_values=_RowCaches([row.cache for row in rows]), **inputs)
    return cast(Tensor, output.logits[:, -1].float())


class _RowCaches(Cache):
    """The caches of several prompts as one, for one token of each."""

    def __init__(self, rows: Sequence[Any]) -> None:
        super().__init__(layers=rows[0].layers)
        self._rows = rows

    def update(  # type: ignore[override]  # lists, for ``_attend`` alone
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return each row's keys and values [1, heads, tokens of the row, head_dim], for ``_attend``."""
        pairs = [
            row.update(key_states[place : place + 1], value_states[place : place + 1], layer_idx, *args, **kwargs)
            for place, row in enumerate(self._rows)
        ]
        return [keys for keys, _ in pairs], [values for _, values in pairs]


def _attend(
    module: Any, query: Tensor, key: Sequence[Tensor], value: Sequence[Tensor], attention_mask: None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Run the model's own attention for each row's one query: without a mask, because all that is cached is visible."""
    own = _implementation.get()
    if own == "eager":
        attention = sys.modules[type(module).__module__].eager_attention_forward
    else:
        attention = AttentionInterface._global_mapping[own]
    rows = [
        attention(module, query[place : place + 1], keys, values, None, **kwargs)[0]
        for place, (keys, values) in enumerate(zip(key, value, strict=True))
    ]
    return torch.cat(rows), None


AttentionInterface.register(NAME, _attend)


@contextmanager
def _row_by_row(model: Any) -> Iterator[None]:
    """Have the model's attention take the lists of ``_RowCaches``."""
    config = text_config(model.config)
    own = config._attn_implementation
    token = _implementation.set(own)
    config._attn_implementation_internal = NAME
    try:
        yield
    finally:
        config._attn_implementation_internal = own
        _implementation.reset(token)


# Batches that begin together.


@dataclass
class Begun:
    """Prefilled prompts that are decoded together."""

    lengths: tuple[int, ...]  # tokens of each prompt
    cache: Any  # padded on the left
    logits: Tensor  # [prompts, vocab] at t*
    mask: Tensor | None  # [prompts, longest], 1 at tokens; None where nothing is padded

    def repeated(self, times: int) -> Begun:
        """Return every prompt so many times in a row; this one's cache is used up."""
        rows = torch.arange(len(self.lengths), device=self.logits.device).repeat_interleave(times)
        self.cache.batch_select_indices(rows)
        lengths = tuple(length for length in self.lengths for _ in range(times))
        return Begun(lengths, self.cache, self.logits[rows], None if self.mask is None else self.mask[rows])


def joined(parts: Sequence[tuple[Any, Batch]], logits: Tensor) -> Begun:
    """Join the caches of batches; row i is the prompt that has index i in its batch.  No layer may have a window."""
    lengths = dict(pair for _, batch in parts for pair in zip(batch.index, batch.prompt_tokens, strict=True))
    longest = max(lengths.values())
    cache: Any = DynamicCache()
    for place, layer in enumerate(parts[0][0].layers):
        sides = [
            side.new_zeros(len(lengths), side.shape[1], longest, side.shape[3]) for side in (layer.keys, layer.values)
        ]
        for part, batch in parts:
            own = part.layers[place]
            for row, (index, start, length) in enumerate(
                zip(batch.index, batch.starts, batch.prompt_tokens, strict=True)
            ):
                for side, source in zip(sides, (own.keys, own.values), strict=True):
                    side[index, :, longest - length :] = source[row, :, start : start + length]
        cache.update(*sides, place)
    ordered = tuple(lengths[index] for index in sorted(lengths))
    mask = None
    if min(ordered) < longest:
        columns = torch.arange(longest, device=logits.device)
        mask = (columns >= longest - torch.tensor(ordered, device=logits.device)[:, None]).long()
    return Begun(ordered, cache, logits, mask)


class Tracer:
    """What the model computes in one ``decode_batch``: each token's log-probability and the states it follows from.

    The state of step t is the residual stream, at every layer, of the token that the t-th answer token is predicted
    from: t* for the first.  Memory: three states [m, hidden_size] for each answer.
    """

    def __init__(self, modules: ModelModules, head: torch.nn.Module, onset: Tensor) -> None:
        """Start with ``onset``, the prompts' states at t*, [m, answers, hidden_size] float32."""
        self._modules, self._head = modules, head
        self._states = onset  # of the step that comes, by row
        self._last, self._sum = onset.clone(), torch.zeros_like(onset)
        self._log_prob: list[list[float]] = [[] for _ in range(onset.shape[1])]

    @contextmanager
    def reading(self, rows: int) -> Iterator[None]:
        """Read the forward pass of one step with so many rows."""
        sink = ActivationBuffer([Site.RESIDUAL_STREAM], self._modules.geometry, rows, self._states.device)
        self._states = sink.buffers[Site.RESIDUAL_STREAM]
        with reading(self._modules, self._head, sink, OnsetIndex([0] * rows, self._states.device), stop=False):
            yield

    def take(self, logits: Tensor, taken: Sequence[tuple[int, int, int]]) -> None:
        """Take one step: logits [rows, vocab] and the (row, answer, token) that were chosen from them."""
        if not taken:
            return
        row, answer, token = torch.tensor(taken, device=logits.device).T
        chosen = logits[row, token].double() - logits[row].double().logsumexp(dim=-1)
        states = self._states[:, row]
        self._last[:, answer] = states
        for (_, index, _), value in zip(taken, chosen.tolist(), strict=True):
            self._log_prob[index].append(value)
        follows = torch.tensor([len(self._log_prob[index]) > 1 for _, index, _ in taken], device=logits.device)
        self._sum[:, answer[follows]] += states[:, follows]

    def answers(self, completions: Sequence[Completion]) -> list[TracedAnswer]:
        """Return what was traced of each answer."""
        count = torch.tensor([len(one) - 1 for one in self._log_prob], device=self._sum.device)
        mean = torch.where(count[:, None] > 0, self._sum / count.clamp(min=1)[:, None], self._last)
        last, means = (part.cpu().numpy() for part in (self._last, mean))
        return [
            TracedAnswer(completion, np.array(self._log_prob[index], np.float64), last[:, index], means[:, index])
            for index, completion in enumerate(completions)
        ]


def decode_batch(
    decoder: Decoder,
    model: Any,
    begun: Begun,
    sampling: Sampling,
    seeds: Sequence[int | None] | None = None,
    tracer: Tracer | None = None,
) -> list[Completion]:
    """Decode prompts together; each answer equals the one that its prompt gets alone.

    Every row has its own generator, so sampled answers do not depend on the rest of the batch either.  Its seed is that
    of ``sampling``, or its own of ``seeds``.  Finished rows are removed once they are half of the batch.
    """
    cache, logits, mask, device = begun.cache, begun.logits, begun.mask, begun.logits.device
    own = seeds or [sampling.seed] * len(begun.lengths)
    answers = [
        Answer(decoder, length, replace(sampling, seed=seed), device)
        for length, seed in zip(begun.lengths, own, strict=True)
    ]
    rows = list(range(len(answers)))  # which answer each row of the cache belongs to
    while True:
        refuse_nan(logits)
        greedy = logits.argmax(dim=-1).tolist() if sampling.temperature == 0.0 else None
        taken = []
        for row, index in enumerate(rows):
            if not (answer := answers[index]).finish:
                token = answer.choose(logits[row]) if greedy is None else greedy[row]
                answer.add(token)
                taken.append((row, index, token))
        if tracer is not None:
            tracer.take(logits, taken)
        running = [row for row, index in enumerate(rows) if not answers[index].finish]
        if not running:
            for answer in answers:
                answer.rest()
            return [answer.completion() for answer in answers]
        if len(running) <= len(rows) // 2:
            remaining = torch.tensor(running, device=device)
            cache.batch_select_indices(remaining)
            mask = mask[remaining] if mask is not None else None
            rows = [rows[row] for row in running]
        # A finished row that is still in the batch repeats its last token; its result is discarded.
        tokens, positions = zip(*(answers[index].last for index in rows), strict=True)
        inputs = {
            "input_ids": torch.tensor(tokens, device=device)[:, None],
            "position_ids": torch.tensor(positions, device=device)[:, None],
        }
        if mask is not None:
            mask = inputs["attention_mask"] = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        with tracer.reading(len(rows)) if tracer is not None else nullcontext():
            logits = model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        decoder.counters.forward_tokens += len(running)
        decoder.counters.decode_steps += len(running)
