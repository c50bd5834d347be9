"""The tables of model families and readout sites: which module of which block both engines read.

The blocks are found by structure in any decoder (``block_list``), and with them the residual
stream.  A row of ``FAMILIES`` says which module of a block has the heads; to read those of another
family, add one row, and one to ``tests/engines/families.json``.  To read another site, name it in
``readout.Site`` and add one row to ``SITES``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from service.errors import EngineError, UnknownFamily
from service.readout import Geometry, Site

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Family:
    """Model types, and the path from a block to the module whose INPUT is all its heads; "" if not
    every block has one.

    ``alone``: prompts share no padding and no step of decoding, as their caches are more than keys
    and values that each later token sees.  ``whole``: a prompt takes one forward pass, however long
    it is, because transformers starts the recurrent state anew where more than one token follows a
    cache."""

    name: str
    model_types: tuple[str, ...]  # config.model_type
    projection: str = ""
    notes: str = ""
    alone: bool = False
    whole: bool = False
    in_vllm: str = ""  # ``projection`` in vLLM's block, where it is called otherwise
    # whether two tensors of vLLM's block are summed, by comparison; None: it must be seen
    summed: bool | None = None

    @property
    def sites(self) -> tuple[Site, ...]:
        """Return the sites that are read."""
        return tuple(site for site, location in SITES.items() if location.path(self) is not None)


UNKNOWN = "no row"
SOME = "only some of its blocks have attention"
LATENT = "latent attention: a head's size is v_head_dim"
O_PROJ = "self_attn.o_proj"
FAMILIES: tuple[Family, ...] = (
    Family("Llama 2 and 3", ("llama",), O_PROJ, summed=True),
    Family("Qwen2, Qwen2.5", ("qwen2",), O_PROJ, "biases on q, k and v only", summed=True),
    Family("Qwen3", ("qwen3",), O_PROJ, "head_dim differs from hidden / heads", summed=True),
    Family("Mistral", ("mistral",), O_PROJ, "older ones have a sliding window", summed=True),
    Family("Gemma 2", ("gemma2",), O_PROJ, "a norm follows o_proj; windows alternate", summed=True),
    Family("Gemma 3 text", ("gemma3_text",), O_PROJ, "a norm follows o_proj", summed=True),
    Family("Gemma 3 multimodal", ("gemma3",), O_PROJ, "text prompts only", summed=True),
    Family(
        "Phi-3, Phi-4",
        ("phi3",),
        O_PROJ,
        "one qkv_proj; longrope depends on the length",
        summed=True,
    ),
    Family("OLMo-2", ("olmo2",), O_PROJ, "norms follow the attention, not precede it", summed=True),
    Family(
        "GPT-NeoX, Pythia",
        ("gpt_neox",),
        "attention.dense",
        "attention and MLP in parallel",
        summed=True,
    ),
    Family("GPT-2", ("gpt2",), "attn.c_proj", "Conv1D: the weight is [in, out]", summed=True),
    Family("Mixtral", ("mixtral",), O_PROJ, "mixture of experts", summed=True),
    Family("Qwen2-MoE", ("qwen2_moe",), O_PROJ, "mixture of experts", summed=True),
    Family("Qwen3-MoE", ("qwen3_moe",), O_PROJ, "mixture of experts", summed=True),
    Family("OLMoE", ("olmoe",), O_PROJ, "mixture of experts", summed=True),
    Family(
        "gpt-oss",
        ("gpt_oss",),
        O_PROJ,
        "mixture of experts; windows alternate, and heads have sinks",
        in_vllm="attn.o_proj",
        summed=True,
    ),
    Family(
        "DeepSeek V2, V3, R1, Kimi K2",
        ("deepseek_v2", "deepseek_v3", "kimi_k2"),
        O_PROJ,
        LATENT,
        alone=True,
    ),
    Family(
        "Llama 4",
        ("llama4", "llama4_text"),
        O_PROJ,
        "mixture of experts; attention in chunks",
        alone=True,
    ),
    Family(
        "GLM-4",
        ("glm", "glm4"),
        O_PROJ,
        "GLM-4-0414's norms follow the attention, too",
        summed=True,
    ),
    Family("GLM-4-MoE", ("glm4_moe",), O_PROJ, "GLM-4.5 to 4.7; mixture of experts"),
    Family("Phi-2", ("phi",), "self_attn.dense", "attention and MLP in parallel"),
    Family("Phi-3.5-MoE", ("phimoe",), O_PROJ, "mixture of experts"),
    Family(
        "Granite", ("granite", "granitemoe"), O_PROJ, "what a block adds is multiplied", summed=True
    ),
    Family(
        "Command",
        ("cohere", "cohere2"),
        O_PROJ,
        "newer ones have windows, one token wider in vLLM",
        summed=False,
    ),
    Family(
        "Falcon",
        ("falcon",),
        "self_attention.dense",
        "attention and MLP in parallel",
        alone=True,
        summed=True,
    ),
    Family(
        "Falcon-H1",
        ("falcon_h1",),
        O_PROJ,
        "a Mamba beside the attention of each block",
        alone=True,
    ),
    Family("Gemma", ("gemma",), O_PROJ),
    Family("OLMo-3", ("olmo3",), O_PROJ, "as OLMo-2; windows alternate"),
    Family("SmolLM3", ("smollm3",), O_PROJ, "some blocks without positions"),
    Family("Seed-OSS", ("seed_oss",), O_PROJ),
    Family("EXAONE 4", ("exaone4",), O_PROJ, "as OLMo-2; windows alternate"),
    Family("ERNIE 4.5", ("ernie4_5",), O_PROJ),
    Family("StarCoder2", ("starcoder2",), O_PROJ),
    Family("StableLM", ("stablelm",), O_PROJ),
    Family("MiniMax-M2", ("minimax_m2",), O_PROJ, "mixture of experts"),
    Family("Qwen2.5-VL", ("qwen2_5_vl", "qwen2_5_vl_text"), O_PROJ, "the language side"),
    Family("Mistral 3", ("mistral3", "ministral3"), O_PROJ, "the language side"),
    Family("Qwen3-Next", ("qwen3_next",), notes=SOME, alone=True),
    Family(
        "Qwen3.5",
        ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        notes=SOME,
        alone=True,
    ),
    Family("Kimi Linear", ("kimi_linear",), notes=SOME, alone=True),
    Family("Granite 4", ("granitemoehybrid",), notes=SOME, alone=True),
    Family("Bamba", ("bamba",), notes=SOME, alone=True, whole=True),
    Family("Zamba2", ("zamba2",), notes=SOME, alone=True),
    Family("Jamba", ("jamba",), notes=SOME, alone=True, whole=True),
    Family("Nemotron-H", ("nemotron_h",), notes=SOME, alone=True),
    Family("LFM2", ("lfm2",), notes=SOME, alone=True),
)


@dataclass(frozen=True, slots=True)
class SiteModule:
    """Which module of a block has a site's activations.  vLLM reads inputs of the attention output
    projection only."""

    # from the block; "" is the block itself, None: the family has none
    path: Callable[[Family], str | None]
    is_input: bool = False


SITES = {
    Site.ATTENTION_HEAD: SiteModule(lambda family: family.projection or None, is_input=True),
    Site.RESIDUAL_STREAM: SiteModule(lambda family: ""),
}


@dataclass(frozen=True, slots=True)
class ModelModules:
    """A model's blocks, and in each the module of every site; ``geometry.num_layers`` of each."""

    geometry: Geometry
    blocks: tuple[nn.Module, ...]
    at: dict[Site, tuple[nn.Module, ...]]


def family_of(config: Any) -> Family:
    """Return the family of a transformers config; without a row one of which only the residual
    stream is read."""
    model_type = str(getattr(config, "model_type", ""))
    known = next((family for family in FAMILIES if model_type in family.model_types), None)
    return known or Family(model_type, (model_type,), notes=UNKNOWN, alone=True)


def check_sites(model_type: str, sites: Iterable[Site]) -> None:
    """Raise UnknownFamily for a site that is not read in models of this type, saying what a row
    would need."""
    family = family_of(SimpleNamespace(model_type=model_type))
    if missing := [site for site in sites if site not in family.sites]:
        why = f"Its attention heads cannot be read: {family.notes}"
        if family.notes == UNKNOWN:
            why = (
                "Its attention heads need one row in service/engines/families.py: Family(name,"
                f" ({model_type!r},), the path from a block to its attention's output projection)"
            )
        raise UnknownFamily(
            f"model_type {model_type!r} is read at {Site.RESIDUAL_STREAM} only, not at"
            f" {', '.join(missing)}: train with --readout {Site.RESIDUAL_STREAM}. {why}"
        )


def text_config(config: Any) -> Any:
    """Return the language model's part of a config; the config itself for text-only models."""
    nested = getattr(config, "get_text_config", None)
    return nested() if nested is not None else config


def geometry(config: Any) -> Geometry:
    """Return layers, QUERY heads and head size of a config.  Raises EngineError if the head size is
    no whole number."""
    text = text_config(config)
    hidden = int(text.hidden_size)
    heads = None
    head_dim = None
    with suppress(Exception):  # transformers raises for what differs between blocks
        # Latent attention: queries and keys are of another size than what the heads hand on.
        head_dim = getattr(text, "v_head_dim", None) or getattr(text, "head_dim", None)
        heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int) or (head_dim is None and hidden % heads):
        if family_of(config).projection:
            raise EngineError(
                f"config: hidden_size {hidden} is not a multiple of {heads} heads; add head_dim"
                " to it"
            )
        heads, head_dim = 1, hidden  # the residual stream has none
    return Geometry(int(text.num_hidden_layers), heads, int(head_dim or hidden // heads), hidden)


def block_list(
    language: nn.Module, num_layers: int, name: str
) -> tuple[nn.Module, tuple[nn.Module, ...]]:
    """Return what holds a model's one outermost list of ``num_layers`` modules, and these.  Raises
    EngineError."""
    from torch.nn import ModuleList

    lists = [
        path
        for path, module in language.named_modules()
        if isinstance(module, ModuleList) and len(module) == num_layers
    ]
    inner = tuple(f"{path}." for path in lists)
    outer = [path for path in lists if not path.startswith(inner)]
    if len(outer) != 1:
        problem = (
            f"has {len(outer)} lists of {num_layers} blocks, as its config's num_hidden_layers"
            " says, and not one"
        )
        raise EngineError(
            f"{name}: {type(language).__name__} {problem}" + f": {', '.join(outer)}" * bool(outer)
        )
    return language.get_submodule(outer[0].rpartition(".")[0]), tuple(
        language.get_submodule(outer[0]).children()
    )


def locate(model: nn.Module) -> ModelModules:
    """Find a loaded model's blocks and the modules of its sites.  Raises EngineError if its config
    contradicts."""
    config: Any = model.config
    family, shape = family_of(config), geometry(config)
    language: Any = model
    _, blocks = block_list(language.get_decoder(), shape.num_layers, family.name)
    at: dict[Site, tuple[nn.Module, ...]] = {}
    for site, location in SITES.items():
        if (path := location.path(family)) is not None:
            at[site] = tuple(_submodule(block, path, family) for block in blocks)
    expected = shape.num_heads * shape.head_dim
    for layer, projection in enumerate(at.get(Site.ATTENTION_HEAD, ())):
        # A Linear's ``in_features``, or the first axis of GPT-2's Conv1D weight.
        weight: Any = projection.weight
        if (width := int(getattr(projection, "in_features", weight.shape[0]))) != expected:
            raise EngineError(
                f"{family.name}: block {layer}'s {family.projection} takes {width} inputs where "
                f"{shape.num_heads} heads of {shape.head_dim} make {expected}; correct the row in "
                "service/engines/families.py or the config"
            )
    return ModelModules(shape, blocks, at)


def _submodule(root: nn.Module, path: str, family: Family) -> nn.Module:
    try:
        return root.get_submodule(path)
    except AttributeError as error:
        raise EngineError(
            f"{family.name}: {type(root).__name__} has no module {path!r}: correct its row"
        ) from error
