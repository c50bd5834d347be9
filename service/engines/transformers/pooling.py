"""Activations pooled over several tokens: the readout-position ablation (App. pooling, Tab. ablation_pooling).

Pooling happens inside the forward pass, layer by layer, so that only one layer's states are held at a time.  Content
words are determined from token ids.  The paper does not define "content word"; ``is_content`` is this project's
definition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from service.engines.base import TokenIds
from service.engines.transformers.batching import Batch
from service.readout import Geometry, Pooling, Site

Tensor = torch.Tensor
Mask = NDArray[np.bool_]
LAST = {Pooling.LAST_4: 4, Pooling.LAST_8: 8, Pooling.LAST_16: 16}
MAXIMA = (Pooling.MAX, Pooling.CONTENT_MAX)
CONTENT = (Pooling.CONTENT_MEAN, Pooling.CONTENT_MAX)


def is_content(text: str) -> bool:
    """Return whether a token's text is a content word: it holds a letter or digit and is no English stop word.

    Compared in lower case, without leading and trailing white space and punctuation, which many vocabularies join to
    words.  Each token is decided alone: a part of a word counts; a part of a character, which decodes to no letter,
    does not.
    """
    from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS  # here, because serving does not need it

    letters = [place for place, character in enumerate(text) if character.isalnum()]
    return bool(letters) and text[letters[0] : letters[-1] + 1].lower() not in ENGLISH_STOP_WORDS


class ContentWords:
    """Which tokens of a prompt are content words, cached by id; special tokens are none, as they have no text."""

    def __init__(self, detokenize: Callable[[Sequence[int]], str]) -> None:
        self._detokenize = detokenize
        self._is_content: dict[int, bool] = {}

    def of(self, prompt: TokenIds) -> Mask:
        """Return [len(prompt)], true at content words."""
        for token in {int(token) for token in prompt} - self._is_content.keys():
            self._is_content[token] = is_content(self._detokenize([token]))
        return np.array([self._is_content[int(token)] for token in prompt], np.bool_)


def windows(
    batch: Batch, prompts: Sequence[TokenIds], poolings: Sequence[Pooling], words: ContentWords
) -> dict[Pooling, Mask]:
    """Return which columns of a padded batch each pooling includes, [batch, columns]; none includes padding.

    ``prompts`` are the caller's, in the numbering of ``batch.index``.  A window longer than its prompt is the whole
    prompt.  A content window is empty if the prompt has no content word.
    """
    left, real = _columns(batch)
    content = np.zeros_like(real)
    if any(pooling in CONTENT for pooling in poolings):
        for row, (index, start, length) in enumerate(zip(batch.index, batch.starts, batch.lengths, strict=True)):
            content[row, start : start + length] = words.of(prompts[index])
    return {
        pooling: content if pooling in CONTENT else real & (left < LAST[pooling]) if pooling in LAST else real
        for pooling in poolings
    }


class PooledBuffer:
    """Pools each layer's states during the forward pass: [m, batch, width] float32 per site and pooling.

    Where a window is empty (a prompt without a content word), both mean and maximum are the mean over all tokens of the
    prompt.  Means and maxima are computed in float32, whatever the model's dtype.  A states sink of ``hooks``.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        geometry: Geometry,
        batch: Batch,
        counted: dict[Pooling, Mask],
        device: torch.device,
    ) -> None:
        """Pool over ``counted``, the ``windows`` of ``batch``."""
        _, real = _columns(batch)
        # Masks are [batch, columns, 1], to broadcast over the width.
        self._padding = torch.from_numpy(~real[:, :, None]).to(device)
        self._means = [pooling for pooling in counted if pooling not in MAXIMA]
        means = [_weights(counted[pooling], real) for pooling in self._means]
        # One product computes all means; the last one is over all tokens, for empty windows.
        self._weights = torch.from_numpy(np.stack([*means, _weights(real, real)], axis=1)).to(device)
        self._outside = {
            pooling: torch.from_numpy(~window[:, :, None]).to(device)
            for pooling, window in counted.items()
            if pooling in MAXIMA
        }
        shape = geometry.num_layers, len(batch.index)
        self.buffers = {
            (site, pooling): torch.empty(*shape, geometry.width(site), dtype=torch.float32, device=device)
            for site in sites
            for pooling in counted
        }

    def take(self, site: Site, layer: int, states: Tensor) -> None:
        """Pool ``states`` [batch, columns, width]."""
        # Filled, not multiplied by zero: states of padding may be NaN, and 0 x NaN is NaN.
        states = states.float().masked_fill(self._padding, 0.0)
        means = torch.bmm(self._weights, states)
        for place, pooling in enumerate(self._means):
            self.buffers[site, pooling][layer] = means[:, place]
        for pooling, outside in self._outside.items():
            largest = states.masked_fill(outside, -torch.inf).amax(dim=1)
            self.buffers[site, pooling][layer] = torch.where(outside.all(dim=1), means[:, -1], largest)


def _columns(batch: Batch) -> tuple[NDArray[np.int64], Mask]:
    """Return, [batch, columns] each: columns left to t* (0 at t*, negative after it), and where no padding is."""
    columns = np.arange(batch.input_ids.shape[1], dtype=np.int64)
    left = np.subtract.outer(np.array(batch.onsets, np.int64), columns)
    return left, (left >= 0) & (left < np.array(batch.lengths)[:, None])


def _weights(window: Mask, real: Mask) -> NDArray[np.float32]:
    """Return weights of a mean over each row's window, or all its tokens if empty: [batch, columns], rows sum to 1."""
    used = np.where(window.any(axis=1, keepdims=True), window, real)
    return np.asarray(used / used.sum(axis=1, keepdims=True), np.float32)
