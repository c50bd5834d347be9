"""POST /v1/feedback: labels of answers that every route gives, and answers that do not depend on
any of it."""

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
from service.access.routes import CHAT_ROUTE, TEXT_ROUTE
from service.annexes.feedback.store import Feedback
from service.annexes.guardrails import CLASSIFY_ROUTE, LITELLM_ROUTE
from service.feedback import databases, writer
from service.feedback.databases import location
from service.policies.guard import Action, Policy
from service.serving.metrics import Metrics
from tests.kit.feedback import rows
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
        return (
            answer.json() if isinstance(answer.json(), dict) and "id" in answer.json() else answer
        )

    def say(self, id: str, label: str = "factual", **body: Any) -> httpx.Response:
        return self.http.post("/v1/feedback", json={"id": id, "label": label, **body})


@contextmanager
def keeping(
    folder: Path, *, kept: dict[str, Any] | None = None, **settings: Any
) -> Iterator[Client]:
    """``kept``: options of ``Feedback``."""

    def feedback(metrics: Metrics) -> Feedback:
        return Feedback(
            location(str(folder / "feedback.db")), metrics, **{"share": 0.05} | (kept or {})
        )

    with running(folder, **{"policy": "observe", "feedback": feedback} | settings) as service:
        yield Client(service)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with keeping(tmp_path_factory.mktemp("kept"), kept={"share": 0.0}) as client:
        yield client


def stored(folder: Path, query: str) -> list[Any]:
    return list(rows(location(str(folder / "feedback.db")), query))


def test_a_label_is_acknowledged_with_what_became_of_it(client: Client) -> None:
    id = client.ask(prompt=["one", "two"])["id"]
    first = client.say(id, "hallucinated", index=1, comment="It is Honiara.")
    assert (first.status_code, first.json()) == (
        200,
        {
            "object": "feedback",
            "id": id,
            "index": 1,
            "label": "hallucinated",
            "standing": "new",
            "conflict": False,
            "drawn": False,
            "counts": True,
            "reason": None,
        },
    )
    assert client.say(id, "hallucinated", index=1).json()["standing"] == "repeated"
    changed = client.say(id, "unclear", index=1).json()
    assert (changed["standing"], changed["counts"], changed["reason"]) == (
        "changed",
        False,
        "it decides nothing",
    )
    assert client.say(id).json()["standing"] == "new"  # index 0: another answer


def test_every_route_gives_an_id_that_can_be_labelled(client: Client) -> None:
    model = {"model": "scripted"}
    ids = [
        client.ask(prompt="why")["id"],
        client.ask("/v1/risk/score", input_ids=[1, 2])["id"],
        client.ask(CHAT_ROUTE, messages=ASKED, **model)["id"],
        client.ask(TEXT_ROUTE, prompt=["a", "b"], **model)["id"],
        client.ask(LITELLM_ROUTE, input_type="request", texts=["a"], request_data={}).headers[
            "x-request-id"
        ],
        client.ask(CLASSIFY_ROUTE, inputs="a").headers["x-request-id"],
    ]
    assert [id.partition("-")[0] for id in ids[:4]] == ["risk", "risk", "chatcmpl", "cmpl"]
    assert all(client.say(id).json()["counts"] is True for id in ids)
    assert [client.say(ids[3], index=index).status_code for index in (1, 2)] == [200, 404]


@pytest.mark.parametrize("route", ["score", "chat"])
def test_a_stream_can_be_labelled_as_soon_as_its_id_is_known(
    client: Client, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.service.engine, "sleep_s", 0.02)
    if route == "chat":
        sdk = openai.OpenAI(base_url=f"{client.service.url}/v1", api_key="none", max_retries=0)
        body: Any = {"model": "scripted", "messages": ASKED, "stream": True}
        chunks = sdk.chat.completions.create(**body)
        assert client.say(next(iter(chunks)).id).status_code == 200
        chunks.close()
        return
    body = {"prompt": "why", "stream": True, "generate": {"max_tokens": 20}}
    with client.http.stream("POST", "/score", json=body) as answer:
        event = next(line for line in answer.iter_lines() if line.startswith("data: "))
        assert client.say(json.loads(event.removeprefix("data: "))["id"]).status_code == 200


def test_what_cannot_be_read_names_its_field(client: Client) -> None:
    id = client.ask(prompt="why")["id"]
    good = {"id": id, "label": "factual"}
    for body, param in (
        ({"label": "factual"}, "id"),
        ({"id": id}, "label"),
        (good | {"label": "wrong"}, "label"),
        (good | {"index": -1}, "index"),
        (good | {"index": "0"}, "index"),
        (good | {"id": "a b"}, "id"),
        (good | {"comment": "x" * 2001}, "comment"),
        (good | {"comment": "\0"}, "comment"),
        (good | {"comment": "\ud800"}, "comment"),
        (good | {"note": "x"}, "note"),
    ):
        headers = {"content-type": "application/json"}
        answer = client.http.post("/v1/feedback", content=json.dumps(body), headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, param), body
    assert client.say(id).json()["standing"] == "new"  # none of it was stored


def test_a_label_of_an_answer_that_was_not_given_does_not_count(tmp_path: Path) -> None:
    decisions = ("abstain", "block", "retrieve")
    policies = {
        one: Policy(one, Action(one), 0.0, None if one == "block" else "No.") for one in decisions
    }
    with keeping(tmp_path, policies=policies) as client:
        for decision in decisions:
            answer = client.say(
                client.ask(prompt="why", policy=decision)["id"], "hallucinated"
            ).json()
            assert (answer["counts"], f"the decision was {decision}" in answer["reason"]) == (
                False,
                True,
            )
        assert client.service.metric("hallutracer_feedback_labels_total") == 3
        assert client.service.metric("hallutracer_feedback_agreement_total") == 0


def test_another_callers_answer_is_not_there_unless_the_operator_says_so(tmp_path: Path) -> None:
    keys = [
        ApiKey("ann" * 8, "ann"),
        ApiKey("bob" * 8, "bob"),
        ApiKey("eve" * 8, "eve", frozenset({"feedback"})),
    ]
    with keeping(tmp_path, api_keys=keys, callers_may=()) as nobody:
        ann, bob, eve = (Client(nobody.service, key.secret) for key in keys)
        id = ann.ask(prompt="why")["id"]
        assert nobody.say(id).status_code == 401
        missing, theirs = bob.say("risk-" + "0" * 32), bob.say(id)
        assert theirs.status_code == missing.status_code == 404
        assert theirs.json() == missing.json()  # nor does it tell that there is one
        assert ann.say(id).json()["counts"]
        answer = eve.say(id, "hallucinated").json()
        assert (answer["standing"], answer["conflict"], answer["reason"]) == (
            "new",
            True,
            "another caller says otherwise",
        )
        assert ann.say(id, "hallucinated").json()["counts"]


def test_where_there_is_nothing_to_label_it_is_told_why(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        answer = Client(service).say("risk-1")
        assert (answer.status_code, "--feedback-db" in answer.text) == (404, True)
    (tmp_path / "kept").mkdir()
    with keeping(tmp_path / "kept", kept={"days": 30}) as client:
        said = client.say("risk-1").json()["error"]
        assert (said["code"], said["param"], "30 days" in said["message"]) == (
            "not_found",
            "id",
            True,
        )


@pytest.mark.parametrize("prompts", [False, True])
def test_prompts_are_kept_only_where_the_operator_asks(tmp_path: Path, prompts: bool) -> None:
    with keeping(tmp_path, kept={"prompts": prompts, "days": 1}) as client:
        said, model = [{"role": "user", "content": SECRET}], {"model": "scripted"}
        for route, body in (
            ("/score", {"prompt": [f"{SECRET} a", SECRET]}),
            ("/score", {"messages": said}),
            (CHAT_ROUTE, {"messages": said} | model),
            (TEXT_ROUTE, {"prompt": SECRET} | model),
            ("/score", {"input_ids": list(SECRET.encode())}),
        ):
            client.ask(route, **body)
        until(lambda: client.service.metric("hallutracer_feedback_answers_total") == 6)
        result = stored(
            tmp_path, "SELECT prompt, mark FROM hallutracer_answers ORDER BY time, place"
        )
    everything = b"".join(path.read_bytes() for path in tmp_path.glob("feedback.db*"))
    assert (SECRET.encode() in everything) is prompts
    kept = [
        {"prompt": f"{SECRET} a"},
        {"prompt": SECRET},
        {"messages": said},
        {"messages": said},
        {"text": SECRET},
        {"input_ids": list(SECRET.encode())},
    ]
    assert [text and json.loads(text) for text, _ in result] == (kept if prompts else [None] * 6)
    marks = [mark for _, mark in result]
    assert marks[1] == marks[2] == marks[3]  # one question, however it was put
    assert len(set(marks)) == 4


def test_the_share_that_is_drawn_is_the_operators_and_no_callers_to_choose(tmp_path: Path) -> None:
    with keeping(tmp_path, kept={"share": 0.3}) as client:
        ids = {client.ask(prompt=["same"] * 250, threshold=None)["id"] for _ in range(8)}
        until(lambda: client.service.metric("hallutracer_feedback_answers_total") == 2000)
    [(drawn, count)] = stored(tmp_path, "SELECT SUM(drawn), COUNT(*) FROM hallutracer_answers")
    assert (len(ids), count) == (8, 2000)
    assert 450 < drawn < 750  # seven deviations either way


def test_what_is_stored_of_an_answer(tmp_path: Path) -> None:
    with keeping(tmp_path, api_keys=[ApiKey("ann" * 8, "ann")]) as client:
        ann = Client(client.service, "ann" * 8)
        body = ann.ask(prompt="why", threshold=0.0)
        ann.say(body["id"], comment="c")
    [row] = stored(
        tmp_path,
        "SELECT request_id, place, caller, route, model, bundle, digest, policy, threshold, risk, "
        "flagged, decision, signals FROM hallutracer_answers",
    )
    [found], bundle = body["data"], body["bundle"]
    assert row == (
        body["id"].removeprefix("risk-"),
        0,
        "ann",
        "/v1/risk/score",
        "scripted",
        f"{bundle['name']}:{bundle['version']}",
        bundle["digest"],
        "observe",
        0.0,
        found["risk"],
        1,
        "continue",
        json.dumps({"depth_mean": found["depth_mean"]}),
    )


def test_answers_neither_wait_for_a_database_nor_fail_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(databases, "BUSY_S", 0.2)
    monkeypatch.setattr(writer, "AGAIN_S", 0.05)
    with keeping(tmp_path) as client:
        other = sqlite3.connect(tmp_path / "feedback.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        ids = [client.ask(prompt="why")["id"] for _ in range(20)]
        refused = client.say(ids[0])
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            503,
            "feedback_unavailable",
        )
        assert refused.headers["retry-after"] == "5"
        assert client.service.metric("hallutracer_feedback_answers_total") == 0
        other.execute("COMMIT")
        until(lambda: client.service.metric("hallutracer_feedback_answers_total") == 20)
        assert client.say(ids[0]).status_code == 200  # what had to wait is there
        monkeypatch.setattr(writer.Writer, "record", lambda *_: 1 / 0)
        id = client.ask(prompt=["why", "how"])["id"]
        assert client.service.metric("hallutracer_feedback_answers_total") == 22
        assert client.say(id).status_code == 404


def test_metrics_count_labels_and_whether_they_agree(tmp_path: Path) -> None:
    with keeping(tmp_path) as client:
        flagged, passed = (
            client.ask(prompt="why", threshold=threshold)["id"] for threshold in (0.0, 1.0)
        )
        for id, label in (
            (flagged, "hallucinated"),
            (flagged, "factual"),
            (passed, "factual"),
            (passed, "factual"),
        ):
            client.say(id, label)
        client.say(client.ask(prompt="why")["id"], "unclear")
        lines = httpx.get(f"{client.service.url}/metrics").text.splitlines()
    counted = [
        line
        for line in lines
        if line.startswith("hallutracer_feedback_") and not line.endswith(" 0.0")
    ]
    of, end = 'bundle="one:1"', 'model_name="scripted"}'
    assert sorted(line.removeprefix("hallutracer_feedback_") for line in counted) == sorted(
        [
            *(
                f'labels_total{{{of},label="{label}",{end} {count}.0'
                for label, count in (("hallucinated", 1), ("factual", 3), ("unclear", 1))
            ),
            *(
                f'agreement_total{{{of},flagged="{flag}",label="{label}",{end} 1.0'
                for flag, label in (("yes", "hallucinated"), ("no", "factual"))
            ),
            'answers_total{fate="stored"} 3.0',
        ]
    )
