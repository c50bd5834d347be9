"""Rows over more of the prompt than t*: the readout-position ablation (App. pooling, Tab. ablation_pooling).

Pooled inside the forward pass, layer by layer, so that one layer's states are held at a time and never all of them.
Which tokens are content words is decided from their ids.  Knows padded batches and a tokenizer; knows no model, no
hooks and no files.  The paper does not define "content word"; ``is_content`` is this project's reading.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from service.engines.base import TokenIds
from service.engines.tokens import Tokens
from service.engines.transformers.batching import Batch
from service.readout import Geometry, Pooling, Site

Tensor = torch.Tensor
LAST = {Pooling.LAST_4: 4, Pooling.LAST_8: 8, Pooling.LAST_16: 16}
MAXIMA = (Pooling.MAX, Pooling.CONTENT_MAX)
CONTENT = (Pooling.CONTENT_MEAN, Pooling.CONTENT_MAX)


def is_content(text: str) -> bool:
    """Whether a token's text is a content word: it holds a letter or digit and is no English stop word.

    Compared in lower case, without the white space and punctuation at its ends, which many vocabularies glue to words.
    A token is judged alone: a piece of a word counts, and a piece of a character, which decodes to no letter, does not.
    """
    from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS  # here: whoever serves never needs it

    kept = [place for place, character in enumerate(text) if character.isalnum()]
    return bool(kept) and text[kept[0] : kept[-1] + 1].lower() not in ENGLISH_STOP_WORDS


class ContentWords:
    """Which tokens of a prompt are content words.  Verdicts are kept per id.

    Special tokens are not: the tokenizer leaves them out of any text.  The words of a chat template are like any other.
    """

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._known: dict[int, bool] = {}

    def of(self, prompt: TokenIds) -> NDArray[np.bool_]:
        """[len(prompt)], true at content words."""
        for token in {int(token) for token in prompt} - self._known.keys():
            self._known[token] = is_content(self._tokens.detokenize([token]))
        return np.array([self._known[int(token)] for token in prompt], np.bool_)


def windows(
    batch: Batch, prompts: Sequence[TokenIds], poolings: Sequence[Pooling], words: ContentWords
) -> dict[Pooling, NDArray[np.bool_]]:
    """Which columns of a padded batch each pooling counts, [batch, columns]; padding is in none of them.

    ``prompts`` are the caller's, as ``batch.index`` numbers them.  A window longer than its prompt is the whole prompt.
    A content window is empty where the prompt has no content word.
    """
    left = _tokens_left(batch)
    real = _real(batch)
    content = np.zeros_like(real)
    if any(pooling in CONTENT for pooling in poolings):
        for row, (index, start, length) in enumerate(zip(batch.index, batch.starts, batch.lengths, strict=True)):
            content[row, start : start + length] = words.of(prompts[index])
    return {
        pooling: content if pooling in CONTENT else real & (left < LAST[pooling]) if pooling in LAST else real
        for pooling in poolings
    }


class PooledBuffer:
    """Pools each layer's states as they pass: [m, batch, width] float32 per site and pooling.

    A row whose window is empty (a prompt without a content word) is the mean over all of its prompt's tokens, under a
    maximum too.  Means and maxima are taken in float32 whatever the model's dtype.  Implements ``hooks.StatesSink``.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        geometry: Geometry,
        batch: Batch,
        counted: dict[Pooling, NDArray[np.bool_]],
        device: torch.device,
    ) -> None:
        """``counted`` is what ``windows`` says of ``batch``."""
        real = _real(batch)
        # Masks are [batch, columns, 1], to be spread over a row's width.
        self._padding = torch.from_numpy(~real[:, :, None]).to(device)
        self._means = [pooling for pooling in counted if pooling not in MAXIMA]
        means = [_weights(counted[pooling], real) for pooling in self._means]
        # One product gives every mean; the last of them is the one over all tokens, for empty windows.
        self._weights = torch.from_numpy(np.stack([*means, _weights(real, real)], axis=1)).to(device)
        self._outside = {
            pooling: torch.from_numpy(~window[:, :, None]).to(device)
            for pooling, window in counted.items()
            if pooling in MAXIMA
        }
        self.buffers = {
            (site, pooling): torch.empty(
                geometry.num_layers, len(batch.index), geometry.width(site), dtype=torch.float32, device=device
            )
            for site in sites
            for pooling in counted
        }

    def take(self, site: Site, layer: int, states: Tensor) -> None:
        """Pool ``states`` [batch, columns, width]."""
        # Filled and not weighed by zero: what padding computes may be a NaN, and 0 x NaN is one.
        states = states.float().masked_fill(self._padding, 0.0)
        means = torch.bmm(self._weights, states)
        for place, pooling in enumerate(self._means):
            self.buffers[site, pooling][layer] = means[:, place]
        for pooling, outside in self._outside.items():
            largest = states.masked_fill(outside, -torch.inf).amax(dim=1)
            self.buffers[site, pooling][layer] = torch.where(outside.all(dim=1), means[:, -1], largest)


def _tokens_left(batch: Batch) -> NDArray[np.int64]:
    """How many columns t* is ahead of each, [batch, columns]: 0 at t*, negative after it."""
    onsets, columns = np.array(batch.onsets, np.int64), np.arange(batch.input_ids.shape[1], dtype=np.int64)
    return np.subtract.outer(onsets, columns)


def _real(batch: Batch) -> NDArray[np.bool_]:
    """True where a prompt's token stands and no padding, [batch, columns]."""
    left = _tokens_left(batch)
    return (left >= 0) & (left < np.array(batch.lengths)[:, None])


def _weights(window: NDArray[np.bool_], real: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Of a mean over each row's window, or over all its tokens where that is empty: [batch, columns], rows sum to 1."""
    used = np.where(window.any(axis=1, keepdims=True), window, real)
    weights: NDArray[np.float32] = (used / used.sum(axis=1, keepdims=True)).astype(np.float32)
    return weights
