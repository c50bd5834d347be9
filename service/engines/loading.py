"""A model and its tokenizer from engine options, and the digest over a model that was built in
memory."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)

from probes_store.records import TemplateArgument
from service.engines import checkpoint, places
from service.engines.adapters import config_of
from service.engines.base import EngineOptions, ModelIdentity
from service.engines.checks import Tokens
from service.engines.devices import choose_device
from service.engines.families import check_sites, text_config
from service.engines.reading import read_for
from service.errors import ModelLoadError
from service.readout import Geometry, Site

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Files of which a tokenizer is made: the fast one's own first.
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "qwen.tiktoken",
)
MOST_TOLD = 300  # characters of a library's message that an error repeats
EXTRA_OPTIONS = frozenset({"attn_implementation"})


@dataclass(frozen=True)
class ModelFiles:
    """A model before its weights are read.  ``loader_arguments`` are for transformers'
    ``from_pretrained``."""

    loader_arguments: dict[str, Any]
    config: Any
    tokenizer: Any
    name: str
    folder: Path
    revision: str = "local"  # the hub's commit, for a name of the hub

    def identity(
        self,
        tokens: Tokens,
        *,
        fingerprint: str,
        geometry: Geometry,
        dtype: object,
        max_tokens: int,
        arguments: Mapping[str, TemplateArgument] | None,
    ) -> ModelIdentity:
        """Return what identifies the model, with what an engine knows of it; ``arguments``: of the
        chat template."""
        return ModelIdentity(
            model=self.name,
            revision=self.revision,
            fingerprint=fingerprint,
            architecture=str((self.config.architectures or [type(self.config).__name__])[0]),
            model_type=str(self.config.model_type),
            tokenizer=tokens.digest,
            chat_template=tokens.chat_template_digest,
            geometry=geometry,
            dtype=str(dtype).removeprefix("torch."),
            max_tokens=max_tokens,
            template_arguments=arguments,
        )


def find_model_files(options: EngineOptions) -> ModelFiles:
    """Return what a folder, GGUF file, package or hub has but weights.  Raises ModelLoadError."""
    local, offline = places.place_of(options.model), True
    if local is not None:
        if options.revision is not None:
            raise ModelLoadError(
                f"{local} is on disk, without revisions; leave it out", param="revision"
            )
        local = places.folder_of(local) if places.is_gguf(local) else local
        checkpoint.check_folder(local)
    else:
        # Where the hub cannot be reached, what was downloaded before is read without asking for
        # news of it.
        offline = not places.reachable(options.model, options.revision)
    arguments: dict[str, Any] = {"pretrained_model_name_or_path": str(local or options.model)}
    arguments |= {"local_files_only": offline, "trust_remote_code": options.trust_remote_code}
    folder = local
    if folder is None:
        folder = checkpoint.snapshot_of(options.model, options.revision)
        # Of one commit, though the branch may move while the files are downloaded.
        arguments["revision"] = folder.name
    config = _attempt(
        "configuration", options, lambda: AutoConfig.from_pretrained(**arguments), folder
    )
    tokenizer = _attempt(
        "tokenizer", options, lambda: AutoTokenizer.from_pretrained(**arguments), folder
    )
    if local is not None:
        # The folder's name without its path, because the name is sent to clients.
        return ModelFiles(arguments, config, tokenizer, local.resolve().name, local)
    return ModelFiles(arguments, config, tokenizer, options.model, folder, folder.name)


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
    arguments = (
        files.loader_arguments | {"config": files.config, "output_loading_info": True} | attention
    )
    dtype = choose_dtype(options.dtype, files.config, device)
    arguments |= {"dtype": dtype, **options.extra}
    with read_for(files.config, dtype, device):
        loaded = loader(files.config).from_pretrained
        model, report = _attempt("weights", options, lambda: loaded(**arguments), files.folder)
    if getattr(model, "_hf_peft_config_loaded", False):  # transformers does so by itself
        problem = f"{options.model} holds an adapter beside its weights"
        raise ModelLoadError(f"{problem}: move it out, and name it as the adapter", param="model")
    if missing := sorted(report["missing_keys"]):
        problem = (
            f"the checkpoint of {options.model} lacks {len(missing)} parameter(s), first"
            f" {missing[0]}"
        )
        raise ModelLoadError(f"{problem}; download the model again", param="model")
    if options.adapter is not None:
        _load_adapter(model, options.adapter, options)
    return _attempt("weights", options, lambda: model.to(device)), files


def _load_adapter(model: Any, folder: str, options: EngineOptions) -> None:
    """Put an adapter into the model's layers.  Raises ModelLoadError without PEFT, or where weights
    do not fit."""
    config_of(folder)
    if importlib.util.find_spec("peft") is None:
        raise ModelLoadError(
            "an adapter needs PEFT: pip install 'hallutracer[lora]'", param="adapter"
        )
    resolved = str(Path(folder).resolve())
    report = _attempt("adapter", options, lambda: model.load_adapter(resolved))
    if wrong := sorted(
        {*report.missing_keys, *report.unexpected_keys, *map(str, report.mismatched_keys)}
    ):
        raise ModelLoadError(
            f"the adapter {folder} is another model's: {len(wrong)} of its weights do not fit"
            f" {options.model}, first {wrong[0]}; name its base model",
            param="adapter",
        )


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
        ("max_batch_tokens", tokens is None or tokens >= 1, "be at least 1"),
    ):
        if not valid:
            raise ModelLoadError(
                f"{name} is {getattr(options, name)!r}; it must {expected}", param=name
            )
    if unknown:
        raise ModelLoadError(
            f"the transformers engine has no option {', '.join(unknown)}; it takes"
            f" {', '.join(EXTRA_OPTIONS)}",
            param="extra",
        )


def choose_dtype(dtype: str, config: Any, device: torch.device) -> torch.dtype:
    """Return the dtype; ``auto`` is float32 on CPU, the checkpoint's own on CUDA.  Raises
    ModelLoadError."""
    if dtype != "auto":
        return DTYPES[dtype]
    if device.type == "cpu":
        return torch.float32
    own: torch.dtype = (
        getattr(config, "dtype", None)
        or getattr(text_config(config), "dtype", None)
        or torch.float32
    )
    if own not in DTYPES.values():
        raise ModelLoadError(
            f"the checkpoint's dtype {own} is not supported; set dtype to bfloat16", param="dtype"
        )
    return own


def _attempt(
    what: str, options: EngineOptions, action: Callable[[], Any], folder: Path | None = None
) -> Any:
    """Return what the action does.  Raises ModelLoadError, of a file in ``folder`` that is none in
    better words."""
    try:
        return action()
    except Exception as error:  # file formats raise their own types (safetensors, tokenizers)
        if folder is not None:
            checkpoint.check_files(folder)
            checkpoint.check_whole(folder)
            if what == "tokenizer" and not any((folder / name).is_file() for name in TOKENIZERS):
                raise ModelLoadError(
                    f"{folder} has no tokenizer; expected {TOKENIZERS[0]}, as it lies beside the"
                    " model's own weights",
                    param="model",
                ) from None
        told = str(error).lower()
        full = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if full or "out of memory" in told or "can't allocate memory" in told:
            message = (
                f"{options.model} does not fit into memory on device {options.device}; use dtype"
                " bfloat16"
            )
        else:
            message = (
                f"the {what} of {options.model} cannot be loaded: {type(error).__name__}:"
                f" {_beginning(str(error))}"
            )
        raise ModelLoadError(message, param="model") from error


def _beginning(told: str) -> str:
    """Return the first paragraph of a library's message in one line; further ones list classes and
    its own options."""
    first = " ".join(told.strip().split("\n\n")[0].split())
    return first if len(first) <= MOST_TOLD else f"{first[:MOST_TOLD]} .."


def memory_fingerprint(model: nn.Module) -> str:
    """Return sha256 over config and every parameter's name, dtype, shape and bytes, for a model
    built in memory."""
    config: Any = model.config
    digest = hashlib.sha256(checkpoint.canonical(config.to_dict()))
    for name, parameter in sorted(model.named_parameters()):
        digest.update(checkpoint.canonical([name, str(parameter.dtype), list(parameter.shape)]))
        digest.update(
            parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()
