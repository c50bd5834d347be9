"""Sampling of tokens and incremental decoding of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from service.engines.base import Sampling

GREEDY_BELOW = 1e-6  # smaller temperatures overflow float32; their limit is the greedy token
INCOMPLETE = "\ufffd"  # what a tokenizer decodes the bytes of an incomplete character to


def generator_for(sampling: Sampling, device: torch.device) -> torch.Generator | None:
    """A seeded generator for sampled decoding; None for greedy decoding."""
    if sampling.temperature < GREEDY_BELOW:
        return None
    generator = torch.Generator(device=device)
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed)
    return generator


def pick(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator | None) -> int:
    """The next token from float32 logits [vocab]: greedy without a generator, else from the nucleus of mass top_p."""
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


class TextStream:
    """Incremental decoding whose joined pieces equal the tokenizer's decoding of all tokens.

    Text that ends in an incomplete character, or that may be the start of a stop string, is held back until the next
    token.  A stop string itself is never returned.
    """

    def __init__(self, detokenize: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._detokenize = detokenize
        self._stop = tuple(stop)
        self._ids: list[int] = []
        # A short window of ids is decoded again at each step, because a token's text may depend on the token before it
        # (SentencePiece drops the first space): the text of ids[_window:_done] has been returned already.
        self._window = self._done = 0
        self._held = ""
        self.text = ""
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
        """The rest of the text at the end of the answer, without the bytes of an incomplete character."""
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
        else:
            cut = len(self._held) - max((_overlap(self._held, stop) for stop in self._stop), default=0)
            out, self._held = self._held[:cut], self._held[cut:]
        self.text += out
        return out


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    return max((length for length in range(1, len(stop)) if text.endswith(stop[:length])), default=0)
