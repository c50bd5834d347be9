"""Where a model is, from its name: a folder, a GGUF file, a package or the hub.  Loads no torch."""

from __future__ import annotations

from pathlib import Path

from service.engines.packaged import PACKAGED
from service.errors import ModelLoadError


def place_of(model: str) -> Path | None:
    """The folder or file; None for a name of the hub.

    Raises ModelLoadError for a path where nothing is, and for a packaged model whose package is not installed.
    """
    local = Path(model).expanduser()
    if local.exists() and model:
        return local
    if model in PACKAGED:
        return PACKAGED[model].path
    if looks_like_path(model):
        raise ModelLoadError(
            f"there is no folder or GGUF file {_shown(model, local)}; give a folder with config.json, a .gguf file or "
            "a hub name",
            param="model",
        )
    return None


def looks_like_path(model: str) -> bool:
    """Whether ``model`` is a path; a hub name is ``name`` or ``owner/name``."""
    return model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model or not model or _is_file(model)


def _is_file(model: str) -> bool:
    """A GGUF file without a folder in front, which no model of the hub is called."""
    return model.endswith((".gguf", ".safetensors", ".bin"))


def _shown(model: str, local: Path) -> str:
    """As it was given, and whole where that leaves open in which folder."""
    return model if local.is_absolute() or not model else f"{model} (that is {local.resolve()})"
