"""Damage that keeps the hashes right, so that a test reaches the check behind them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from probes_store.syntax import canonical_json, readable_json


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def reseal(document: dict[str, Any]) -> bytes:
    """The bytes of an edited manifest, digest and seal right again where they are there."""
    content = {k: v for k, v in document.items() if k not in ("version", "created", "digest", "seal")}
    if "digest" in document:
        document["digest"] = "sha256:" + sha256(canonical_json(content))
    if "seal" in document:
        document["seal"] = "sha256:" + sha256(canonical_json({k: v for k, v in document.items() if k != "seal"}))
    return readable_json(document)


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "bundle.json"
    document = json.loads(path.read_bytes())
    edit(document)
    path.write_bytes(reseal(document))


def replace_file(folder: Path, name: str, data: bytes) -> None:
    (folder / name).write_bytes(data)
    edit_manifest(folder, lambda m: m["files"].update({name: {"bytes": len(data), "sha256": sha256(data)}}))


def edit_tensors(folder: Path, name: str, edit: Callable[[dict[str, Any]], object]) -> None:
    tensors = {key: np.array(value) for key, value in load((folder / name).read_bytes()).items()}
    edit(tensors)
    replace_file(folder, name, save(tensors))


def without_in_evaluation(source: Path, folder: Path, *keys: str) -> Path:
    """Copy a bundle's folder without what stands at this path of its evaluation.json; the copy."""
    shutil.copytree(source, folder)
    document = json.loads((folder / "evaluation.json").read_bytes())
    inner = document
    for key in keys[:-1]:
        inner = inner[key]
    del inner[keys[-1]]
    replace_file(folder, "evaluation.json", readable_json(document))
    return folder
