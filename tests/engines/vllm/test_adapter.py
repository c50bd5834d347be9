"""The readout where vLLM runs with a LoRA adapter, against the same weights merged and read by transformers."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from pathlib import Path

import numpy as np
import pytest

from service.demo import MODEL_DIR
from service.engines.base import EngineOptions, Sampling
from service.errors import ModelLoadError
from service.readout import Site
from tests.engines import lora, tiny
from tests.engines.vllm.installed import vllm_or_skip

vllm_or_skip()

from service.engines.vllm.engine import VllmEngine  # noqa: E402

pytestmark = pytest.mark.long

CLOSE = 1e-5  # of the largest truth logit
ANSWER = Sampling(max_tokens=8)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lora.save_adapter(MODEL_DIR, tmp_path_factory.mktemp("adapter") / "terse")


@pytest.fixture(scope="module")
def engine(adapter: Path) -> Iterator[VllmEngine]:
    extra = {"max_model_len": "128", "max_num_seqs": "32"}  # compiled
    options = EngineOptions(str(MODEL_DIR), dtype="float32", max_batch_tokens=32, adapter=str(adapter), extra=extra)
    loaded = VllmEngine.load(options, rows=True)
    yield loaded
    loaded.close()


def test_the_adapter_is_read_and_no_other(engine: VllmEngine, adapter: Path, tmp_path: Path) -> None:
    """Chunked, with prefix hits, beside requests without it; the numbers are those of the merged weights."""
    merged = lora.reference(MODEL_DIR, adapter, tmp_path / "merged")
    assert engine.identity.adapter == merged.identity.adapter
    assert (engine.identity.model, engine.identity.fingerprint) == (merged.identity.model, merged.identity.fingerprint)
    question = engine.render_chat([{"role": "user", "content": "What is the capital of Italy?"}])
    prompts = [question, *tiny.prompts([1, 30, 7, 90, 30, 110], seed=4), question]
    probes = [tiny.probes(engine.identity.geometry, site, 3) for site in Site]

    def read(one: object) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        return np.array([found.trajectories for found in one.score(prompts, probes)])  # type: ignore[attr-defined]

    wanted = read(merged)
    size, plain = np.abs(wanted).max(), copy(engine)
    plain._adapter = None
    for _ in range(2):  # from the prefix cache, too, which the model without it shares
        assert np.abs(read(engine) - wanted).max() < CLOSE * size
        assert np.abs(read(plain) - wanted).max() > 0.01 * size
    answers = [one.generate([question], ANSWER)[0].text for one in (engine, merged, plain)]
    assert answers[0] == answers[1] != answers[2]
    rows = [one.extract(prompts, list(Site)).activations for one in (engine, merged)]
    for site in Site:
        assert np.abs(rows[0][site] - rows[1][site]).max() < 1e-4 * np.abs(rows[1][site]).max()


def test_what_vllm_cannot_run_is_refused(engine: VllmEngine, adapter: Path, tmp_path: Path) -> None:
    """By its own loader, whose words are kept."""
    from service.engines.bridge import run_on
    from tests.engines.test_adapters import changed

    dora = changed(adapter, tmp_path / "dora", use_dora=True)
    with pytest.raises(ModelLoadError, match="DoRA"):
        run_on(engine.loop, engine._load_adapter(dora))
