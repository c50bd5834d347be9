"""What a model's configuration says about its limits.  Loads nothing and runs nothing."""

from __future__ import annotations

from typing import Any

from service.engines.families import text_config
from service.errors import ModelLoadError

# RoPE variants whose frequencies follow the longest position in the batch.
LENGTH_DEPENDENT_ROPE = frozenset({"longrope", "dynamic"})


def context_length(config: Any) -> int:
    """The longest sequence the model can hold.  Raises ModelLoadError where the config does not say."""
    length = getattr(text_config(config), "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise ModelLoadError(
            "config.json has no max_position_embeddings, so prompts that are too long could not be refused; add it"
        )
    return length


def depends_on_longest(config: Any) -> bool:
    """Whether a prompt's positions are encoded differently beside a longer batch mate (Phi-3's longrope)."""
    parameters = getattr(text_config(config), "rope_parameters", None) or {}
    per_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    return any(entry.get("rope_type") in LENGTH_DEPENDENT_ROPE for entry in (parameters, *per_layer_type))


def end_tokens(model: Any) -> frozenset[int]:
    """Tokens that end an answer: the generation config's where it has any, else the config's."""
    for config in (getattr(model, "generation_config", None), model.config, text_config(model.config)):
        tokens = getattr(config, "eos_token_id", None)
        if tokens is not None:
            return frozenset(int(token) for token in (tokens if isinstance(tokens, list | tuple) else [tokens]))
    return frozenset()
