"""Batched decoding for labelling: one cache padded on the left, one forward pass per step for all prompts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import DynamicCache

from service.engines.base import Completion, Sampling
from service.engines.transformers.batching import Batch
from service.engines.transformers.decoding import TextStream, generator_for, pick
from service.engines.transformers.kv import Decoder
from service.engines.transformers.results import refuse_nan
from service.engines.transformers.tracing import Tracer

Tensor = torch.Tensor


@dataclass
class _BatchAnswer:
    """The answer of one prompt of a batch."""

    length: int  # prompt tokens
    budget: int  # tokens it may still produce
    stream: TextStream
    generator: torch.Generator | None
    ids: list[int] = field(default_factory=list)
    finish: str = ""

    def add_token(self, token: int, end: frozenset[int]) -> None:
        self.ids.append(token)
        if token in end:
            self.finish = "stop"
        else:
            self.stream.push(token)
            if self.stream.stopped:
                self.finish = "stop"
            elif len(self.ids) >= self.budget:
                self.finish = "length"

    def completion(self) -> Completion:
        self.stream.finish()
        reason = "stop" if self.stream.stopped else self.finish or "length"
        return Completion(text=self.stream.text, token_ids=tuple(self.ids), finish_reason=reason)


@dataclass
class Begun:
    """Prefilled prompts that are decoded together."""

    lengths: tuple[int, ...]  # tokens of each prompt
    cache: Any  # padded on the left
    logits: Tensor  # [prompts, vocab] at t*
    mask: Tensor | None  # [prompts, longest], 1 at tokens; None where nothing is padded

    def repeated(self, times: int) -> Begun:
        """Every prompt so many times in a row; this one's cache is used up."""
        rows = torch.arange(len(self.lengths), device=self.logits.device).repeat_interleave(times)
        self.cache.batch_select_indices(rows)
        lengths = tuple(length for length in self.lengths for _ in range(times))
        return Begun(lengths, self.cache, self.logits[rows], None if self.mask is None else self.mask[rows])


def joined(parts: Sequence[tuple[Any, Batch]], logits: Tensor) -> Begun:
    """The caches of batches as one; row i is the prompt that has index i in its batch.  No layer may have a window."""
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
                for side, full in zip(sides, (own.keys, own.values), strict=True):
                    side[index, :, longest - length :] = full[row, :, start : start + length]
        cache.update(*sides, place)
    ordered = tuple(lengths[index] for index in sorted(lengths))
    mask = None
    if min(ordered) < longest:
        columns = torch.arange(longest, device=logits.device)
        mask = (columns >= longest - torch.tensor(ordered, device=logits.device)[:, None]).long()
    return Begun(ordered, cache, logits, mask)


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
    device = begun.logits.device
    answers = [
        _BatchAnswer(
            length=length,
            budget=min(sampling.max_tokens, decoder.max_tokens - length),
            stream=TextStream(decoder.detokenize, sampling.stop),
            generator=generator_for(replace(sampling, seed=seed), device),
        )
        for length, seed in zip(begun.lengths, seeds or [sampling.seed] * len(begun.lengths), strict=True)
    ]
    cache, logits, mask = begun.cache, begun.logits, begun.mask
    rows = list(range(len(answers)))  # which answer each row of the cache belongs to
    while True:
        taken = _take_step(refuse_nan(logits), rows, answers, sampling, decoder.end_tokens)
        if tracer is not None:
            tracer.take(logits, taken)
        running = [row for row, index in enumerate(rows) if not answers[index].finish and answers[index].budget > 0]
        if not running:
            return [answer.completion() for answer in answers]
        if len(running) <= len(rows) // 2:
            remaining = torch.tensor(running, device=device)
            cache.batch_select_indices(remaining)
            mask = mask[remaining] if mask is not None else None
            rows = [rows[row] for row in running]
        inputs = _next_inputs(rows, answers, device)
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            inputs["attention_mask"] = mask
        with tracer.reading(len(rows)) if tracer is not None else nullcontext():
            logits = model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        decoder.counters.forward_tokens += len(running)
        decoder.counters.decode_steps += len(running)


def _take_step(
    logits: Tensor, rows: Sequence[int], answers: Sequence[_BatchAnswer], sampling: Sampling, end: frozenset[int]
) -> list[tuple[int, int, int]]:
    """Choose a token for each answer that goes on: (row, answer, token) of each."""
    taken = []
    greedy = logits.argmax(dim=-1).tolist() if sampling.temperature == 0.0 else None
    for row, index in enumerate(rows):
        answer = answers[index]
        if answer.finish or answer.budget <= 0:
            continue
        token = greedy[row] if greedy is not None else pick(logits[row], sampling, answer.generator)
        answer.add_token(token, end)
        taken.append((row, index, token))
    return taken


def _next_inputs(rows: Sequence[int], answers: Sequence[_BatchAnswer], device: torch.device) -> dict[str, Any]:
    # A finished row that is still in the batch repeats its last token; its result is discarded.
    tokens = [[answers[index].ids[-1] if answers[index].ids else 0] for index in rows]
    positions = [[max(0, answers[index].length + len(answers[index].ids) - 1)] for index in rows]
    return {
        "input_ids": torch.tensor(tokens, device=device),
        "position_ids": torch.tensor(positions, device=device),
    }
