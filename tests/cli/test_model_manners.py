"""A model that is not there, or is not the bundle's, is said at once, once, and with the bundle's own."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from huggingface_hub import constants

from probes_store.errors import WrongModel
from probes_store.store import SHIPPED, Store
from service.demo import MODEL_DIR
from service.engines import places
from service.engines.base import EngineOptions
from service.engines.vllm.launch import STAGES, say, stages
from service.errors import ModelLoadError
from service.library.engine import load_engine
from service.progress import progress
from tests.command_line import hallutracer
from tests.local_server import answer, listening
from tests.running import until

ASKED: list[str] = []
COMMIT = "a" * 40


def hub_of_one(request: BaseHTTPRequestHandler, _: bytes) -> None:
    """A hub with one model, one that is gated, and nothing else."""
    ASKED.append(request.path)
    name = request.path.partition("/resolve/")[0].strip("/")
    status, code = {"owner/there": (200, ""), "owner/gated": (403, "GatedRepo")}.get(name, (404, "RepoNotFound"))
    headers = {"ETag": '"1"', "X-Repo-Commit": COMMIT} | ({"X-Error-Code": code} if code else {})
    answer(request, status, b"", **{name.replace("-", "_"): value for name, value in headers.items()})


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


def _point_to(monkeypatch: pytest.MonkeyPatch, place: str) -> str:
    address = f"http://{place}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    return address


@pytest.mark.parametrize("command", [["score", "x"], ["serve"], ["bundle", "verify", "demo"], ["demo", "retrieval"]])
def test_a_path_where_nothing_is_is_named(command: list[str]) -> None:
    done = hallutracer(*command, "--model", "./nope")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"--model: there is no folder or GGUF file ./nope (that is {Path('nope').resolve()})" in done.stderr


def test_a_name_that_is_nearly_a_shipped_model_is_guessed() -> None:
    said = hallutracer("score", "x", "--model", "SmolLM").stderr
    assert "--model: no folder or file is called 'SmolLM' here" in said
    assert "did you mean smollm2?" in said
    assert "did you mean" not in hallutracer("score", "x", "--model", "owner/model").stderr.lower()


def test_a_file_given_as_a_prompt_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n')
    done = hallutracer("score", str(tmp_path / "rows.jsonl"))
    assert done.returncode == 2
    assert f"--input {tmp_path / 'rows.jsonl'}" in done.stderr


def test_the_bundle_is_asked_before_the_hub(online: str) -> None:
    done = hallutracer("score", "x", "--model", "owner/there", "--bundle", "demo")
    assert (done.returncode, ASKED) == (1, [])
    assert "bundle demo:1 is for hallutracer-demo" in done.stderr
    assert "Name the model demo" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_model_that_is_nowhere_is_asked_for_once(online: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "q{n}", "label": {n % 2}}}\n' for n in range(40)))
    arguments = ("--data", str(rows), "--name", "n", "--run-dir", str(tmp_path / "run"), "--store", str(tmp_path))
    done = hallutracer("train", "--model", "owner/nope", *arguments)
    assert (done.returncode, len(ASKED), done.stderr.count("\n")) == (1, 1, 2)  # "40 rows", and why not
    assert f"{online} has no model owner/nope, or it is private" in done.stderr


def test_offline_it_is_said_in_one_line_with_the_bundles_own_model(offline: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        places.reachable("owner/nope", None)
    assert f"owner/nope is no folder or GGUF file here, was not downloaded before, and {offline}" in str(caught.value)
    assert "cannot be reached" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [("owner/gated", "is gated: accept its terms"), ("a b", "neither a folder, a GGUF file nor a name")],
)
def test_other_reasons_are_told_apart(online: str, name: str, said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        places.reachable(name, None)
    ASKED.clear()
    assert [places.reachable("owner/there", None) for _ in range(2)] == [True, True]
    assert len(ASKED) == 1


def test_what_was_downloaded_before_is_used_offline(offline: str, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "models--owner--there"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    shutil.copytree(MODEL_DIR, folder / "snapshots" / COMMIT)
    assert places.reachable("owner/there", None) is False


def test_a_bundle_of_other_weights_is_refused_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("service.engines.transformers.engine.TransformersEngine.load", lambda _: pytest.fail("read"))
    bundle = Store(SHIPPED).load("smollm2")
    with pytest.raises(WrongModel, match="smollm2:1 is for SmolLM2-135M.*Name the model smollm2") as caught:
        load_engine(EngineOptions(model=str(MODEL_DIR)), bundles=[bundle])
    assert "hallutracer-demo has other weights" in str(caught.value)


def test_what_a_starting_worker_says_is_reported_as_it_begins() -> None:
    lines: list[str] = []
    say("nobody listens")
    with stages() as last, progress("loading m", lines.append, last):
        assert last() == ""
        for stage in ("loading the weights", "warming up"):
            say(stage)
            assert last() == stage
            until(lambda stage=stage: lines and f"loading m: {stage} (" in lines[-1], 30)  # type: ignore[misc]
    assert lines[-1].startswith("loading m: done in ")
    assert STAGES not in os.environ
    assert last() == ""
