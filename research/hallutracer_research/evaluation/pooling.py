"""Activations of several tokens: pooled, for the readout-position ablation (App. pooling, Tab.
ablation_pooling), or the last ones as they are.  Engines read the answer onset alone, so each
prompt runs once more, by itself.  Content words are determined from token ids. The paper does not
define "content word"; ``is_content`` is this project's definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from service.engines.base import Extraction, LoadedModel, Prompts, Sampling, TokenIds, TorchModel
from service.engines.checks import beyond_onset, check_onset_only, first_token_of, summarise
from service.engines.families import SITES, locate
from service.errors import EngineError, NonFiniteReadout
from service.readout import Pooling, Site

Tensor = torch.Tensor
LAST = {Pooling.LAST_4: 4, Pooling.LAST_8: 8, Pooling.LAST_16: 16}
CONTENT = (Pooling.CONTENT_MEAN, Pooling.CONTENT_MAX)


@cache
def is_content(text: str) -> bool:
    """Return whether a token's text is a content word: it holds a letter or digit and is no English
    stop word. Compared in lower case, without leading and trailing white space and punctuation,
    which many vocabularies join to words.  Each token is decided alone: a part of a word counts; a
    part of a character, which decodes to no letter, does not."""
    from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

    letters = [number for number, character in enumerate(text) if character.isalnum()]
    return bool(letters) and text[letters[0] : letters[-1] + 1].lower() not in ENGLISH_STOP_WORDS


def pool(states: Tensor, pooling: Pooling, content: Tensor) -> Tensor:
    """Pool one prompt's states [tokens, width] in float32; ``content`` [tokens] is true at content
    words.  A window longer than the prompt is the whole prompt.  Without a content word both mean
    and maximum are the mean over all tokens."""
    states = states.float()
    if pooling in CONTENT:
        if not bool(content.any()):
            return states.mean(dim=0)
        states = states[content]
    if pooling in (Pooling.MAX, Pooling.CONTENT_MAX):
        return states.amax(dim=0)
    return states[-LAST.get(pooling, len(states)) :].mean(dim=0)


Span = tuple[int, int]  # of tokens, from the first to before the second


class SpanReadouts(NamedTuple):
    """What n rows of tokens were read at, besides their ends."""

    heads: NDArray[np.float32]  # [spans, n, m, width] attention heads, mean over each span's tokens
    # [n, layers, count, hidden_size] residual stream of so many tokens; zeros in front
    states: NDArray[np.float16]
    # [n, 2] behind the last token: log maximum probability, entropy (nats)
    first_token: NDArray[np.float64]


class PoolingEngine:
    """An engine whose ``extract`` pools, too; all else is the engine's own."""

    def __init__(self, engine: LoadedModel) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def extract(
        self,
        prompts: Prompts,
        sites: Sequence[Site],
        poolings: Sequence[Pooling] = (),
        sampling: Sampling | None = None,
    ) -> Extraction:
        """Extract as the engine does, and pool.  Raises EngineError where its modules are in
        another process."""
        more = beyond_onset(poolings)
        if self._engine.torch_model is None:
            check_onset_only(more)
        plain = self._engine.extract(prompts, sites, (), sampling)
        pooled = {
            (site, pooling): np.empty_like(plain.activations[site])
            for site in sites
            for pooling in more
        }
        for number, prompt in enumerate(prompts if more else ()):
            for key, rows in self._pooled(prompt, sites, more).items():
                if not np.isfinite(rows).all():
                    layer = int(np.argwhere(~np.isfinite(rows))[0][0])
                    raise NonFiniteReadout(
                        f"layer {layer} gave a NaN or infinity ({', '.join(key)}) for prompt"
                        f" {number}; the model overflowed: load it with dtype bfloat16 or float32,"
                        " and check its weights"
                    )
                pooled[key][number] = rows
        return Extraction(plain.activations, plain.first_tokens, pooled, plain.completions)

    def _pooled(
        self, prompt: TokenIds, sites: Sequence[Site], poolings: Sequence[Pooling]
    ) -> dict[tuple[Site, Pooling], NDArray[np.float32]]:
        """Return [m, width] of each site and pooling, pooled layer by layer within a forward pass
        of one prompt."""
        model = self._engine.torch_model
        assert model is not None
        words = [self._engine.detokenize([token]) for token in prompt]  # special tokens have none
        content = torch.tensor([is_content(word) for word in words], device=model.device)

        def pool_all(states: Tensor) -> Tensor:
            return torch.stack([pool(states, pooling, content) for pooling in poolings])

        every_layer = range(self._engine.identity.geometry.num_layers)
        readers = [(site, layer, pool_all) for site in sites for layer in every_layer]
        values, _ = _read(model, prompt, readers)
        pooled: dict[tuple[Site, Pooling], NDArray[np.float32]] = {}
        for site in sites:
            of_site = torch.stack([values[site, layer] for layer in every_layer], dim=1).cpu()
            pooled |= {(site, pooling): of_site[n].numpy() for n, pooling in enumerate(poolings)}
        return pooled

    def spans(
        self,
        rows: Prompts,
        spans: Sequence[Sequence[Span]],
        *,
        layers: Sequence[int] = (),
        count: int = 0,
        ends: Sequence[int] = (),
    ) -> SpanReadouts:
        """Read rows of tokens at spans, as many in each row, in one pass each: what lies before a
        token is read as if nothing came behind it, since attention is causal.  With ``layers`` also
        the residual stream of ``count`` tokens before each of ``ends``.  Raises EngineError where
        modules are in another process."""
        model, geometry = self._engine.torch_model, self._engine.identity.geometry
        if model is None:
            raise EngineError(
                "other positions are read by the transformers engine only", param="engine"
            )
        heads, residual = Site.ATTENTION_HEAD, Site.RESIDUAL_STREAM
        kinds, every_layer = len(spans[0]) if spans else 0, range(geometry.num_layers)
        readouts = SpanReadouts(
            np.empty((kinds, len(rows), len(every_layer), geometry.width(heads)), np.float32),
            np.zeros((len(rows), len(layers), count, geometry.hidden_size), np.float16),
            np.empty((len(rows), 2)),
        )
        for row, (tokens, of_row) in enumerate(zip(rows, spans, strict=True)):
            means = partial(_span_means, of_row)
            readers: list[Reader] = [(heads, layer, means) for layer in every_layer]
            for layer in layers:
                copied = partial(_copied, max(0, ends[row] - count), ends[row])
                readers.append((residual, layer, copied))
            values, output = _read(model, tokens, readers, logits_to_keep=1)
            for layer in every_layer:
                readouts.heads[:, row, layer] = values[heads, layer].cpu().numpy()
            for number, layer in enumerate(layers):
                states = values[residual, layer].float().cpu().numpy()
                readouts.states[row, number, count - len(states) :] = states
            logits = output.logits[:, -1].float()
            first = first_token_of(summarise(logits)[0].cpu().numpy())
            readouts.first_token[row] = first.log_max_prob, first.entropy
        if not (np.isfinite(readouts.heads).all() and np.isfinite(readouts.states).all()):
            raise NonFiniteReadout(
                "a position is beyond the range of its dtype: load the model with dtype float32"
            )
        return readouts


def _copied(begin: int, end: int, states: Tensor) -> Tensor:
    return states[begin:end].clone()  # a view would keep all tokens, which the model may change


def _span_means(spans: Sequence[Span], states: Tensor) -> Tensor:
    return torch.stack([states[begin:end].float().mean(dim=0) for begin, end in spans])


Reader = tuple[Site, int, Callable[[Tensor], Tensor]]
"""A site, a layer, and what is kept of its states [tokens, width]."""


def _read(
    model: TorchModel, prompt: TokenIds, readers: Sequence[Reader], **options: Any
) -> tuple[dict[tuple[Site, int], Tensor], Any]:
    """Run one prompt, and return what is kept of each (site, layer), and the model's output."""
    values: dict[tuple[Site, int], Tensor] = {}

    def hook_of(site: Site, layer: int, keep: Callable[[Tensor], Tensor]) -> Any:
        def hook(_module: Any, *tensors: Any) -> None:
            batch = tensors[-1][0] if isinstance(tensors[-1], tuple) else tensors[-1]
            values[site, layer] = keep(batch[0])

        module = modules[site][layer]
        if SITES[site].is_input:
            return module.register_forward_pre_hook(hook)
        return module.register_forward_hook(hook)

    modules = locate(model.model).at
    handles = [hook_of(*reader) for reader in readers]
    try:
        with torch.inference_mode():
            output = model.model(
                input_ids=torch.tensor([list(prompt)], device=model.device),
                use_cache=False,
                **options,
            )
    finally:
        for handle in handles:
            handle.remove()
    return values, output
