"""One server of vLLM's own under a policy that observes, for the files that ask it, and a bundle with a guarantee."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from probes_store.bundle import BundleDraft
from probes_store.store import SHIPPED, Store
from tests.probes_store.factory import GUARANTEE, write_bundle
from tests.vllm_plugin.server import serving

SURE = "sure"  # the demo's bundle, with a guarantee


@pytest.fixture(scope="package")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with ``SURE``."""
    folder = tmp_path_factory.mktemp("store")
    shipped = Store(Path("/nonexistent"), fallbacks=[SHIPPED]).load("demo")
    guarantee = dataclasses.replace(GUARANTEE, threshold=shipped.manifest.threshold)
    manifest = dataclasses.replace(shipped.manifest, name=SURE, guarantee=guarantee)
    draft = BundleDraft(manifest, shipped.probes, shipped.golden, shipped.evaluation(), "A test's.")
    write_bundle(draft, folder / SURE / "1")
    return folder


@pytest.fixture(scope="package")
def audit_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "audit.jsonl"


@pytest.fixture(scope="package")
def url(tmp_path_factory: pytest.TempPathFactory, audit_log: Path, store: Path) -> Iterator[str]:
    variables = {"HALLUTRACER_BUNDLE": f"demo demo-fused {SURE}", "HALLUTRACER_STORE": str(store)}
    log = tmp_path_factory.mktemp("vllm") / "log"
    with serving(log, "--trust-request-chat-template", HALLUTRACER_AUDIT_LOG=str(audit_log), **variables) as address:
        yield address


@pytest.fixture(scope="package")
def client(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
