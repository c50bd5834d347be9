"""OpenAI's own client against vLLM's own server with the plugin: completions, chats, streams, gated and not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines.vllm.installed import vllm_or_skip

vllm_or_skip()

import openai  # noqa: E402

from service.audit.file import verify  # noqa: E402
from service.scoring import Scorer  # noqa: E402
from tests.vllm_plugin.server import MODEL  # noqa: E402
from tests.vllm_plugin.test_audit import check_lines, own_fields  # noqa: E402

KNOWN, UNKNOWN = "What is the capital of Italy?", "What is the capital of the Solomon Islands?"
GATE = {"vllm_xargs": {"hallutracer_policy": "gate"}}


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """What the transformers engine says of the same prompts."""
    from pathlib import Path

    from probes_store.store import SHIPPED, Store
    from service.demo import MODEL_DIR
    from service.engines.base import EngineOptions, Sampling
    from service.engines.scheduler import Scheduled
    from service.engines.transformers.engine import TransformersEngine
    from service.policies.guard import OBSERVE

    engine = Scheduled(TransformersEngine.load(EngineOptions(str(MODEL_DIR))))
    scorer = Scorer(engine, Store(Path("/nonexistent"), fallbacks=[SHIPPED]).load("demo"))
    ids = [scorer.render(text) for text in (KNOWN, UNKNOWN)]
    reports = scorer.score_or_continue(ids, Sampling(max_tokens=12), OBSERVE)
    return {"ids": ids, "risk": [r.risk for r in reports], "text": [r.completion.text for r in reports if r.completion]}


def risk_of(response: Any) -> dict[str, Any]:
    found = response.model_extra["hallutracer"]
    assert found["bundle"]["name"] in ("demo", "demo-fused")
    return found  # type: ignore[no-any-return]


def chat(client: openai.OpenAI, question: str, **options: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": question}], max_tokens=12, temperature=0.0, **options
    )


@pytest.mark.parametrize("place", [0, 1])
def test_a_chat_says_its_risk(client: openai.OpenAI, expected: dict[str, Any], place: int) -> None:
    response = chat(client, (KNOWN, UNKNOWN)[place])
    (row,) = risk_of(response)["data"]
    assert row["risk"] == pytest.approx(expected["risk"][place], abs=1e-5)
    assert row["decision"] == "continue"  # observe is the default: nothing changes for whoever upgrades
    assert row["flagged"] is (place == 1)
    assert response.choices[0].message.content == expected["text"][place]
    assert response.choices[0].finish_reason == "stop"


def test_what_is_told_is_in_the_audit_log_in_our_own_services_form(
    client: openai.OpenAI, url: str, audit_log: Path, tmp_path: Path
) -> None:
    like, told = own_fields(tmp_path), chat(client, UNKNOWN, extra_body=GATE)
    gated = check_lines(audit_log, like)[-1]
    assert gated["request_id"] == told.id
    assert (gated["route"], gated["policy"]) == ("/v1/chat/completions", "gate")
    assert gated["digest"] == risk_of(told)["bundle"]["digest"]
    risk = pytest.approx(risk_of(told)["data"][0]["risk"], abs=1e-6)
    assert gated["prompts"] == [{"index": 0, "risk": risk, "decision": "abstain", "flagged": True}]
    pair = client.completions.create(model=MODEL, prompt=[KNOWN, UNKNOWN], max_tokens=2, temperature=0)
    both = check_lines(audit_log, like)[-2:]
    assert sorted(line["prompts"][0]["index"] for line in both) == [0, 1]
    assert all(line["request_id"].startswith(pair.id) for line in both)
    httpx.post(f"{url}/v1/risk/score", json={"prompt": KNOWN}, timeout=60).raise_for_status()
    assert check_lines(audit_log, like)[-1]["route"] == "/v1/risk/score"
    assert KNOWN not in audit_log.read_text()
    assert verify([audit_log]).problems == []


def test_a_gated_chat_has_no_answer(client: openai.OpenAI) -> None:
    response = chat(client, UNKNOWN, extra_body=GATE)
    (row,) = risk_of(response)["data"]
    assert (row["decision"], row["message"]) == ("abstain", "I am not sure.")
    assert not response.choices[0].message.content
    assert response.choices[0].finish_reason == "content_filter"


def test_a_gate_lets_the_others_through(client: openai.OpenAI, expected: dict[str, Any]) -> None:
    response = chat(client, KNOWN, extra_body=GATE)
    assert response.choices[0].message.content == expected["text"][0]
    assert risk_of(response)["policy"] == "gate"


def test_a_stream_tells_the_risk_first(client: openai.OpenAI, expected: dict[str, Any]) -> None:
    chunks = list(chat(client, KNOWN, stream=True))
    assert risk_of(chunks[0])["data"][0]["risk"] == pytest.approx(expected["risk"][0], abs=1e-5)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected["text"][0]
    assert sum("hallutracer" in (chunk.model_extra or {}) for chunk in chunks) == 1
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("logprobs", [None, True])
def test_a_gated_stream_has_no_token(client: openai.OpenAI, logprobs: bool | None) -> None:
    chunks = list(chat(client, UNKNOWN, stream=True, extra_body=GATE, logprobs=logprobs))
    assert risk_of(chunks[0])["data"][0]["decision"] == "abstain"
    assert not any(c.choices[0].delta.content for c in chunks if c.choices)
    assert chunks[-1].choices[0].finish_reason == "content_filter"


def test_completions_of_several_prompts(client: openai.OpenAI, expected: dict[str, Any]) -> None:
    response = client.completions.create(
        model=MODEL, prompt=expected["ids"], max_tokens=12, temperature=0.0, extra_body=GATE
    )
    rows = risk_of(response)["data"]
    assert [row["index"] for row in rows] == [0, 1]
    assert [row["risk"] for row in rows] == pytest.approx(expected["risk"], abs=1e-5)
    assert [choice.text for choice in response.choices] == [expected["text"][0], ""]
    assert [choice.finish_reason for choice in response.choices] == ["stop", "content_filter"]


def test_a_stream_of_several_prompts(client: openai.OpenAI, expected: dict[str, Any]) -> None:
    text, ended, rows = ["", ""], ["", ""], {}
    for chunk in client.completions.create(
        model=MODEL, prompt=expected["ids"], max_tokens=12, temperature=0.0, stream=True, extra_body=GATE
    ):
        for row in (chunk.model_extra or {}).get("hallutracer", {}).get("data", []):
            assert row["index"] not in rows
            rows[row["index"]] = row["risk"]
        for choice in chunk.choices:
            assert choice.index in rows, "text before its risk"
            text[choice.index] += choice.text
            ended[choice.index] = choice.finish_reason or ended[choice.index]
    assert text == [expected["text"][0], ""]
    assert ended == ["stop", "content_filter"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("question", [KNOWN, UNKNOWN])
def test_several_choices(client: openai.OpenAI, question: str, stream: bool) -> None:
    got = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        max_tokens=12,
        n=2,
        seed=1,
        stream=stream,
        extra_body=GATE,
    )
    text, ended = ["", ""], ["", ""]
    for part in got if stream else [got]:
        for choice in part.choices:
            text[choice.index] += (choice.delta if stream else choice.message).content or ""
            ended[choice.index] = choice.finish_reason or ended[choice.index]
    assert all(text) is (question == KNOWN)
    assert ended == (["stop"] * 2 if question == KNOWN else ["content_filter"] * 2)


@pytest.mark.parametrize(
    "awkward",
    [
        {"ignore_eos": True},
        {"min_tokens": 4},
        {"structured_outputs": {"regex": " [A-Z][a-z]+"}},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("stream", [False, True])
def test_where_an_end_token_would_not_end_it_the_gate_holds_too(
    client: openai.OpenAI, awkward: dict[str, Any], stream: bool
) -> None:
    for question, open_ in ((UNKNOWN, False), (KNOWN, True)):
        got = chat(client, question, stream=stream, extra_body=GATE | awkward)
        parts = list(got) if stream else [got]
        said = [(c.delta if stream else c.message).content for part in parts for c in part.choices]
        assert any(said) is open_
        assert (parts[-1].choices[0].finish_reason == "content_filter") is not open_


def test_another_bundle_and_threshold(client: openai.OpenAI) -> None:
    asked = {"hallutracer_bundle": "demo-fused", "hallutracer_policy": "gate", "hallutracer_threshold": 1.0}
    response = chat(client, UNKNOWN, extra_body={"vllm_xargs": asked})
    found = risk_of(response)
    assert found["bundle"]["name"] == "demo-fused"
    assert found["data"][0]["threshold"] == 1.0
    assert response.choices[0].message.content


@pytest.mark.parametrize(
    "asked",
    [
        {"hallutracer_policy": "nonsense"},
        {"hallutracer_bundle": "nonsense"},
        {"hallutracer_threshold": 2.0},
        {"hallutracer_threshold": "high"},
    ],
)
def test_what_it_does_not_know_is_refused(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match="hallutracer|nonsense|threshold"):
        chat(client, KNOWN, extra_body={"vllm_xargs": asked})


def test_a_forged_directive_is_not_taken(client: openai.OpenAI) -> None:
    forged = {"vllm_xargs": {"hallutracer": "anything", "hallutracer_policy": "gate"}}
    assert not chat(client, UNKNOWN, extra_body=forged).choices[0].message.content


def test_beam_search_is_not_gated_behind_ones_back(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="beam search"):
        chat(client, UNKNOWN, n=2, extra_body=GATE | {"use_beam_search": True})
    passed = chat(client, KNOWN, n=2, extra_body={"use_beam_search": True})
    assert "beam search" in passed.model_extra["hallutracer"]["error"]
    assert passed.choices[0].message.content


def test_risk_headers(url: str) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2}
    for stream in (False, True):
        response = httpx.post(f"{url}/v1/completions", json=body | {"stream": stream}, timeout=60)
        assert 0.0 <= float(response.headers["x-hallutracer-risk"]) <= 1.0
        assert response.headers["x-hallutracer-decision"] == "continue"


def test_errors_of_vllms_own_pass_unchanged(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt=[1] * 5000, max_tokens=4)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="x")


def test_our_own_route(url: str, expected: dict[str, Any]) -> None:
    response = httpx.post(f"{url}/v1/risk/score", json={"prompt": [KNOWN, UNKNOWN], "policy": "gate"}, timeout=60)
    assert response.status_code == 200, response.text
    assert [row["risk"] for row in response.json()["data"]] == pytest.approx(expected["risk"], abs=1e-5)
    events = httpx.post(
        f"{url}/v1/risk/score",
        json={"prompt": KNOWN, "generate": {"max_tokens": 12}, "stream": True},
        timeout=60,
    ).text.split("\n\n")
    assert json.loads(events[0].removeprefix("data: "))["object"] == "risk.list"
    wrong = httpx.post(f"{url}/v1/risk/score", json={"prompt": ""}, timeout=60)
    assert wrong.status_code in (400, 422)
    assert httpx.get(f"{url}/v1/bundles").json()["data"][0]["name"] == "demo"


def test_our_series_are_among_vllms(url: str) -> None:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    assert any(line.startswith("vllm:") for line in lines)
    counted = [line for line in lines if line.startswith("hallutracer_prompts_total") and 'decision="abstain"' in line]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in counted) > 0
    routes = [line for line in lines if line.startswith("hallutracer_route_prompts_total")]
    for route, some in (("/v1/completions", True), ("/v1/chat/completions", True), ("/classify", False)):
        found = [float(line.rsplit(" ", 1)[1]) for line in routes if f'route="{route}"' in line]
        assert (sum(found) > 0) is some, route
    shapes = [line for line in lines if line.startswith("hallutracer_risk_by_conversation_count")]
    for turns in ("0", "unknown"):  # chats, and texts
        assert sum(float(line.rsplit(" ", 1)[1]) for line in shapes if f'turns="{turns}"' in line) > 0, turns


def test_a_reader_who_leaves_ends_the_request(url: str) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        next(response.iter_lines())
    for _ in range(100):
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        running = [float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith("vllm:num_requests_running{")]
        if sum(running) == 0:
            return
    raise AssertionError("the request still runs")
