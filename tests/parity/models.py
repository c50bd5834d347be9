"""Tiny random models of every family, on disk, in shapes that vLLM's CPU attention takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf

from tests.engines import tiny

CONTEXT = 256
HEAD = 32  # the least that vLLM's CPU attention takes
WINDOW = 24  # of the sliding families: several lie within a prompt

BASE: dict[str, Any] = tiny.BASE | {
    "hidden_size": 128,  # 4 heads x 32
    "intermediate_size": 96,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.08,
}
WIDE = BASE | {"hidden_size": 96, "head_dim": HEAD}  # 4 heads x 32 = 128, while hidden is 96
NO_GQA = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
SLIDING = {"sliding_window": WINDOW}
GEMMA = WIDE | SLIDING | {"query_pre_attn_scalar": HEAD}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def _gemma3_multimodal() -> hf.Gemma3Config:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 28,
        "patch_size": 14,
    }
    ends = {"bos_token_id": tiny.BOS, "eos_token_id": tiny.EOS, "pad_token_id": tiny.PAD}
    tokens = {"image_token_index": 260, "boi_token_index": 261, "eoi_token_index": 262}
    return hf.Gemma3Config(text_config=GEMMA, vision_config=vision, mm_tokens_per_image=4, **tokens, **ends)


def _gpt2() -> hf.GPT2Config:
    ends = {"bos_token_id": tiny.BOS, "eos_token_id": tiny.EOS, "pad_token_id": tiny.PAD}
    shape = {"n_positions": CONTEXT, "n_embd": 128, "n_layer": 3, "n_head": 4, "initializer_range": 0.08}
    return hf.GPT2Config(vocab_size=tiny.VOCABULARY, **shape, **ends)


CONFIGS: dict[str, Any] = {
    "llama": lambda: hf.LlamaConfig(**WIDE),
    "qwen2": lambda: hf.Qwen2Config(**BASE),
    "qwen3": lambda: hf.Qwen3Config(**WIDE),
    "mistral": lambda: hf.MistralConfig(**WIDE, **SLIDING),
    "gemma2": lambda: hf.Gemma2Config(**GEMMA, final_logit_softcapping=5.0, attn_logit_softcapping=None),
    # The cap of its checkpoints, 50, hardly bends the scores of a random model (leaving it out changes 0.004 of 8.7,
    # at 5 it changes 0.37), and multiplies what vLLM's tanh on AVX-512 loses by 50: 2.3e-5 apart.
    "gemma2_capped": lambda: hf.Gemma2Config(**GEMMA, final_logit_softcapping=5.0, attn_logit_softcapping=5.0),
    "gemma3_text": lambda: hf.Gemma3TextConfig(**GEMMA),
    "gemma3": _gemma3_multimodal,
    "phi3": lambda: hf.Phi3Config(**BASE),
    "olmo2": lambda: hf.Olmo2Config(**BASE),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**NO_GQA),
    "gpt2": _gpt2,
    "mixtral": lambda: hf.MixtralConfig(**WIDE, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(**BASE, **EXPERTS, shared_expert_intermediate_size=64),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**WIDE, **EXPERTS),
    "olmoe": lambda: hf.OlmoeConfig(**BASE, num_experts=4, num_experts_per_tok=2),
}


def save(family: str, folder: Path, seed: int = 0) -> Path:
    """A model folder as a user would have one: configuration, float32 weights, tokenizer."""
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[family]()).float().eval()
    with torch.no_grad():  # biases and norms that are all zeros or ones would hide that they are left out
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            assert torch.isfinite(parameter).all(), name
    model.generation_config = hf.GenerationConfig(bos_token_id=tiny.BOS, eos_token_id=tiny.EOS, pad_token_id=tiny.PAD)
    model.save_pretrained(folder)
    tokenizer = tiny.tokenizer()
    tokenizer.model_max_length = CONTEXT
    tokenizer.save_pretrained(folder)
    return folder
