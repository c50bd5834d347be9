"""Facts from a model's configuration: context length, position encoding, end tokens."""

from __future__ import annotations

from typing import Any

from service.engines.families import text_config
from service.errors import ModelLoadError

# RoPE variants whose frequencies follow the longest position in the batch.
LENGTH_DEPENDENT_ROPE = frozenset({"longrope", "dynamic"})
# Else a large model's cache would take as much memory as its weights: of 7B with 8 key-value heads 4 GiB instead of 14.
MAX_DECODE_TOKENS = 32_768


def tokens_worth_the_weights(model: Any) -> int:
    """Tokens whose keys and values take as many bytes as the model's weights, at most ``MAX_DECODE_TOKENS``.

    A step of decoding reads all weights, whatever the batch, and the cache of every row: up to so many tokens a larger
    batch costs a step less than twice the time of a single row.
    """
    config = text_config(model.config)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    element = next(model.parameters()).element_size()
    return min(MAX_DECODE_TOKENS, int(weights // (2 * config.num_hidden_layers * kv_heads * head_dim * element)))


def context_length(config: Any) -> int:
    """The longest sequence that the model supports.  Raises ModelLoadError if the config lacks it."""
    length = getattr(text_config(config), "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise ModelLoadError(
            "config.json has no max_position_embeddings, which is needed to refuse prompts that are too long; add it"
        )
    return length


def depends_on_longest(config: Any) -> bool:
    """Whether the encoding of positions depends on the batch's longest prompt (Phi-3's longrope)."""
    parameters = getattr(text_config(config), "rope_parameters", None) or {}
    per_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    return any(entry.get("rope_type") in LENGTH_DEPENDENT_ROPE for entry in (parameters, *per_layer_type))


def end_tokens(model: Any) -> frozenset[int]:
    """Tokens that end an answer: from the generation config if it has any, else from the config."""
    for config in (getattr(model, "generation_config", None), model.config, text_config(model.config)):
        tokens = getattr(config, "eos_token_id", None)
        if tokens is not None:
            return frozenset(int(token) for token in (tokens if isinstance(tokens, list | tuple) else [tokens]))
    return frozenset()
