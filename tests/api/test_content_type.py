"""A body that is not declared as JSON, as curl sends it by default."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from service.api import error_handlers
from service.api.middleware import RequestFrame
from service.api.request_schema import ScoreRequest
from service.serving.metrics import Metrics

BODY = b'{"prompt": "a"}'


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()

    @app.post("/score")
    def score(body: ScoreRequest) -> str:
        return str(body.prompt)

    error_handlers.install(app)
    app.add_middleware(RequestFrame, max_body_bytes=1000, body_seconds=5.0, metrics=Metrics())
    return TestClient(app)


@pytest.mark.parametrize("declared", [None, "application/x-www-form-urlencoded", "text/plain", "x" * 500])
def test_another_content_type_is_named(client: TestClient, declared: str | None) -> None:
    response = client.post("/score", content=BODY, headers={"content-type": declared} if declared else {})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (422, "invalid_request", "invalid_request_error")
    assert "Content-Type: application/json" in error["message"]
    assert (declared or "none")[:80] in error["message"]
    assert len(error["message"]) < 200


@pytest.mark.parametrize("declared", ["application/json", "application/json; charset=utf-8", "application/x+json"])
def test_json_is_read(client: TestClient, declared: str) -> None:
    assert client.post("/score", content=BODY, headers={"content-type": declared}).json() == "a"


def test_other_faults_keep_their_message(client: TestClient) -> None:
    assert client.post("/score", content=b"{", headers={"content-type": "application/json"}).status_code == 400
    wrong = client.post("/score", json={"prompt": 3}).json()["error"]
    assert (wrong["param"], wrong["code"]) == ("prompt", "invalid_request")
