"""The readout where vLLM runs with a LoRA adapter, against the same weights merged and read by
transformers."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.engines.base import Sampling
from service.errors import ModelLoadError
from service.readout import Site
from tests.engines import lora, tiny
from tests.engines.vllm.installed import vllm_or_skip
from tests.parity import models

vllm_or_skip()

from service.engines.vllm.engine import VllmEngine  # noqa: E402
from tests.engines.vllm.asking import loaded  # noqa: E402

pytestmark = pytest.mark.long

CLOSE = 1e-5  # truth logits
ANSWER = Sampling(max_tokens=12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save("llama", tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lora.save_adapter(model, tmp_path_factory.mktemp("adapter") / "terse", scale=0.5)


@pytest.fixture(scope="module")
def engine(model: Path, adapter: Path) -> Iterator[VllmEngine]:
    with loaded(model, 128, 32, eager=False, adapter=str(adapter), rows=True) as engine:
        yield engine


def test_the_adapter_is_read_and_no_other(
    engine: VllmEngine, model: Path, adapter: Path, tmp_path: Path
) -> None:
    """Chunked, with prefix hits, beside requests without it; the numbers are those of the merged
    weights."""
    merged = lora.reference(model, adapter, tmp_path / "merged")
    assert engine.identity.adapter == merged.identity.adapter
    assert (engine.identity.model, engine.identity.fingerprint) == (
        merged.identity.model,
        merged.identity.fingerprint,
    )
    prompts = [reader.prompt[:110] for reader in models.questions(40)]
    probes = models.probes(engine.identity.geometry, 0)

    wanted, plain = tiny.logits(merged, prompts, probes), copy(engine)
    plain._adapter = None
    for _ in range(2):  # from the prefix cache, too, which the model without it shares
        assert np.abs(tiny.logits(engine, prompts, probes) - wanted).max() < CLOSE
        assert np.abs(tiny.logits(plain, prompts, probes) - wanted).max() > 1000 * CLOSE

    def answers(reader: Any) -> list[str]:
        return [answer.text for answer in reader.generate(prompts[:8], ANSWER)]

    adapted = answers(engine)
    assert adapted == answers(merged)
    assert not set(adapted) & set(answers(plain))
    rows = [reader.extract(prompts, list(Site)).activations for reader in (engine, merged)]
    for site in Site:
        assert np.abs(rows[0][site] - rows[1][site]).max() < 2 * CLOSE


def test_what_vllm_cannot_run_is_refused(engine: VllmEngine, adapter: Path, tmp_path: Path) -> None:
    """By its own loader, whose words are kept."""
    from service.engines.bridge import run_on
    from tests.engines.test_adapters import changed

    dora = changed(adapter, tmp_path / "dora", use_dora=True)
    run_on(engine.loop, engine._async_llm.remove_lora(1))  # which it would be taken for
    with pytest.raises(ModelLoadError, match="DoRA"):
        run_on(engine.loop, engine._load_adapter(dora))
