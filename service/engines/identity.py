"""Digests over a model's configuration and weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from service.errors import ModelLoadError

MIB = 1 << 20
# Keys that saving, casting or renaming a checkpoint changes, without changing what is computed from its weights.
INCIDENTAL = frozenset({"transformers_version", "_name_or_path", "torch_dtype", "dtype"})


def weight_files(folder: Path) -> list[Path]:
    """The weight files that transformers would load from a folder, sorted by name; possibly none.

    Raises ModelLoadError if an index names a missing file.
    """
    for single, index in (
        ("model.safetensors", "model.safetensors.index.json"),
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ):
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            names = sorted(set(_read_json(folder / index).get("weight_map", {}).values()))
            if missing := [name for name in names if not (folder / name).is_file()]:
                raise ModelLoadError(
                    f"{folder / index} names {', '.join(missing)}, which is not there; download the model again"
                )
            return [folder / name for name in names]
    return []


def folder_fingerprint(folder: Path) -> str:
    """sha256 over config.json and, for each weight file, its name, size and the sha256 of its first and last MiB.

    Reading only both ends takes milliseconds instead of minutes for tens of gigabytes.  It detects a wrong model, not a
    deliberate edit in the middle of a file.
    """
    digest = hashlib.sha256(_canonical(_read_json(folder / "config.json")))
    for file in weight_files(folder):
        size = file.stat().st_size
        ends = hashlib.sha256()
        with file.open("rb") as stream:
            ends.update(stream.read(MIB))
            stream.seek(max(0, size - MIB))
            ends.update(stream.read(MIB))
        digest.update(_canonical([file.name, size, ends.hexdigest()]))
    return digest.hexdigest()


def changed_at_load(fingerprint: str, changes: Mapping[str, str]) -> str:
    """The fingerprint of a checkpoint that is loaded otherwise than it was saved, such as quantized; without changes
    the checkpoint's own.
    """
    if not changes:
        return fingerprint
    return hashlib.sha256(fingerprint.encode() + _canonical(dict(changes))).hexdigest()


def memory_fingerprint(model: nn.Module) -> str:
    """sha256 over the config and every parameter's name, dtype, shape and bytes, for a model built in memory."""
    config: Any = model.config
    digest = hashlib.sha256(_canonical(config.to_dict()))
    for name, parameter in sorted(model.named_parameters()):
        digest.update(_canonical([name, str(parameter.dtype), list(parameter.shape)]))
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def revision_of(config: Any) -> str:
    """The hub commit a model was loaded from, or "local"."""
    return getattr(config, "_commit_hash", None) or "local"


def _canonical(content: Any) -> bytes:
    return json.dumps(_essential(content), sort_keys=True, separators=(",", ":"), default=str).encode()


def _essential(content: Any) -> Any:
    if isinstance(content, dict):
        return {str(key): _essential(value) for key, value in content.items() if key not in INCIDENTAL}
    if isinstance(content, list | tuple):
        return [_essential(value) for value in content]
    return content


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON ({error}); download the model again") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} is not a JSON object; download the model again")
    return content
