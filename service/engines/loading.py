"""A model and its tokenizer from engine options, and the digests over its configuration and weights."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.utils.hub import cached_file

from service.engines import places
from service.engines.adapters import config_of
from service.engines.base import EngineOptions
from service.engines.devices import choose_device
from service.engines.families import check_sites, text_config
from service.engines.reading import read_for
from service.errors import ModelLoadError
from service.readout import Site

MIB = 1 << 20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EXTRA_OPTIONS = frozenset({"attn_implementation"})
SINGLE = "model.safetensors", "pytorch_model.bin"
DESCRIPTIONS = (
    places.CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja",
)  # fmt: skip
# Keys that saving, casting or renaming a checkpoint changes, without changing what is computed from its weights.
INCIDENTAL = frozenset({"transformers_version", "_name_or_path", "torch_dtype", "dtype"})


@dataclass(frozen=True)
class ModelFiles:
    """A model before its weights are read.  ``loader_arguments`` are for transformers' ``from_pretrained``."""

    loader_arguments: dict[str, Any]
    config: Any
    tokenizer: Any
    name: str
    folder: Path
    revision: str = "local"  # the hub's commit, for a name of the hub


def find_model_files(options: EngineOptions) -> ModelFiles:
    """Return what a folder, GGUF file, package or hub has but weights.  Raises ModelLoadError."""
    local, offline = places.place_of(options.model), True
    if local is not None:
        if options.revision is not None:
            raise ModelLoadError(f"{local} is on disk, without revisions; leave it out", param="revision")
        local = places.folder_of(local) if places.is_gguf(local) else local
        check_folder(local)
    else:
        # Where the hub cannot be reached, what was downloaded before is read without asking for news of it.
        offline = not places.reachable(options.model, options.revision)
    arguments: dict[str, Any] = {"pretrained_model_name_or_path": str(local or options.model)}
    arguments |= {"local_files_only": offline, "trust_remote_code": options.trust_remote_code}
    folder = local
    if folder is None:
        folder = snapshot_of(options)
        # Of one commit, though the branch may move while the files are downloaded.
        arguments["revision"] = folder.name
    config = _attempt("configuration", options, lambda: AutoConfig.from_pretrained(**arguments), folder)
    tokenizer = _attempt("tokenizer", options, lambda: AutoTokenizer.from_pretrained(**arguments), folder)
    if local is not None:
        # The folder's name without its path, because the name is sent to clients.
        return ModelFiles(arguments, config, tokenizer, local.resolve().name, local)
    return ModelFiles(arguments, config, tokenizer, options.model, folder, folder.name)


def snapshot_of(options: EngineOptions) -> Path:
    """Return the folder of what is downloaded of a hub's model, named by the commit.  Gets its configuration alone.

    Raises ModelLoadError."""
    offline = not places.reachable(options.model, options.revision)
    where = {"revision": options.revision, "local_files_only": offline}
    config = _attempt("configuration", options, lambda: cached_file(options.model, places.CONFIG, **where))
    return Path(str(config)).parent


def load(options: EngineOptions, sites: Iterable[Site] = ()) -> tuple[Any, ModelFiles]:
    """Load a folder or hub name, to be read at ``sites``.

    Raises ModelLoadError, and UnknownFamily for a site that is not read, before any weight is."""
    check_options(options)
    device = choose_device(options.device)
    files = find_model_files(options)
    check_sites(str(files.config.model_type), sites)
    # Only ``eager`` caps attention logits (Gemma 2).
    capped = getattr(text_config(files.config), "attn_logit_softcapping", None) is not None
    attention = {"attn_implementation": "eager"} if capped else {}
    arguments = files.loader_arguments | {"config": files.config, "output_loading_info": True} | attention
    dtype = choose_dtype(options.dtype, files.config, device)
    arguments |= {"dtype": dtype, **options.extra}
    with read_for(files.config, dtype, device):
        loaded = loader(files.config).from_pretrained
        model, report = _attempt("weights", options, lambda: loaded(**arguments), files.folder)
    if missing := sorted(report["missing_keys"]):
        said = f"the checkpoint of {options.model} lacks {len(missing)} parameter(s), first {missing[0]}"
        raise ModelLoadError(f"{said}; download the model again", param="model")
    if getattr(model, "_hf_peft_config_loaded", False):  # transformers does so by itself
        raise ModelLoadError(f"{options.model} holds an adapter beside its weights: move it out, and name it as the "
                             "adapter", param="model")  # fmt: skip
    if options.adapter is not None:
        _load_adapter(model, options.adapter, options)
    return _attempt("weights", options, lambda: model.to(device)), files


def _load_adapter(model: Any, folder: str, options: EngineOptions) -> None:
    """Put an adapter into the model's layers.  Raises ModelLoadError without PEFT, or where weights do not fit."""
    config_of(folder)
    if importlib.util.find_spec("peft") is None:
        raise ModelLoadError("an adapter needs PEFT: pip install 'hallutracer[lora]'", param="adapter")
    place = str(Path(folder).resolve())
    report = _attempt("adapter", options, lambda: model.load_adapter(place))
    if wrong := sorted({*report.missing_keys, *report.unexpected_keys, *map(str, report.mismatched_keys)}):
        said = f"{len(wrong)} of its weights do not fit {options.model}, first {wrong[0]}; name its base model"
        raise ModelLoadError(f"the adapter {folder} is another model's: {said}", param="adapter")


def loader(config: Any) -> Any:
    """Return transformers' class that loads a model of text, or of text and images."""
    mappings: Any = AutoModelForCausalLM._model_mapping, AutoModelForImageTextToText._model_mapping
    text, images = (type(config) in mapping for mapping in mappings)
    return AutoModelForImageTextToText if images and not text else AutoModelForCausalLM


def check_options(options: EngineOptions) -> None:
    """Raise ModelLoadError for an option that is invalid for any model."""
    tokens, unknown = options.max_batch_tokens, sorted(set(options.extra) - EXTRA_OPTIONS)
    for name, valid, expected in (
        ("dtype", options.dtype in ("auto", *DTYPES), f"be auto, {', '.join(DTYPES)}"),
        ("padding_side", options.padding_side in ("left", "right"), "be left or right"),
        ("max_batch_tokens", tokens is None or tokens >= 1, "be at least 1"),
    ):
        if not valid:
            raise ModelLoadError(f"{name} is {getattr(options, name)!r}; it must {expected}", param=name)
    if unknown:
        said = f"the transformers engine has no option {', '.join(unknown)}; it takes {', '.join(EXTRA_OPTIONS)}"
        raise ModelLoadError(said, param="extra")


def check_folder(folder: Path) -> None:
    """Raise ModelLoadError for a file, or a folder without a config or without weights, or with something else in a
    file's place."""
    for wrong, problem in (
        (not folder.is_dir(), "is neither a folder nor a GGUF file"),
        (not (folder / "config.json").is_file(), "has no config.json; it is not a transformers model folder"),
    ):
        if wrong:
            raise ModelLoadError(f"{folder} {problem}", param="model")
    check_files(folder)
    if not weight_files(folder):
        said = f"{folder} has no weights; expected {' or '.join(SINGLE)}, or an index of shards"
        raise ModelLoadError(said, param="model")


def check_files(folder: Path) -> None:
    """Raise ModelLoadError for something else in the place of a file that is read of those that a folder has."""
    names = [*DESCRIPTIONS, *(f"{single}.index.json" for single in SINGLE)]
    names += [] if (folder / "tokenizer.json").is_file() else ["tokenizer.model"]
    for file in (folder / name for name in names):
        if file.is_file() and (file.suffix == ".json" or file.stat().st_size):  # a text may be empty
            places.check_contents(file)
    for file in weight_files(folder):
        places.check_contents(file)


def choose_dtype(dtype: str, config: Any, device: torch.device) -> torch.dtype:
    """Return the dtype; ``auto`` is float32 on CPU, the checkpoint's own on CUDA.  Raises ModelLoadError."""
    if dtype != "auto":
        return DTYPES[dtype]
    if device.type == "cpu":
        return torch.float32
    own: torch.dtype = getattr(config, "dtype", None) or getattr(text_config(config), "dtype", None) or torch.float32
    if own not in DTYPES.values():
        raise ModelLoadError(f"the checkpoint's dtype {own} is not supported; set dtype to bfloat16", param="dtype")
    return own


def _attempt(what: str, options: EngineOptions, action: Callable[[], Any], folder: Path | None = None) -> Any:
    """Return what the action does.  Raises ModelLoadError, of a file in ``folder`` that is none in better words."""
    try:
        return action()
    except Exception as error:  # file formats raise their own types (safetensors, tokenizers)
        if folder is not None:
            check_files(folder)
        told = str(error).lower()
        full = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if full or "out of memory" in told or "can't allocate memory" in told:
            message = f"{options.model} does not fit into memory on device {options.device}; use dtype bfloat16"
        else:
            message = f"the {what} of {options.model} cannot be loaded: {type(error).__name__}: {error}"
        raise ModelLoadError(message, param="model") from error


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files that transformers would load, by name.  Raises ModelLoadError if one is missing."""
    for single in SINGLE:
        index = folder / f"{single}.index.json"
        names = sorted(set(_read_json(index).get("weight_map", {}).values())) if index.is_file() else [single]
        if (folder / single).is_file():
            if names != [single]:
                said = f"{folder} holds {single} beside {index.name}, which names other files; keep what is whole"
                raise ModelLoadError(f"{said}: vLLM reads what the index names, transformers does not", param="model")
            return [folder / single]
        if index.is_file():
            files = [folder / name for name in names]
            if missing := [file.name for file in files if not file.is_file()]:
                raise ModelLoadError(f"{index} names {', '.join(missing)}, which is not there; download it again")
            return files
    return []


def folder_fingerprint(folder: Path) -> str:
    """Return sha256 over config.json and each weight file's name, size and both ends, a MiB each."""
    digest = hashlib.sha256(_canonical(_read_json(folder / "config.json")))
    for file in weight_files(folder):
        size = file.stat().st_size
        with file.open("rb") as stream:
            ends = hashlib.sha256(stream.read(MIB))
            stream.seek(max(0, size - MIB))
            ends.update(stream.read(MIB))
        digest.update(_canonical([file.name, size, ends.hexdigest()]))
    return digest.hexdigest()


def fingerprint_on_disk(folder: Path) -> str | None:
    """Return ``folder_fingerprint``; None where weights are still to be downloaded."""
    try:
        return folder_fingerprint(folder) if weight_files(folder) else None
    except ModelLoadError:  # an index is there, and not all that it names
        return None


def changed_at_load(fingerprint: str, changes: Mapping[str, str]) -> str:
    """Return the fingerprint of a checkpoint loaded otherwise than saved, as quantized; without changes its own."""
    changed = hashlib.sha256(fingerprint.encode() + _canonical(dict(changes))).hexdigest()
    return changed if changes else fingerprint


def memory_fingerprint(model: nn.Module) -> str:
    """Return sha256 over config and every parameter's name, dtype, shape and bytes, for a model built in memory."""
    config: Any = model.config
    digest = hashlib.sha256(_canonical(config.to_dict()))
    for name, parameter in sorted(model.named_parameters()):
        digest.update(_canonical([name, str(parameter.dtype), list(parameter.shape)]))
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


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
