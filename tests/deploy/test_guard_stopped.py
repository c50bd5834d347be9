"""No integration is open while the guard is stopped: the RAG sidecar's app, and a service that
cannot read.

The Python clients: tests/client/test_service.py.  The balancer: test_balancer.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import openai
import pytest
from fastapi.testclient import TestClient

from tests.deploy.test_rag_app import FOLDER
from tests.running import Running, running

CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize("setting", ["refuse", "passages"])
def test_the_sidecars_app_and_openais_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import rag_app

    with ExitStack() as stopped:
        service = stopped.enter_context(running(tmp_path, names=["tiny"], policy="observe"))
        monkeypatch.setenv("HALLUTRACER_URL", service.url)
        monkeypatch.setenv("RAG_WHEN_GUARD_FAILS", setting)
        monkeypatch.setenv("RAG_ALLOW_ANONYMOUS", "true")
        monkeypatch.setenv("RAG_ALLOWED_HOSTS", "testserver")
        theirs = openai.OpenAI(
            base_url=f"{service.url}/v1", api_key="none", max_retries=0
        ).chat.completions
        with TestClient(rag_app.app) as app:
            question = {"question": "What is the capital of Italy?"}
            assert app.post("/ask", json=question).json()["source"] == "model"
            assert theirs.create(**CHAT).choices  # type: ignore[call-overload]
            stopped.close()
            after = app.post("/ask", json=question)
            if setting == "refuse":
                assert (after.status_code, set(after.json())) == (503, {"detail"})
            else:
                shown = after.json()
                assert (shown["source"], shown["answer"]) == ("passages", None)
                assert "Rome" in shown["passages"][0]["text"]
            assert app.get("/health").json()["guard"] is False
            with pytest.raises(openai.APIConnectionError):
                theirs.create(**CHAT)  # type: ignore[call-overload]


@pytest.fixture(scope="module", params=["gate", "observe"])
def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("store"), names=["tiny"], policy=request.param) as service:
        yield service


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/score", {"prompt": "a"}),
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"model": "scripted", "prompt": "a"}),
        ("/classify", {"inputs": "a"}),
        ("/beta/litellm_basic_guardrail_api", {"input_type": "request", "texts": ["a"]}),
    ],
)
def test_a_service_that_cannot_read_answers_nothing_whatever_its_policy(
    service: Running, path: str, body: dict[str, Any]
) -> None:
    assert httpx.post(f"{service.url}{path}", json=body, timeout=60).status_code == 200
    with patch.object(service.state.lifecycle, "error", OSError("the engine is gone")):
        refused = httpx.post(f"{service.url}{path}", json=body, timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
    assert "retry-after" not in refused.headers, (
        "an engine that has failed does not come back by waiting"
    )
