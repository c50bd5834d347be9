"""KV caches of prefilled prompts, and decoding from them.

A batch's prefill keeps every layer's keys in full, also in layers with a sliding window, because in a padded batch the
window of a short prompt differs from that of a long one.  Then each prompt gets its own unpadded cache of the model's
native kind, and freeing one frees its memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import torch
from transformers import DynamicCache

from service.engines.base import Completion, Counters, PrefillResult, Sampling
from service.engines.checks import check_sampling
from service.engines.transformers.batching import Batch
from service.engines.transformers.decoding import TextStream, generator_for, pick
from service.engines.transformers.results import refuse_nan
from service.errors import EngineError

Tensor = torch.Tensor


def split_cache(cache: Any, batch: Batch, config: Any) -> list[Any]:
    """Copy a prefilled batch's cache into one unpadded native cache per row; the batch's can be freed then."""
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


class Decoder(Protocol):
    """The part of an engine that a continuation uses."""

    counters: Counters
    end_tokens: frozenset[int]  # tokens that end an answer
    max_tokens: int  # longest prompt plus answer

    def step_together(self, continuations: Sequence[Any]) -> None:
        """As ``base.BatchEngine.step_together``."""

    def detokenize(self, token_ids: Any) -> str:
        """Ids to text."""


class KvContinuation:
    """A prefilled prompt that can be decoded.  Implements ``base.Continuation``."""

    def __init__(self, decoder: Decoder, prefill: PrefillResult, cache: Any, logits: Tensor) -> None:
        self._decoder = decoder
        self.prefill = prefill
        self.cache: Any = cache
        self._logits: Tensor | None = logits
        self._ids: list[int] = []
        self._stream: TextStream | None = None
        self._ahead: Tensor | None = None  # the next token's logits, where they were computed together with others'
        self._goes_on = False  # whether a further token is wanted after the last one
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
            limit = min(sampling.max_tokens, self._decoder.max_tokens - self.prefill.prompt_tokens)
            for number in range(limit):
                if cancelled():
                    return
                if number and time.monotonic() >= sampling.until:
                    self._finish = "length"
                    break
                if number:
                    if self.cache is None:
                        return  # closed while decoding
                    if self._ahead is None:
                        self._decoder.step_together([self])
                    logits, self._ahead = refuse_nan(cast(Tensor, self._ahead)), None
                token = pick(logits, sampling, generator)
                self._ids.append(token)
                if token in self._decoder.end_tokens:
                    self._finish = "stop"
                    break
                piece = stream.push(token)
                self._goes_on = not stream.stopped and number + 1 < limit
                yield piece
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

    @property
    def waits(self) -> bool:
        """Whether its next token needs a forward pass over its last one."""
        return self.cache is not None and self._ahead is None and self._goes_on

    @property
    def last(self) -> tuple[int, int]:
        """The last token and its position."""
        return self._ids[-1], self.prefill.prompt_tokens + len(self._ids) - 1

    def go_on(self, logits: Tensor) -> None:
        """Take the next token's logits [vocab] float32."""
        self._ahead = logits

    def close(self) -> None:
        """Free the KV cache.  Safe to call twice."""
        if self._logits is not None:
            self._decoder.counters.open_continuations -= 1
        self.cache = self._logits = self._ahead = None
