"""Damage that keeps the hashes right, so that a test reaches the check behind them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from probes_store.syntax import canonical_json, readable_json

Edit = Callable[[dict[str, Any]], object]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def reseal(document: dict[str, Any]) -> bytes:
    """The bytes of an edited manifest, digest and seal right again where they are there."""
    for field, left_out in (
        ("digest", ("version", "created", "digest", "seal")),
        ("seal", ("seal",)),
    ):
        if field in document:
            content = {key: value for key, value in document.items() if key not in left_out}
            document[field] = "sha256:" + sha256(canonical_json(content))
    return readable_json(document)


def edit_manifest(folder: Path, edit: Edit) -> None:
    document = json.loads((folder / "bundle.json").read_bytes())
    edit(document)
    (folder / "bundle.json").write_bytes(reseal(document))


def replace_file(folder: Path, name: str, data: bytes) -> None:
    (folder / name).write_bytes(data)
    edit_manifest(
        folder, lambda m: m["files"].update({name: {"bytes": len(data), "sha256": sha256(data)}})
    )


def without_in_evaluation(source: Path, folder: Path, *keys: str) -> Path:
    """Copy a bundle's folder without what stands at this path of its evaluation.json; the copy."""
    shutil.copytree(source, folder)
    inner = document = json.loads((folder / "evaluation.json").read_bytes())
    for key in keys[:-1]:
        inner = inner[key]
    del inner[keys[-1]]
    replace_file(folder, "evaluation.json", readable_json(document))
    return folder
