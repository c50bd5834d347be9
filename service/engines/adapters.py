"""A LoRA adapter's folder, as PEFT saves it: the digest that a bundle names it by.  Imports no
engine."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from service.engines.base import ModelIdentity
from service.engines.places import check_contents
from service.errors import ModelLoadError

CONFIG = "adapter_config.json"
# PEFT and vLLM both take the first that is there
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# Of the configuration, what says where an adapter comes from or how it was trained; nothing of it
# is computed with.
INCIDENTAL = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "init_lora_weights",
        "lora_dropout",
        "peft_version",
        "revision",
        "runtime_config",
        "task_type",
    }
)


def digest_of(folder: str | Path) -> str:
    """Return sha256 over an adapter's weights and what its configuration says of them.

    Raises ModelLoadError for a folder that holds no adapter."""
    config, digest = config_of(folder), hashlib.sha256()
    names = config.get("target_modules")
    # unset, by any release
    settings = {name: value for name, value in config.items() if name not in INCIDENTAL and value}
    if isinstance(names, list):
        settings["target_modules"] = sorted(names)  # PEFT saves a set
    digest.update(json.dumps(settings, sort_keys=True).encode())
    with _weights(Path(folder)).open("rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def identity_with(identity: ModelIdentity, folder: str | Path) -> ModelIdentity:
    """Return a model's identity with an adapter on it.  Raises ModelLoadError for a folder that
    holds none."""
    # who asks for the model alone must not get this one
    name = f"{identity.model}+{Path(folder).resolve().name}"
    return replace(identity, model=name, adapter=digest_of(folder))


def config_of(folder: str | Path) -> dict[str, Any]:
    """Return an adapter's configuration.  Raises ModelLoadError for a folder that holds no LoRA
    adapter."""
    path = Path(folder) / CONFIG
    for file in (path, *(Path(folder) / name for name in WEIGHTS)):
        if file.is_file():
            check_contents(file, "adapter")
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"{folder} holds no adapter: {CONFIG} cannot be read ({error})", param="adapter"
        ) from None
    if (
        not isinstance(config, dict)
        or config.get("peft_type") != "LORA"
        or not isinstance(config.get("r"), int)
    ):
        raise ModelLoadError(
            f"{path} is not a LoRA adapter's; save one with PEFT's save_pretrained", param="adapter"
        )
    _weights(Path(folder))
    return config


def _weights(folder: Path) -> Path:
    for name in WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    raise ModelLoadError(
        f"{folder} holds no adapter: there is no {' or '.join(WEIGHTS)}", param="adapter"
    )
