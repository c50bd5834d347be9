"""docs/runbooks.md by experiment: each caller before a service that answers, and after it was stopped under it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import openai
import pytest
from fastapi.testclient import TestClient

from hallutracer_client import AsyncClient, Client, Generate, TransportError
from service.policies.guard import Action, Policy, Upstream
from tests.deploy import balancer
from tests.deploy.test_rag_app import FOLDER
from tests.running import Running, running, until

ASKED = {"prompt": "a", "policy": "observe", "generate": {"max_tokens": 2}}
TWO = Generate(max_tokens=2)


class Stoppable(ExitStack):
    """Real services on a scripted engine, each stopped when told to: SIGTERM's way."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def add(self, **options: Any) -> Running:
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        return self.enter_context(running(folder, names=["tiny"], **options))


@pytest.fixture
def guard(tmp_path: Path) -> Iterator[Stoppable]:
    with Stoppable(tmp_path) as stoppable:
        yield stoppable


def scored(url: str) -> Any:
    with Client(url, max_retries=1) as client:
        return client.score(prompt="a", policy="observe", generate=TWO).decision


def streamed(url: str) -> Any:
    with Client(url, max_retries=1) as client, client.stream(prompt="a", policy="observe", generate=TWO) as answer:
        return "".join(answer)


def awaited(url: str) -> Any:
    async def score() -> str:
        async with AsyncClient(url, max_retries=0) as client:
            return (await client.score(prompt="a", policy="observe", generate=TWO)).decision

    return asyncio.run(score())


def by_openais(url: str) -> Any:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    message = {"role": "user", "content": "a"}
    return client.chat.completions.create(model="scripted", messages=[message]).choices  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("ask", "error"),
    [(scored, TransportError), (streamed, TransportError), (awaited, TransportError),
     (by_openais, openai.APIConnectionError)],
)  # fmt: skip
def test_a_client_has_an_answer_and_then_an_error(
    guard: Stoppable, ask: Callable[[str], Any], error: type[Exception]
) -> None:
    url = guard.add().url
    assert ask(url)
    guard.close()
    with pytest.raises(error):
        ask(url)


@pytest.mark.parametrize("setting", ["refuse", "passages"])
def test_the_sidecars_app(guard: Stoppable, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import rag_app

    monkeypatch.setenv("HALLUTRACER_URL", guard.add(policy="observe").url)
    monkeypatch.setenv("RAG_WHEN_GUARD_FAILS", setting)
    with TestClient(rag_app.app) as app:

        def ask() -> httpx.Response:
            return app.post("/ask", json={"question": "What is the capital of Italy?"})

        assert ask().json()["source"] == "model"
        guard.close()
        after = ask()
        if setting == "refuse":
            assert (after.status_code, set(after.json())) == (503, {"detail"})
        else:
            assert (after.json()["source"], after.json()["answer"]) == ("passages", None)
        assert app.get("/health").json()["guard"] is False


def test_the_balancer(guard: Stoppable, tmp_path: Path) -> None:
    one, two = guard.add(), guard.add()
    with balancer.balancing(tmp_path, (f"127.0.0.1:{one.port}", f"127.0.0.1:{two.port}")) as front:

        def ask() -> int:
            return httpx.post(f"{front.url}/score", json=ASKED, timeout=60).status_code

        assert [ask() for _ in range(4)] == [200] * 4
        one.server.should_exit = True  # one of two: nobody notices
        until(lambda: not one.server.started or one.state.lifecycle.stopping)
        assert [ask() for _ in range(8)] == [200] * 8
        guard.close()
        assert [ask() for _ in range(3)] == [502] * 3


def test_a_withheld_answer_whose_other_server_is_away_is_an_error(guard: Stoppable) -> None:
    """The other way round: this service is there, and the server of its policy is not."""
    away = Upstream(f"http://127.0.0.1:{balancer.free_port()}/v1", "large")
    policy = Policy("bigger", Action.FALLBACK, threshold=0.0, upstream=away)
    service = guard.add(policies={"bigger": policy})
    chat = {"model": "scripted", "messages": [{"role": "user", "content": "a"}]}
    asked = chat | {"vllm_xargs": {"hallutracer_policy": "bigger"}}
    refused = httpx.post(f"{service.url}/v1/chat/completions", json=asked, timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (502, "upstream_failed")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/score", {"prompt": "a"}),
        ("/v1/chat/completions", {"model": "scripted", "messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"model": "scripted", "prompt": "a"}),
        ("/classify", {"inputs": "a"}),
        ("/beta/litellm_basic_guardrail_api", {"input_type": "request", "texts": ["a"]}),
    ],
)
@pytest.mark.parametrize("policy", ["gate", "observe"])
def test_a_service_that_cannot_read_answers_nothing_whatever_its_policy(
    guard: Stoppable, path: str, body: dict[str, Any], policy: str
) -> None:
    service = guard.add(policy=policy)
    assert httpx.post(f"{service.url}{path}", json=body, timeout=60).status_code == 200
    with patch.object(service.state.lifecycle, "error", OSError("the engine is gone")):
        refused = httpx.post(f"{service.url}{path}", json=body, timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
    assert refused.headers["retry-after"]
