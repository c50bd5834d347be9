"""A GGUF file as a plain model folder: read by gguf, converted by transformers.

transformers parses the whole file at each call and dequantizes tensor by tensor in float32.  Here
it is parsed once, and dequantized piece by piece straight into the dtype that is saved."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import _type_traits  # the types that it can dequantize
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from service.engines.families import family_of
from service.errors import HalluTracerError, ModelLoadError

PLAIN = frozenset({"F32", "F16", "BF16"})
# numbers dequantized at once: they and what is computed on the way stay in a CPU's cache
PIECE = 1 << 18
_ALONE = threading.Lock()  # held while gguf's functions are replaced


class _Reader(gguf.GGUFReader):
    """gguf's own, on a plain view of the mapped file: a slice of a memmap costs ten of another
    array, and a vocabulary is read slice by slice."""

    @property
    def data(self) -> Any:
        return self._data

    @data.setter
    def data(self, mapped: Any) -> None:
        self._data = mapped.view(np.ndarray)


@dataclass(frozen=True)
class Source:
    """A file that is sound, and what its conversion would forget."""

    file: Path
    reader: Any
    weights: int
    head_dim: int | None  # None: it does not say
    adds_bos: bool | None  # None: it does not say
    adds_eos: bool


def read(file: Path) -> Source:
    """Raise ModelLoadError for a file that is damaged, or whose weights cannot be read here."""
    try:
        reader = _Reader(file)

        def said(name: str) -> Any:
            field = reader.get_field(name)
            return None if field is None else field.contents()

        weights = sum(int(tensor.n_elements) for tensor in reader.tensors)
        # llama.cpp's default for SentencePiece vocabularies is a first token.
        by_default = True if said("tokenizer.ggml.model") == "llama" else None
        adds_bos = said("tokenizer.ggml.add_bos_token")
        adds_eos = bool(said("tokenizer.ggml.add_eos_token"))
        head_dim = said(f"{said('general.architecture')}.attention.key_length")
        shards = int(said("split.count") or 1)
        types = {tensor.tensor_type for tensor in reader.tensors}
    except (OSError, ValueError, KeyError, IndexError, UnicodeDecodeError) as error:
        raise refused(f"{file} is not a sound GGUF file ({error}); download it again") from error
    if shards > 1:
        raise refused(
            f"{file} is one of {shards} parts; merge them: llama-gguf-split --merge {file.name}"
            " whole.gguf"
        )
    if unknown := sorted(
        kind.name for kind in types if kind.name not in PLAIN and kind not in _type_traits
    ):
        raise refused(
            f"{file} has weights of type {unknown[0]}, which are not read here; use Q4_K_M or Q8_0"
        )
    adds_bos = by_default if adds_bos is None else adds_bos
    return Source(
        file, reader, weights, None if head_dim is None else int(head_dim), adds_bos, adds_eos
    )


def refused(message: str) -> ModelLoadError:
    """Return what is raised for a file."""
    return ModelLoadError(message, param="model")


def convert(source: Source, folder: Path) -> None:
    """Write the model and its tokenizer, and keep no memory of them.  Raises ModelLoadError."""
    _write(source, folder)
    _trim()


def _trim() -> None:
    """Give freed memory back: glibc keeps tensors of less than 32 MiB, which would stand beside the
    model's own."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _write(source: Source, folder: Path) -> None:
    try:
        model, tokenizer = _loaded(source)
        settings = model.config.to_dict()
        settings.pop("quantization_config", None)  # refuses to be saved
        with torch.device("meta"):
            plain = type(model)(type(model.config).from_dict(settings))
        plain.load_state_dict(model.state_dict(), assign=True)
        plain.tie_weights()
        plain.generation_config = model.generation_config
    except HalluTracerError:
        raise
    except Exception as error:  # formats raise their own types
        raise refused(
            f"{source.file} cannot be converted: {type(error).__name__}: {error}"
        ) from error
    if source.adds_bos is not None:
        _carry_special_tokens(tokenizer, source.adds_bos, source.adds_eos)
    tokenizer.save_pretrained(folder)
    plain.save_pretrained(folder)


def _loaded(source: Source) -> tuple[Any, Any]:
    name = source.file.name
    arguments: dict[str, Any] = {
        "pretrained_model_name_or_path": str(source.file.parent),
        "gguf_file": name,
    }
    arguments["local_files_only"] = True
    with _helped(source, torch.float16):
        config = AutoConfig.from_pretrained(**arguments)
        if not family_of(config).projection:  # one whose conversion nobody compared
            raise refused(f"{name}: {config.model_type} is not read from GGUF; use its safetensors")
        if source.head_dim is not None and hasattr(config, "head_dim"):
            config.head_dim = source.head_dim  # which the conversion forgets
        tokenizer = AutoTokenizer.from_pretrained(**arguments)
        arguments |= {"config": config, "output_loading_info": True}
        load: Any = AutoModelForCausalLM.from_pretrained
        model, report = load(**arguments, dtype=torch.float16)
    if missing := sorted(report["missing_keys"]):  # which the conversion does not know
        raise refused(
            f"{name}: {config.model_type} is not converted whole, first lacking {missing[0]}"
        )
    if not all(map(_is_finite, model.parameters())):  # beyond float16's range
        del model
        with _helped(source, torch.float32):
            model, _ = load(**arguments, dtype=torch.bfloat16)
    return model, tokenizer


def _is_finite(tensor: torch.Tensor) -> bool:
    """NaN is handed on by ``aminmax``, which takes a fortieth of the time that ``isfinite`` takes
    in float16."""
    return all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor.detach()))


@contextmanager
def _helped(source: Source, dtype: torch.dtype) -> Iterator[None]:
    """Let transformers, which imports gguf's functions as it calls them, find the parsed file and
    faster ones.

    One conversion at a time; where transformers comes to import others, it is as slow as
    without."""

    def reader(path: Any, *rest: Any) -> Any:
        return source.reader if Path(path) == source.file and not rest else _Reader(path, *rest)

    ours: dict[str, Any] = {
        "GGUFReader": reader,
        "dequantize": functools.partial(dequantized, dtype=dtype),
        # Asked for once per module of the model, with the same answer.
        "get_tensor_name_map": functools.cache(gguf.get_tensor_name_map),
    }
    with _ALONE:
        theirs = {name: getattr(gguf, name) for name in ours}
        try:
            for name, function in ours.items():
                setattr(gguf, name, function)
            yield
        finally:
            for name, function in theirs.items():
                setattr(gguf, name, function)


_dequantize = gguf.dequantize


def dequantized(data: Any, kind: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Return a tensor's numbers, those of gguf rounded to ``dtype``.

    Vectors stay float32, as the conversion adds to norms; matrices it only moves."""
    if data.ndim < 2 or kind.name == "F32":
        return _dequantize(data, kind)
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = data.view(np.uint8).reshape(-1, size)
    whole = torch.empty((len(blocks), numbers), dtype=dtype)
    step = max(1, PIECE // numbers)
    for start in range(0, len(blocks), step):
        # As one row: of several, gguf takes sixteen at a time.
        piece = _dequantize(blocks[start : start + step].reshape(1, -1), kind)
        whole[start : start + step] = torch.from_numpy(piece).view(-1, numbers)
    return whole.numpy().reshape(*data.shape[:-1], -1)


def _carry_special_tokens(tokenizer: Any, adds_bos: bool, adds_eos: bool) -> None:
    """Make the converted tokenizer begin and end a text as the file's own does, which the
    conversion forgets."""
    from tokenizers.processors import TemplateProcessing

    ids = tokenizer("a")["input_ids"]
    if (ids[:1] == [tokenizer.bos_token_id], ids[-1:] == [tokenizer.eos_token_id]) == (
        adds_bos,
        adds_eos,
    ):
        return
    if adds_bos and tokenizer.bos_token is None:
        raise refused("the GGUF file asks for a first token and names none")
    parts = [tokenizer.bos_token] * adds_bos + ["$A"] + [tokenizer.eos_token] * adds_eos
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in parts if token != "$A"]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=" ".join(parts), special_tokens=special
    )
    tokenizer.init_kwargs |= {"add_bos_token": adds_bos, "add_eos_token": adds_eos}
