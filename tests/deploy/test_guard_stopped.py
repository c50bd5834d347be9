"""docs/runbooks.md by experiment: each caller before a service that answers, and after it was stopped under it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi.testclient import TestClient

from hallutracer_client import AsyncClient, Client, ClientError, Generate, TimedOut, TransportError
from service.policies.guard import Action, Policy, Upstream
from tests.deploy import balancer
from tests.deploy.test_rag_app import FOLDER
from tests.local_server import listening
from tests.running import Running, running, until

ASKED = {"prompt": "a", "policy": "observe", "generate": {"max_tokens": 2}}
TWO = Generate(max_tokens=2)


class Stoppable:
    """Real services on a scripted engine, each stopped when told to: SIGTERM's way."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stack, self.services = folder, ExitStack(), list[Running]()

    def add(self, **options: Any) -> Running:
        folder = self._folder / f"service-{len(self.services)}"
        service = self._stack.enter_context(running(folder, names=["tiny"], **options))
        self.services.append(service)
        return service

    def stop(self) -> None:
        self._stack.close()


@pytest.fixture
def guard(tmp_path: Path) -> Iterator[Stoppable]:
    stoppable = Stoppable(tmp_path)
    yield stoppable
    stoppable.stop()


def before_and_after(guard: Stoppable, ask: Callable[[], Any], error: type[Exception]) -> Exception:
    """``ask`` has an answer while the service runs and, once it was stopped, ends with ``error``."""
    assert ask()
    guard.stop()
    with pytest.raises(error) as raised:
        ask()
    return raised.value


@pytest.mark.parametrize("streams", [False, True])
def test_our_client_raises_and_has_no_risk(guard: Stoppable, streams: bool) -> None:
    with Client(guard.add().url, max_retries=1) as client:

        def ask() -> str:
            if not streams:
                return str(client.score(prompt="a", policy="observe", generate=TWO).decision)
            with client.stream(prompt="a", policy="observe", generate=TWO) as answer:
                return "".join(answer)

        error = before_and_after(guard, ask, TransportError)
    assert isinstance(error, ClientError)


def test_our_async_client_does_too(guard: Stoppable) -> None:
    url = guard.add().url

    async def score() -> str:
        async with AsyncClient(url, max_retries=0) as client:
            return str((await client.score(prompt="a", policy="observe", generate=TWO)).decision)

    before_and_after(guard, lambda: asyncio.run(score()), TransportError)


def test_a_service_that_hangs_is_given_up() -> None:
    over = threading.Event()
    with listening(lambda request, body: over.wait(30) and None) as address:
        with Client(f"http://{address}", timeout=0.3) as client, pytest.raises(TimedOut):
            client.score(prompt="a", policy="observe", generate=TWO)
        over.set()


def test_openais_client_has_no_answer(guard: Stoppable) -> None:
    client = openai.OpenAI(base_url=f"{guard.add().url}/v1", api_key="none", max_retries=0)

    def ask() -> Any:
        message = {"role": "user", "content": "a"}
        return client.chat.completions.create(model="scripted", messages=[message]).choices  # type: ignore[list-item]

    before_and_after(guard, ask, openai.APIConnectionError)


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
        guard.stop()
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
        guard.stop()
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


@contextmanager
def broken(state: Any) -> Iterator[None]:
    state.lifecycle.error = OSError("the engine is gone")
    try:
        yield
    finally:
        state.lifecycle.error = None


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
    with broken(service.state):
        refused = httpx.post(f"{service.url}{path}", json=body, timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
    assert refused.headers["retry-after"]


def test_generate_is_never_answered_without_a_risk(guard: Stoppable) -> None:
    with Client(guard.add().url) as client:
        found = client.score(prompt="a", policy="observe", generate=TWO).only
    assert found.completion is not None
    assert 0 < found.risk < 1
