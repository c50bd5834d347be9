"""Activations of several tokens: pooled, for the readout-position ablation (App. pooling, Tab.
ablation_pooling), or the last ones as they are.  Engines read the answer onset alone, so each
prompt runs once more, by itself.  Content words are determined from token ids. The paper does not
define "content word"; ``is_content`` is this project's definition."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
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

    letters = [place for place, character in enumerate(text) if character.isalnum()]
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
    states: NDArray[
        np.float16
    ]  # [n, layers, count, hidden_size] residual stream of so many tokens; zeros in front
    first_token: NDArray[
        np.float64
    ]  # [n, 2] behind the last token: log maximum probability, entropy (nats)


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
        others = beyond_onset(poolings)
        if self._engine.torch_model is None:
            check_onset_only(others)
        found = self._engine.extract(prompts, sites, (), sampling)
        pooled = {
            (site, one): np.empty_like(found.activations[site]) for site in sites for one in others
        }
        for number, prompt in enumerate(prompts if others else ()):
            for key, rows in self._pooled(prompt, sites, others).items():
                if not np.isfinite(rows).all():
                    layer = int(np.argwhere(~np.isfinite(rows))[0][0])
                    raise NonFiniteReadout(
                        f"layer {layer} gave a NaN or infinity ({', '.join(key)}) for prompt"
                        f" {number}; the model overflowed: load it with dtype bfloat16 or float32,"
                        " and check its weights"
                    )
                pooled[key][number] = rows
        return Extraction(found.activations, found.first_tokens, pooled, found.completions)

    def _pooled(
        self, prompt: TokenIds, sites: Sequence[Site], poolings: Sequence[Pooling]
    ) -> dict[tuple[Site, Pooling], NDArray[np.float32]]:
        """Return [m, width] of each site and pooling, pooled layer by layer within a forward pass
        of one prompt."""
        model = self._engine.torch_model
        assert model is not None
        text = [self._engine.detokenize([token]) for token in prompt]  # special tokens have none
        content = torch.tensor([is_content(one) for one in text], device=model.device)
        rows: dict[tuple[Site, Pooling], list[Tensor]] = {
            (site, one): [] for site in sites for one in poolings
        }

        def reader(site: Site) -> Any:
            def hook(_module: Any, *tensors: Any) -> None:
                states = _states(tensors)
                for pooling in poolings:
                    rows[site, pooling].append(pool(states, pooling, content))

            return hook

        at = locate(model.model).at
        _pass(
            model,
            prompt,
            [(module, reader(site), SITES[site].is_input) for site in sites for module in at[site]],
        )
        return {key: torch.stack(layers).cpu().numpy() for key, layers in rows.items()}

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
        site, number = Site.ATTENTION_HEAD, len(rows)
        at = locate(model.model).at
        kinds = len(spans[0]) if spans else 0
        found = SpanReadouts(
            np.empty((kinds, number, geometry.num_layers, geometry.width(site)), np.float32),
            np.zeros((number, len(layers), count, geometry.hidden_size), np.float16),
            np.empty((number, 2)),
        )
        for row, (tokens, own) in enumerate(zip(rows, spans, strict=True)):

            def last(place: int, row: int = row) -> Any:
                def hook(_module: Any, *tensors: Any) -> None:
                    states = (
                        _states(tensors)[max(0, ends[row] - count) : ends[row]]
                        .float()
                        .cpu()
                        .numpy()
                    )
                    found.states[row, place, count - len(states) :] = states

                return hook

            def heads(layer: int, row: int = row, own: Sequence[Span] = own) -> Any:
                def hook(_module: Any, *tensors: Any) -> None:
                    states = _states(tensors)
                    for kind, (begin, end) in enumerate(own):
                        found.heads[kind, row, layer] = (
                            states[begin:end].float().mean(dim=0).cpu().numpy()
                        )

                return hook

            residual = at[Site.RESIDUAL_STREAM]
            hooks = [
                (residual[one], last(place), SITES[Site.RESIDUAL_STREAM].is_input)
                for place, one in enumerate(layers)
            ]
            hooks += [
                (module, heads(layer), SITES[site].is_input)
                for layer, module in enumerate(at[site])
            ]
            logits = _pass(model, tokens, hooks, logits_to_keep=1).logits[:, -1].float()
            first = first_token_of(summarise(logits)[0].cpu().numpy())
            found.first_token[row] = first.log_max_prob, first.entropy
        if not (np.isfinite(found.heads).all() and np.isfinite(found.states).all()):
            raise NonFiniteReadout(
                "a position is beyond the range of its dtype: load the model with dtype float32"
            )
        return found


def _states(tensors: Sequence[Any]) -> Tensor:
    """Return the [tokens, width] that a hook was given."""
    batch: Tensor = tensors[-1][0] if isinstance(tensors[-1], tuple) else tensors[-1]
    return batch[0]


def _pass(
    model: TorchModel, prompt: TokenIds, hooks: Sequence[tuple[Any, Any, bool]], **options: Any
) -> Any:
    """Run one prompt with hooks on modules, before or behind them, and return the model's
    output."""
    handles = [
        module.register_forward_pre_hook(hook) if before else module.register_forward_hook(hook)
        for module, hook, before in hooks
    ]
    try:
        with torch.inference_mode():
            return model.model(
                input_ids=torch.tensor([list(prompt)], device=model.device),
                use_cache=False,
                **options,
            )
    finally:
        for handle in handles:
            handle.remove()
