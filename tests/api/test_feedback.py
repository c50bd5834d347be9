"""POST /v1/feedback: labels of answers that every route gives, and answers that do not depend on any of it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from service.access.callers import ApiKey
from service.feedback import databases, writer
from service.feedback.databases import location
from service.policies.guard import Action, Policy
from service.serving.feedback import Feedback
from service.serving.metrics import Metrics
from tests.feedback.made import rows
from tests.running import Running, running, until

ASKED = [{"role": "user", "content": "What is the capital of France?"}]
SECRET = "kumquat"


class Client:
    """One caller of a service that keeps feedback."""

    def __init__(self, service: Running, key: str | None = None) -> None:
        self.service = service
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=service.url, headers=headers, timeout=30)

    def ask(self, route: str = "/score", **body: Any) -> Any:
        answer = self.http.post(route, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def say(self, id: str, label: str = "factual", **body: Any) -> httpx.Response:
        return self.http.post("/v1/feedback", json={"id": id, "label": label, **body})


@contextmanager
def keeping(
    folder: Path, *, prompts: bool = False, days: float | None = None, share: float = 0.05, **settings: Any
) -> Iterator[Client]:
    def feedback(metrics: Metrics) -> Feedback:
        return Feedback(location(str(folder / "feedback.db")), metrics, prompts=prompts, days=days, share=share)

    with running(folder, **{"policy": "observe", "feedback": feedback} | settings) as service:
        yield Client(service)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with keeping(tmp_path_factory.mktemp("kept"), share=0.0) as client:
        yield client


def test_a_label_is_acknowledged_with_what_became_of_it(client: Client) -> None:
    id = client.ask(prompt=["one", "two"])["id"]
    first = client.say(id, "hallucinated", index=1, comment="It is Honiara.")
    assert first.status_code == 200
    assert first.json() == {"object": "feedback", "id": id, "index": 1, "label": "hallucinated", "standing": "new",
                            "conflict": False, "drawn": False, "counts": True, "reason": None}  # fmt: skip
    assert client.say(id, "hallucinated", index=1).json()["standing"] == "repeated"
    changed = client.say(id, "unclear", index=1).json()
    assert (changed["standing"], changed["counts"], changed["reason"]) == ("changed", False, "it decides nothing")
    assert client.say(id).json()["standing"] == "new"  # index 0: another answer


def test_every_route_gives_an_id_that_can_be_labelled(client: Client) -> None:
    chat = {"model": "scripted", "messages": ASKED}
    text = {"model": "scripted", "prompt": ["a", "b"]}
    ids = [client.ask(prompt="why")["id"], client.ask("/v1/risk/score", input_ids=[1, 2])["id"],
           client.ask("/v1/chat/completions", **chat)["id"], client.ask("/v1/completions", **text)["id"]]  # fmt: skip
    assert [id.partition("-")[0] for id in ids] == ["risk", "risk", "chatcmpl", "cmpl"]
    litellm = client.http.post("/beta/litellm_basic_guardrail_api",
                               json={"input_type": "request", "texts": ["a"], "request_data": {}})  # fmt: skip
    classify = client.http.post("/classify", json={"inputs": "a"})
    ids += [answer.headers["x-request-id"] for answer in (litellm, classify)]
    for id in ids:
        assert client.say(id).json()["counts"] is True, id
    assert client.say(ids[3], index=1).status_code == 200
    assert client.say(ids[3], index=2).status_code == 404


@pytest.mark.parametrize("route", ["score", "chat"])
def test_a_stream_can_be_labelled_as_soon_as_its_id_is_known(client: Client, route: str) -> None:
    client.service.engine.sleep_s = 0.02
    try:
        if route == "chat":
            sdk = openai.OpenAI(base_url=f"{client.service.url}/v1", api_key="none", max_retries=0)
            chunks = sdk.chat.completions.create(model="scripted", messages=ASKED, stream=True)  # type: ignore[call-overload]
            assert client.say(next(iter(chunks)).id).status_code == 200
            chunks.close()
            return
        body = {"prompt": "why", "stream": True, "generate": {"max_tokens": 20}}
        with client.http.stream("POST", "/score", json=body) as answer:
            event = next(line for line in answer.iter_lines() if line.startswith("data: "))
            assert client.say(json.loads(event.removeprefix("data: "))["id"]).status_code == 200
    finally:
        client.service.engine.sleep_s = 0.0


def test_what_cannot_be_read_names_its_field(client: Client) -> None:
    id = client.ask(prompt="why")["id"]
    for body, param in (
        ({"label": "factual"}, "id"), ({"id": id}, "label"), ({"id": id, "label": "wrong"}, "label"),
        ({"id": id, "label": "factual", "index": -1}, "index"), ({"id": id, "label": "factual", "index": "0"}, "index"),
        ({"id": "a b", "label": "factual"}, "id"), ({"id": id, "label": "factual", "comment": "x" * 2001}, "comment"),
        ({"id": id, "label": "factual", "comment": "\0"}, "comment"),
        ({"id": id, "label": "factual", "note": "x"}, "note"),
    ):  # fmt: skip
        answer = client.http.post("/v1/feedback", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, param), body
    half = client.http.post("/v1/feedback", headers={"content-type": "application/json"},
                            content=f'{{"id": "{id}", "label": "factual", "comment": "\\ud800"}}')  # fmt: skip
    assert (half.status_code, half.json()["error"]["param"]) == (422, "comment")
    assert client.say(id).json()["standing"] == "new"  # none of it was stored


@pytest.mark.parametrize("decision", ["abstain", "block", "retrieve"])
def test_a_label_of_an_answer_that_was_not_given_does_not_count(tmp_path: Path, decision: str) -> None:
    policy = Policy("mine", Action(decision), 0.0, None if decision == "block" else "No.")
    with keeping(tmp_path, policies={"mine": policy}, policy="mine") as client:
        found = client.say(client.ask(prompt="why", generate={})["id"], "hallucinated").json()
        assert (found["counts"], found["reason"]) == (False, f"the decision was {decision}: no answer of this model "
                                                      "was given")  # fmt: skip
        assert client.service.metric("hallutracer_feedback_labels_total") == 1
        assert client.service.metric("hallutracer_feedback_agreement_total") == 0


def test_another_callers_answer_is_not_there_unless_the_operator_says_so(tmp_path: Path) -> None:
    keys = [ApiKey("ann" * 8, "ann"), ApiKey("bob" * 8, "bob"), ApiKey("eve" * 8, "eve", frozenset({"feedback"}))]
    with keeping(tmp_path, api_keys=keys, callers_may=()) as nobody:
        ann, bob, eve = (Client(nobody.service, key.secret) for key in keys)
        id = ann.ask(prompt="why")["id"]
        assert nobody.say(id).status_code == 401
        missing, theirs = bob.say("risk-" + "0" * 32), bob.say(id)
        assert theirs.status_code == missing.status_code == 404
        assert theirs.json() == missing.json()  # nor does it tell that there is one
        assert ann.say(id).json()["counts"]
        found = eve.say(id, "hallucinated").json()
        assert (found["standing"], found["conflict"], found["reason"]) == ("new", True, "another caller says otherwise")
        assert ann.say(id, "hallucinated").json()["counts"]


def test_without_a_database_the_route_says_how_to_have_one(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        answer = Client(service).say("risk-1")
        assert answer.status_code == 404
        assert "--feedback-db" in answer.json()["error"]["message"]


def test_a_late_label_is_told_why(tmp_path: Path) -> None:
    with keeping(tmp_path, days=30) as client:
        said = client.say("risk-1").json()["error"]
        assert (said["code"], said["param"]) == ("not_found", "id")
        assert "older than 30 days" in said["message"]


def everything(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.glob("feedback.db*"))


@pytest.mark.parametrize("prompts", [False, True])
def test_prompts_are_kept_only_where_the_operator_asks(tmp_path: Path, prompts: bool) -> None:
    with keeping(tmp_path, prompts=prompts, days=1) as client:
        said = [{"role": "user", "content": SECRET}]
        client.ask(prompt=[f"{SECRET} a", SECRET])
        client.ask(messages=said)
        client.ask("/v1/chat/completions", model="scripted", messages=said)
        client.ask("/v1/completions", model="scripted", prompt=SECRET)
        client.ask(input_ids=list(SECRET.encode()))
        until(lambda: client.service.metric("hallutracer_feedback_answers_total") == 6)
        where = location(str(tmp_path / "feedback.db"))
        found = rows(where, "SELECT prompt, mark FROM hallutracer_answers ORDER BY time, place")
    assert (SECRET.encode() in everything(tmp_path)) is prompts
    texts = [None if text is None else json.loads(text) for text, _ in found]
    kept = [{"prompt": f"{SECRET} a"}, {"prompt": SECRET}, {"messages": said}, {"messages": said}, {"text": SECRET},
            {"input_ids": list(SECRET.encode())}]  # fmt: skip
    assert texts == (kept if prompts else [None] * 6)
    marks = [mark for _, mark in found]
    assert marks[1] == marks[2] == marks[3]  # one question, however it was put
    assert len(set(marks)) == 4


def test_the_share_that_is_drawn_is_the_operators_and_no_callers_to_choose(tmp_path: Path) -> None:
    with keeping(tmp_path, share=0.3) as client:
        ids = {client.ask(prompt=["same"] * 250, threshold=None)["id"] for _ in range(8)}
        until(lambda: client.service.metric("hallutracer_feedback_answers_total") == 2000)
    found = rows(location(str(tmp_path / "feedback.db")), "SELECT SUM(drawn), COUNT(*) FROM hallutracer_answers")
    assert len(ids) == 8
    assert found[0][1] == 2000
    assert 450 < found[0][0] < 750  # seven deviations either way


def test_what_is_stored_of_an_answer(tmp_path: Path) -> None:
    with keeping(tmp_path, api_keys=[ApiKey("ann" * 8, "ann")]) as client:
        ann = Client(client.service, "ann" * 8)
        body = ann.ask(prompt="why", threshold=0.0)
        ann.say(body["id"], comment="c")
    [row] = rows(location(str(tmp_path / "feedback.db")), "SELECT request_id, place, caller, route, model, bundle, "
                 "digest, policy, threshold, risk, flagged, decision, signals FROM hallutracer_answers")  # fmt: skip
    [found] = body["data"]
    bundle = body["bundle"]
    assert row == (
        body["id"].removeprefix("risk-"), 0, "ann", "/v1/risk/score", "scripted",
        f"{bundle['name']}:{bundle['version']}", bundle["digest"], "observe", 0.0, found["risk"], 1, "continue",
        json.dumps({"depth_mean": found["depth_mean"]}),
    )  # fmt: skip


def test_answers_do_not_wait_for_a_database_that_is_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "BUSY_S", 0.2)
    monkeypatch.setattr(writer, "AGAIN_S", 0.05)
    with keeping(tmp_path) as client:
        other = sqlite3.connect(tmp_path / "feedback.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        ids = [client.ask(prompt="why")["id"] for _ in range(20)]
        refused = client.say(ids[0])
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "feedback_unavailable")
        assert refused.headers["retry-after"] == "5"
        assert client.service.metric("hallutracer_feedback_answers_total") == 0
        other.execute("COMMIT")
        until(lambda: client.service.metric("hallutracer_feedback_answers_total") == 20)
        assert client.say(ids[0]).status_code == 200  # what had to wait is there


def test_answers_do_not_fail_with_what_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with keeping(tmp_path) as client:
        monkeypatch.setattr(writer.Writer, "record", lambda *_: 1 / 0)
        id = client.ask(prompt=["why", "how"])["id"]
        assert client.service.metric("hallutracer_feedback_answers_total") == 2
        assert client.say(id).status_code == 404


def test_metrics_count_labels_and_whether_they_agree(tmp_path: Path) -> None:
    with keeping(tmp_path) as client:
        flagged = client.ask(prompt="why", threshold=0.0)["id"]
        passed = client.ask(prompt="why", threshold=1.0)["id"]
        for id, label in ((flagged, "hallucinated"), (flagged, "factual"), (passed, "factual"), (passed, "factual")):
            client.say(id, label)
        client.say(client.ask(prompt="why")["id"], "unclear")
        lines = httpx.get(f"{client.service.url}/metrics").text.splitlines()
    counted = [line for line in lines if line.startswith("hallutracer_feedback_") and not line.endswith(" 0.0")]
    of = 'bundle="one:1"'
    assert sorted(counted) == sorted([
        f'hallutracer_feedback_labels_total{{{of},label="hallucinated",model_name="scripted"}} 1.0',
        f'hallutracer_feedback_labels_total{{{of},label="factual",model_name="scripted"}} 3.0',
        f'hallutracer_feedback_labels_total{{{of},label="unclear",model_name="scripted"}} 1.0',
        f'hallutracer_feedback_agreement_total{{{of},flagged="yes",label="hallucinated",model_name="scripted"}} 1.0',
        f'hallutracer_feedback_agreement_total{{{of},flagged="no",label="factual",model_name="scripted"}} 1.0',
        'hallutracer_feedback_answers_total{fate="stored"} 3.0',
    ])  # fmt: skip
