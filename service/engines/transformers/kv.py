"""KV caches of prefilled prompts, and decoding from them.

A batch's prefill keeps every layer's keys in full, also in layers with a sliding window, because in a padded batch the
window of a short prompt differs from that of a long one.  Then each prompt gets its own unpadded cache of the model's
native kind, and freeing one frees its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from transformers import DynamicCache

from service.engines.base import Completion, Counters, PrefillResult, Sampling
from service.engines.checks import check_sampling
from service.engines.transformers.batching import Batch
from service.engines.transformers.decoding import TextStream, generator_for, pick
from service.errors import EngineError

Tensor = torch.Tensor


def split_cache(cache: Any, batch: Batch, config: Any) -> list[Any]:
    """Copy a prefilled batch's cache into one unpadded native cache per row; the batch's can be freed then."""
    if len(batch.index) == 1:
        return [cache]
    rows = []
    for row, (start, length) in enumerate(zip(batch.starts, batch.lengths, strict=True)):
        own = DynamicCache(config=config)
        for layer, full in enumerate(cache.layers):
            span = (slice(row, row + 1), slice(None), slice(start, start + length))
            own.update(full.keys[span], full.values[span], layer)  # update concatenates, which copies
        rows.append(own)
    return rows


class Decoder(Protocol):
    """The part of an engine that a continuation uses."""

    counters: Counters
    end_tokens: frozenset[int]  # tokens that end an answer
    max_tokens: int  # longest prompt plus answer

    def step(self, token: int, cache: Any) -> Tensor:
        """Run one token through the model against a cache: float32 logits [vocab]."""

    def detokenize(self, token_ids: Any) -> str:
        """Ids to text."""


class KvContinuation:
    """A prefilled prompt that can be decoded.  Implements ``base.Continuation``."""

    def __init__(self, decoder: Decoder, prefill: PrefillResult, cache: Any, logits: Tensor) -> None:
        self._decoder = decoder
        self.prefill = prefill
        self._cache: Any = cache
        self._logits: Tensor | None = logits
        self._ids: list[int] = []
        self._stream: TextStream | None = None
        self._finish = "cancelled"  # unless decoded to the end
        decoder.counters.open_continuations += 1

    @property
    def completion(self) -> Completion | None:
        """The answer so far; None before ``decode``."""
        if self._stream is None:
            return None
        return Completion(text=self._stream.text, token_ids=tuple(self._ids), finish_reason=self._finish)

    def decode(self, sampling: Sampling, cancelled: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """Yield each token's text as it is decoded from the prefill's cache, without running the prompt again.

        A piece can be empty or hold the text of several tokens; the joined pieces are the answer.  The answer ends with
        ``length`` where it fills the model's context.
        Raises RequestError for invalid sampling options and EngineError after ``close`` or a first ``decode``.
        """
        check_sampling(sampling)
        if self._logits is None:
            raise EngineError("this continuation is closed; call begin again")
        if self._stream is not None:
            raise EngineError("this continuation is already being decoded; call begin again for another answer")
        self._stream = TextStream(self._decoder.detokenize, sampling.stop)
        return self._decode(sampling, cancelled, self._logits, self._stream)

    def _decode(
        self, sampling: Sampling, cancelled: Callable[[], bool], logits: Tensor, stream: TextStream
    ) -> Iterator[str]:
        try:
            generator = generator_for(sampling, logits.device)
            for number in range(min(sampling.max_tokens, self._decoder.max_tokens - self.prefill.prompt_tokens)):
                if cancelled():
                    return
                if number:
                    if self._cache is None:
                        return  # closed while decoding
                    logits = self._decoder.step(self._ids[-1], self._cache)
                token = pick(logits, sampling, generator)
                self._ids.append(token)
                if token in self._decoder.end_tokens:
                    self._finish = "stop"
                    break
                yield stream.push(token)
                if stream.stopped:
                    self._finish = "stop"
                    break
            else:
                self._finish = "length"
            if rest := stream.finish():
                yield rest
            if stream.stopped:
                self._finish = "stop"
        finally:
            self.close()

    def close(self) -> None:
        """Free the KV cache.  Safe to call twice."""
        if self._logits is not None:
            self._decoder.counters.open_continuations -= 1
        self._cache = self._logits = None
