"""What the service writes to its audit log: every decision that anybody is told of, and changes, whoever makes them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from service.access.callers import ApiKey
from service.audit.auditor import Auditor
from service.audit.events import Who
from service.audit.file import verify
from service.policies.guard import GATE
from service.serving import observers
from service.serving.judgement import Judgement
from service.serving.metrics import Metrics
from tests.key_files import add_key, revoke_key
from tests.running import App, until

KEY = {"authorization": "Bearer sesame"}
CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "the patient's name"}]}
# Route -> body; each asks one prompt.
ASKED: dict[str, dict[str, Any]] = {
    "/score": {"prompt": "the patient's name", "generate": {}},
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "scripted", "prompt": "the patient's name"},
    "/classify": {"inputs": "the patient's name"},
    "/beta/litellm_basic_guardrail_api": {"input_type": "request", "texts": ["the patient's name"]},
}


@contextmanager
def audited(tmp_path: Path, *, required: bool = False, **options: Any) -> Iterator[App]:
    def audit(metrics: Metrics) -> Auditor:
        return Auditor(tmp_path / "audit.jsonl", required=required, count=metrics.audit_lines)

    with App(tmp_path, names=["tiny"], audit=audit, **options).started() as app:
        yield app


def lines(tmp_path: Path, event: str | None = None) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    return [line for line in found if event in (None, line["event"])]


def break_log(tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl").rename(tmp_path / "kept")
    (tmp_path / "audit.jsonl").mkdir()


def mend_log(tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl").rmdir()
    (tmp_path / "kept").rename(tmp_path / "audit.jsonl")


@pytest.mark.parametrize("path", ASKED)
def test_every_route_that_decides_is_audited_and_no_prompt_is(tmp_path: Path, path: str) -> None:
    with audited(tmp_path, api_keys=[ApiKey("sesame", "ann")]) as app:
        for stream in [False, True] if path in ("/score", "/v1/chat/completions", "/v1/completions") else [None]:
            body = ASKED[path] | ({} if stream is None else {"stream": stream})
            answer = app.client.post(path, json=body, headers=KEY | {"x-request-id": f"r-{stream}"})
            assert answer.status_code == 200, answer.text
            line = lines(tmp_path)[-1]
            manifest = app.bundles[0].manifest
            assert (line["event"], line["key"], line["address"]) == ("decision", "ann", "testclient")
            assert (line["request_id"], line["bundle"], line["digest"]) == (f"r-{stream}", "tiny:1", manifest.digest)
            assert line["route"] == ("/v1/risk/score" if path == "/score" else path)
            assert (line["model"], line["policy"], line["threshold"]) == ("scripted", "gate", 0.5)
            [prompt] = line["prompts"]
            assert prompt["index"] == 0
            assert prompt["decision"] == ("abstain" if prompt["flagged"] else "continue")
            assert 0 < prompt["risk"] < 1
        assert app.client.post(path, json=body).status_code == 401
    text = (tmp_path / "audit.jsonl").read_text()
    assert not any(secret in text for secret in ("patient", "sesame", "It is"))
    assert [line["event"] for line in lines(tmp_path)][-1] == "service.stop"
    assert verify([tmp_path / "audit.jsonl"]).problems == []


def test_the_line_says_what_the_answer_says(tmp_path: Path) -> None:
    with audited(tmp_path) as app:
        body = {"prompt": ["a", "b", "c"], "policy": "observe", "threshold": 0.4}
        answer = app.client.post("/score", json=body).json()
    [line] = lines(tmp_path, "decision")
    assert answer["id"] == f"risk-{line['request_id']}"
    assert (line["policy"], line["threshold"], line["key"]) == ("observe", 0.4, None)
    for told, kept in zip(answer["data"], line["prompts"], strict=True):
        assert told["risk"] == pytest.approx(kept["risk"], abs=1e-6)
        assert {name: told[name] for name in ("index", "decision", "flagged")} == {
            name: kept[name] for name in ("index", "decision", "flagged")
        }


def test_what_a_client_sends_stays_within_its_line(tmp_path: Path) -> None:
    forged = '\n{"prev": "0", "event": "keys.reload"}\n'
    with audited(tmp_path) as app:
        scorer = app.state.catalogue.scorers[0]
        for sent in ("x" * 60_000, "x\\u000a{}", "\u00e9\u2028", '"},{"', "x\x85"):
            headers = {"x-request-id": sent.encode(), "x-forwarded-for": b"6.6.6.6", "x-session-id": sent.encode()}
            assert app.client.post("/score", json={"prompt": "a"}, headers=headers).status_code == 200
        for sent in (forged, "x" * 60_000, "\ud800"):  # as vLLM hands its client's id on
            judgement = Judgement.of(scorer, GATE, scorer.score([[1, 2]]), sent)
            app.client.portal.call(observers.judged, app.state, judgement)  # type: ignore[union-attr]
    found = verify([tmp_path / "audit.jsonl"])
    assert (found.problems, found.lines) == ([], 10)
    assert {line["address"] for line in lines(tmp_path, "decision")} == {"testclient", None}
    assert all(len(line["request_id"]) <= 256 for line in lines(tmp_path, "decision"))
    assert lines(tmp_path, "keys.reload") == []


def test_answers_go_on_without_the_log_and_are_counted(tmp_path: Path) -> None:
    with audited(tmp_path) as app:
        break_log(tmp_path)
        assert app.client.post("/score", json={"prompt": "a"}).status_code == 200
        assert 'hallutracer_audit_lines_total{fate="missed"} 1.0' in app.client.get("/metrics").text
        mend_log(tmp_path)
        assert app.client.post("/score", json={"prompt": "a"}).status_code == 200
        assert 'hallutracer_audit_lines_total{fate="written"} 1.0' in app.client.get("/metrics").text
        assert lines(tmp_path)[-1]["missed"] == 1


def test_where_the_log_is_required_nothing_is_told_that_is_not_in_it(tmp_path: Path) -> None:
    with audited(tmp_path, required=True) as app:
        assert app.client.post("/score", json={"prompt": "a"}).status_code == 200
        break_log(tmp_path)
        for path, body in ASKED.items():
            refused = app.client.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "audit_unavailable"), path
            assert refused.headers["retry-after"]
            assert "risk" not in refused.json()
        refused = app.client.post("/score", json=ASKED["/score"] | {"stream": True})
        assert refused.status_code == 503
        mend_log(tmp_path)
        assert app.client.post("/score", json={"prompt": "a"}).status_code == 200
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
        break_log(tmp_path)
        three = add_key(path, "three", {"scopes": ["score"]})
        until(lambda: ring.problem is not None)
        assert ring.find(three) is None
        revoke_key(path, "one")
        until(lambda: ring.find(one) is None)  # what is taken away is gone, audited or not
        assert [ring.find(two) is None, ring.find(three) is None] == [False, True]
        mend_log(tmp_path)
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
