"""A random LoRA adapter of a Llama folder, as PEFT saves one, and the same model with it merged into its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import save_file

RANK, ALPHA = 4, 8
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _layers(model: Any) -> dict[str, torch.nn.Linear]:
    return {name: one for name, one in model.named_modules() if name.rpartition(".")[2] in TARGETS}


def save_adapter(base: Path, folder: Path, seed: int = 0, scale: float = 0.3) -> Path:
    """An adapter of the model in ``base`` whose answers are others, in ``folder``."""
    model = hf.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, layer in _layers(model).items():
        for part, shape in (("A", (RANK, layer.in_features)), ("B", (layer.out_features, RANK))):
            values = torch.randn(shape, generator=generator) * scale * layer.in_features**-0.5
            weights[f"base_model.model.{name}.lora_{part}.weight"] = values * (RANK if part == "B" else 1)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0,
              "target_modules": list(TARGETS), "bias": "none", "base_model_name_or_path": str(base)}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def save_merged(base: Path, adapter: Path, folder: Path) -> Path:
    """The model of ``base`` with W + alpha / r B A for each W: what the adapter computes, without any adapter."""
    from safetensors.torch import load_file

    model, weights = hf.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), None
    weights = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, layer in _layers(model).items():
            down, up = (weights[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
            layer.weight += ALPHA / RANK * (up @ down)
    model.save_pretrained(folder)
    hf.AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder
