"""Which model and bundles a command loads: the defaults, what is left out, and what is not there,
said once."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
from huggingface_hub import constants

from probes_store.errors import BundleError, WrongModel
from probes_store.manifest import MANIFEST
from probes_store.records import DType
from probes_store.store import SHIPPED, Store
from service.cli.loading import OptionalBundles, bundle_names, chosen_model, load_bundles
from service.cli.loading import load_engine as load_of_command
from service.cli.options import BundleOptions, EngineChoice, UsageError
from service.demo import MODEL_DIR
from service.engines import devices, places
from service.engines.base import EngineOptions
from service.engines.checkpoint import gguf_shape
from service.engines.places import PACKAGED, PackagedModel, sha256_of
from service.engines.vllm.launch import STAGES, say, stages
from service.errors import HalluTracerError, ModelLoadError, UnknownFamily
from service.library import engine as library
from service.library.engine import DEMO, SMOLLM2, default_model, load_engine
from service.library.engine import SHIPPED as OWN
from service.progress import progress
from service.trainer.options import TrainOptions
from tests.command_line import ended, hallutracer, one_line_says
from tests.engines import tiny
from tests.fitting.planted import write_rows
from tests.kit.local_server import answer, listening
from tests.running import until

ASKED: list[str] = []
COMMIT = "a" * 40


def test_a_damaged_bundle_beside_others_is_left_out_and_the_default_never_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(
        SHIPPED / "demo-fused", tmp_path / "demo-fused"
    )  # damaged, in front of the shipped one
    (manifest,) = (tmp_path / "demo-fused").glob(f"*/{MANIFEST}")
    manifest.write_bytes(manifest.read_bytes()[:-10])
    store = Store(tmp_path, fallbacks=[SHIPPED])
    optional = OptionalBundles(["demo-fused"])
    with caplog.at_level(logging.ERROR):
        assert list(load_bundles(store, ["demo", "demo-fused"], optional)) == ["demo"]
    assert "demo-fused is left out" in caplog.text
    assert list(optional.reasons) == ["demo-fused"]
    for names, leave_out in (
        (["demo", "demo-fused"], None),
        (["demo-fused", "demo"], OptionalBundles(["demo"])),
    ):
        with pytest.raises(BundleError):
            load_bundles(store, names, leave_out)


# A command, a further bundle that it is told, and words of the one line that it prints.
NOWHERE = """
score hi | nope | no bundle nope in
try | nope | no bundle nope in
demo retrieval | nope | no bundle nope in
serve --port 0 | nope | no bundle nope in
serve --port 0 | demo:9 | version 9, which is not there
serve --port 0 | demo@nope | demo has no alias nope
serve --port 0 | demo,demo-fused | 'demo,demo-fused'
serve --port 0 | demo@sha256:ab | reference
"""


@pytest.mark.parametrize("row", NOWHERE.strip().splitlines())
def test_a_further_bundle_that_is_nowhere_is_refused_wherever_it_is_named(row: str) -> None:
    """By the variable, whose values a space separates, and by the repeated flag: it is never passed
    over."""
    command, further, words = row.split(" | ")
    for done in (
        hallutracer(*command.split(), HALLUTRACER_BUNDLE=f"demo {further}"),
        hallutracer(*command.split(), "--bundle", "demo", "--bundle", further),
    ):
        assert "listening" not in ended(done, 1, words)
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        "serve --port 0",
        "score hi",
        "try",
        "demo info",
        "demo retrieval",
        "bundle verify demo",
        "bundle show demo",
        "bundle compare demo demo-fused",
    ],
)
def test_a_store_that_is_named_and_is_not_there_is_refused(command: str, tmp_path: Path) -> None:
    missing, file = tmp_path / "prbes", tmp_path / "file"
    file.write_text("")
    words = command.split()
    for store, reason, done in (
        (missing, "there is no folder", hallutracer(*words, "--store", str(missing))),
        (file, "is not a folder", hallutracer(*words, HALLUTRACER_STORE=str(file))),
    ):
        printed = ended(done, 2, "--store", reason, str(store), "leave it out")
        assert "listening" not in printed
    assert not missing.exists()


def test_a_home_without_a_store_is_as_a_fresh_machine(tmp_path: Path) -> None:
    assert hallutracer("demo", "info", HOME=str(tmp_path)).returncode == 0
    with pytest.raises(HalluTracerError, match="there is no folder"):
        library.check_store(tmp_path / "prbes")
    library.check_store("s3://nowhere/probes")  # a URL is asked once something is read


@pytest.mark.parametrize("installed", [True, False])
def test_without_a_model_the_bundle_decides_then_what_is_installed(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackagedModel, "is_installed", installed)
    assert default_model() == (SMOLLM2 if installed else DEMO)
    assert default_model(["demo-fused:1", "smollm2"]) == DEMO
    assert default_model(["smollm2@production"]) == SMOLLM2
    assert default_model(["mine"]) == (SMOLLM2 if installed else DEMO)
    assert bundle_names(None, BundleOptions()) == OWN[default_model()]
    assert bundle_names("demo", BundleOptions()) == OWN[DEMO]
    assert bundle_names(None, BundleOptions(bundle=("mine",))) == ("mine",)
    with pytest.raises(UsageError):
        bundle_names("./mine", BundleOptions())
    assert Path(EngineChoice().options_for(["demo"]).model) == MODEL_DIR
    assert EngineChoice().options_for(["smollm2"]).model == "smollm2"
    assert Path(EngineChoice(model="demo").options_for(["smollm2"]).model) == MODEL_DIR


def test_a_file_that_people_have_is_known_by_its_digest_whatever_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"GGUF" + bytes(100)
    known = (len(content), hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(library, "FILES", {known: ("of-the-file", "another")})
    file, other = tmp_path / "mine.gguf", tmp_path / "other.gguf"
    file.write_bytes(content)
    assert bundle_names(str(file), BundleOptions()) == ("of-the-file", "another")
    assert bundle_names(str(file), BundleOptions(bundle=("named",))) == ("named",)
    read: list[Path] = []
    monkeypatch.setattr(library, "sha256_of", lambda path: read.append(path) or sha256_of(path))
    for bytes_ in (content[:-1] + b"x", content + b"x"):
        other.write_bytes(bytes_)
        with pytest.raises(UsageError, match="no bundle comes with"):
            bundle_names(str(other), BundleOptions())
    assert read == [other]  # a file of another size is not read
    other.write_bytes(content)  # the same size as the first time, other bytes
    assert bundle_names(str(other), BundleOptions()) == ("of-the-file", "another")


def test_a_model_without_a_bundle_is_told_which_of_the_store_fits(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    shutil.copytree(MODEL_DIR, folder)
    # The store at home may hold bundles of the demo model, too.
    fits = r"demo.*:\d+ in .* was trained on it: --bundle \S*demo"
    with pytest.raises(UsageError, match=fits):
        bundle_names(str(folder), BundleOptions())
    (folder / "config.json").write_text(
        (folder / "config.json").read_text().replace("{", '{"other": 1,', 1)
    )
    with pytest.raises(UsageError) as caught:
        bundle_names(str(folder), BundleOptions())
    assert "was trained on" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "words", "unwanted"),
    [
        (
            "Qwen/Qwen2.5-7B-Instruct",
            ("hf download Qwen/Qwen2.5-7B-Instruct)", "name its folder"),
            "GGUF",
        ),
        (
            "Qwen/Qwen2.5-Coder-1.5B-Instruct",
            ("hf download", "'hallutracer bundle show qwen2.5-coder-1.5b'"),
            "mean",
        ),
        (
            "qwen2.5-coder-1.5b",
            ("no folder or file is called", "'hallutracer bundle show qwen2.5-coder-1.5b'"),
            "hf",
        ),
        ("FOLDER", ("no bundle comes with FOLDER",), "hf download"),
    ],
)
def test_a_model_without_a_bundle_gets_one_sentence_that_says_what_to_do(
    model: str, words: tuple[str, ...], unwanted: str, tmp_path: Path
) -> None:
    named = model.replace("FOLDER", str(tmp_path))
    if "/" in named:
        words = (*words, f"hallutracer train --model {named})")
    words = tuple(word.replace("FOLDER", str(tmp_path)) for word in words)
    assert unwanted not in one_line_says(f"serve --model {named}", 2, *words)


def test_every_shipped_model_has_its_bundles_and_make_run_fetches_the_right_package() -> None:
    names = {name for bundles in (*OWN.values(), *library.FILES.values()) for name in bundles}
    assert {path.name for path in SHIPPED.iterdir() if path.is_dir()} == names
    pinned = f"{PACKAGED[SMOLLM2].package}=={PACKAGED[SMOLLM2].version}"
    assert f"SMOLLM2 := {pinned}\n" in (Path(__file__).parents[2] / "Makefile").read_text()


# models of the hub


def hub_of_one(request: BaseHTTPRequestHandler, _: bytes) -> None:
    """A hub with one model, one that is gated, and nothing else."""
    if (
        "/resolve/" in request.path
    ):  # the hub's library asks for a list of its own once in a process
        ASKED.append(request.path)
    name = request.path.partition("/resolve/")[0].strip("/")
    status, code = {"owner/there": (200, ""), "owner/gated": (403, "GatedRepo")}.get(
        name, (404, "RepoNotFound")
    )
    error = {"X_Error_Code": code} if code else {}
    answer(request, status, b"", ETag='"1"', X_Repo_Commit=COMMIT, **error)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing downloaded, nothing remembered."""
    ASKED.clear()
    places.reachable.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield
    places.reachable.cache_clear()


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with listening(hub_of_one) as address:
        yield _point_to(monkeypatch, address)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return _point_to(monkeypatch, f"127.0.0.1:{free.getsockname()[1]}")


def _point_to(monkeypatch: pytest.MonkeyPatch, host: str) -> str:
    address = f"http://{host}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        address + "/{repo_id}/resolve/{revision}/{filename}",
    )
    return address


@pytest.mark.parametrize(
    ("command", "word"),
    [
        *(
            (
                f"{command} --model ./nope",
                f"there is no folder or GGUF file ./nope (that is {Path('nope').resolve()})",
            )
            for command in ("score x", "serve", "bundle verify demo", "demo retrieval")
        ),
        ("score x --model SmolLM", "no folder or file is called 'SmolLM' here"),
        ("score x --model SmolLM", "did you mean smollm2?"),
        ("score ROWS", "--input ROWS"),
    ],
)
def test_what_is_not_there_is_named_at_once(command: str, word: str, tmp_path: Path) -> None:
    (rows := tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n')
    done = hallutracer(*command.replace("ROWS", str(rows)).split())
    ended(done, 2, word.replace("ROWS", str(rows)))
    assert done.stderr.count("\n") == 1


def test_a_name_of_the_hub_is_not_taken_for_a_misspelt_one() -> None:
    error = hallutracer("score", "x", "--model", "owner/model").stderr
    assert "did you mean" not in error.lower()


def test_the_bundle_is_asked_before_the_hub(online: str) -> None:
    words = "bundle demo:1 is for hallutracer-demo", "Name the model demo"
    one_line_says("score x --model owner/there --bundle demo", 1, *words)
    assert ASKED == []


def test_a_model_that_is_nowhere_is_asked_for_once(online: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"q{n}", "label": n % 2} for n in range(40)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    command = f"train --model owner/nope --data {data} --name n --store {tmp_path}"
    done = hallutracer(*command.split(), "--run-dir", str(tmp_path / "run"))
    ended(done, 1, f"{online} has no model owner/nope, or it is private")
    assert (len(ASKED), done.stderr.count("\n")) == (1, 2)  # "40 rows", and why not


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("owner/gated", "is gated: accept its terms"),
        ("a b", "neither a folder, a GGUF file nor a name"),
    ],
)
def test_other_reasons_are_told_apart_and_an_answer_is_remembered(
    online: str, name: str, message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        places.reachable(name, None)
    ASKED.clear()
    assert [places.reachable("owner/there", None) for _ in range(2)] == [True, True]
    assert len(ASKED) == 1


def test_offline_what_was_downloaded_before_is_used_and_else_it_is_said_in_one_line(
    offline: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        places.reachable("owner/nope", None)
    for words in (
        f"owner/nope is no folder or GGUF file here, was not downloaded before, and {offline}",
        "cannot be reached",
        "(hf download owner/nope --local-dir FOLDER) and give that folder",
    ):
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    folder = tmp_path / "cache" / "models--owner--there"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    shutil.copytree(MODEL_DIR, folder / "snapshots" / COMMIT)
    assert places.reachable("owner/there", None) is False


def test_a_bundle_of_other_weights_is_refused_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "service.engines.transformers.engine.TransformersEngine.load", lambda _: pytest.fail("read")
    )
    bundle = Store(SHIPPED).load("smollm2")
    with pytest.raises(
        WrongModel, match="smollm2:1 is for SmolLM2-135M.*Name the model smollm2"
    ) as caught:
        load_engine(EngineOptions(model=str(MODEL_DIR)), bundles=[bundle])
    assert "hallutracer-demo has other weights" in str(caught.value)


def test_a_download_that_ended_early_is_told_as_that_and_not_as_another_model(
    tmp_path: Path,
) -> None:
    folder = Path(shutil.copytree(MODEL_DIR, tmp_path / "model"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    for name in ("demo", "smollm2"):
        with pytest.raises(ModelLoadError, match="cut short.*download the file again"):
            load_engine(EngineOptions(model=str(folder)), bundles=[Store(SHIPPED).load(name)])


REFUSED = """
import sys, hallutracer_start
for command in COMMANDS:
    sys.argv = ["hallutracer", *command.split()]
    try:
        hallutracer_start.main()
    except SystemExit as end:
        heavy = [name for name in ("torch", "transformers", "vllm") if name in sys.modules]
        print(end.code, heavy, flush=True)
"""


def test_a_bundle_of_another_model_is_refused_before_anything_is_imported_for_it(
    tmp_path: Path,
) -> None:
    """By whatever a command is given of the model: a folder, a GGUF file, what was downloaded,
    vLLM's checkpoint."""
    config = json.loads((MODEL_DIR / "config.json").read_text())
    folder, other, heads = tmp_path / "mine", tmp_path / "another", tmp_path / "mine.gguf"
    shutil.copytree(MODEL_DIR, folder)
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 7.0}))
    shutil.copytree(MODEL_DIR, other)
    (other / "config.json").write_text(json.dumps(config | {"architectures": ["OtherForCausalLM"]}))
    write_head(heads, {"llama.block_count": 8, "llama.embedding_length": 4096})
    commands = [
        *(
            f"{command} --model {folder}"
            for command in (
                "score hi --bundle demo",
                "bundle verify demo",
                "try --bundle demo",
                "serve --port 0 --bundle demo",
            )
        ),
        f"score hi --bundle demo --model {heads}",
        f"score hi --bundle demo --engine vllm --model {other}",
    ]
    code = REFUSED.replace("COMMANDS", repr(commands))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"HALLUTRACER_CACHE": str(tmp_path / "cache")},
    )
    ends = [line for line in done.stdout.splitlines() if line[:1] == "1"]
    assert ends == ["1 []"] * len(commands), done.stderr
    assert done.stderr.count("error: bundle demo:1 is for hallutracer-demo: ") == len(commands), (
        done.stderr
    )
    assert "listening" not in done.stdout


def test_a_model_is_compared_with_its_bundle_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, bundle = list[str](), Store(SHIPPED).load("demo")
    monkeypatch.setattr(
        library, "refuse_another_model", lambda options, _: compared.append(options.model)
    )
    monkeypatch.setattr(library, "_transformers", lambda options, *_: options)
    choice = EngineChoice(model="demo")
    for chosen in (None, chosen_model(choice, [bundle])):
        compared.clear()
        load_of_command(choice, bundles=[bundle], chosen=chosen)
        assert compared == ([] if chosen else [str(MODEL_DIR)])
    assert load_engine(EngineOptions(model=str(MODEL_DIR)), bundles=[bundle])
    assert compared == [str(MODEL_DIR)]


@pytest.mark.parametrize(
    ("trained", "asked", "flags", "served"),
    [
        ("bfloat16", "auto", "fma avx512_bf16", "bfloat16"),
        ("bfloat16", "auto", "asimd bf16 fphp", "bfloat16"),
        ("bfloat16", "auto", "fma avx512f", "auto"),
        ("bfloat16", "auto", None, "auto"),
        ("bfloat16", "float32", "amx_bf16", "float32"),
        ("float16", "auto", "amx_bf16", "auto"),
        ("float32", "auto", "amx_bf16", "auto"),
    ],
)
def test_a_bundle_is_read_in_the_dtype_of_its_training_where_the_cpu_multiplies_it(
    trained: str,
    asked: str,
    flags: str | None,
    served: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = tmp_path / "cpuinfo"
    if flags is not None:
        cpu.write_text(f"processor : 0\nflags : {flags}\n", encoding="utf-8")
    native = devices.multiplies_bfloat16
    monkeypatch.setattr(devices, "multiplies_bfloat16", lambda: native(cpu))
    monkeypatch.setattr(library, "refuse_another_model", lambda *_: None)
    monkeypatch.setattr(library, "_transformers", lambda options, *_: options)
    shipped = Store(SHIPPED).load("demo")
    bundle = replace(shipped, manifest=replace(shipped.manifest, dtype=cast(DType, trained)))
    options = EngineOptions(model=str(MODEL_DIR), dtype=asked, device="cpu")
    loaded = cast(Any, load_engine(options, bundles=[bundle]))
    assert loaded.dtype == served


def write_head(file: Path, numbers: dict[str, int]) -> None:
    """Write the head of a GGUF file: numbers, behind a short list and before the vocabulary."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    fields = [text("general.languages") + struct.pack("<IIQ", 9, 8, 1) + text("en")]
    fields += [text("general.weight") + struct.pack("<If", 6, 0.5)]
    fields += [text(name) + struct.pack("<II", 4, value) for name, value in numbers.items()]
    fields += [text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 50_000)]
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields) + 1) + b"".join(fields))


def test_the_head_of_a_gguf_file_is_read_up_to_the_vocabulary_and_what_is_none_tells_nothing(
    tmp_path: Path,
) -> None:
    file = tmp_path / "m.gguf"
    write_head(file, {"llama.block_count": 8, "llama.embedding_length": 64, "llama.vocab_size": 9})
    assert gguf_shape(file) == {"num_layers": 8, "hidden_size": 64}
    whole = file.read_bytes()
    for cut in range(0, len(whole), 7):
        file.write_bytes(whole[:cut])
        assert gguf_shape(file).items() <= {"num_layers": 8, "hidden_size": 64}.items()
    file.write_bytes(b"GGUF" + bytes([255]) * 100)
    assert gguf_shape(file) == {}


def test_what_a_starting_worker_says_is_reported_as_it_begins() -> None:
    lines: list[str] = []
    say("nobody listens")
    with stages() as last, progress("loading m", lines.append, last):
        assert last() == ""
        for stage in ("loading the weights", "warming up"):
            say(stage)
            assert last() == stage
            report = f"loading m: {stage} ("
            until(lambda report=report: lines and report in lines[-1], 30)  # type: ignore[misc]
    assert lines[-1].startswith("loading m: done in ")
    assert STAGES not in os.environ
    assert last() == ""


def test_training_on_a_family_without_heads_ends_before_the_weights_and_names_the_option(
    tmp_path: Path,
) -> None:
    config = {"model_type": "opt", "architectures": ["OPTForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    tiny.tokenizer().save_pretrained(tmp_path)
    for engine in ("transformers", "vllm"):
        if engine == "vllm" and find_spec("vllm") is None:
            continue
        with pytest.raises(UnknownFamily, match="--readout residual_stream"):
            load_engine(
                EngineOptions(model=str(tmp_path), engine=engine),
                rows=[TrainOptions(name="a").site],
            )
