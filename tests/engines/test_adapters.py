"""An adapter is another model: its digest, what it is refused for, and the embedded engine with one
through PEFT."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes_store.errors import WrongModel
from service.demo import MODEL_DIR
from service.engines.adapters import CONFIG, WEIGHTS, digest_of
from service.engines.base import Sampling
from service.errors import ModelLoadError
from service.readout import Site
from service.scoring import Scorer
from tests.engines import lora, tiny
from tests.parity import models


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lora.save_adapter(MODEL_DIR, tmp_path_factory.mktemp("adapter") / "terse")


def changed(adapter: Path, folder: Path, **fields: Any) -> Path:
    shutil.copytree(adapter, folder)
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | fields))
    return folder


def test_the_digest_is_of_what_is_computed(adapter: Path, tmp_path: Path) -> None:
    incidental = {
        "base_model_name_or_path": "/elsewhere",
        "lora_dropout": 0.1,
        "use_dora": False,
        "target_modules": list(reversed(lora.TARGETS)),
        "revision": "x",
        "alpha_pattern": {},
    }
    digest = digest_of(adapter)
    assert digest_of(changed(adapter, tmp_path / "same", **incidental)) == digest
    essential = {"lora_alpha": 9, "use_rslora": True, "alpha_pattern": {"q_proj": 3}}
    folders = [
        changed(adapter, tmp_path / name, **{name: value}) for name, value in essential.items()
    ]
    folders.append(lora.save_adapter(MODEL_DIR, tmp_path / "weights", seed=1))
    assert len({digest, *map(digest_of, folders)}) == 5


def test_what_is_no_adapter_is_refused_by_name(adapter: Path, tmp_path: Path) -> None:
    bare = changed(adapter, tmp_path / "bare")
    (bare / WEIGHTS[0]).unlink()
    for folder, words in (
        (tmp_path / "nothing", "holds no adapter"),
        (bare, "there is no adapter_model.safetensors"),
        (changed(adapter, tmp_path / "ia3", peft_type="IA3"), "is not a LoRA adapter's"),
    ):
        with pytest.raises(ModelLoadError, match=words) as caught:
            tiny.load_engine(MODEL_DIR, adapter=str(folder))
        assert caught.value.param == "adapter"
    if importlib.util.find_spec("peft") is None:
        with pytest.raises(ModelLoadError, match=r"hallutracer\[lora\]"):
            tiny.load_engine(MODEL_DIR, adapter=str(adapter))


def test_the_embedded_engine_reads_the_model_with_its_adapter(
    adapter: Path, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    engine = tiny.load_engine(MODEL_DIR, dtype="float32", adapter=str(adapter))
    plain = tiny.load_engine(MODEL_DIR, dtype="float32")
    merged = lora.reference(MODEL_DIR, adapter, tmp_path / "merged")
    assert engine.identity == merged.identity
    prompts = [
        engine.render_chat([{"role": "user", "content": "What is the capital of Italy?"}]),
        *tiny.prompts([1, 17, 60], seed=2),
    ]
    probes = [tiny.probes_of(engine, site, 3) for site in Site]

    adapted, wanted, without = (
        tiny.logits(each, prompts, probes) for each in (engine, merged, plain)
    )
    size = np.abs(wanted).max()
    assert np.abs(adapted - wanted).max() < 1e-5 * max(size, 1.0)
    assert np.abs(adapted - without).max() > 1e-2 * size
    answers = [
        each.generate(prompts[:1], Sampling(max_tokens=8))[0].text
        for each in (engine, merged, plain)
    ]
    assert answers[0] == answers[1] != answers[2]
    adapted_bundle = lora.save_bundle(engine, tmp_path / "store")
    Scorer(engine, adapted_bundle)
    for each, bundle in ((engine, lora.shipped_bundle()), (plain, adapted_bundle)):
        with pytest.raises(WrongModel, match="trained on another adapter"):
            Scorer(each, bundle)


def test_an_adapter_of_another_model_is_refused(adapter: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    other = models.save("llama", tmp_path / "other")
    with pytest.raises(ModelLoadError, match="another model's|cannot be loaded"):
        tiny.load_engine(other, adapter=str(adapter))
