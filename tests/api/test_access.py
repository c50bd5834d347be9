"""Keys, CORS, policies, the log line and the metrics: who may ask, and what is remembered."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from service.access.routes import CHAT_ROUTE, CLASSIFY_ROUTE, LITELLM_ROUTE, TEXT_ROUTE
from service.api.app import pages
from service.api.auth import HEALTH, METRICS
from service.policies.guard import Action, Policy
from service.serving.request_log import JsonLines
from tests.running import App

KEY = {"authorization": "Bearer sesame"}


@contextmanager
def client(tmp_path: Path, **options: Any) -> Iterator[TestClient]:
    with App(tmp_path, names=["tiny"], **options).started() as app:
        yield app.client


def paths(opened: TestClient) -> list[tuple[str, str]]:
    """Every method and path that the app answers."""
    found = []
    pending = list(opened.app.routes)  # type: ignore[attr-defined]
    for route in pending:
        methods = getattr(route, "methods", None)
        if methods:
            found += [(method, route.path) for method in methods]
    assert any(isinstance(route, APIRoute) for route in pending)
    return found


@pytest.mark.parametrize("protect_metrics", [False, True])
def test_every_route_but_health_metrics_and_the_pages_asks_for_a_key(tmp_path: Path, protect_metrics: bool) -> None:
    with client(tmp_path, api_keys=("other", "sesame"), protect_metrics=protect_metrics) as opened:
        walked, files = paths(opened), set(pages(True))
        assert {"/score", "/v1/risk/score", "/v1/models", "/v1/bundles", "/openapi.json", "/docs", METRICS} <= {
            path for _, path in walked
        }
        for method, path in [*walked, ("GET", "/nothing"), ("POST", "/health/%2e%2e/score"), ("POST", "//score")]:
            refused = opened.request(method, path, json={"prompt": "a"}, follow_redirects=False)
            is_open = path in HEALTH or (path == METRICS and not protect_metrics)
            is_open = is_open or (path in files and method in ("GET", "HEAD"))
            assert (refused.status_code == 401) is not is_open, (method, path, refused.status_code)
            if not is_open and method != "HEAD":
                assert refused.json()["error"]["code"] == "unauthorized"
                assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.headers["x-request-id"]
            allowed = opened.request(method, path, json={"prompt": "a"}, headers=KEY)
            assert allowed.status_code != 401


def test_without_the_key_health_names_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with client(tmp_path, api_keys=("sesame",)) as opened:
        assert opened.get("/health/ready").json() == {"status": "ready"}
        assert opened.get("/health/ready", headers=KEY).json()["bundles"] == ["tiny:1"]
        state = opened.app.state.service  # type: ignore[attr-defined]
        monkeypatch.setattr(state.lifecycle, "error", OSError("/srv/models/secret"))
        for path in ("/health/live", "/health/ready"):
            hidden, told = opened.get(path), opened.get(path, headers=KEY)
            assert (hidden.status_code, told.status_code) == (503, 503)
            assert "/srv" not in hidden.text
            assert "/srv/models/secret" in told.text


@pytest.mark.parametrize(
    "value", ["", "sesame", "Bearer", "Bearer ", "Bearer sesam", "Bearer sesamee", "Basic sesame", "Bearer SESAME"]
)
def test_wrong_keys(tmp_path: Path, value: str) -> None:
    with client(tmp_path, api_keys=("sesame",)) as opened:
        assert opened.get("/v1/models", headers={"authorization": value}).status_code == 401
        assert opened.get("/v1/models", headers={"authorization": "bearer sesame"}).status_code == 200
        assert opened.get("/v1/models", headers={"authorization": b"Bearer \xff\xfe"}).status_code == 401


def test_a_wrong_key_costs_no_body(tmp_path: Path) -> None:
    with client(tmp_path, api_keys=("sesame",)) as opened:
        assert opened.post("/score", content=b"{" * 100).status_code == 401


def test_openapi_declares_the_keys_where_they_are_asked_for(tmp_path: Path) -> None:
    with client(tmp_path, api_keys=("sesame",)) as opened:
        document = opened.get("/openapi.json", headers=KEY).json()
        assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
        assert document["paths"]["/score"]["post"]["security"] == [{"key": []}]
        assert "security" not in document["paths"]["/health/live"]["get"]
        assert "security" not in document["paths"]["/metrics"]["get"]
    with client(tmp_path / "open") as opened:
        assert "securitySchemes" not in opened.get("/openapi.json").json()["components"]


def test_cors_is_off_unless_an_origin_is_named(tmp_path: Path) -> None:
    origin = {"origin": "https://a.example"}
    preflight = origin | {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    with client(tmp_path) as opened:
        assert "access-control-allow-origin" not in opened.get("/v1/models", headers=origin).headers
        assert opened.options("/score", headers=preflight).status_code == 405
    with client(tmp_path / "on", cors_origins=("https://a.example",), api_keys=("sesame",)) as opened:
        assert opened.options("/score", headers=preflight).status_code == 200
        allowed = opened.get("/v1/models", headers=origin | KEY)
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        assert "x-hallutracer-risk" in allowed.headers["access-control-expose-headers"]
        other = opened.get("/v1/models", headers={"origin": "https://b.example"} | KEY)
        assert "access-control-allow-origin" not in other.headers


def test_policies_and_whose_threshold_counts(tmp_path: Path) -> None:
    support = Policy("support", Action.ABSTAIN, threshold=0.0, message="Ask Ada.")
    with client(tmp_path, policies={"support": support}, policy="support", threshold=1.0) as opened:

        def row(**body: Any) -> Any:
            answer = opened.post("/score", json={"prompt": "a", **body})
            assert answer.status_code == 200, answer.text
            return answer.json() | answer.json()["data"][0]

        mine = row(generate={})
        assert (mine["policy"], mine["decision"], mine["threshold"]) == ("support", "abstain", 0.0)
        assert mine["message"] == "Ask Ada."
        assert "completion" not in mine
        assert row(policy="gate")["threshold"] == 1.0  # the service's, since the policy names none
        assert row(threshold=0.5)["threshold"] == 0.5  # the request's, before any other
        observed = row(policy="observe", threshold=0.0, generate={})
        assert (observed["decision"], observed["flagged"]) == ("continue", True)
        assert observed["completion"]["text"] == "It is so."
        blocked = row(policy="block", threshold=0.0, generate={})
        assert blocked["decision"] == "block"
        assert not {"message", "completion"} & set(blocked)
        missing = opened.post("/score", json={"prompt": "a", "policy": "none"})
        assert missing.status_code == 404
        assert missing.json()["error"]["param"] == "policy"
        assert opened.get("/v1/bundles").json()["policies"] == ["support", "block", "gate", "observe"]


def test_models_and_bundles(tmp_path: Path) -> None:
    with client(tmp_path) as opened:
        (model,) = opened.get("/v1/models").json()["data"]
        assert (model["id"], model["object"], model["bundles"]) == ("scripted", "model", ["tiny:1"])
        (bundle,) = opened.get("/v1/bundles").json()["data"]
        assert (bundle["id"], bundle["default"], bundle["signals"]) == ("tiny:1", True, ["depth_mean"])
        assert bundle["digest"].startswith("sha256:")


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("hallutracer")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(before)


def test_one_line_a_request_and_never_a_prompt(tmp_path: Path, lines: io.StringIO) -> None:
    with client(tmp_path, api_keys=("sesame",)) as opened:
        secret = "the patient's name"
        body = {"prompt": [secret, secret + "?"], "generate": {"max_tokens": 3, "stop": [secret]}, "policy": "observe"}
        ids = {"x-request-id": "abc"} | KEY
        answer = opened.post("/score", json=body, headers=ids).json()
        streamed = {"prompt": secret, "generate": {}, "threshold": 1, "stream": True}
        opened.post("/score", json=streamed, headers=KEY)
        opened.post("/score", json={"prompt": secret, "threshold": secret}, headers=KEY)
        opened.post("/score", json={"prompt": secret})
        opened.post("/score", json={"prompt": secret, "bundle": "none"}, headers=KEY)
        opened.get("/health/ready")
        opened.get("/metrics")
    written = lines.getvalue()
    assert "patient" not in written
    assert "sesame" not in written
    assert "It is" not in written
    served = [json.loads(line) for line in written.splitlines()]
    assert [line.get("code") for line in served] == [None, None, "invalid_request", "unauthorized", "not_found"]
    assert [line["status"] for line in served] == [200, 200, 422, 401, 404]
    first = served[0]
    assert [line.get("caller") for line in served] == ["key-1", "key-1", "key-1", None, "key-1"]
    assert first["request_id"] == "abc"
    assert first["digest"] == answer["bundle"]["digest"]
    assert first["risks"] == [row["risk"] for row in answer["data"]]
    assert first["decisions"] == ["continue", "continue"]
    assert first["threshold"] == answer["data"][0]["threshold"]
    assert (first["policy"], first["bundle"], first["model"]) == ("observe", "tiny:1", "scripted")
    assert first["completion_tokens"] == 6
    assert {"queue_ms", "prefill_ms", "probe_ms", "decode_ms", "total_ms"} <= set(first)
    assert served[1]["completion_tokens"] == 9


def test_an_exception_is_one_json_line(tmp_path: Path, lines: io.StringIO) -> None:
    with client(tmp_path) as opened:
        opened.app.state.service.tokenizing.run = None  # type: ignore[attr-defined]
        assert opened.post("/score", json={"prompt": "a"}).status_code == 500
    broken, request = (json.loads(line) for line in lines.getvalue().splitlines())
    assert "Traceback" in broken["exception"]
    assert request["code"] == "internal_error"


def test_what_is_counted(tmp_path: Path) -> None:
    with client(tmp_path) as opened:
        opened.post("/score", json={"prompt": ["a", "b"], "threshold": 0, "generate": {}})
        opened.post("/score", json={"prompt": "a", "threshold": 0, "policy": "observe", "generate": {"max_tokens": 4}})
        opened.post("/score", json={"prompt": ""})
        opened.get("/v1/models")
        text = opened.get("/metrics").text
    own = 'bundle="tiny:1",decision="{}",model_name="scripted"'
    assert f"hallutracer_prompts_total{{{own.format('abstain')}}} 2.0" in text
    assert f"hallutracer_prompts_total{{{own.format('continue')}}} 1.0" in text
    assert f"hallutracer_prompts_total{{{own.format('block')}}} 0.0" in text
    for line in (
        'hallutracer_flagged_total{bundle="tiny:1",model_name="scripted"} 3.0',
        'hallutracer_route_prompts_total{bundle="tiny:1",flagged="yes",model_name="scripted",'
        'route="/v1/risk/score"} 3.0',  # asked by its alias
        'hallutracer_completion_tokens_total{bundle="tiny:1",model_name="scripted"} 4.0',
        'hallutracer_risk_count{bundle="tiny:1",model_name="scripted"} 3.0',
        'hallutracer_errors_total{code="empty_prompt"} 1.0',
        'hallutracer_http_requests_total{status="200"} 2.0',
        "hallutracer_request_seconds_count 2.0",
        "hallutracer_decode_seconds_count 1.0",
        "hallutracer_requests_in_flight 0.0",
        "hallutracer_ready 1.0",
    ):
        assert line in text


def test_risks_are_counted_by_the_shape_of_what_was_asked(tmp_path: Path) -> None:
    question = {"role": "user", "content": "What is the capital of Nauru?"}
    answered = [question, {"role": "assistant", "content": "Yaren."}] * 2
    system = {"role": "developer", "content": "Be brief."}
    beside = "Documents:\nYaren is a district of Nauru.\n\n" + question["content"]
    parts = [{"type": "text", "text": "Background: Yaren is in Nauru. "}, {"type": "text", "text": question["content"]}]
    chat, texts = {"model": "scripted", "max_tokens": 2}, {"input_type": "request", "texts": [beside]}
    with client(tmp_path, policy="observe") as opened:
        for path, body in (
            ("/score", {"prompt": [question["content"], beside], "policy": "gate", "threshold": 0}),
            ("/score", {"prompt": question["content"], "generate": {"max_tokens": 2}, "stream": True}),
            ("/score", {"messages": [*answered, question]}),
            ("/score", {"input_ids": [[1, 2], [3]]}),
            (CHAT_ROUTE, chat | {"messages": [system, *answered, {"role": "user", "content": parts}]}),
            (TEXT_ROUTE, chat | {"prompt": beside}),
            (CLASSIFY_ROUTE, {"inputs": question["content"]}),
            (LITELLM_ROUTE, texts),
            (LITELLM_ROUTE, texts | {"structured_messages": [question]}),
        ):
            assert opened.post(path, json=body).status_code == 200, path
        for messages in ([], [question | {"content": None}]):
            assert opened.post("/score", json={"messages": messages}).status_code == 422
        (scorer,) = opened.app.state.service.catalogue.scorers  # type: ignore[attr-defined]
        scorer.prompt_format = "text"  # a prompt of such a bundle may hold a whole conversation
        opened.post("/score", json={"prompt": beside})
        text = opened.get("/metrics").text
    found: dict[str, dict[tuple[str, ...], float]] = {
        "risk_by_conversation_count": {},
        "gated_by_conversation_total": {},
    }
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.value and (own := found.get(sample.name.removeprefix("hallutracer_"))) is not None:
                own[tuple(sample.labels[name] for name in ("turns", "passage", "system"))] = sample.value
    asked, gated = found.values()
    assert asked == {
        ("0", "no", "no"): 4,
        ("0", "yes", "no"): 2,
        ("2-4", "no", "no"): 1,
        ("2-4", "yes", "yes"): 1,
        ("unknown", "unknown", "unknown"): 4,  # token ids, and texts that go through no template
    }
    assert gated == {("0", "no", "no"): 1, ("0", "yes", "no"): 1}
    assert "Nauru" not in text
