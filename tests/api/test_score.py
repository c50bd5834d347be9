"""The wire of /score, on the scripted engine."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from service.api.app import create_app
from service.scoring import Scorer
from service.serving.service import Service
from tests.engine_kinds import KINDS
from tests.matching import Held
from tests.running import App, until


class ScoringApp(App):
    """A running app with its engine in reach."""

    def post(self, **body: Any) -> Any:
        return self.client.post("/score", json=body)


@pytest.fixture(params=KINDS)
def service(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ScoringApp]:
    with ScoringApp(
        tmp_path,
        request.param,
        aliases_of=lambda name: {"canary": 1} if name == "two" else {},
        max_body_bytes=20_000,
        max_prompts=8,
    ).started() as service:
        yield service


def test_one_prompt(service: ScoringApp) -> None:
    response = service.post(prompt="What is the capital of France?")
    body = response.json()
    assert response.status_code == 200, body
    assert body["object"] == "risk.list"
    assert body["bundle"] == {"name": "one", "version": 1, "digest": service.bundles[0].manifest.digest}
    (row,) = body["data"]
    assert set(row) == {"index", "risk", "depth_mean", "decision", "flagged", "threshold"}
    assert 0 <= row["risk"] <= 1
    assert row["decision"] == ("abstain" if row["risk"] >= row["threshold"] else "continue")
    tokens = len(service.engine.render_chat([{"role": "user", "content": "What is the capital of France?"}]))
    assert body["usage"] == {
        "prompt_tokens": tokens, "cached_tokens": 0, "completion_tokens": 0, "total_tokens": tokens,
    }  # fmt: skip
    assert float(response.headers["x-hallutracer-risk"]) == pytest.approx(row["risk"], abs=1e-6)
    assert response.headers["x-hallutracer-decision"] == row["decision"]
    for header in ("x-queue-time", "x-inference-time", "x-total-time"):
        assert float(response.headers[header]) >= 0


def test_a_list_messages_and_ids_agree_with_single_prompts(service: ScoringApp) -> None:
    both = service.post(prompt=["a", "b"]).json()["data"]
    assert [row["index"] for row in both] == [0, 1]
    assert both[1]["risk"] == service.post(prompt="b").json()["data"][0]["risk"]
    message = [{"role": "user", "content": "b"}]
    assert both[1]["risk"] == service.post(messages=message).json()["data"][0]["risk"]
    ids = service.engine.render_chat(message)
    assert both[1]["risk"] == service.post(input_ids=ids).json()["data"][0]["risk"]
    assert both[1]["risk"] == service.post(input_ids=[ids, ids]).json()["data"][1]["risk"]


def test_both_routes_are_one(service: ScoringApp) -> None:
    long = service.client.post("/v1/risk/score", json={"prompt": "b"}).json()
    assert long["data"] == service.post(prompt="b").json()["data"]


def test_include(service: ScoringApp) -> None:
    (row,) = service.post(prompt="b", include=["trajectory", "running_mean"]).json()["data"]
    assert len(row["trajectory"]) == len(row["running_mean"]) == 4
    assert row["running_mean"][-1] == pytest.approx(row["depth_mean"])
    assert sum(row["trajectory"]) / 4 == pytest.approx(row["depth_mean"])


def test_the_operators_reference_names_what_was_loaded(tmp_path: Path) -> None:
    """Also where the alias moved meanwhile."""
    app = ScoringApp(tmp_path, aliases_of=lambda name: {"production": 2})
    load = app.state.lifecycle.load
    app.state.lifecycle.load = lambda: dict(zip(["one@production", "two"], load().values(), strict=True))
    with app.started() as service:
        assert service.post(prompt="b", bundle="one@production").json()["bundle"]["version"] == 1
        assert service.post(prompt="b", bundle="two@production").status_code == 404


def test_bundles_by_name_and_reference(service: ScoringApp) -> None:
    for reference in ("two", "two:1", "two@canary"):
        assert service.post(prompt="b", bundle=reference).json()["bundle"]["name"] == "two"
    for missing in ("two@other", "one@canary", "nosuch@x"):
        error = service.post(prompt="b", bundle=missing).json()["error"]
        assert error["code"] == "not_found"
        assert "/" not in error["message"], "no path of the server is told"
    missing = service.post(prompt="b", bundle="three")
    assert missing.status_code == 404
    assert "one:1, two:1" in missing.json()["error"]["message"]
    assert service.post(prompt="b", model="other").json()["error"]["param"] == "model"
    assert service.post(prompt="b", model="scripted").status_code == 200


def test_generate_goes_on_only_below_the_threshold(service: ScoringApp) -> None:
    gated = service.post(prompt="b", threshold=0, generate={}).json()
    assert gated["data"][0]["decision"] == "abstain"
    assert "completion" not in gated["data"][0]
    assert service.engine.counters.decode_steps == 0
    (row,) = service.post(prompt="b", threshold=1, generate={"max_tokens": 4}).json()["data"]
    assert row["completion"] == {"text": "It i", "finish_reason": "length", "completion_tokens": 4}


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 422, None),
        ({"prompt": "a", "input_ids": [1]}, 422, None),
        ({"prompt": ""}, 422, "prompt"),
        ({"prompt": []}, 422, "prompt"),
        ({"input_ids": []}, 422, "input_ids"),
        ({"prompt": ["a", " "]}, 422, "prompt"),
        ({"prompt": 3}, 422, "prompt"),
        ({"prompt": ["a", 5]}, 422, "prompt.1"),
        ({"input_ids": [[1, 2], [3, "x"]]}, 422, "input_ids.1.1"),
        ({"input_ids": [2**70]}, 422, "input_ids"),
        ({"input_ids": [True]}, 422, "input_ids.0"),
        ({f"f{n}": 1 for n in range(40)}, 422, None),
        ({"prompt": "a", "threshold": True}, 422, "threshold"),
        ({"prompt": "a", "threshold": "0.5"}, 422, "threshold"),
        ({"prompt": "a", "generate": {"seed": 2**64}}, 422, "generate.seed"),
        ({"prompt": "a", "generate": {"temperature": True}}, 422, "generate.temperature"),
        ({"prompt": "a", "treshold": 0.1}, 422, "treshold"),
        ({"prompt": "a", "threshold": 1.5}, 422, "threshold"),
        ({"prompt": "a", "threshold": "0.5x"}, 422, "threshold"),
        ({"prompt": "a", "include": ["all"]}, 422, "include.0"),
        ({"prompt": "a" * 600}, 413, "prompt"),
        ({"prompt": ["a"] * 9}, 422, "prompt"),
        ({"input_ids": [-1]}, 422, "input_ids"),
        ({"input_ids": [[1], []]}, 422, "input_ids"),
        ({"input_ids": [999_999]}, 422, "input_ids"),
        ({"messages": []}, 422, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, 422, "messages.0.role"),
        ({"prompt": "a", "generate": {"max_tokens": 0}}, 422, "generate.max_tokens"),
        ({"prompt": "a", "generate": {"max_tokens": 10**6}}, 422, "generate.max_tokens"),
    ],
)
def test_bad_requests(service: ScoringApp, body: dict[str, Any], status: int, param: str | None) -> None:
    response = service.client.post("/score", json=body)
    error = response.json()["error"]
    assert response.status_code == status, error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"]


@pytest.mark.parametrize("refuses", [True, False])
def test_a_message_that_spells_out_a_special_token_is_refused_where_the_operator_wants_it(
    tmp_path: Path, refuses: bool
) -> None:
    with App(tmp_path, refuse_special_tokens=refuses).started() as app:
        for content in ("a", "a <|end|> b"):
            messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
            response = app.client.post("/score", json={"messages": messages})
            if refuses and content != "a":
                assert (response.status_code, response.json()["error"]["param"]) == (422, "messages.1.content")
                assert "<|end|>" in response.json()["error"]["message"]
            else:
                assert response.status_code == 200


def test_a_body_meets_its_limit_whole_or_chunked(service: ScoringApp) -> None:
    def chunks() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(40):
            yield b"a" * 1000
        yield b'"}'

    for content in (b"".join(chunks()), chunks()):
        response = service.client.post("/score", content=content, headers={"content-type": "application/json"})
        assert response.status_code == 413, response.text


def test_request_ids(service: ScoringApp) -> None:
    given = service.client.post("/score", json={"prompt": "a"}, headers={"X-Request-Id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    assert given.json()["id"] == "risk-abc-1"
    made = service.client.post("/score", json={"prompt": "a"}, headers={"X-Request-Id": "bad id\t"})
    assert len(made.headers["x-request-id"]) == 32


def test_engine_failures_are_500_without_details(service: ScoringApp) -> None:
    service.engine.fail = RuntimeError("secret detail")
    response = service.client.post("/score", json={"prompt": "a"}, headers={"X-Request-Id": "abc"})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.json()["error"]["code"] == "internal_error"
    assert response.headers["x-request-id"] == "abc"
    service.engine.fail = None
    service.engine.nan_layer = 0
    assert service.post(prompt="a").json()["error"]["code"] == "non_finite_readout"


def test_unknown_paths_and_methods_use_the_envelope(service: ScoringApp) -> None:
    assert service.client.get("/nothing").json()["error"]["code"] == "not_found"
    assert service.client.get("/score").json()["error"]["code"] == "method_not_allowed"


def test_many_wrong_elements_are_one_error(service: ScoringApp) -> None:
    for body in ({"input_ids": [""] * 4000}, {"messages": [0] * 4000}, {"prompt": [0] * 4000}):
        error = service.client.post("/score", json=body).json()["error"]
        assert len(error["message"]) < 200


def test_shutting_down_answers_503_to_queued_work(service: ScoringApp) -> None:
    service.engine.before = held = Held()
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(service.post, prompt="a") for _ in range(2)]
        assert held.entered.wait(10)
        until(lambda: "hallutracer_queue_depth 2.0" in service.client.get("/metrics").text)
        pool.submit(service.state.stop)
        time.sleep(0.2)
        held.release.set()
    answers = [one.result() for one in asked]
    assert [answer.status_code for answer in answers] == [503, 503]
    assert all(answer.headers["content-type"] == "application/json" for answer in answers)


def test_openapi_names_the_examples(service: ScoringApp) -> None:
    schema = service.client.get("/openapi.json").json()
    assert "/v1/risk/score" in schema["paths"]
    assert "capital of France" in json.dumps(schema)


def test_not_ready_while_the_engine_stands_still(service: ScoringApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.state.lifecycle.dispatcher, "stalled", True)
    assert service.client.get("/health/live").status_code == 200
    for answer in (service.client.get("/health/ready"), service.post(prompt="a")):
        assert answer.status_code == 503
        assert "has given nothing for 20 s" in answer.json()["error"]["message"]
    monkeypatch.undo()
    assert service.post(prompt="a").status_code == 200


def test_not_ready_before_loading_and_after_a_failure(tmp_path: Path) -> None:
    state = Service.of(lambda: {})
    app = create_app(state)
    early = TestClient(app).post("/score", json={"prompt": "a"})  # without the lifespan nothing is loaded
    assert early.status_code == 503
    assert early.headers["retry-after"] == "1"

    def broken() -> dict[str, Scorer]:
        raise RuntimeError("no such model")

    state = Service.of(broken)
    with TestClient(create_app(state)) as client:
        until(lambda: state.lifecycle.failure is not None)
        assert client.get("/health/live").status_code == 503
        ready = client.get("/health/ready")
    assert ready.status_code == 503
    assert "no such model" in ready.json()["error"]["message"]
