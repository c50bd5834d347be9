"""Loads a model and its tokenizer from engine options.  Raises ModelLoadError naming the cause."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.hub import cached_file

from service.engines import gguf, hub
from service.engines.base import EngineOptions
from service.engines.families import family_of, text_config
from service.engines.identity import folder_fingerprint, weight_files
from service.engines.places import place_of
from service.errors import ModelLoadError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EXTRA_OPTIONS = frozenset({"attn_implementation"})


@dataclass(frozen=True)
class LoadedWeights:
    """A model with its weights, ready to be run by an engine."""

    model: Any
    tokenizer: Any
    name: str
    fingerprint: str


@dataclass(frozen=True)
class ModelFiles:
    """A model before its weights are read.  ``loader_arguments`` are for transformers' ``from_pretrained``."""

    loader_arguments: dict[str, Any]
    config: Any
    tokenizer: Any
    name: str
    folder: Path


def find_model_files(options: EngineOptions) -> ModelFiles:
    """Configuration and tokenizer of a folder, a GGUF file, a packaged model or a hub name.

    Raises ModelLoadError or UnknownFamily.
    """
    local = place_of(options.model)
    if local is None:
        # Where the hub cannot be reached, what was downloaded before is read without asking for news of it.
        offline = not hub.reachable(options.model, options.revision)
        loader_arguments: dict[str, Any] = {
            "pretrained_model_name_or_path": options.model,
            "revision": options.revision,
            "local_files_only": offline,
        }
    else:
        if options.revision is not None:
            raise ModelLoadError(f"{local} is on disk, without revisions; leave it out", param="revision")
        if gguf.is_gguf(local):
            local = gguf.folder_of(local)
        check_folder(local)
        loader_arguments = {"pretrained_model_name_or_path": str(local), "local_files_only": True}
    loader_arguments["trust_remote_code"] = options.trust_remote_code

    config = _attempt("configuration", options, lambda: AutoConfig.from_pretrained(**loader_arguments))
    family_of(config)
    tokenizer = _attempt("tokenizer", options, lambda: AutoTokenizer.from_pretrained(**loader_arguments))
    if local is not None:
        # The folder's name without its path, because the name is sent to clients.
        return ModelFiles(loader_arguments, config, tokenizer, local.resolve().name, local)
    cached = cached_file(options.model, "config.json", revision=options.revision, local_files_only=offline)
    return ModelFiles(loader_arguments, config, tokenizer, options.model, Path(str(cached)).parent)


def load(options: EngineOptions) -> LoadedWeights:
    """Load a folder or a hub name.  Raises ModelLoadError, or UnknownFamily before any weight is read."""
    check_options(options)
    device = choose_device(options.device)
    files = find_model_files(options)
    dtype = choose_dtype(options.dtype, files.config, device)
    model, report = _attempt(
        "weights",
        options,
        lambda: AutoModelForCausalLM.from_pretrained(
            **files.loader_arguments,
            config=files.config,
            dtype=dtype,
            output_loading_info=True,
            **attention(files.config) | options.extra,
        ),
    )
    if missing := sorted(report["missing_keys"]):
        raise ModelLoadError(
            f"the checkpoint of {options.model} lacks {len(missing)} parameter(s), first {missing[0]}, which "
            "would be random; download the model again, or check that config.json belongs to these weights",
            param="model",
        )
    model = _attempt("weights", options, lambda: model.to(device))
    return LoadedWeights(
        model=model, tokenizer=files.tokenizer, name=files.name, fingerprint=folder_fingerprint(files.folder)
    )


def attention(config: Any) -> dict[str, str]:
    """``eager`` for models that cap attention logits (Gemma 2): transformers' other implementations do not."""
    capped = getattr(text_config(config), "attn_logit_softcapping", None) is not None
    return {"attn_implementation": "eager"} if capped else {}


def check_options(options: EngineOptions) -> None:
    """Raise ModelLoadError for an option that is invalid for any model."""
    if options.dtype != "auto" and options.dtype not in DTYPES:
        raise ModelLoadError(
            f"dtype {options.dtype!r} is not supported; choose auto, {', '.join(DTYPES)}", param="dtype"
        )
    if options.padding_side not in ("left", "right"):
        raise ModelLoadError(
            f"padding_side is {options.padding_side!r}; it must be left or right", param="padding_side"
        )
    if options.max_batch_tokens is not None and options.max_batch_tokens < 1:
        raise ModelLoadError(
            f"max_batch_tokens is {options.max_batch_tokens}; it must be at least 1", param="max_batch_tokens"
        )
    if unknown := sorted(set(options.extra) - EXTRA_OPTIONS):
        raise ModelLoadError(
            f"the transformers engine has no option {', '.join(unknown)}; it takes {', '.join(sorted(EXTRA_OPTIONS))}",
            param="extra",
        )


def check_folder(folder: Path) -> None:
    """Raise ModelLoadError for a file, or a folder without a config or without weights."""
    if not folder.is_dir():
        raise ModelLoadError(f"{folder} is neither a folder nor a GGUF file", param="model")
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder} has no config.json; it is not a transformers model folder", param="model")
    if not weight_files(folder):
        raise ModelLoadError(
            f"{folder} has no weights; expected model.safetensors or pytorch_model.bin, or an index of shards",
            param="model",
        )


def choose_device(device: str) -> torch.device:
    """``auto`` is cuda if available.  Raises ModelLoadError for a device that is not available."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ModelLoadError(
            f"device {device!r} is unknown to torch; use cpu, cuda or cuda:0", param="device"
        ) from error
    if chosen.type not in ("cpu", "cuda"):
        raise ModelLoadError(f"device {device!r} is not supported; use cpu or cuda", param="device")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ModelLoadError(
            f"device {device!r} is not available: torch finds {torch.cuda.device_count()} CUDA device(s); use cpu",
            param="device",
        )
    return chosen


def choose_dtype(dtype: str, config: Any, device: torch.device) -> torch.dtype:
    """``auto``: float32 on CPU, the checkpoint's own on CUDA.  Raises ModelLoadError if that is not supported."""
    if dtype != "auto":
        return DTYPES[dtype]
    if device.type == "cpu":
        return torch.float32
    own: torch.dtype = getattr(config, "dtype", None) or getattr(text_config(config), "dtype", None) or torch.float32
    if own not in DTYPES.values():
        raise ModelLoadError(f"the checkpoint's dtype {own} is not supported; set dtype to bfloat16", param="dtype")
    return own


def _attempt(what: str, options: EngineOptions, action: Any) -> Any:
    try:
        return action()
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _out_of_memory(options) from error
    except Exception as error:  # file formats raise their own types (safetensors, tokenizers)
        if "out of memory" in str(error).lower() or "can't allocate memory" in str(error).lower():
            raise _out_of_memory(options) from error
        raise ModelLoadError(
            f"the {what} of {options.model} cannot be loaded: {type(error).__name__}: {error}", param="model"
        ) from error


def _out_of_memory(options: EngineOptions) -> ModelLoadError:
    return ModelLoadError(
        f"{options.model} does not fit into memory on device {options.device}; use a smaller model, dtype bfloat16 or "
        "another device",
        param="model",
    )
