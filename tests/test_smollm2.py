"""SmolLM2 and its shipped bundles, for real; skipped where its package cannot be had."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from service.engines.places import PACKAGED
from service.library.engine import SHIPPED, SMOLLM2
from tests.command_line import hallutracer
from tests.serve_process import MAY_CHOOSE, ServeProcess, serve

KNOWN = "Which city is the capital of Yemen?"
CONFABULATED = "Do you know the capital of American Samoa?"
pytestmark = pytest.mark.skipif(not PACKAGED[SMOLLM2].is_installed, reason=f"needs {PACKAGED[SMOLLM2].install}")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """What ``make run`` serves: no model is named."""
    with serve(HALLUTRACER_STORE=str(tmp_path_factory.mktemp("store")), HALLUTRACER_MODEL="", **MAY_CHOOSE) as process:
        yield process


@pytest.mark.parametrize("bundle", SHIPPED[SMOLLM2])
def test_a_known_fact_passes_and_a_confabulated_one_is_withheld(service: ServeProcess, bundle: str) -> None:
    body = {"prompt": [KNOWN, CONFABULATED], "generate": {"max_tokens": 16}, "bundle": bundle}
    answer = httpx.post(f"{service.url}/score", json=body, timeout=60).json()
    known, confabulated = answer["data"]
    assert answer["model"] == Path(PACKAGED[SMOLLM2].file).stem
    assert known["risk"] < known["threshold"] <= confabulated["risk"]
    assert "Sana'a" in known["completion"]["text"]
    assert "completion" not in confabulated


def test_the_model_would_have_confabulated() -> None:
    arguments = ("score", CONFABULATED, "--json", "--generate", "16", "--threshold", "1")
    done = hallutracer(*arguments, HALLUTRACER_MODEL=SMOLLM2)
    (risk,) = json.loads(done.stdout)["data"]
    assert risk["completion"]["text"].strip()
    assert "Pago" not in risk["completion"]["text"]


@pytest.mark.parametrize("bundle", SHIPPED[SMOLLM2])
def test_the_shipped_bundles_verify(bundle: str, tmp_path: Path) -> None:
    done = hallutracer("bundle", "verify", bundle, HALLUTRACER_MODEL="", HALLUTRACER_STORE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert f"golden prompts gave the recorded risks on {Path(PACKAGED[SMOLLM2].file).stem}" in done.stdout
