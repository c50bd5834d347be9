"""Bundles reloaded under load: no request is lost, each digest matches its risk.  What retrievals
remember."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from probes_store.bundle import Bundle
from probes_store.store import SHIPPED, Store
from service.api.app import create_app
from service.demo import MODEL_DIR
from service.engines.base import Engine, EngineOptions
from service.engines.scheduler import Scheduled
from service.engines.transformers.engine import TransformersEngine
from service.policies.guard import Action, Policy
from service.policies.policy import Policies, Rule, built_in
from service.scoring import Scorer
from service.serving.judgement import Retrievals
from service.serving.service import Service
from service.settings import ServiceSettings
from tests.engine_kinds import OnOwnLoop
from tests.matching import matching_bundle
from tests.scripted_engine import ScriptedEngine

PROMPTS = [
    f"What is the capital of {name}?"
    for name in ("Italy", "Chad", "Peru", "Nauru", "Japan", "Mali", "Oman")
]


def scripted_bundles(tmp_path: Path) -> list[Bundle]:
    return [
        matching_bundle(ScriptedEngine(), tmp_path, name, seed)
        for seed, name in enumerate(("one", "two"))
    ]


ENGINES: dict[str, tuple[Callable[[], Engine], Callable[[Path], list[Bundle]]]] = {
    "transformers": (
        lambda: Scheduled(TransformersEngine.load(EngineOptions(str(MODEL_DIR), dtype="float32"))),
        lambda _: [Store(SHIPPED).load(name) for name in ("demo", "demo-fused")],
    ),
    "own loop": (lambda: OnOwnLoop(ScriptedEngine()), scripted_bundles),
}


@asynccontextmanager
async def serving(
    make: Callable[[], Engine], bundle: Bundle
) -> AsyncIterator[tuple[Service, httpx.AsyncClient]]:
    settings = ServiceSettings(max_queue=4096, callers_may=("policy",))
    state = Service(lambda: {bundle.reference: Scorer(make(), bundle)}, settings=settings)
    await state.lifecycle.start()
    assert state.lifecycle.failure is None
    transport = httpx.ASGITransport(app=create_app(state))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://service", timeout=60
    ) as client:
        yield state, client
    await asyncio.to_thread(state.stop)


@pytest.mark.parametrize(
    ("policy", "ruled", "gates"),
    [
        ("observe", None, 0),
        ("gate", None, 1),
        ("block", None, 1),
        ("observe", "gate", 1),
        ("observe", "observe", 0),
        ("warn", None, 1),
    ],
)
def test_a_gauge_says_whether_a_gate_is_configured(
    policy: str, ruled: str | None, gates: int
) -> None:
    """Not whether a caller may choose one: ``gate`` and ``block`` are always there to be chosen."""
    rules = () if ruled is None else (Rule(policy=ruled, route="/classify"),)
    known = Policies(
        built_in() | {"warn": Policy("warn", Action.ANNOTATE, None, "Take care.")}, rules
    )
    state = Service(dict, settings=ServiceSettings(policy=policy), policies=known)
    assert (
        f"hallutracer_gate_configured {gates}.0" in state.metrics.render()[0].decode().splitlines()
    )


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ENGINES)
async def test_no_request_is_lost_and_each_digest_matches_its_risk(
    kind: str, tmp_path: Path
) -> None:
    make, bundles_of = ENGINES[kind]
    bundles, alone = bundles_of(tmp_path), make()
    expected: dict[tuple[str, str], float] = {}
    for bundle in bundles:
        scorer = Scorer(alone, bundle)
        for prompt in PROMPTS:
            expected[bundle.manifest.digest, prompt] = scorer.score([scorer.render(prompt)])[0].risk
    alone.close()
    digests: list[str] = []
    done = asyncio.Event()

    async def client_of(client: httpx.AsyncClient, number: int) -> int:
        served, answers = 0, number % 3 == 0
        while not done.is_set():
            prompt = PROMPTS[(number + served) % len(PROMPTS)]
            body: dict[str, Any] = {"prompt": prompt, "deadline_ms": 30_000}
            response = await client.post(
                "/score",
                json=body
                | ({"generate": {"max_tokens": 8}, "policy": "observe"} if answers else {}),
            )
            assert response.status_code == 200, response.text
            answer = response.json()
            (row,) = answer["data"]
            assert row["risk"] == pytest.approx(
                expected[answer["bundle"]["digest"], prompt], abs=1e-5
            )
            assert ("completion" in row) == answers
            digests.append(answer["bundle"]["digest"])
            served += 1
        return served

    async with serving(make, bundles[0]) as (state, client):
        clients = [asyncio.create_task(client_of(client, number)) for number in range(12)]
        for swap in range(1, 5):
            before, bundle = len(digests), bundles[swap % 2]

            def load(engine: Engine, bundle: Bundle = bundle) -> dict[str, Scorer]:
                return {bundle.reference: Scorer(engine, bundle)}

            await state.lifecycle.reload(load)
            while len(digests) < before + 24:
                await asyncio.sleep(0.005)
        done.set()
        assert sum(await asyncio.gather(*clients)) == len(digests)
    assert set(digests) == {bundle.manifest.digest for bundle in bundles}


def test_what_was_sent_to_fetch_a_passage_is_remembered_for_its_caller_for_a_while() -> None:
    known = Retrievals()
    known.record("a", "1", 0.9, "d")
    for named in ("1", "risk-1", "chatcmpl-1", "cmpl-1"):
        result = known.recall("a", named)
        assert result.first is not None
        assert (result.of, result.first.risk, result.first.digest) == (named, 0.9, "d")
    assert known.recall("b", "risk-1").first is known.recall("a", "risk-risk-1").first is None
    few, short = Retrievals(most=2), Retrievals(seconds=0.0)
    for name in ("1", "2", "1", "3"):
        few.record("a", name, 0.5, "d")
    assert [few.recall("a", name).first is not None for name in ("1", "2", "3")] == [
        True,
        False,
        True,
    ]
    short.record("a", "1", 0.5, "d")
    assert short.recall("a", "1").first is None
