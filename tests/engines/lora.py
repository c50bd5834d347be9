"""A random LoRA adapter of a Llama folder, as PEFT saves one, and the same model with it merged
into its weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from probes_store.bundle import Bundle, BundleDraft
from probes_store.store import SHIPPED, Store
from probes_store.tensors import Golden
from service.engines.adapters import identity_with
from service.engines.transformers.engine import TransformersEngine
from service.policies.guard import OBSERVE
from service.readout import Probes, Site
from service.scoring import Scorer
from tests.engines import tiny
from tests.kit.bundles import write_bundle

RANK, ALPHA = 4, 8
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _layers(model: Any) -> dict[str, torch.nn.Linear]:
    return {
        name: module for name, module in model.named_modules() if name.rpartition(".")[2] in TARGETS
    }


def save_adapter(base: Path, folder: Path, seed: int = 0, scale: float = 1.0) -> Path:
    """An adapter of the model in ``base`` whose answers are others, in ``folder``."""
    model = hf.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, layer in _layers(model).items():
        for part, shape in (("A", (RANK, layer.in_features)), ("B", (layer.out_features, RANK))):
            values = torch.randn(shape, generator=generator) * scale * layer.in_features**-0.5
            weights[f"base_model.model.{name}.lora_{part}.weight"] = values * (
                RANK if part == "B" else 1
            )
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "target_modules": list(TARGETS),
        "bias": "none",
        "base_model_name_or_path": str(base),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def save_merged(base: Path, adapter: Path, folder: Path) -> Path:
    """The model of ``base`` with W + alpha / r B A for each W: what the adapter computes, without
    any adapter."""
    model = hf.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    weights = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, layer in _layers(model).items():
            down, up = (weights[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
            layer.weight += ALPHA / RANK * (up @ down)
    model.save_pretrained(folder)
    hf.AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def reference(base: Path, adapter: Path, merged: Path) -> TransformersEngine:
    """The embedded engine on the merged weights, under the identity of the model with the
    adapter."""
    plain = tiny.load_engine(base, dtype="float32")
    engine = tiny.load_engine(save_merged(base, adapter, merged), dtype="float32")
    engine.identity = identity_with(plain.identity, adapter)
    return engine


def shipped_bundle() -> Bundle:
    """The demo's."""
    return Store(Path("/nonexistent"), fallbacks=[SHIPPED]).load("demo")


def save_bundle(engine: Any, folder: Path) -> Bundle:
    """The demo's bundle with the readings of this engine, and its adapter's digest, as one of a
    store in ``folder``."""
    shipped = shipped_bundle()
    model = replace(shipped.manifest.model, adapter=engine.identity.adapter)
    manifest = replace(shipped.manifest, name="adapted", model=model)
    scorer = Scorer.__new__(Scorer)  # its golden prompts are to be made
    scorer.engine = engine
    scorer.bundle = replace(shipped, manifest=manifest)
    scorer.needs_first_token = False
    scorer.probes = Probes.all_of(Site(manifest.readout.site), shipped.probes)
    prompts = shipped.golden.prompts()
    reports = scorer.score(prompts, OBSERVE)
    golden = Golden.record(
        prompts,
        np.stack([report.logits for report in reports]),
        np.array([report.risk for report in reports]),
    )
    draft = BundleDraft(manifest, shipped.probes, golden, shipped.evaluation(), "A test's.")
    return write_bundle(draft, folder / "adapted" / "1")
