"""What a request leaves behind: one log line, its numbers on /metrics, its line in the audit log;
never a prompt."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from service.access.callers import ApiKey
from service.access.routes import CHAT_ROUTE, MESSAGES_ROUTE, RESPONSES_ROUTE, TEXT_ROUTE
from service.annexes.guardrails import (
    CLASSIFY_ROUTE,
    DETECTOR_ROUTES,
    LITELLM_ROUTE,
)
from service.audit.auditor import Auditor
from service.audit.file import verify
from service.policies.guard import GATE
from service.serving import metrics, observers
from service.serving.judgement import Judgement
from service.serving.metrics import Metrics
from service.serving.request_log import JsonLines
from service.serving.service import Service
from tests.api.test_auth import KEY, client
from tests.kit.api import (
    CHAT,
    MESSAGES,
    RESPONSES,
    TEXT,
    WIRES,
    bodies_by_route,
    check_error,
    request_of,
)
from tests.kit.audit import audit_lines, broken_log
from tests.kit.key_files import add_key, revoke_key
from tests.kit.tables import lines as text_lines
from tests.kit.tables import values
from tests.running import App, until

SECRET = "the patient's name"


# --- the log line ---


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The lines of the service's log so far, as it writes them."""
    caplog.set_level(logging.INFO, "hallutracer")
    written, own = JsonLines().format, "hallutracer"
    return lambda: [written(line) for line in caplog.records if line.name.startswith(own)]


def test_one_line_a_request_and_never_a_prompt(
    tmp_path: Path, log: Callable[[], list[str]]
) -> None:
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
    written = log()
    assert not any(secret in "".join(written) for secret in ("patient", "sesame", "It is"))
    started, *served = map(json.loads, written)
    assert "status" not in started  # what judges: said once, at the start
    assert [[line["status"], line.get("code"), line.get("caller")] for line in served] == values(
        """
        200 | null | "key-1"
        200 | null | "key-1"
        422 | "invalid_request" | "key-1"
        401 | "unauthorized" | null
        404 | "not_found" | "key-1"
        """
    )
    first = served[0]
    assert (first["request_id"], first["digest"]) == ("abc", answer["bundle"]["digest"])
    assert first["risks"] == [row["risk"] for row in answer["data"]]
    assert first["decisions"] == ["continue", "continue"]
    assert first["threshold"] == answer["data"][0]["threshold"]
    assert (first["policy"], first["bundle"], first["model"]) == ("observe", "tiny:1", "scripted")
    assert (first["completion_tokens"], served[1]["completion_tokens"]) == (6, 9)
    assert {"queue_ms", "prefill_ms", "probe_ms", "decode_ms", "total_ms"} <= set(first)


def test_an_exception_is_one_json_line(tmp_path: Path, log: Callable[[], list[str]]) -> None:
    with client(tmp_path) as opened:
        opened.app.state.service.tokenizing.run = None  # type: ignore[attr-defined]
        assert opened.post("/score", json={"prompt": "a"}).status_code == 500
    _, broken, request = map(json.loads, log())
    assert ("Traceback" in broken["exception"], request["code"]) == (True, "internal_error")


# --- the numbers; by themselves: test_metrics.py ---


# The first route is called by its alias.
COUNTED = """
prompts_total{bundle="tiny:1",decision="abstain",model_name="scripted"} 2.0
prompts_total{bundle="tiny:1",decision="continue",model_name="scripted"} 1.0
prompts_total{bundle="tiny:1",decision="block",model_name="scripted"} 0.0
flagged_total{bundle="tiny:1",model_name="scripted"} 3.0
route_prompts_total{bundle="tiny:1",flagged="yes",model_name="scripted",route="/v1/risk/score"} 3.0
route_prompts_total{bundle="tiny:1",flagged="no",model_name="scripted",route="/v1/risk/score"} 0.0
gated_by_route_total{bundle="tiny:1",model_name="scripted",route="/v1/risk/score"} 2.0
prompt_tokens_total{bundle="tiny:1",model_name="scripted"} 30.0
completion_tokens_total{bundle="tiny:1",model_name="scripted"} 4.0
risk_count{bundle="tiny:1",model_name="scripted"} 3.0
risk_bucket{bundle="tiny:1",le="1.0",model_name="scripted"} 3.0
prompt_length_tokens_bucket{le="8.0"} 0.0
prompt_length_tokens_bucket{le="16.0"} 3.0
errors_total{code="empty_prompt"} 1.0
http_requests_total{status="200"} 2.0
request_seconds_count 2.0
queue_seconds_count 3.0
prefill_seconds_count 3.0
probe_seconds_count 3.0
decode_seconds_count 1.0
requests_in_flight 0.0
ready 1.0
"""


def test_what_is_counted(tmp_path: Path) -> None:
    with App(tmp_path, names=["tiny"]).started() as app:
        rows = app.ask(prompt=["a", "b"], threshold=0, generate={})["data"]
        app.ask(status=422, prompt="")
        observed = {"policy": "observe", "generate": {"max_tokens": 4}}
        rows += app.ask(prompt="a", threshold=0, **observed)["data"]
        assert [row["index"] for row in rows] == [0, 1, 0]
        app.client.get("/v1/models")
        assert app.series("risk_sum") == pytest.approx(sum(row["risk"] for row in rows))
        answer = app.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    written = answer.text.splitlines()
    assert [line for line in text_lines(COUNTED) if f"hallutracer_{line}" not in written] == []


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
    with App(tmp_path, names=["tiny"]).started() as app:
        app.ask(prompt=["a", "a longer prompt than that" * 4])
        assert app.series("long_prompts_total", bundle="tiny:1") == 1


# Not known of token ids, and of texts that go through no template.
SHAPES = """
    risk_by_conversation_count{passage="no",system="no",turns="0"} 3.0
    risk_by_conversation_count{passage="yes",system="no",turns="0"} 2.0
    risk_by_conversation_count{passage="no",system="no",turns="2-4"} 1.0
    risk_by_conversation_count{passage="no",system="yes",turns="0"} 2.0
    risk_by_conversation_count{passage="no",system="yes",turns="2-4"} 1.0
    risk_by_conversation_count{passage="unknown",system="unknown",turns="unknown"} 4.0
    gated_by_conversation_total{passage="no",system="no",turns="0"} 1.0
    gated_by_conversation_total{passage="yes",system="no",turns="0"} 1.0
    """


def test_risks_are_counted_by_the_shape_of_what_was_asked(tmp_path: Path) -> None:
    question = {"role": "user", "content": "What is the capital of Nauru?"}
    turns = [question, {"role": "assistant", "content": "Yaren."}] * 2 + [question]
    beside = "Documents:\nYaren is a district of Nauru.\n\n" + question["content"]
    brief = "Be brief."
    texts = {"input_type": "request", "texts": [beside]}
    with client(tmp_path, policy="observe") as opened:
        for path, body in (
            ("/score", {"prompt": [question["content"], beside], "policy": "gate", "threshold": 0}),
            ("/score", {"messages": turns}),
            ("/score", {"input_ids": [[1, 2], [3]]}),
            (CHAT_ROUTE, request_of(CHAT, [{"role": "developer", "content": brief}, question])),
            (RESPONSES_ROUTE, request_of(RESPONSES, [question], instructions=brief)),
            (MESSAGES_ROUTE, request_of(MESSAGES, turns, system=brief)),
            (TEXT_ROUTE, request_of(TEXT, prompt=beside)),
            (CLASSIFY_ROUTE, {"inputs": question["content"]}),
            (LITELLM_ROUTE, texts),
            (LITELLM_ROUTE, texts | {"structured_messages": [question]}),
        ):
            assert opened.post(path, json=body).status_code == 200, path
        (scorer,) = opened.app.state.service.catalogue.scorers  # type: ignore[attr-defined]
        scorer.prompt_format = "text"  # a prompt of such a bundle may hold a whole conversation
        opened.post("/score", json={"prompt": beside})
        text = opened.get("/metrics").text
    shapes = text.replace('bundle="tiny:1",model_name="scripted",', "")
    names = r"hallutracer_((?:risk_by_conversation_count|gated_by_conversation_total){.* [1-9].*)"
    assert set(re.findall(names, shapes)) == {*text_lines(SHAPES)}
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
            assert app.series("audit_lines_total", fate="missed") == 1
        app.ask(prompt="a")
        assert app.series("audit_lines_total", fate="written") == 1
        assert lines(tmp_path)[-1]["missed"] == 1


def test_where_the_log_is_required_nothing_is_told_that_is_not_in_it(tmp_path: Path) -> None:
    with audited(tmp_path, required=True) as app:
        app.ask(prompt="a")
        with broken_log(tmp_path / "audit.jsonl"):
            for path, body in [*ASKED.items(), STREAMED[0]]:
                refused = app.client.post(path, json=body)
                error = refused.json().get("error", refused.json())
                name = error["type"] if path == MESSAGES_ROUTE else error["code"]
                names = {MESSAGES_ROUTE: "overloaded_error"} | dict.fromkeys(DETECTOR_ROUTES, 503)
                assert (refused.status_code, name) == (503, names.get(path, "audit_unavailable"))
                assert refused.headers["retry-after"]
                assert "risk" not in refused.json()
            assert app.client.get("/health/live").status_code == 200
            error = check_error(app.client.get("/health/ready"), 503, code="not_ready")
            assert "cannot write the audit log" in error["message"]
            assert app.series("ready") == 0
        app.ask(prompt="a")
        assert app.client.get("/health/ready").status_code == 200
        assert app.series("errors_total", code="audit_unavailable") == len(ASKED) + 1
    assert len(lines(tmp_path, "decision")) == 2


def test_keys_that_change_are_audited_and_without_the_log_none_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.serving.service.WATCH_S", 0.02)
    path = tmp_path / "keys.toml"
    one = add_key(path, "one", {"scopes": ["score"]})
    with audited(tmp_path, keys_file=path) as app:
        ring, good = app.state.access.keys, path.read_text()
        path.write_text("[one")  # in which the log has no part
        until(lambda: ring.problem is not None)
        path.write_text(good)
        until(lambda: ring.problem is None)
        assert lines(tmp_path, "keys.reload") == []
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
