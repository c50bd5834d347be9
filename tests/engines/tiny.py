"""Tiny random models of every family, and a byte-level tokenizer: nothing is downloaded.

GQA wherever the family has it, head_dim apart from hidden / heads wherever the config permits, and
weights large enough that a mistake shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from probes_store.manifest import SIGNALS
from probes_store.records import Context
from service.engines.base import EngineGate, EngineOptions, FirstToken, PrefillResult, TorchModel
from service.engines.families import locate
from service.engines.loading import loader
from service.engines.transformers.engine import TransformersEngine
from service.readout import Geometry, Probes, Site

VOCABULARY, BOS, EOS, PAD, CHAT = 264, 256, 257, 258, 259
CONTEXT = 96
WINDOW = 8  # of the sliding families: shorter than the tests' prompts
CHAT_TEMPLATE = (
    "<s>{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{%"
    " endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt"
    " %}<|assistant|>{% endif %}"
)

BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
WIDE = BASE | {"head_dim": 16}  # 4 heads x 16 = 64, while hidden is 32


def makers(options: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """By model type, what makes its configuration with these options.  It raises ValueError where
    this version of transformers does not have the type."""
    return {
        name: partial(hf.AutoConfig.for_model, name, **chosen) for name, chosen in options.items()
    }


def families(
    base: dict[str, Any], wide: dict[str, Any], window: int, expert: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A configuration's maker for each family, of two shapes; those that are compared in fewer ways
    apart.  Hybrids have attention in the second block.

    ``expert``: hidden size of an expert.  A maker raises ValueError where this version of
    transformers does not have the family."""
    hidden, head = base["hidden_size"], wide["head_dim"]
    sliding = {"sliding_window": window}
    ends = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    no_gqa = {key: value for key, value in base.items() if key != "num_key_value_heads"}
    local = {"num_local_experts": 4, "num_experts_per_tok": 2}
    few = {"num_experts": 4, "num_experts_per_tok": 2}
    experts = few | {"moe_intermediate_size": expert}
    gemma = wide | sliding | {"query_pre_attn_scalar": head}
    gpt2 = {
        "n_positions": base["max_position_embeddings"],
        "n_embd": hidden,
        "n_layer": 3,
        "n_head": 4,
        "vocab_size": VOCABULARY,
        "initializer_range": base["initializer_range"],
    }
    sight = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 28,
        "patch_size": 14,
    }
    images = {
        "image_token_index": 260,
        "boi_token_index": 261,
        "eoi_token_index": 262,
        "mm_tokens_per_image": 4,
    }
    compared = {
        "llama": wide,
        "qwen2": base,
        "qwen3": wide,
        "mistral": wide | sliding,
        "gemma2": gemma | {"final_logit_softcapping": 5.0},
        "gemma3_text": gemma,
        "gemma3": {"text_config": gemma, "vision_config": sight} | images | ends,
        "phi3": base,
        "olmo2": base,
        "gpt_neox": no_gqa,
        "gpt2": gpt2 | ends,
        "mixtral": wide | local,
        "qwen2_moe": base | experts | {"shared_expert_intermediate_size": 2 * expert},
        "qwen3_moe": wide | experts,
        "olmoe": base | few,
    }
    routed = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": expert,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    }
    latent = base | {
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    }
    hybrid = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    linear = hybrid | {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": head,
        "linear_value_head_dim": head,
        "linear_conv_kernel_dim": 4,
    }
    shared = experts | {"shared_expert_intermediate_size": expert}
    mamba = {
        "mamba_n_heads": 4,
        "mamba_d_head": hidden // 2,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_expand": 2,
        "mamba_d_conv": 4,
        "mamba_chunk_size": 16,
    }
    states = {
        "mamba_d_state": 16,
        "mamba_ngroups": 1,
        "n_mamba_heads": 4,
        "mamba_headdim": hidden // 2,
    }
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [hidden // 16, hidden // 32, hidden // 32],
    }
    qwen_sight = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": hidden,
    }
    qwen_images = {
        "image_token_id": 260,
        "video_token_id": 261,
        "vision_start_token_id": 262,
        "vision_end_token_id": 263,
    }
    fewer = {
        "gpt_oss": wide | sliding | local,
        "deepseek_v2": latent | routed | {"topk_method": "greedy"},
        "deepseek_v3": latent | routed | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        "kimi_linear": latent
        | hybrid
        | local
        | {
            "n_group": 1,
            "linear_head_dim": head,
            "linear_num_heads": 4,
            "moe_intermediate_size": expert,
            "first_k_dense_replace": 1,
        },
        "llama4_text": wide
        | {
            "intermediate_size_mlp": base["intermediate_size"],
            "attention_chunk_size": window,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
        },
        "glm": wide,
        "glm4": wide,
        "glm4_moe": wide | routed,
        "phi": base,
        "phimoe": base | local,
        "granite": base
        | {
            "residual_multiplier": 0.5,
            "embedding_multiplier": 2.0,
            "logits_scaling": 2.0,
            "attention_multiplier": 0.2,
        },
        "granitemoe": base | local,
        "cohere": base,
        "cohere2": base | sliding,
        "falcon": no_gqa | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": False},
        "falcon_h1": wide | mamba | {"mamba_d_ssm": 2 * hidden},
        "gemma": wide,
        "olmo3": base | sliding,
        "smollm3": base,
        "seed_oss": wide,
        "exaone4": base | sliding,
        "ernie4_5": wide,
        "starcoder2": base,
        "stablelm": base,
        "minimax_m2": wide | local,
        "qwen2_5_vl": {
            "text_config": base | {"rope_parameters": rope},
            "vision_config": qwen_sight,
        }
        | qwen_images
        | ends,
        "mistral3": {
            "text_config": wide | {"model_type": "mistral"},
            "vision_config": sight | {"model_type": "pixtral", "head_dim": 32},
            "image_token_index": 260,
        }
        | ends,
        "qwen3_next": wide | linear | shared,
        "qwen3_5_text": wide | linear,
        "qwen3_5_moe_text": wide | linear | shared,
        "granitemoehybrid": base
        | mamba
        | local
        | {
            "shared_intermediate_size": expert,
            "layer_types": ["mamba", "attention", "mamba"],
        },
        "bamba": base | mamba | {"attn_layer_indices": [1]},
        "zamba2": base
        | states
        | {
            "chunk_size": 16,
            "num_mem_blocks": 1,
            "adapter_rank": 8,
            "use_mem_rope": True,
            "hybrid_layer_ids": [1],
            "layers_block_type": ["mamba", "hybrid", "mamba"],
        },
        "jamba": base
        | {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "mamba_d_state": 16,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
        "nemotron_h": base
        | {
            "hybrid_override_pattern": "M*-",
            "mamba_num_heads": 4,
            "mamba_head_dim": hidden // 2,
            "ssm_state_size": 16,
            "n_groups": 1,
            "chunk_size": 16,
        },
        "lfm2": base | {"layer_types": ["conv", "full_attention", "conv"]},
        "opt": ends  # no row
        | {
            "vocab_size": VOCABULARY,
            "hidden_size": hidden,
            "ffn_dim": 2 * hidden,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": base["max_position_embeddings"],
            "word_embed_proj_dim": hidden,
        },
    }
    return makers(compared), makers(fewer)


CONFIGS, MORE = families(BASE, WIDE, WINDOW, 24)
ALL = sorted(CONFIGS)


def from_config(config: Any) -> Any:
    """A random model, of the class that the engine loads a checkpoint with."""
    return loader(config).from_config(config)


def model(family: str, seed: int = 0) -> Any:
    """A fresh random model in float32."""
    torch.manual_seed(seed)
    built = from_config((CONFIGS | MORE)[family]()).float().eval()
    built.generation_config = hf.GenerationConfig(
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD
    )
    return built


def tokenizer(*, template: str | None = CHAT_TEMPLATE) -> Any:
    """One token per UTF-8 byte, a BOS in front of plain text, and a chat template."""
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    fast = byte_level(
        models.BPE(vocab=vocabulary, merges=[]), ["<s>", "</s>", "<pad>", "<|assistant|>"]
    )
    fast.pad_token, fast.model_max_length = "<pad>", CONTEXT
    if template is not None:
        fast.chat_template = template
    return fast


def byte_level(model: models.BPE, special: list[str]) -> Any:
    """A tokenizer of bytes with special tokens, of which <s> stands in front of plain text."""
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    first = [("<s>", backend.token_to_id("<s>"))]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=first)
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def engine(family: str = "llama", **options: Any) -> TransformersEngine:
    """A fresh engine; options as in EngineOptions."""
    return TransformersEngine(
        model(family), tokenizer(), options=EngineOptions(model=f"tiny-{family}", **options)
    )


@cache
def shared_engine(family: str, max_batch_tokens: int = 8192) -> TransformersEngine:
    """One engine for tests that neither count nor close."""
    return engine(family, max_batch_tokens=max_batch_tokens)


def modules(engine: Any) -> TorchModel:
    """A model's modules, of an engine that is not closed."""
    assert engine.torch_model is not None
    return engine.torch_model  # type: ignore[no-any-return]


def projections(engine: Any) -> tuple[torch.nn.Module, ...]:
    """Each layer's attention output projection."""
    return locate(modules(engine).model).at[Site.ATTENTION_HEAD]


def longrope_engine() -> TransformersEngine:
    """A Phi-3 whose positions are encoded differently once the longest prompt of a batch passes 16
    tokens."""
    config = CONFIGS["phi3"]()
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [8.0] * 4,
        "rope_theta": 10000.0,
    }
    config.rope_parameters = rope | {
        "original_max_position_embeddings": 16,
        "partial_rotary_factor": 1.0,
    }
    config.original_max_position_embeddings = 16
    torch.manual_seed(0)
    return TransformersEngine(hf.Phi3ForCausalLM(config).eval(), tokenizer())


def prompts(lengths: list[int], seed: int = 1) -> list[list[int]]:
    """Random prompts of these lengths, without special tokens."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, size=length).tolist() for length in lengths]


def come_and_go(
    engine: TransformersEngine, continuations: Sequence[Any], streams: Sequence[Iterator[str]]
) -> None:
    """Decode answers to their ends, of which some take part in each step."""
    chance, running = Random(0), list(range(len(streams)))
    while running:
        some = chance.sample(running, chance.randint(1, len(running)))
        engine.step_together([continuations[number] for number in some])
        for number in some:
            if next(streams[number], None) is None:
                running.remove(number)


def probes(
    geometry: Geometry, site: Site = Site.ATTENTION_HEAD, seed: int = 2, *, scaled: bool = False
) -> Probes:
    """Random unit probes for a geometry.  Of an engine's: ``probes_of``."""
    generator = np.random.default_rng(seed)
    m, d = geometry.num_layers, geometry.dim(site)
    direction = generator.standard_normal((m, d))
    direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
    scale = generator.uniform(0.5, 2.0, m) if scaled else np.ones(m)
    return Probes(
        site=site,
        head=generator.integers(0, geometry.heads(site), m),
        direction=direction.astype(np.float32),
        bias=generator.standard_normal(m).astype(np.float32),
        scale=scale.astype(np.float32),
    )


def probes_of(engine: Any, *arguments: Any, **options: Any) -> Probes:
    """Random unit probes for an engine's model; the rest as of ``probes``."""
    return probes(engine.identity.geometry, *arguments, **options)


def gate(
    threshold: float,
    weight: Sequence[float] = (1.0,),
    intercept: float = 0.0,
    context: Context | None = None,
) -> EngineGate:
    """A gate on the depth mean, and on the signals behind it that have a weight."""
    unread = [0.0] * (len(SIGNALS) - len(weight))
    return EngineGate((*weight, *unread), intercept, threshold, context)


def trajectories(engine: Any, prompts: Sequence[list[int]], probes: Probes) -> NDArray[np.float64]:
    """Truth logits [prompts, m] of these probes."""
    return np.stack([result.trajectories[0] for result in engine.score(prompts, [probes])])


def check_same(
    result: PrefillResult,
    expected: PrefillResult,
    *,
    tokens: bool,
    rtol: float = 1e-5,
    atol: float = 1e-5,
) -> None:
    """Two readings of one prompt are alike, with first tokens where ``tokens`` says so."""
    assert result.prompt_tokens == expected.prompt_tokens
    for ours, theirs in zip(result.trajectories, expected.trajectories, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol)
    assert (result.first_token is not None) == tokens
    if tokens:
        check_first(result.first_token, expected.first_token)


def check_first(first: FirstToken | None, expected: FirstToken | None) -> None:
    """Two distributions of a prompt's first token are alike."""
    assert first is not None
    assert expected is not None
    assert first.token == expected.token
    assert first.log_max_prob == pytest.approx(expected.log_max_prob, abs=1e-5)
    assert first.entropy == pytest.approx(expected.entropy, abs=1e-5)
