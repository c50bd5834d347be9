"""A model by its hub name: what ``train`` publishes for it is scored, served, verified and loaded
by that name."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from huggingface_hub import constants, hf_api
from safetensors.torch import load_file, save

import hallutracer as ht
from probes_store.errors import WrongModel, WrongRevision
from probes_store.store import Store
from service.api.app import create_app
from service.demo import MODEL_DIR
from service.demo.questions import questions
from service.engines import loading, places
from service.engines.base import EngineOptions
from service.errors import ModelLoadError
from service.library.engine import load_engine
from service.scoring import Scorer
from service.serving.service import Service
from service.settings import ServiceSettings
from service.trainer.new_rows import draft_of
from tests.command_line import ended, hallutracer
from tests.engines import test_gguf
from tests.fitting.planted import write_rows
from tests.kit.hub_stand_in import Hub, hub_stand_in
from tests.running import until
from tests.serve_process import ServeProcess

NAME, SHARDED = "acme/tiny", "acme/sharded"
QUIET: dict[str, Any] = {"report": lambda line: None}
QUESTION = "What is the capital of Italy?"
USER, BRIEF = {"role": "user", "content": QUESTION}, {"role": "system", "content": "Be brief."}


def sharded() -> dict[str, bytes]:
    """The demo model in two files and their index."""
    tensors, file_of = load_file(MODEL_DIR / "model.safetensors"), dict[str, str]()
    files = {
        path.name: path.read_bytes()
        for path in MODEL_DIR.iterdir()
        if path.suffix != ".safetensors"
    }
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        files[file] = save({name: tensors[name] for name in names}, metadata={"format": "pt"})
        file_of |= dict.fromkeys(names, file)
    files["model.safetensors.index.json"] = json.dumps(
        {"metadata": {}, "weight_map": file_of}
    ).encode()
    return files


@pytest.fixture(scope="module")
def plain() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in MODEL_DIR.iterdir()}


@pytest.fixture(scope="module", autouse=True)
def hub(tmp_path_factory: pytest.TempPathFactory, plain: dict[str, bytes]) -> Iterator[Hub]:
    """A hub with the demo model, whole and in shards; nothing of it was downloaded before."""
    with hub_stand_in() as running, pytest.MonkeyPatch.context() as patch:
        running.repository(NAME, plain)
        running.repository(SHARDED, sharded())
        patch.setattr(constants, "ENDPOINT", running.url)
        # Clients keep the endpoint of their making: that of huggingface_hub, that of transformers.
        patch.setattr(hf_api.api, "endpoint", running.url)
        patch.setattr("transformers.utils.hub._hf_api", None, raising=False)
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        places.reachable.cache_clear()
        yield running
    places.reachable.cache_clear()


@pytest.fixture
def again() -> Iterator[None]:
    """What a new process knows of the hub: nothing."""
    places.reachable.cache_clear()
    yield
    places.reachable.cache_clear()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


def trained(store: Path, model: str, name: str) -> str:
    """Train quickly on what the demo model has read often or not at all; return what ``train``
    printed."""
    rows = [
        {"prompt": row["prompt"], "label": int(row["exposures"] > 4), "group": row["group"]}
        for row in questions("train")[::60]
    ]
    data = write_rows(store.parent / f"{store.name}-{name}.jsonl", rows)
    fast = (
        "--forms none --seeds 1 --folds 2 --c 0.03 --no-evaluate --no-sample --allow-no-signal"
        " --no-answer-probes --readout residual_stream"
    )
    folders = f"--store {store} --run-dir {store.parent / f'{store.name}-run-{name}'}"
    command = f"train --model {model} --data {data} --name {name} {folders} {fast}"
    done = hallutracer(*command.split())
    ended(done, 0)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def printed(store: Path) -> str:
    return trained(store, NAME, "hub")


def score(store: Path, model: str, bundle: str = "hub") -> float:
    options = f"--model {model} --bundle {bundle} --store {store} --json"
    printed = ended(hallutracer("score", QUESTION, *options.split()), 0)
    return float(json.loads(printed)["data"][0]["risk"])


@contextmanager
def serving(store: Path, model: str, bundle: str) -> Iterator[TestClient]:
    """The service of a model and a bundle in this process, once it is ready."""
    loaded = Store(store).load(bundle)
    engine = load_engine(EngineOptions(model), bundles=[loaded], **QUIET)
    state = Service(
        lambda: {bundle: Scorer(engine, loaded)}, settings=ServiceSettings(model_names=("*",))
    )
    with closing(engine), TestClient(create_app(state)) as client:
        until(lambda: state.lifecycle.is_ready, 300)
        yield client


def answers(client: TestClient, risk: float) -> None:
    """It has this risk of the question, and an answer to it."""
    scored = client.post("/score", json={"prompt": QUESTION})
    assert scored.json()["data"][0]["risk"] == pytest.approx(risk, abs=1e-6), scored.text
    body = {"model": "x", "max_tokens": 2, "messages": [USER]}
    chat = client.post("/v1/chat/completions", json=body)
    assert (chat.status_code, chat.json()["usage"]["completion_tokens"]) == (200, 2), chat.text


def refuses_alone(client: TestClient, messages: list[dict[str, str]], why: str) -> None:
    """These messages are refused; a text is answered."""
    short = {"model": "x", "max_tokens": 1}
    chat = client.post("/v1/chat/completions", json=short | {"messages": messages})
    assert (chat.status_code, why in chat.json()["error"]["message"]) == (422, True), chat.text
    text = client.post("/v1/completions", json=short | {"prompt": QUESTION})
    assert text.status_code == 200, text.text


def test_what_train_prints_next_is_what_works(hub: Hub, store: Path, printed: str) -> None:
    command = next(line for line in printed.splitlines() if "hallutracer score" in line)
    assert f"--model {NAME}" in command
    model = Store(store).load("hub").manifest.model
    assert (model.name, model.revision) == (NAME, hub.repositories[NAME].head)
    risk = score(store, NAME)
    with ht.load(NAME, bundle="hub", store=store, **QUIET) as detector:
        assert detector.score([QUESTION])[0].risk == pytest.approx(risk, abs=1e-6)
    verified = hallutracer("bundle", "verify", "hub", "--model", NAME, "--store", str(store))
    ended(verified, 0, "golden prompts gave the recorded risks")
    for more in ("", "--load"):
        doctor = f"doctor --model {NAME} --bundle hub --store {store} --port 0 {more}"
        report = hallutracer(*doctor.split()).stdout
        assert "was trained on this model, tokenizer and chat template" in report
        assert not [line for line in report.splitlines() if line[:4] == "fail" and "model" in line]
    assert score(store, str(MODEL_DIR)) == pytest.approx(
        risk, abs=1e-6
    )  # the same weights in a folder


def test_it_is_served_by_its_name_also_offline(hub: Hub, store: Path, printed: str) -> None:
    variables = {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": constants.HF_HUB_CACHE,
        "HF_HUB_OFFLINE": "1",
    }
    asked = len(hub.requests)
    with ServeProcess(
        "--model", NAME, "--bundle", "hub", "--store", str(store), **variables
    ) as service:
        answer = httpx.post(f"{service.url}/score", json={"prompt": QUESTION}, timeout=60).json()
    assert answer["data"][0]["risk"] == pytest.approx(score(store, NAME), abs=1e-6)
    assert answer["model"] == NAME
    downloads = (one for one in hub.requests[asked:] if "/resolve/" in one and "HEAD" not in one)
    assert not list(downloads), "``score`` alone asked the hub"


def test_shards_a_folder_and_the_hub_are_one_model(hub: Hub, store: Path) -> None:
    trained(store, SHARDED, "shards")
    risk = score(store, SHARDED, "shards")
    snapshot = next(Path(constants.HF_HUB_CACHE).glob("models--acme--sharded/snapshots/*"))
    assert snapshot.name == Store(store).load("shards").manifest.model.revision
    assert score(store, str(snapshot), "shards") == pytest.approx(risk, abs=1e-6)
    for model in (SHARDED, str(snapshot)):
        with serving(store, model, "shards") as client:
            answers(client, risk)
    folder = store.parent / "sharded"
    shutil.copytree(snapshot, folder)
    trained(store, str(folder), "folder")
    assert Store(store).load("folder").manifest.model.revision == "local"
    assert score(store, SHARDED, "folder") == pytest.approx(
        score(store, str(folder), "folder"), abs=1e-6
    )


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("acme/tiny-GGUF", "hf download acme/tiny-GGUF FILE.gguf --local-dir ."),
        ("acme/tiny-gguf-q4", "hf download acme/tiny-gguf-q4 FILE.gguf --local-dir ."),
        ("acme/pictures", "it is no transformers model"),
    ],
)
def test_a_hub_name_without_a_configuration_is_refused_with_its_cure(
    hub: Hub, again: None, name: str, cure: str
) -> None:
    hub.repository(name, {"tiny.gguf": b"GGUF", "README.md": b"no configuration"})
    with pytest.raises(ModelLoadError) as refused:
        load_engine(EngineOptions(name), **QUIET)
    assert f"{name} on {hub.url} has no config.json" in str(refused.value)
    assert cure in str(refused.value)
    assert ("hf download" in str(refused.value)) == ("gguf" in name.lower())


REFUSES_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system prompt here') }}{% endif %}"
)
ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [test_gguf.TEMPLATE, None])
def test_a_gguf_file_is_trained_scored_and_served(
    template: str | None, store: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name = "gguf" if template else "gguf-bare"
    file = str(test_gguf.write(tmp_path / "tiny.gguf", "qwen2", template=template))
    assert f" --model {file} " in trained(store, file, name)
    risk = score(store, file, name)
    assert 0 < risk < 1
    with serving(store, file, name) as client:
        if template is not None:
            answers(client, risk)
        else:
            refuses_alone(client, [USER], "has no chat template:")


@pytest.mark.parametrize(
    ("before", "refused", "said"),
    [
        (None, [USER], "has no chat template: /v1/completions takes"),
        (REFUSES_SYSTEM, [BRIEF, USER], "no system prompt here"),
        (ALTERNATE, [USER, USER], "roles must alternate"),
    ],
    ids=["none", "refuses-system", "refuses-two-turns-of-the-user"],
)
def test_a_model_is_trained_scored_and_served_whatever_its_template_takes(
    before: str | None,
    refused: list[dict[str, str]],
    said: str,
    store: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """``before``: what its template begins with; None: it has none."""
    name, folder = request.node.callspec.id, tmp_path / "model"
    shutil.copytree(MODEL_DIR, folder)
    template = folder / "chat_template.jinja"
    if before is None:
        template.unlink()
    else:
        template.write_text(before + template.read_text())
    trained(store, str(folder), name)
    risk = score(store, str(folder), name)
    with serving(store, str(folder), name) as client:
        answer = client.post("/score", json={"prompt": QUESTION}).json()
        assert answer["data"][0]["risk"] == pytest.approx(risk, abs=1e-6)
        refuses_alone(client, refused, said)


def test_other_weights_under_the_same_name_are_another_revision(
    hub: Hub,
    store: Path,
    printed: str,
    plain: dict[str, bytes],
    again: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundle, trained_at = Store(store).load("hub"), hub.repositories[NAME].head
    # As versions before this one wrote it: trained on a hub name, and no commit recorded.
    model = dataclasses.replace(bundle.manifest.model, revision="local")
    manifest = dataclasses.replace(bundle.manifest, name="old", version=1, model=model)
    old = Store(store).publish(draft_of(bundle, manifest, bundle.evaluation(), bundle.card()))
    assert score(store, NAME, "old") == pytest.approx(score(store, NAME), abs=1e-6)
    places.reachable.cache_clear()
    tensors = {
        name: tensor + 1e-3 for name, tensor in load_file(MODEL_DIR / "model.safetensors").items()
    }
    hub.repository(NAME, plain | {"model.safetensors": save(tensors, metadata={"format": "pt"})})
    try:
        engine = load_engine(EngineOptions(NAME), bundles=[bundle], **QUIET)  # which downloads them
        with pytest.raises(WrongRevision, match=f"--revision {trained_at}") as caught:
            Scorer(engine, bundle)
        assert f"{NAME} at revision {trained_at}" in str(caught.value)
        engine.close()
        engine = load_engine(EngineOptions(NAME, revision=trained_at), bundles=[bundle], **QUIET)
        assert engine.identity.revision == trained_at
        Scorer(engine, bundle)
        engine.close()
        with monkeypatch.context() as patch:
            patch.setattr(loading, "loader", lambda config: pytest.fail("weights were read"))
            with pytest.raises(WrongRevision, match=f"--revision {trained_at}"):
                load_engine(EngineOptions(NAME), bundles=[bundle], **QUIET)
            with pytest.raises(WrongModel, match="other weights"):
                load_engine(EngineOptions(NAME), bundles=[old], **QUIET)
        options = f"--model {NAME} --bundle hub --store {store}"
        ended(hallutracer("score", QUESTION, *options.split()), 1, f"--revision {trained_at}")
    finally:
        hub.repositories[NAME].commits.popitem()


def test_all_files_are_those_of_one_commit(
    hub: Hub, plain: dict[str, bytes], again: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The branch moves between the download of the configuration and of the weights."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    began = hub.repositories[NAME].head
    theirs = loading.AutoConfig.from_pretrained

    def moved(*given: Any, **how: Any) -> Any:
        config = theirs(*given, **how)
        if hub.repositories[NAME].head == began:
            hub.repository(NAME, plain | {"model.safetensors": b"another"})
        return config

    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", moved)
    try:
        engine = load_engine(EngineOptions(NAME), **QUIET)
        assert engine.identity.revision == began
        engine.close()
    finally:
        hub.repositories[NAME].commits.popitem()
