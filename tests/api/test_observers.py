"""What a request leaves behind: one log line, its numbers on /metrics, its line in the audit log;
never a prompt."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from service.access.callers import ApiKey
from service.access.routes import CHAT_ROUTE, MESSAGES_ROUTE, RESPONSES_ROUTE, TEXT_ROUTE
from service.annexes.guardrails import (
    CLASSIFY_ROUTE,
    DETECTOR_ROUTES,
    LITELLM_ROUTE,
)
from service.audit.auditor import Auditor, Who
from service.audit.file import verify
from service.policies.guard import GATE
from service.serving import metrics, observers
from service.serving.judgement import Judgement
from service.serving.metrics import Metrics
from service.serving.request_log import JsonLines
from service.serving.service import Service
from tests.kit.api import WIRES, bodies_by_route, check_error
from tests.kit.audit import audit_lines, broken_log
from tests.kit.key_files import add_key, revoke_key
from tests.running import App, until

KEY = {"authorization": "Bearer sesame"}
SECRET = "the patient's name"


@contextmanager
def client(tmp_path: Path, **options: Any) -> Iterator[TestClient]:
    with App(tmp_path, names=["tiny"], **options).started() as app:
        yield app.client


# --- the log line ---


@pytest.fixture
def log() -> Iterator[io.StringIO]:
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


def test_one_line_a_request_and_never_a_prompt(tmp_path: Path, log: io.StringIO) -> None:
    many = {
        "prompt": [SECRET, SECRET + "?"],
        "generate": {"max_tokens": 3, "stop": [SECRET]},
        "policy": "observe",
    }
    with client(tmp_path, api_keys=("sesame",)) as opened:
        answer = opened.post("/score", json=many, headers={"x-request-id": "abc"} | KEY).json()
        for body, headers in (
            ({"generate": {}, "threshold": 1, "stream": True}, KEY),
            ({"threshold": SECRET}, KEY),
            ({}, {}),
            ({"bundle": "none"}, KEY),
        ):
            opened.post("/score", json={"prompt": SECRET} | body, headers=headers)
        opened.get("/health/ready")
        opened.get("/metrics")
    written = log.getvalue()
    assert not any(secret in written for secret in ("patient", "sesame", "It is"))
    started, *served = [json.loads(line) for line in written.splitlines()]
    assert "status" not in started  # what judges: said once, at the start
    assert [(line["status"], line.get("code"), line.get("caller")) for line in served] == [
        (200, None, "key-1"),
        (200, None, "key-1"),
        (422, "invalid_request", "key-1"),
        (401, "unauthorized", None),
        (404, "not_found", "key-1"),
    ]
    first = served[0]
    assert (first["request_id"], first["digest"]) == ("abc", answer["bundle"]["digest"])
    assert first["risks"] == [row["risk"] for row in answer["data"]]
    assert first["decisions"] == ["continue", "continue"]
    assert first["threshold"] == answer["data"][0]["threshold"]
    assert (first["policy"], first["bundle"], first["model"]) == ("observe", "tiny:1", "scripted")
    assert (first["completion_tokens"], served[1]["completion_tokens"]) == (6, 9)
    assert {"queue_ms", "prefill_ms", "probe_ms", "decode_ms", "total_ms"} <= set(first)


def test_an_exception_is_one_json_line(tmp_path: Path, log: io.StringIO) -> None:
    with client(tmp_path) as opened:
        opened.app.state.service.tokenizing.run = None  # type: ignore[attr-defined]
        assert opened.post("/score", json={"prompt": "a"}).status_code == 500
    _, broken, request = (json.loads(line) for line in log.getvalue().splitlines())
    assert ("Traceback" in broken["exception"], request["code"]) == (True, "internal_error")


# --- the numbers; by themselves: test_metrics.py ---


def test_what_is_counted(tmp_path: Path) -> None:
    with client(tmp_path) as opened:
        for body in (
            {"prompt": ["a", "b"], "threshold": 0, "generate": {}},
            {"prompt": ""},
            {"prompt": "a", "threshold": 0, "policy": "observe", "generate": {"max_tokens": 4}},
        ):
            opened.post("/score", json=body)
        opened.get("/v1/models")
        text = opened.get("/metrics").text
    of = 'bundle="tiny:1"'
    for line in (
        *(
            f'prompts_total{{{of},decision="{decision}",model_name="scripted"}} {count}.0'
            for decision, count in (("abstain", 2), ("continue", 1), ("block", 0))
        ),
        f'flagged_total{{{of},model_name="scripted"}} 3.0',
        # by its alias
        f'route_prompts_total{{{of},flagged="yes",model_name="scripted",'
        'route="/v1/risk/score"} 3.0',
        f'completion_tokens_total{{{of},model_name="scripted"}} 4.0',
        f'risk_count{{{of},model_name="scripted"}} 3.0',
        'errors_total{code="empty_prompt"} 1.0',
        'http_requests_total{status="200"} 2.0',
        "request_seconds_count 2.0",
        "decode_seconds_count 1.0",
        "requests_in_flight 0.0",
        "ready 1.0",
    ):
        assert f"hallutracer_{line}" in text


def test_a_new_metric_is_a_series_and_an_observer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count_long(service: Service, judgement: Judgement, *_: Any) -> None:
        for prompt in judgement.prompts:
            if prompt.report.prompt_tokens > 24:
                service.metrics.count("long_prompts_total", judgement.bundle)

    series = metrics._counter("long_prompts_total", "Prompts of more than 24 tokens.", "bundle")
    monkeypatch.setattr(metrics, "_SERIES", (*metrics._SERIES, series))
    monkeypatch.setattr(observers, "ENDED", (*observers.ENDED, count_long))
    with client(tmp_path) as opened:
        opened.post("/score", json={"prompt": ["a", "a longer prompt than that" * 4]})
        assert 'hallutracer_long_prompts_total{bundle="tiny:1"} 1.0' in opened.get("/metrics").text


def by_shape(text: str, name: str) -> dict[tuple[str, ...], float]:
    """What is counted of each shape of a conversation."""
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    counted = [one for one in samples if one.value and one.name == f"hallutracer_{name}"]
    shape = itemgetter("turns", "passage", "system")
    return {shape(sample.labels): sample.value for sample in counted}


def test_risks_are_counted_by_the_shape_of_what_was_asked(tmp_path: Path) -> None:
    question = {"role": "user", "content": "What is the capital of Nauru?"}
    turns = [question, {"role": "assistant", "content": "Yaren."}] * 2 + [question]
    beside = "Documents:\nYaren is a district of Nauru.\n\n" + question["content"]
    chat = {"model": "scripted", "max_tokens": 2}
    texts = {"input_type": "request", "texts": [beside]}
    with client(tmp_path, policy="observe") as opened:
        for path, body in (
            ("/score", {"prompt": [question["content"], beside], "policy": "gate", "threshold": 0}),
            ("/score", {"messages": turns}),
            ("/score", {"input_ids": [[1, 2], [3]]}),
            (
                CHAT_ROUTE,
                chat | {"messages": [{"role": "developer", "content": "Be brief."}, question]},
            ),
            (
                RESPONSES_ROUTE,
                {"model": "scripted", "input": [question], "instructions": "Be brief."},
            ),
            (MESSAGES_ROUTE, chat | {"messages": turns, "system": "Be brief."}),
            (TEXT_ROUTE, chat | {"prompt": beside}),
            (CLASSIFY_ROUTE, {"inputs": question["content"]}),
            (LITELLM_ROUTE, texts),
            (LITELLM_ROUTE, texts | {"structured_messages": [question]}),
        ):
            assert opened.post(path, json=body).status_code == 200, path
        (scorer,) = opened.app.state.service.catalogue.scorers  # type: ignore[attr-defined]
        scorer.prompt_format = "text"  # a prompt of such a bundle may hold a whole conversation
        opened.post("/score", json={"prompt": beside})
        text = opened.get("/metrics").text
    assert by_shape(text, "risk_by_conversation_count") == {
        ("0", "no", "no"): 3,
        ("0", "yes", "no"): 2,
        ("2-4", "no", "no"): 1,
        ("0", "no", "yes"): 2,
        ("2-4", "no", "yes"): 1,
        ("unknown", "unknown", "unknown"): 4,  # token ids, and texts that go through no template
    }
    gated = by_shape(text, "gated_by_conversation_total")
    assert gated == {("0", "no", "no"): 1, ("0", "yes", "no"): 1}
    assert "Nauru" not in text


# --- the audit log: every decision that anybody is told of, and changes, whoever makes them ---

ASKED = bodies_by_route(SECRET)
ASKED[RESPONSES_ROUTE]["instructions"] = SECRET
STREAMED = [(wire.route, ASKED[wire.route] | {"stream": True}) for wire in WIRES.values()]


@contextmanager
def audited(tmp_path: Path, *, required: bool = False, **options: Any) -> Iterator[App]:
    def audit(metrics: Metrics) -> Auditor:
        return Auditor(tmp_path / "audit.jsonl", required=required, count=metrics.audit_lines)

    with App(tmp_path, names=["tiny"], audit=audit, **options).started() as app:
        yield app


def lines(tmp_path: Path, event: str | None = None) -> list[dict[str, Any]]:
    return audit_lines(tmp_path / "audit.jsonl", event)


def test_every_route_that_decides_is_audited_and_no_prompt_is(tmp_path: Path) -> None:
    alias = ("/score", {"prompt": SECRET})
    same = {"event": "decision", "key": "ann", "address": "testclient", "bundle": "tiny:1"}
    same |= {"model": "scripted", "policy": "gate"}
    with audited(tmp_path, api_keys=[ApiKey("sesame", "ann")]) as app:
        for number, (path, body) in enumerate([*ASKED.items(), *STREAMED, alias]):
            headers = KEY | {"x-request-id": f"r-{number}"}
            answer = app.client.post(path, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            line, [prompt] = lines(tmp_path)[-1], lines(tmp_path)[-1]["prompts"]
            same["route"] = "/v1/risk/score" if path == "/score" else path
            assert line.items() >= (same | {"request_id": f"r-{number}"}).items()
            assert (line["digest"], line["threshold"]) == (app.bundles[0].manifest.digest, 0.5)
            assert (prompt["index"], prompt["decision"] == "abstain") == (0, prompt["flagged"])
            if path == "/score":
                [row] = answer.json()["data"]
                assert (prompt["decision"], prompt["flagged"]) == (row["decision"], row["flagged"])
                assert prompt["risk"] == pytest.approx(row["risk"], abs=1e-6)
            app.ask(path, status=401, **body)
            assert app.series("route_prompts_total", route=line["route"]) >= 1
    text = (tmp_path / "audit.jsonl").read_text()
    assert not any(secret in text for secret in ("patient", "sesame", "It is"))
    assert lines(tmp_path)[-1]["event"] == "service.stop"
    assert verify([tmp_path / "audit.jsonl"]).problems == []


def test_what_a_client_sends_stays_within_its_line(tmp_path: Path) -> None:
    forged = '\n{"prev": "0", "event": "keys.reload"}\n'
    with audited(tmp_path) as app:
        scorer = app.state.catalogue.scorers[0]
        for sent in ("x" * 60_000, "x\\u000a{}", "\u00e9\u2028", '"},{"', "x\x85"):
            headers = {
                "x-request-id": sent.encode(),
                "x-forwarded-for": b"6.6.6.6",
                "x-session-id": sent.encode(),
            }
            app.ask(headers=headers, prompt="a")
        for sent in (forged, "x" * 60_000, "\ud800"):  # as vLLM hands its client's id on
            judgement = Judgement.of(scorer, GATE, scorer.score([[1, 2]]), sent)
            assert app.client.portal is not None
            app.client.portal.call(observers.judged, app.state, judgement)
    result = verify([tmp_path / "audit.jsonl"])
    assert (result.problems, result.lines) == ([], 10)
    assert {line["address"] for line in lines(tmp_path, "decision")} == {"testclient", None}
    assert all(len(line["request_id"]) <= 256 for line in lines(tmp_path, "decision"))
    assert lines(tmp_path, "keys.reload") == []


def test_answers_go_on_without_the_log_and_are_counted(tmp_path: Path) -> None:
    with audited(tmp_path) as app:
        with broken_log(tmp_path / "audit.jsonl"):
            app.ask(prompt="a")
            assert (
                'hallutracer_audit_lines_total{fate="missed"} 1.0'
                in app.client.get("/metrics").text
            )
        app.ask(prompt="a")
        assert (
            'hallutracer_audit_lines_total{fate="written"} 1.0' in app.client.get("/metrics").text
        )
        assert lines(tmp_path)[-1]["missed"] == 1


def test_where_the_log_is_required_nothing_is_told_that_is_not_in_it(tmp_path: Path) -> None:
    with audited(tmp_path, required=True) as app:
        app.ask(prompt="a")
        with broken_log(tmp_path / "audit.jsonl"):
            for path, body in [*ASKED.items(), STREAMED[0]]:
                refused = app.client.post(path, json=body)
                error = refused.json().get("error", refused.json())
                name = error["type"] if path == MESSAGES_ROUTE else error["code"]
                names = {
                    MESSAGES_ROUTE: "overloaded_error",
                    **dict.fromkeys(DETECTOR_ROUTES, 503),
                }
                expected = (503, names.get(path, "audit_unavailable"))
                assert (refused.status_code, name) == expected, path
                assert refused.headers["retry-after"]
                assert "risk" not in refused.json()
            assert app.client.get("/health/live").status_code == 200
            not_ready = app.client.get("/health/ready")
            error = check_error(not_ready, 503, code="not_ready")
            assert "cannot write the audit log" in error["message"]
            assert "hallutracer_ready 0.0" in app.client.get("/metrics").text
        app.ask(prompt="a")
        assert app.client.get("/health/ready").status_code == 200
        text = app.client.get("/metrics").text
        assert f'hallutracer_errors_total{{code="audit_unavailable"}} {len(ASKED) + 1}.0' in text
    assert len(lines(tmp_path, "decision")) == 2


def test_keys_that_change_are_audited_and_without_the_log_none_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.serving.service.WATCH_S", 0.02)
    path = tmp_path / "keys.toml"
    one = add_key(path, "one", {"scopes": ["score"]})
    with audited(tmp_path, keys_file=path) as app:
        ring = app.state.access.keys
        two = add_key(path, "two", {"scopes": ["score"]})
        until(lambda: ring.find(two) is not None and len(lines(tmp_path, "keys.reload")) > 1)
        begun, done = lines(tmp_path, "keys.reload")
        assert (begun["by"], begun["outcome"], done["outcome"]) == ("file", "begun", "done")
        assert done["what"] == {"added": ["two"], "removed": [], "changed": []}
        with broken_log(tmp_path / "audit.jsonl"):
            three = add_key(path, "three", {"scopes": ["score"]})
            until(lambda: ring.problem is not None)
            assert ring.find(three) is None
            revoke_key(path, "one")
            until(lambda: ring.find(one) is None)  # what is taken away is gone, audited or not
            assert [ring.find(two) is None, ring.find(three) is None] == [False, True]
        until(lambda: ring.find(three) is not None)  # by itself, once it can be written
        until(lambda: ring.problem is None)


def test_the_log_has_no_part_in_a_broken_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    add_key(path, "one", {"scopes": ["score"]})
    with audited(tmp_path, keys_file=path) as app:
        path.write_text("[one")
        assert asyncio.run(app.state.access.reload(Who(by="signal")))
        assert app.state.access.keys.problem is not None
        assert lines(tmp_path, "keys.reload") == []
