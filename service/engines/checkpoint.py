"""The files of a checkpoint: which are read, whether they hold what their names say, and the
digests over them.

Loads no torch: a bundle of another model is refused before anything of the model is."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from service.engines import places
from service.errors import ModelLoadError

MIB = 1 << 20
# Of the GGUF format: where the number of fields stands, and the types of values, by their numbers.
_COUNT_AT = 16
_TEXT, _LIST = 8, 9
# layouts; bytes
_WHOLE = {4: "I", 5: "i", 10: "Q", 11: "q"}
_OTHER = {0: 1, 1: 1, 2: 2, 3: 2, 6: 4, 7: 1, 12: 8}
_LONGEST, _SHORT_LIST = 1 << 20, 1000
_LENGTH_BYTES = 8  # of the number with which a safetensors file begins: how long its header is
SINGLE = "model.safetensors", "pytorch_model.bin"
# suffixes of files with weights, whatever their names
WEIGHTS = (".safetensors", ".bin", ".pth", ".pt")
ADAPTER = "adapter_config.json"
DESCRIPTIONS = (
    places.CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
)
# Keys that saving, casting or renaming a checkpoint changes, without changing what is computed from
# its weights.
INCIDENTAL = frozenset({"transformers_version", "_name_or_path", "torch_dtype", "dtype"})


def snapshot_of(model: str, revision: str | None) -> Path:
    """Return the folder of what is downloaded of a hub's model, named by the commit.  Gets its
    configuration alone.

    Raises ModelLoadError."""
    from huggingface_hub import hf_hub_download

    offline = not places.reachable(model, revision)
    try:
        config = hf_hub_download(model, places.CONFIG, revision=revision, local_files_only=offline)
    except Exception as error:
        # connections fail in many ways, also by exceptions of the HTTP library in use
        raise ModelLoadError(
            f"the configuration of {model} cannot be loaded: {type(error).__name__}: {error}",
            param="model",
        ) from error
    return Path(config).parent


def check_folder(folder: Path) -> None:
    """Raise ModelLoadError for a file, or a folder without a config or without weights, or with
    something else in a file's place."""
    if not folder.is_dir():
        raise ModelLoadError(f"{folder} is neither a folder nor a GGUF file", param="model")
    if not (folder / places.CONFIG).is_file():
        problem = f"{folder} has no config.json; it is not a transformers model folder"
        raise ModelLoadError(f"{problem}{_instead(folder)}", param="model")
    check_files(folder)
    if not weight_files(folder):
        problem = f"{folder} has no weights; expected {' or '.join(SINGLE)}, or an index of shards"
        raise ModelLoadError(f"{problem}{_instead(folder)}", param="model")


def _instead(folder: Path) -> str:
    """Return what a folder that is no model's has in its stead, and what to name; "" where nothing
    is known of it."""
    files = sorted(file.name for file in folder.iterdir())
    below = sorted(inner.parent.name for inner in folder.glob(f"*/{places.CONFIG}"))
    commits = sorted(
        str(inner.parent.relative_to(folder))
        for inner in folder.glob(f"snapshots/*/{places.CONFIG}")
    )
    packed = [name for name in files if name.lower().endswith(".gguf")]
    weights = [name for name in files if Path(name).suffix in WEIGHTS]
    if ADAPTER in files:
        return (
            "; it holds an adapter: name the model that it belongs to, and this folder as the"
            " adapter"
        )
    if packed:
        return f"; it holds {packed[0]}: name that file"
    if commits:
        return (
            "; it is a model's folder in the hub's cache: name one of its commits, as"
            f" {folder / commits[-1]}"
        )
    if below:
        return f"; name the folder below it, {folder / below[0]}"
    if len(weights) > 1:
        return f"; it holds {weights[0]} and others: download the index that names them, too"
    return f"; it holds {weights[0]}, and a file of that name is not read" if weights else ""


def check_whole(folder: Path) -> None:
    """Raise ModelLoadError for a file of weights that is cut short, or does not begin as its format
    does."""
    for file in weight_files(folder):
        if file.suffix == ".safetensors" and not _is_whole(file):
            raise ModelLoadError(
                f"the weights in {file} are cut short, or are none; download the file again",
                param="model",
            )


def _is_whole(file: Path) -> bool:
    """Return whether a safetensors file has the header that its first bytes promise, and the data
    that it tells of."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES + length:
            return False
        with suppress(ValueError, AttributeError, KeyError, TypeError, RecursionError):
            tensors = json.loads(stream.read(length))
            tensors.pop("__metadata__", None)
            ends = [tensor["data_offsets"][1] for tensor in tensors.values()]
            return bool(size == _LENGTH_BYTES + length + max(ends, default=0))
    return False


def check_files(folder: Path) -> None:
    """Raise ModelLoadError for something else in the place of a file that is read of those that a
    folder has."""
    names = [*DESCRIPTIONS, *(f"{single}.index.json" for single in SINGLE)]
    names += [] if (folder / "tokenizer.json").is_file() else ["tokenizer.model"]
    for file in (folder / name for name in names):
        if file.is_file() and (
            file.suffix == ".json" or file.stat().st_size
        ):  # a text may be empty
            places.check_contents(file)
    for file in weight_files(folder):
        places.check_contents(file)


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files that transformers would load, by name.  Raises ModelLoadError if one
    is missing."""
    for single in SINGLE:
        index = folder / f"{single}.index.json"
        names = _named_in(index) if index.is_file() else [single]
        if (folder / single).is_file():
            if names != [single]:
                raise ModelLoadError(
                    f"{folder} holds {single} beside {index.name}, which names other files; keep"
                    " what is whole: vLLM reads what the index names, transformers does not",
                    param="model",
                )
            return [folder / single]
        if index.is_file():
            files = [folder / name for name in names]
            if missing := [file.name for file in files if not file.is_file()]:
                raise ModelLoadError(
                    f"{index} names {', '.join(missing)}, which is not there; download it again"
                )
            return files
    return []


def _named_in(index: Path) -> list[str]:
    """Return the files that an index of shards names.  Raises ModelLoadError where it names
    none."""
    named = read_json(index).get("weight_map")
    files = list(named.values()) if isinstance(named, dict) else []
    if not files or not all(isinstance(file, str) for file in files):
        raise ModelLoadError(
            f"{index} does not say in which files the weights are (weight_map); download it again",
            param="model",
        )
    return sorted(set(files))


def folder_fingerprint(folder: Path) -> str:
    """Return sha256 over config.json and each weight file's name, size and both ends, a MiB
    each."""
    digest = hashlib.sha256(canonical(read_json(folder / "config.json")))
    for file in weight_files(folder):
        size = file.stat().st_size
        with file.open("rb") as stream:
            ends = hashlib.sha256(stream.read(MIB))
            stream.seek(max(0, size - MIB))
            ends.update(stream.read(MIB))
        digest.update(canonical([file.name, size, ends.hexdigest()]))
    return digest.hexdigest()


def fingerprint_on_disk(folder: Path) -> str | None:
    """Return ``folder_fingerprint``; None where weights are still to be downloaded."""
    try:
        return folder_fingerprint(folder) if weight_files(folder) else None
    except ModelLoadError:  # an index is there, and not all that it names
        return None


def shape_of(folder: Path) -> dict[str, str | int]:
    """Return what a configuration tells of architecture, num_layers and hidden_size, as a bundle's
    manifest has them.

    Raises ModelLoadError."""
    config = read_json(folder / places.CONFIG)
    nested = config.get("text_config")
    text: dict[str, Any] = nested if isinstance(nested, dict) and nested else config
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    told = {
        "architecture": first,
        "num_layers": text.get("num_hidden_layers"),
        "hidden_size": text.get("hidden_size"),
    }
    return {field: value for field, value in told.items() if value is not None}


def gguf_shape(file: Path) -> dict[str, str | int]:
    """Return what the head of a GGUF file tells of num_layers and hidden_size.

    gguf's own reader takes seconds, most of them for the vocabulary; this one ends before it."""
    numbers: dict[str, int] = {}
    with file.open("rb") as stream:

        def number(layout: str) -> int:
            (value,) = struct.unpack(f"<{layout}", stream.read(struct.calcsize(f"<{layout}")))
            return int(value)

        def text() -> str:
            return stream.read(min(number("Q"), _LONGEST)).decode("utf-8", "replace")

        with suppress(struct.error, KeyError):  # cut, or of another version: its reader says so
            stream.seek(_COUNT_AT)
            for _ in range(number("Q")):
                name, kind = text(), number("I")
                items, kind = (1, kind) if kind != _LIST else (-1, number("I"))
                items = number("Q") if items < 0 else items
                if items > _SHORT_LIST:  # the vocabulary
                    break
                for _ in range(items):
                    if kind == _TEXT:
                        text()
                    elif kind in _WHOLE:
                        numbers[name] = number(_WHOLE[kind])
                    else:
                        stream.seek(_OTHER[kind], 1)
    fields = {"block_count": "num_layers", "embedding_length": "hidden_size"}
    by_ending = {name.partition(".")[2]: value for name, value in numbers.items()}
    return {fields[ending]: value for ending, value in by_ending.items() if ending in fields}


def changed_at_load(fingerprint: str, changes: Mapping[str, str]) -> str:
    """Return the fingerprint of a checkpoint loaded otherwise than saved, as quantized; without
    changes its own."""
    changed = hashlib.sha256(fingerprint.encode() + canonical(dict(changes))).hexdigest()
    return changed if changes else fingerprint


def canonical(content: Any) -> bytes:
    """Return what of a configuration is digested: all but the INCIDENTAL keys."""
    return json.dumps(
        _essential(content), sort_keys=True, separators=(",", ":"), default=str
    ).encode()


def _essential(content: Any) -> Any:
    if isinstance(content, dict):
        return {
            str(key): _essential(value) for key, value in content.items() if key not in INCIDENTAL
        }
    if isinstance(content, list | tuple):
        return [_essential(value) for value in content]
    return content


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file.  Raises ModelLoadError."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"{path} cannot be read as JSON ({error}); download the model again"
        ) from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} is not a JSON object; download the model again")
    return content
