"""Bundles reloaded under load: no request is lost, each digest matches its risk.  What retrievals
remember."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from probes_store.bundle import Bundle
from probes_store.store import SHIPPED, Store
from service.demo import MODEL_DIR
from service.engines.base import Engine, EngineOptions
from service.engines.scheduler import Scheduled
from service.engines.transformers.engine import TransformersEngine
from service.policies.policy import Policies, Rule, built_in
from service.scoring import Scorer
from service.serving.judgement import Retrievals
from service.serving.service import Service
from service.settings import ServiceSettings
from tests.engine_kinds import OnOwnLoop
from tests.kit.api import POLICIES
from tests.kit.tables import values
from tests.matching import matching_bundle
from tests.running import in_process, until
from tests.scripted_engine import ScriptedEngine

PROMPTS = [
    f"What is the capital of {name}?"
    for name in ("Italy", "Chad", "Peru", "Nauru", "Japan", "Mali", "Oman")
]


def demo(_: Path) -> tuple[Engine, list[Bundle]]:
    engine = TransformersEngine.load(EngineOptions(str(MODEL_DIR), dtype="float32"))
    return Scheduled(engine), [Store(SHIPPED).load(name) for name in ("demo", "demo-fused")]


def scripted_on_own_loop(folder: Path) -> tuple[Engine, list[Bundle]]:
    script = ScriptedEngine()
    bundles = [
        matching_bundle(script, folder, name, seed) for seed, name in enumerate(("one", "two"))
    ]
    return OnOwnLoop(script), bundles


@pytest.mark.parametrize(
    ("policy", "ruled", "gates"),
    values(
        """
        "observe" | null | 0
        "gate" | null | 1
        "block" | null | 1
        "observe" | "gate" | 1
        "observe" | "observe" | 0
        "warn" | null | 1
        """
    ),
)
def test_a_gauge_says_whether_a_gate_is_configured(
    policy: str, ruled: str | None, gates: int
) -> None:
    """Not whether a caller may choose one: ``gate`` and ``block`` are always there to be chosen."""
    rules = () if ruled is None else (Rule(policy=ruled, route="/classify"),)
    known = Policies(built_in() | POLICIES, rules)
    state = Service(dict, settings=ServiceSettings(policy=policy), policies=known)
    lines = state.metrics.render()[0].decode().splitlines()
    assert f"hallutracer_gate_configured {gates}.0" in lines


@pytest.mark.parametrize("make", [demo, scripted_on_own_loop])
def test_no_request_is_lost_and_each_digest_matches_its_risk(
    make: Callable[[Path], tuple[Engine, list[Bundle]]], tmp_path: Path
) -> None:
    engine, bundles = make(tmp_path)
    expected: dict[tuple[str, str], float] = {}
    for bundle in bundles:
        scorer = Scorer(engine, bundle)
        for prompt in PROMPTS:
            expected[bundle.manifest.digest, prompt] = scorer.score([scorer.render(prompt)])[0].risk
    digests, done = list[str](), threading.Event()

    def ask(client: TestClient, number: int) -> None:
        body: dict[str, Any] = {"deadline_ms": 30_000}
        if answers := number % 3 == 0:
            body |= {"generate": {"max_tokens": 8}, "policy": "observe"}
        for prompt in cycle(PROMPTS[number % len(PROMPTS) :] + PROMPTS):
            if done.is_set():
                return
            response = client.post("/score", json=body | {"prompt": prompt})
            assert response.status_code == 200, response.text
            answer = response.json()
            [row], digest = answer["data"], answer["bundle"]["digest"]
            assert row["risk"] == pytest.approx(expected[digest, prompt], abs=1e-5)
            assert ("completion" in row) == answers
            digests.append(digest)

    def load(bundle: Bundle, engine: Engine = engine) -> dict[str, Scorer]:
        return {bundle.reference: Scorer(engine, bundle)}

    settings: dict[str, Any] = {"max_queue": 4096, "callers_may": ("policy",)}
    with (
        in_process(partial(load, bundles[0]), **settings) as client,
        ThreadPoolExecutor(12) as pool,
    ):
        asking = [pool.submit(ask, client, number) for number in range(12)]
        try:
            for swap in range(1, 5):
                app: Any = client.app
                before, service = len(digests), app.state.service
                assert client.portal is not None
                client.portal.call(service.lifecycle.reload, partial(load, bundles[swap % 2]))
                until(lambda before=before: len(digests) >= before + 24)
        finally:
            done.set()
        for future in asking:
            future.result()
    assert set(digests) == {bundle.manifest.digest for bundle in bundles}


def test_what_was_sent_to_fetch_a_passage_is_remembered_for_its_caller_for_a_while() -> None:
    known = Retrievals()
    known.record("a", "1", 0.9, "d")
    for named in ("1", "risk-1", "chatcmpl-1", "cmpl-1", "resp_1", "msg_1"):
        result = known.recall("a", named)
        assert result.first is not None
        assert (result.of, result.first.risk, result.first.digest) == (named, 0.9, "d")
    assert known.recall("b", "risk-1").first is known.recall("a", "risk-risk-1").first is None
    few, short = Retrievals(most=2), Retrievals(seconds=0.0)
    for name in ("1", "2", "1", "3"):
        few.record("a", name, 0.5, "d")
    kept = [name for name in ("1", "2", "3") if few.recall("a", name).first is not None]
    assert kept == ["1", "3"]
    short.record("a", "1", 0.5, "d")
    assert short.recall("a", "1").first is None
