"""Bundles reloaded under load on the demo model: no request is lost, and each answer's digest matches its risk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from probes_store.bundle import Bundle
from probes_store.errors import GoldenMismatch
from probes_store.store import SHIPPED, Store
from service.api.app import create_app
from service.demo import MODEL_DIR
from service.engines.base import Engine, EngineOptions
from service.engines.scheduler import Scheduled
from service.engines.transformers.engine import TransformersEngine
from service.scoring import Scorer
from service.serving.service import Service
from service.settings import ServiceSettings
from tests.engine_kinds import OnOwnLoop
from tests.matching import matching_bundle
from tests.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.anyio
PROMPTS = [f"What is the capital of {name}?" for name in ("Italy", "Chad", "Peru", "Nauru", "Japan", "Mali", "Oman")]


def demo_engine() -> Engine:
    return Scheduled(TransformersEngine.load(EngineOptions(str(MODEL_DIR), dtype="float32")))


def demo_bundles(_: Path) -> list[Bundle]:
    return [Store(SHIPPED).load(name) for name in ("demo", "demo-fused")]


def scripted_bundles(tmp_path: Path) -> list[Bundle]:
    return [matching_bundle(ScriptedEngine(), tmp_path, name, seed) for seed, name in enumerate(("one", "two"))]


ENGINES = {
    "transformers": (demo_engine, demo_bundles),
    "own loop": (lambda: OnOwnLoop(ScriptedEngine()), scripted_bundles),
}


@asynccontextmanager
async def serving(make: Callable[[], Engine], bundle: Bundle) -> AsyncIterator[tuple[Service, httpx.AsyncClient]]:
    state = Service.of(
        lambda: {bundle.reference: Scorer(make(), bundle)},
        settings=ServiceSettings(max_queue=4096, callers_may=("policy",)),
    )
    await state.lifecycle.start()
    assert state.lifecycle.failure is None
    transport = httpx.ASGITransport(app=create_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://service", timeout=60) as client:
        yield state, client
    await asyncio.to_thread(state.stop)


@pytest.mark.parametrize("kind", ENGINES)
async def test_no_request_is_lost_and_each_digest_matches_its_risk(kind: str, tmp_path: Path) -> None:
    make, bundles_of = ENGINES[kind]
    bundles = bundles_of(tmp_path)
    alone = make()
    expected: dict[tuple[str, str], float] = {}
    for bundle in bundles:
        scorer = Scorer(alone, bundle)
        for prompt in PROMPTS:
            expected[bundle.manifest.digest, prompt] = scorer.score([scorer.render(prompt)])[0].risk
    alone.close()
    digests: list[str] = []
    done = asyncio.Event()

    async def client_of(client: httpx.AsyncClient, number: int) -> int:
        served = 0
        while not done.is_set():
            prompt = PROMPTS[(number + served) % len(PROMPTS)]
            body: dict[str, Any] = {"prompt": prompt, "deadline_ms": 30_000}
            if number % 3 == 0:
                body |= {"generate": {"max_tokens": 8}, "policy": "observe"}
            response = await client.post("/score", json=body)
            assert response.status_code == 200, response.text
            answer = response.json()
            (row,) = answer["data"]
            assert row["risk"] == pytest.approx(expected[answer["bundle"]["digest"], prompt], abs=1e-5)
            assert ("completion" in row) == (number % 3 == 0)
            digests.append(answer["bundle"]["digest"])
            served += 1
        return served

    async with serving(make, bundles[0]) as (state, client):
        clients = [asyncio.create_task(client_of(client, number)) for number in range(12)]
        for swap in range(1, 9):
            before = len(digests)
            await state.lifecycle.reload(
                lambda engine, bundle=bundles[swap % 2]: {bundle.reference: Scorer(engine, bundle)}
            )  # type: ignore[misc]
            while len(digests) < before + 24:
                await asyncio.sleep(0.005)
        done.set()
        assert sum(await asyncio.gather(*clients)) == len(digests)
    assert set(digests) == {bundle.manifest.digest for bundle in bundles}


async def test_a_bundle_that_does_not_match_leaves_the_old_one(tmp_path: Path) -> None:
    bundles = scripted_bundles(tmp_path)
    script = ScriptedEngine()
    async with serving(lambda: Scheduled(script), bundles[0]) as (state, client):
        before = (await client.post("/score", json={"prompt": "a"})).json()
        other = matching_bundle(script, tmp_path / "other", "other")

        def load(engine: Engine) -> dict[str, Scorer]:
            script.nan_layer = None
            activations = script.activations
            script.activations = lambda prompt, site: activations(prompt, site) + 1  # type: ignore[method-assign]
            try:
                return {other.reference: Scorer(engine, other)}
            finally:
                script.activations = activations  # type: ignore[method-assign]

        with pytest.raises(GoldenMismatch):
            await state.lifecycle.reload(load)
        after = (await client.post("/score", json={"prompt": "a"})).json()
        assert (after["bundle"], after["data"]) == (before["bundle"], before["data"])
