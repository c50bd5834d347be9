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

SHAPE = {"intermediate_size": 96, "max_position_embeddings": CONTEXT, "initializer_range": 0.08}
BASE: dict[str, Any] = tiny.BASE | SHAPE | {"hidden_size": 128}  # 4 heads x 32
WIDE = BASE | {"hidden_size": 96, "head_dim": HEAD}  # 4 heads x 32 = 128, while hidden is 96


def _gemma2(cap: float | None) -> hf.Gemma2Config:
    given = WIDE | {"sliding_window": WINDOW, "query_pre_attn_scalar": HEAD}
    return hf.Gemma2Config(**given, final_logit_softcapping=5.0, attn_logit_softcapping=cap)


# The cap of Gemma 2's checkpoints, 50, hardly bends the scores of a random model (leaving it out changes 0.004 of 8.7,
# at 5 it changes 0.37), and multiplies what vLLM's tanh on AVX-512 loses by 50: 2.3e-5 apart.
CAPPED = {"gemma2": lambda: _gemma2(None), "gemma2_capped": lambda: _gemma2(5.0)}
CONFIGS: dict[str, Any] = tiny.families(BASE, WIDE, WINDOW, 64) | CAPPED


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
