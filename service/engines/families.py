"""The tables of model families and readout sites: which module of which block both engines read.

To support another family, add one row to ``FAMILIES`` and one config to ``tests/engines/tiny.py``.  To read another
site, name it in ``readout.Site`` and add one row to ``SITES``: both engines then read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from service.errors import EngineError, UnknownFamily
from service.readout import Geometry, Site

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Family:
    """The paths from the causal-LM module to the blocks, and from a block to the module whose INPUT the heads are."""

    name: str
    model_types: tuple[str, ...]  # config.model_type
    blocks: str
    projection: str
    notes: str = ""


FAMILIES: tuple[Family, ...] = (
    Family("Llama 2 and 3", ("llama",), "model.layers", "self_attn.o_proj"),
    Family("Qwen2, Qwen2.5", ("qwen2",), "model.layers", "self_attn.o_proj", "biases on q, k and v only"),
    Family("Qwen3", ("qwen3",), "model.layers", "self_attn.o_proj", "head_dim differs from hidden / heads"),
    Family("Mistral", ("mistral",), "model.layers", "self_attn.o_proj", "older ones have a sliding window"),
    Family("Gemma 2", ("gemma2",), "model.layers", "self_attn.o_proj", "a norm follows o_proj; windows alternate"),
    Family("Gemma 3 text", ("gemma3_text",), "model.layers", "self_attn.o_proj", "a norm follows o_proj"),
    Family("Gemma 3 multimodal", ("gemma3",), "model.language_model.layers", "self_attn.o_proj", "text prompts only"),
    Family("Phi-3", ("phi3",), "model.layers", "self_attn.o_proj", "one qkv_proj; longrope depends on the length"),
    Family("OLMo-2", ("olmo2",), "model.layers", "self_attn.o_proj", "norms follow the attention, not precede it"),
    Family("GPT-NeoX, Pythia", ("gpt_neox",), "gpt_neox.layers", "attention.dense", "attention and MLP in parallel"),
    Family("GPT-2", ("gpt2",), "transformer.h", "attn.c_proj", "Conv1D: the weight is [in, out]"),
    Family("Mixtral", ("mixtral",), "model.layers", "self_attn.o_proj", "mixture of experts"),
    Family("Qwen2-MoE", ("qwen2_moe",), "model.layers", "self_attn.o_proj", "mixture of experts"),
    Family("Qwen3-MoE", ("qwen3_moe",), "model.layers", "self_attn.o_proj", "mixture of experts"),
    Family("OLMoE", ("olmoe",), "model.layers", "self_attn.o_proj", "mixture of experts"),
)


@dataclass(frozen=True, slots=True)
class SiteModule:
    """Which module of a block has a site's activations.  vLLM reads inputs of the attention output projection only."""

    path: Callable[[Family], str]  # from the block; "" is the block itself
    is_input: bool = False


SITES = {
    Site.ATTENTION_HEAD: SiteModule(lambda family: family.projection, is_input=True),
    Site.RESIDUAL_STREAM: SiteModule(lambda family: ""),
}


@dataclass(frozen=True, slots=True)
class ModelModules:
    """A model's blocks, and in each the module of every site; ``geometry.num_layers`` of each."""

    geometry: Geometry
    blocks: tuple[nn.Module, ...]
    at: dict[Site, tuple[nn.Module, ...]]


def family_of(config: Any) -> Family:
    """Return the family of a transformers config.  Raises UnknownFamily."""
    model_type = str(getattr(config, "model_type", ""))
    if found := next((family for family in FAMILIES if model_type in family.model_types), None):
        return found
    known = ", ".join(sorted(name for family in FAMILIES for name in family.model_types))
    raise UnknownFamily(
        f"model_type {model_type!r} is not a known model family. Known: {known}. "
        "To add it, write one row in service/engines/families.py (FAMILIES)."
    )


def text_config(config: Any) -> Any:
    """Return the language model's part of a config; the config itself for text-only models."""
    nested = getattr(config, "get_text_config", None)
    return nested() if nested is not None else config


def geometry(config: Any) -> Geometry:
    """Return layers, QUERY heads and head size of a config.  Raises EngineError if the head size is no whole number."""
    text = text_config(config)
    hidden, heads = int(text.hidden_size), int(text.num_attention_heads)
    head_dim = getattr(text, "head_dim", None)
    if head_dim is None:
        if hidden % heads:
            raise EngineError(f"config: hidden_size {hidden} is not a multiple of {heads} heads; add head_dim to it")
        head_dim = hidden // heads
    return Geometry(num_layers=int(text.num_hidden_layers), num_heads=heads, head_dim=int(head_dim), hidden_size=hidden)


def locate(model: nn.Module) -> ModelModules:
    """Find a loaded model's blocks and projections.  Raises UnknownFamily, or EngineError if its config contradicts."""
    config: Any = model.config
    family, shape = family_of(config), geometry(config)
    blocks = tuple(_submodule(model, family.blocks, family).children())
    if len(blocks) != shape.num_layers:
        raise EngineError(
            f"{family.name}: {family.blocks} has {len(blocks)} blocks where the config's num_hidden_layers says "
            f"{shape.num_layers}; correct the row in service/engines/families.py or the config"
        )
    at = {
        site: tuple(_submodule(block, found.path(family), family) for block in blocks) for site, found in SITES.items()
    }
    expected = shape.num_heads * shape.head_dim
    for layer, projection in enumerate(at[Site.ATTENTION_HEAD]):
        # A Linear's ``in_features``, or the first axis of GPT-2's Conv1D weight.
        weight: Any = projection.weight
        if (width := int(getattr(projection, "in_features", weight.shape[0]))) != expected:
            raise EngineError(
                f"{family.name}: {family.blocks}.{layer}.{family.projection} takes {width} inputs where "
                f"{shape.num_heads} heads of {shape.head_dim} make {expected}; correct the row in "
                "service/engines/families.py or the config"
            )
    return ModelModules(shape, blocks, at)


def _submodule(root: nn.Module, path: str, family: Family) -> nn.Module:
    try:
        return root.get_submodule(path)
    except AttributeError as error:
        raise EngineError(f"{family.name}: {type(root).__name__} has no module {path!r}: correct its row") from error
