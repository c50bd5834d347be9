"""Decoding from prefilled caches: one answer's tokens and text, and steps of answers that come and
go.

The linear layers of a step run on all rows together (``next_logits``), which reads the weights
once, and attention row by row on the row's own keys and values, so that nothing is padded or copied
and a row may come and go."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, cast

import numpy as np
import torch
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from service.engines.base import (
    AnswerReading,
    BatchEngine,
    Completion,
    PrefillResult,
    Sampling,
    TracedAnswer,
)
from service.engines.checks import check_sampling
from service.engines.families import text_config
from service.engines.formats import Held
from service.engines.transformers.hooks import Batch, with_cache
from service.errors import EngineError, NonFiniteReadout
from service.readout import Probes, Site

Tensor = torch.Tensor
GREEDY_BELOW = 1e-6  # smaller temperatures overflow float32; their limit is the greedy token
INCOMPLETE = "\ufffd"  # what a tokenizer decodes the bytes of an incomplete character to


# a layer, its keys, values and the tokens that it has seen
Window = tuple[Any, Tensor, Tensor, int]


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
    """Return the next token for float32 logits [vocab]: greedy without a generator, else from the
    nucleus of top_p."""
    if generator is None:
        return int(logits.argmax())
    # The largest is subtracted first, so that a tiny temperature cannot overflow.
    probabilities = torch.softmax((logits - logits.max()) / sampling.temperature, dim=-1)
    if sampling.top_p < 1.0:
        # All smaller ones together are less than 1 - top_p: sorting the rest, a tenth of a large
        # vocabulary, suffices.
        likely = (probabilities >= (1.0 - sampling.top_p) / 2 / len(probabilities)).nonzero()[:, 0]
        ordered, order = probabilities[likely].sort(descending=True)
        # the token that crosses top_p is kept
        outside = ordered.cumsum(dim=-1) - ordered >= sampling.top_p
        outside[0] = False  # also if top_p is zero in float32
        probabilities = torch.zeros_like(probabilities).scatter(
            0, likely[order], ordered.masked_fill(outside, 0.0)
        )
    return int(torch.multinomial(probabilities, 1, generator=generator))


def only(logits: Tensor, allowed: bytes) -> Tensor:
    """Return logits [vocab] with all tokens but the allowed ones, a bit for each, at minus
    infinity."""
    bits = np.unpackbits(np.frombuffer(allowed, np.uint8), count=len(logits), bitorder="little")
    return logits.masked_fill(torch.from_numpy(bits == 0).to(logits.device), -torch.inf)


class TextStream:
    """Incremental decoding: the joined pieces are the text, and incomplete characters and stop
    strings wait."""

    def __init__(
        self, detokenize: Callable[[Sequence[int]], str], stop: Sequence[str] = ()
    ) -> None:
        self._detokenize, self._stop = detokenize, tuple(stop)
        self._ids: list[int] = []
        # A short window of ids is decoded again at each step, because a token's text may depend on
        # the token before it (SentencePiece drops the first space): the text of ids[_window:_done]
        # has been returned already.
        self._window = self._done = 0
        self._held = self.text = ""
        self.stopped: str | None = None  # the stop string that was found

    def push(self, token: int) -> str:
        """Add one token; return the text that is complete now, possibly ""."""
        self._ids.append(token)
        text = self._fresh()
        if not text or text.endswith(INCOMPLETE):
            return ""
        self._window, self._done = self._done, len(self._ids)
        return self._release(text)

    def finish(self) -> str:
        """Return the rest of the text at the end of the answer, without the bytes of an incomplete
        character."""
        if self.stopped is not None:
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
        stops = [(self._held.find(stop), stop) for stop in self._stop if stop in self._held]
        if stops:
            at, self.stopped = min(stops)
            out, self._held = self._held[:at], ""
        else:  # what may begin a stop string is held back
            cut = len(self._held) - max((self._begun(stop) for stop in self._stop), default=0)
            out, self._held = self._held[:cut], self._held[cut:]
        self.text += out
        return out

    def _begun(self, stop: str) -> int:
        """Return with how many of a stop string's first characters the held text ends: of less than
        all of them."""
        longest = min(len(stop) - 1, len(self._held))  # not of all of a long string, at each token
        return next((size for size in range(longest, 0, -1) if self._held.endswith(stop[:size])), 0)


class Decoder(BatchEngine, Protocol):
    """The part of an engine that decoding uses."""

    end_tokens: frozenset[int]  # tokens that end an answer
    max_tokens: int  # longest prompt plus answer


class KvContinuation:
    """A prefilled prompt and its answer (``base.Continuation``); with a ``site`` and its ``states``
    at t*, traced."""

    def __init__(
        self,
        decoder: Decoder,
        prefill: PrefillResult,
        cache: Any,
        logits: Tensor,
        site: Site | None = None,
        states: Tensor | None = None,
    ) -> None:
        self._decoder = decoder
        self.prefill = prefill
        self.cache: Any = cache  # None once it is closed
        # the next token's, float32 [vocab]; None while they are to be computed
        self._ahead: Tensor | None = logits
        # where the answer's own tokens are read, None: nowhere, or by ``answer_probes``
        self.site = site
        self.answer_probes: Probes | None = None
        self._traced = states is not None
        # of the token that ``_ahead`` follows: [m, width], truth logits [m] by probes
        self._read: Any = states
        self._sum: Any = None  # of the answer's own tokens, so many
        self._tokens = 0
        self._log_prob: list[float] = []
        self._stream: TextStream | None = None
        self._ids: list[int] = []
        self.failure: Exception | None = None  # of a step that has left the cache half changed
        self._finish = ""  # why the answer has ended; "" while it goes on
        decoder.counters.open_continuations += 1

    @property
    def completion(self) -> Completion | None:
        """The answer so far; None before ``decode``."""
        if self._stream is None:
            return None
        ids, stop = tuple(self._ids), self._stream.stopped
        return Completion(self._stream.text, ids, self._finish or "cancelled", stop=stop)

    def decode(
        self, sampling: Sampling, cancelled: Callable[[], bool] = lambda: False
    ) -> Iterator[str]:
        """Yield each token's text; the joined pieces are the answer.  Raises RequestError,
        EngineError."""
        check_sampling(sampling)
        if self._stream is not None and self.cache is not None:
            raise EngineError(
                "this continuation is already being decoded; call begin again for another answer"
            )
        if self.cache is None or self._ahead is None:
            raise EngineError("this continuation is closed; call begin again")
        self._stream = TextStream(self._decoder.detokenize, sampling.stop)
        return self._decode(
            self._stream, sampling, generator_for(sampling, self._ahead.device), cancelled
        )

    def _decode(
        self,
        stream: TextStream,
        sampling: Sampling,
        generator: torch.Generator | None,
        cancelled: Callable[[], bool],
    ) -> Iterator[str]:
        limit = min(sampling.max_tokens, self._decoder.max_tokens - self.prefill.prompt_tokens)
        held: Held | None = None
        try:
            held = None if sampling.format is None else Held(sampling.format)
            while not self._finish:
                if len(self._ids) >= limit or (self._ids and time.monotonic() >= sampling.until):
                    self._finish = "length"
                    break
                if cancelled() or self.cache is None:
                    return
                if self._ahead is None:
                    self._decoder.step_together([self])
                logits, self._ahead = cast(Tensor, self._ahead), None
                if self._ids and bool(
                    torch.isnan(logits).any()
                ):  # the first ones were checked with the prefill
                    raise NonFiniteReadout(
                        "the logits of a decode step hold a NaN: load the model with dtype bfloat16"
                    )
                token = pick(
                    logits if held is None else only(logits, held.allowed()), sampling, generator
                )
                self._ids.append(token)
                if self._traced:
                    self._log_prob.append(
                        float(logits[token].double() - logits.double().logsumexp(dim=-1))
                    )
                if token in self._decoder.end_tokens:
                    self._finish = "stop"
                    break
                piece, complete = stream.push(token), held is not None and held.take(token)
                if stream.stopped is not None or complete:
                    self._finish = "stop"
                elif len(self._ids) >= limit:
                    self._finish = "length"
                yield piece
            rest = stream.finish()
            if stream.stopped is not None:
                self._finish = "stop"
            if rest:
                yield rest
        finally:
            if held is not None:
                held.close()
            self.close()

    @property
    def mean(self) -> Any:
        """The mean of what was read of the answer's own tokens, as ``_read`` is; None before a
        token."""
        return self._sum / self._tokens if self._tokens else None

    def traced(self) -> TracedAnswer:
        """Return the finished answer and what the model computed for it."""
        assert self.completion is not None
        mean = self._read if self.mean is None else self.mean
        last, means = (part.cpu().numpy() for part in (self._read, mean))
        return TracedAnswer(self.completion, np.array(self._log_prob, np.float64), last, means)

    @property
    def reading(self) -> AnswerReading | None:
        """What ``answer_probes`` have read so far; None before a token."""
        if self.answer_probes is None or not self._tokens:
            return None
        return AnswerReading(self._tokens, self.mean)

    @property
    def waits(self) -> bool:
        """Whether its next token needs a forward pass over its last one."""
        return self.cache is not None and self._ahead is None and not self._finish

    @property
    def last(self) -> tuple[int, int]:
        """The last token and its position."""
        return self._ids[-1], self.prefill.prompt_tokens + len(self._ids) - 1

    def go_on(self, logits: Tensor, read: Any = None) -> None:
        """Take the next token's logits [vocab] float32 and what was read of the token that they
        follow."""
        self._ahead = logits
        if read is not None:
            self._read, self._tokens = read, self._tokens + 1
            self._sum = read if self._sum is None else self._sum + read

    def restore(self, windows: Sequence[Window], error: Exception) -> None:
        """Put the cache back as it was before a step that failed with ``error``; ``windows`` as
        they were then.

        A recurrent state cannot be put back: such an answer's next step raises ``error``, too."""
        if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self.cache.layers):
            self.failure = error
            return
        for layer, keys, values, seen in windows:
            layer.keys = keys
            layer.values = values
            layer.cumulative_length = seen
        _, length = self.last
        for layer in self.cache.layers:
            if not layer.is_sliding:
                layer.keys = layer.keys[..., :length, :]
                layer.values = layer.values[..., :length, :]

    def close(self) -> None:
        """Free the KV cache.  Safe to call twice."""
        if self.cache is not None:
            self._decoder.counters.open_continuations -= 1
        self.cache = self._ahead = None


def split_cache(cache: Any, batch: Batch, config: Any) -> list[Any]:
    """Copy a batch's cache, full also in layers with windows, into one unpadded native cache per
    row."""
    if len(batch.index) == 1:
        return [cache]
    rows = []
    for row, length in enumerate(batch.prompt_tokens):
        own = DynamicCache(config=config)
        for layer, full in enumerate(cache.layers):
            span = (slice(row, row + 1), slice(None), slice(length))
            # update concatenates, which copies
            own.update(full.keys[span], full.values[span], layer)
        rows.append(own)
    return rows


def windows_of(cache: Any) -> list[Window]:
    """Return what a step drops from the layers that see a window only; the tensors are not
    copied."""
    layers = (layer for layer in cache.layers if getattr(layer, "is_sliding", False))
    return [(layer, layer.keys, layer.values, layer.cumulative_length) for layer in layers]


# transformers has a place for both parts of a step: a cache whose ``update`` hands on what it
# likes, and registered attention functions.

NAME = "hallutracer_rows"
_implementation: ContextVar[str] = ContextVar("the model's own attention")


def next_logits(model: Any, rows: Sequence[KvContinuation], device: torch.device) -> Tensor:
    """Read each row's last token: float32 logits [rows, vocab].  The caches are extended in
    place."""
    tokens, positions = torch.tensor([row.last for row in rows], device=device).T[..., None]
    inputs = {"input_ids": tokens, "position_ids": positions}
    if len(rows) == 1:
        output = model(**inputs, **with_cache(model, rows[0].cache))
    else:
        with _row_by_row(model):
            output = model(**inputs, **with_cache(model, _RowCaches([row.cache for row in rows])))
    return cast(Tensor, output.logits[:, -1].float())


class _RowCaches(Cache):
    def __init__(self, rows: Sequence[Any]) -> None:
        super().__init__(layers=rows[0].layers)
        self._rows = rows

    def update(  # type: ignore[override]  # lists, for ``_attend`` alone
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return each row's keys and values [1, heads, tokens of the row, head_dim], for
        ``_attend``."""
        pairs = [
            row.update(
                key_states[index : index + 1],
                value_states[index : index + 1],
                layer_idx,
                *args,
                **kwargs,
            )
            for index, row in enumerate(self._rows)
        ]
        return [keys for keys, _ in pairs], [values for _, values in pairs]


def _attend(
    module: Any,
    query: Tensor,
    key: Sequence[Tensor],
    value: Sequence[Tensor],
    attention_mask: None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Run the model's own attention for each row's one query: without a mask, because all that is
    cached is visible."""
    own = _implementation.get()
    if own == "eager":
        attention = sys.modules[type(module).__module__].eager_attention_forward
    else:
        attention = AttentionInterface._global_mapping[own]
    rows = [
        attention(module, query[index : index + 1], keys, values, None, **kwargs)[0]
        for index, (keys, values) in enumerate(zip(key, value, strict=True))
    ]
    return torch.cat(rows), None


AttentionInterface.register(NAME, _attend)


@contextmanager
def _row_by_row(model: Any) -> Iterator[None]:
    config = text_config(model.config)
    own = config._attn_implementation
    token = _implementation.set(own)
    config._attn_implementation_internal = NAME
    try:
        yield
    finally:
        config._attn_implementation_internal = own
        _implementation.reset(token)
