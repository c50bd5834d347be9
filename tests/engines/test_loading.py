"""Loading from a folder: what is wrong is named, and the identity is stable."""

from __future__ import annotations

import codecs
import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import modeling_utils

from service.engines import checkpoint, loading, places, reading
from service.engines.base import BatchEngine
from service.engines.checkpoint import folder_fingerprint
from service.engines.loading import memory_fingerprint
from service.engines.transformers.engine import TransformersEngine
from service.errors import ModelLoadError, UnknownFamily
from service.readout import Site
from tests.engines import tiny

# What is wrong with a model, and the words that say so.
TABLES = json.loads(Path(__file__).with_name("refused_models.json").read_text(encoding="utf-8"))
load = partial(tiny.load_engine, device="cpu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.model("llama").save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def test_a_loaded_model_reads_what_the_one_in_memory_reads(saved: Path):
    engine: BatchEngine = load(saved)
    memory = tiny.shared_engine("llama")
    prompts, probe = tiny.prompts([5, 12]), tiny.probes(memory.identity.geometry)
    both = (tiny.trajectories(each, prompts, probe) for each in (engine, memory))
    np.testing.assert_allclose(*both, rtol=0, atol=1e-6)
    identity, fingerprint = memory.identity, folder_fingerprint(saved)
    assert engine.identity == replace(
        identity, model=saved.name, revision="local", fingerprint=fingerprint
    )
    assert (identity.architecture, identity.model_type) == ("LlamaForCausalLM", "llama")
    assert (identity.dtype, identity.max_tokens) == ("float32", tiny.CONTEXT)
    assert engine.tokenize("x") == memory.tokenize("x")
    assert not any(parameter.requires_grad for parameter in tiny.modules(engine).model.parameters())


def test_the_dtype_and_the_attention_are_those_asked_for(saved: Path) -> None:
    for dtype in ("bfloat16", "float16"):
        identity = load(saved, dtype=dtype).identity
        assert (identity.dtype, identity.fingerprint) == (dtype, folder_fingerprint(saved))
    engine = load(saved, extra={"attn_implementation": "eager"})
    assert tiny.modules(engine).model.config._attn_implementation == "eager"


def test_weights_that_are_converted_are_read_and_not_mapped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mapped, the file's pages count to the memory that loading takes, beside the weights in
    float32."""
    # As it is put back below, it is the one that counts.
    monkeypatch.setattr(modeling_utils, "safe_open", reading.safe_open)
    opened = Mock(wraps=reading.safe_open)
    monkeypatch.setattr(reading, "safe_open", opened)
    half = tiny.model("llama").half()
    half.save_pretrained(folder)
    engine = load(folder)
    for name, weight in tiny.modules(engine).model.named_parameters():
        assert torch.equal(weight, half.get_parameter(name).float()), name
    load(folder, dtype="float16")
    assert modeling_utils.safe_open is opened
    assert [call.kwargs["backend"] for call in opened.mock_calls] == ["pread", "mmap"]


def test_a_fingerprint_sees_config_weights_and_their_size_and_not_where_and_by_what_it_was_saved(
    saved: Path, folder: Path
) -> None:
    original = folder_fingerprint(saved)
    written = folder / "config.json"
    weights = folder / "model.safetensors"
    config, content = json.loads(written.read_text()), bytearray(weights.read_bytes())
    incidental = dict.fromkeys(
        ("transformers_version", "_name_or_path", "dtype", "torch_dtype"), "x"
    )
    written.write_text(json.dumps(config | incidental, indent=7))
    assert folder_fingerprint(folder) == original
    written.write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    fingerprints = {folder_fingerprint(folder)}
    written.write_text(json.dumps(config))
    weights.write_bytes(content + b"\0")
    fingerprints.add(folder_fingerprint(folder))
    content[-1] ^= 1
    weights.write_bytes(content)
    assert len({original, folder_fingerprint(folder)} | fingerprints) == 4


def test_the_fingerprint_in_memory_follows_every_parameter():
    model = tiny.model("llama")
    original = memory_fingerprint(model)
    assert original == memory_fingerprint(tiny.model("llama"))
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-3
    assert memory_fingerprint(model) != original
    assert memory_fingerprint(tiny.model("llama").bfloat16()) != original


def test_a_hub_name_is_no_path() -> None:
    assert places.looks_like_path("")
    assert not places.looks_like_path("owner/model")


@pytest.mark.parametrize(("option", "bad"), TABLES["options"])
def test_an_option_that_is_none_is_named(saved: Path, option: str, bad: Any) -> None:
    with pytest.raises(ModelLoadError) as caught:
        tiny.load_engine(saved, **{option: bad})
    assert caught.value.param == option


@pytest.mark.parametrize(("file", "content", "cause"), TABLES["damaged"])
def test_a_damaged_folder_is_refused_with_the_cause(
    folder: Path, file: str, content: str | None, cause: str
) -> None:
    for damaged in folder.glob(file):
        damaged.unlink() if content is None else damaged.write_text(content)
    with pytest.raises(ModelLoadError, match=cause):
        load(folder)


def test_a_missing_parameter_is_not_filled_with_noise_and_a_family_without_heads_reads_no_weights(
    folder: Path,
) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.o_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"layers\.1\.self_attn\.o_proj"):
        load(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"model_type": "opt", "architectures": ["OPTForCausalLM"]})
    )
    (folder / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(UnknownFamily, match="'opt' is read at residual_stream only"):
        tiny.load_engine(folder, [Site.ATTENTION_HEAD])


def test_out_of_memory_is_told_apart(saved: Path, monkeypatch: pytest.MonkeyPatch):
    full = Mock(side_effect=torch.OutOfMemoryError("Tried to allocate 9 GiB"))
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(ModelLoadError, match="does not fit into memory"):
        load(saved)


def test_auto_dtype_is_float32_on_cpu_and_the_checkpoints_own_elsewhere():
    config = tiny.CONFIGS["llama"]()
    config.dtype = torch.bfloat16
    assert loading.choose_dtype("auto", config, torch.device("cpu")) is torch.float32
    assert loading.choose_dtype("auto", config, torch.device("cuda")) is torch.bfloat16
    assert loading.choose_dtype("float16", config, torch.device("cuda")) is torch.float16
    config.dtype = torch.float64
    with pytest.raises(ModelLoadError, match="float64 is not supported"):
        loading.choose_dtype("auto", config, torch.device("cuda"))


def test_a_config_without_a_context_length_is_refused():
    model = tiny.model("llama")
    model.config.max_position_embeddings = 0
    with pytest.raises(ModelLoadError, match="max_position_embeddings"):
        TransformersEngine(model, tiny.tokenizer())


# files that are not what their names say

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 4223008\n"
)
PAGE = b"\n<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n"
LISTING = b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>AccessDenied</Code></Error>'
FOREIGN = [
    (POINTER, "is a Git LFS pointer.*git lfs pull"),
    (PAGE, "holds a web page"),
    (LISTING, "holds a web page"),
    (PAGE.lower(), "holds a web page"),
    (b"", "is empty"),
]


MARKED = [
    (mark + b"{}", "begins with a byte order mark.*as UTF-8 without")
    for mark in (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
]
TEXTS = ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
FILES = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
SHARDED = ["model.safetensors.index.json", "part-1.safetensors"]
GGUF = ["model.gguf", "weights"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (name, *foreign)
        for names, contents in (((*FILES, *SHARDED, *GGUF), FOREIGN), (TEXTS, MARKED))
        for name in names
        for foreign in contents
    ],
)
def test_what_is_not_what_its_name_says_is_named_before_it_is_parsed(
    folder: Path, name: str, content: bytes, words: str
) -> None:
    if name in SHARDED:
        sharded(folder)
    file = folder / name
    file.write_bytes(content)
    with pytest.raises(ModelLoadError, match=words) as caught:
        places.place_of(str(file)) if name in GGUF else load(folder)
    assert f"{file} " in caught.value.message
    assert caught.value.param == "model"


def test_what_is_not_read_may_be_a_pointer(folder: Path) -> None:
    for name in ("pytorch_model.bin", "tokenizer.model", "model.onnx", "flax_model.msgpack"):
        (folder / name).write_bytes(POINTER)
    load(folder)


def sharded(folder: Path) -> Path:
    """The folder's weights as two shards and an index; return the index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    file_of = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(names)}
    for file in set(file_of.values()):
        part = {name: tensors[name] for name in names if file_of[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    return index


def test_a_fingerprint_reads_every_shard(folder: Path) -> None:
    sharded(folder)
    whole, shard = folder_fingerprint(folder), folder / "part-1.safetensors"
    assert load(folder).identity.fingerprint == whole
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert folder_fingerprint(folder) != whole
    shard.unlink()
    with pytest.raises(ModelLoadError, match=shard.name):
        load(folder)


def test_a_single_file_beside_an_index_of_others_is_refused_and_one_that_it_names_is_not(
    folder: Path,
) -> None:
    stray = (folder / "model.safetensors").read_bytes()
    index = sharded(folder)
    whole = load(folder).identity.fingerprint
    # Beside safetensors neither engine reads it.
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    assert load(folder).identity.fingerprint == whole
    (folder / "model.safetensors").write_bytes(stray)
    beside = r"model\.safetensors beside .*index\.json, which names other files"
    with pytest.raises(ModelLoadError, match=beside):
        load(folder)
    names = load_file(folder / "model.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    load(folder)


@pytest.mark.parametrize(
    "content", [{}, {"weight_map": {}}, {"weight_map": ["a"]}, {"weight_map": {"a": 1}}]
)
def test_an_index_that_names_no_files_is_refused(folder: Path, content: Any) -> None:
    sharded(folder).write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match="index.json does not say in which files the weights"):
        checkpoint.check_folder(folder)


@pytest.mark.parametrize(("files", "words"), TABLES["folders"])
def test_a_folder_that_is_no_model_s_tells_what_to_name(
    tmp_path: Path, files: str, words: str
) -> None:
    for file in files.split():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    if (config := tmp_path / "config.json").exists():
        config.write_text("{}")
    with pytest.raises(ModelLoadError, match=words):
        checkpoint.check_folder(tmp_path)


@pytest.mark.parametrize(("model", "words"), TABLES["models"])
def test_what_is_no_model_tells_what_to_name(folder: Path, model: str, words: str) -> None:
    (folder / "rows.csv").write_text("prompt")
    with pytest.raises(ModelLoadError, match=words.format(folder=folder)):
        load(model.format(folder=folder))


def test_weights_that_are_cut_short_or_none_are_named(folder: Path) -> None:
    sharded(folder)
    part = folder / "part-1.safetensors"
    whole = part.read_bytes()
    checkpoint.check_whole(folder)
    for content in (whole[:-9], whole[:100], b"Access to this model is restricted.", whole + b"\0"):
        part.write_bytes(content)
        with pytest.raises(ModelLoadError, match="weights in .*part-1.safetensors are cut short"):
            load(folder)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "newest"}, "does not recognize this architecture"),
        (
            {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
            "Unrecognized configuration class",
        ),
    ],
)
def test_what_a_library_tells_is_one_line(folder: Path, config: Any, words: str) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=words) as caught:
        load(folder)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 500
