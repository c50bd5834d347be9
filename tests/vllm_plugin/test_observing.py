"""vLLM's own server with the plugin under a policy that observes, by OpenAI's own client and by
hand.

Completions, chats, streams, gated and not; and a caller who changes how its prompt is rendered, so
that its risk falls.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines.vllm.installed import vllm_or_skip

vllm_or_skip()

import openai  # noqa: E402

from probes_store.store import SHIPPED, Store  # noqa: E402
from service.audit.file import verify  # noqa: E402
from service.demo import MODEL_DIR  # noqa: E402
from service.engines.base import EngineOptions, Sampling  # noqa: E402
from service.engines.scheduler import Scheduled  # noqa: E402
from service.engines.transformers.engine import TransformersEngine  # noqa: E402
from service.policies.guard import OBSERVE  # noqa: E402
from service.scoring import Scorer  # noqa: E402
from tests.api.test_observers import audited, lines  # noqa: E402
from tests.vllm_plugin.conftest import KNOWN, MODEL, SURE, UNKNOWN  # noqa: E402
from tests.vllm_plugin.test_gated import CHATS, TEXTS, documents, token_ids, turn  # noqa: E402

GATE = {"vllm_xargs": {"hallutracer_policy": "gate"}}
REASONS = ["stop", "content_filter"]


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """What the transformers engine says of the same prompts."""
    engine = Scheduled(TransformersEngine.load(EngineOptions(str(MODEL_DIR))))
    scorer = Scorer(engine, Store(Path("/nonexistent"), fallbacks=[SHIPPED]).load("demo"))
    ids = [scorer.render(text) for text in (KNOWN, UNKNOWN)]
    reports = scorer.score_or_continue(ids, Sampling(max_tokens=12), OBSERVE)
    return {
        "ids": ids,
        "risk": [r.risk for r in reports],
        "text": [r.completion.text for r in reports if r.completion],
    }


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def note_in(part: Any) -> dict[str, Any]:
    return dict((part.model_extra or {}).get("hallutracer", {}))


def chat(client: openai.OpenAI, question: str, **options: Any) -> Any:
    """A chat's response, or the list of its chunks."""
    asked = {"model": MODEL, "messages": turn(question), "max_tokens": 12, "temperature": 0.0}
    got = client.chat.completions.create(**asked | options)
    return list(got) if options.get("stream") else got


def choices_of(parts: list[Any]) -> tuple[list[str], list[str]]:
    """Each choice's text, and why it ended."""
    text, ended = {}, {}
    for choice in (choice for part in parts for choice in part.choices):
        message = getattr(choice, "delta", None) or getattr(choice, "message", None)
        text[choice.index] = text.get(choice.index, "") + (
            (choice.text if message is None else message.content) or ""
        )
        ended[choice.index] = choice.finish_reason or ended.get(choice.index)
    return [text[index] for index in sorted(text)], [ended[index] for index in sorted(ended)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("number", [0, 1])
def test_a_chat_says_its_risk_first_and_a_gate_withholds_the_unknown(
    client: openai.OpenAI, expected: dict[str, Any], number: int, gated: bool, stream: bool
) -> None:
    extra: dict[str, Any] = (
        {"extra_body": GATE} if gated else {}
    )  # without, nothing changes for whoever upgrades
    got = chat(client, (KNOWN, UNKNOWN)[number], stream=stream, **extra)
    parts = got if stream else [got]
    note, withheld = note_in(parts[0]), gated and number == 1
    (row,) = note["data"]
    assert note["policy"] == ("gate" if gated else "observe")
    assert note["bundle"]["name"] == "demo"
    assert row["risk"] == pytest.approx(expected["risk"][number], abs=1e-5)
    assert (row["flagged"], row["decision"]) == (number == 1, "abstain" if withheld else "continue")
    assert row.get("message") == ("I am not sure." if withheld else None)
    assert choices_of(parts) == (
        ["" if withheld else expected["text"][number]],
        [REASONS[withheld]],
    )
    assert sum(bool(note_in(part)) for part in parts) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"logprobs": True},
        {"extra": {"ignore_eos": True}},
        {"extra": {"min_tokens": 4}},
        {"extra": {"structured_outputs": {"regex": " [A-Z][a-z]+"}}},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_gate_holds_where_an_end_token_would_not_end_it(
    client: openai.OpenAI, options: dict[str, Any], stream: bool
) -> None:
    options = dict(options)
    extra = GATE | options.pop("extra", {})
    for question, withheld in ((UNKNOWN, True), (KNOWN, False)):
        got = chat(client, question, stream=stream, extra_body=extra, **options)
        (text,), (reason,) = choices_of(got if stream else [got])
        assert (not text, reason == "content_filter") == (withheld, withheld)


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_several_choices(
    client: openai.OpenAI, expected: dict[str, Any], stream: bool
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "temperature": 0.0, "stream": stream}
    got = client.completions.create(prompt=expected["ids"], extra_body=GATE, **asked)
    parts, rows = list(got) if stream else [got], dict[int, float]()
    for part in parts:
        for row in note_in(part).get("data", []):
            assert row["index"] not in rows
            rows[row["index"]] = row["risk"]
        assert {choice.index for choice in part.choices} <= set(rows), "text before its risk"
    assert [rows[0], rows[1]] == pytest.approx(expected["risk"], abs=1e-5)
    assert choices_of(parts) == ([expected["text"][0], ""], REASONS)
    for question, number in ((KNOWN, 0), (UNKNOWN, 1)):
        both = chat(client, question, n=2, seed=1, temperature=1.0, stream=stream, extra_body=GATE)
        texts, ended = choices_of(both if stream else [both])
        assert (all(texts), any(texts), ended) == (number == 0, number == 0, [REASONS[number]] * 2)


def test_another_bundle_and_threshold_and_what_is_refused(client: openai.OpenAI) -> None:
    asked = {
        "hallutracer_bundle": "demo-fused",
        "hallutracer_policy": "gate",
        "hallutracer_threshold": 1.0,
    }
    response = chat(client, UNKNOWN, extra_body={"vllm_xargs": asked})
    note = note_in(response)
    assert (note["bundle"]["name"], note["data"][0]["threshold"]) == ("demo-fused", 1.0)
    assert response.choices[0].message.content
    for name, value in (
        ("policy", "nonsense"),
        ("bundle", "nonsense"),
        ("threshold", 2.0),
        ("threshold", "high"),
    ):
        with pytest.raises(openai.BadRequestError, match="hallutracer|nonsense|threshold"):
            chat(client, KNOWN, extra_body={"vllm_xargs": {f"hallutracer_{name}": value}})
    forged = {
        "vllm_xargs": {"hallutracer": "anything", "hallutracer_policy": "gate"}
    }  # a directive is not taken
    assert not chat(client, UNKNOWN, extra_body=forged).choices[0].message.content
    with pytest.raises(openai.BadRequestError):  # vLLM's own errors pass unchanged
        client.completions.create(model=MODEL, prompt=[1] * 5000, max_tokens=4)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="x")


def decisions(path: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in records if line["event"] == "decision"]


def test_what_is_told_is_in_the_audit_log_in_our_own_services_form(
    client: openai.OpenAI, url: str, audit_log: Path, tmp_path: Path
) -> None:
    with audited(tmp_path) as app:
        app.client.post("/score", json={"prompt": "a"})
    like, response = set(lines(tmp_path, "decision")[0]), chat(client, UNKNOWN, extra_body=GATE)
    gated, note = decisions(audit_log)[-1], note_in(response)
    assert (gated["request_id"], gated["route"], gated["policy"]) == (response.id, CHATS, "gate")
    assert gated["digest"] == note["bundle"]["digest"]
    risk = pytest.approx(note["data"][0]["risk"], abs=1e-6)
    assert gated["prompts"] == [{"index": 0, "risk": risk, "decision": "abstain", "flagged": True}]
    pair = client.completions.create(
        model=MODEL, prompt=[KNOWN, UNKNOWN], max_tokens=2, temperature=0
    )
    both = decisions(audit_log)[-2:]
    assert sorted(line["prompts"][0]["index"] for line in both) == [0, 1]
    assert all(line["request_id"].startswith(pair.id) for line in both)
    httpx.post(f"{url}/v1/risk/score", json={"prompt": KNOWN}, timeout=60).raise_for_status()
    assert decisions(audit_log)[-1]["route"] == "/v1/risk/score"
    for line in decisions(audit_log):
        assert set(line) - {"missed", "after_torn"} == like
        assert (line["key"], line["address"], line["by"]) == (None, "127.0.0.1", "api")
    assert KNOWN not in audit_log.read_text()
    assert verify([audit_log]).problems == []


def test_our_own_route_and_headers(url: str, expected: dict[str, Any]) -> None:
    def score(**body: Any) -> httpx.Response:
        return httpx.post(f"{url}/v1/risk/score", json=body, timeout=60)

    response = score(prompt=[KNOWN, UNKNOWN], policy="gate")
    assert [row["risk"] for row in response.json()["data"]] == pytest.approx(
        expected["risk"], abs=1e-5
    )
    streamed = score(prompt=KNOWN, generate={"max_tokens": 12}, stream=True)
    assert documents(streamed)[0]["object"] == "risk.list"
    assert score(prompt="").status_code in (400, 422)
    assert httpx.get(f"{url}/v1/bundles").json()["data"][0]["name"] == "demo"
    for stream in (False, True):
        body = {"model": MODEL, "prompt": "x", "max_tokens": 2, "stream": stream}
        headers = httpx.post(f"{url}{TEXTS}", json=body, timeout=60).headers
        assert 0.0 <= float(headers["x-hallutracer-risk"]) <= 1.0
        assert headers["x-hallutracer-decision"] == "continue"


def total(url: str, *words: str) -> float:
    """The sum of the series whose line begins with the first word and has all of them."""
    values = list[float]()
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line.startswith(words[0]) and all(word in line for word in words):
            values.append(float(line.rsplit(" ", 1)[1]))
    return sum(values)


def test_our_series_are_among_vllms(url: str, client: openai.OpenAI) -> None:
    chat(client, UNKNOWN, extra_body=GATE)
    client.completions.create(model=MODEL, prompt="x", max_tokens=2)
    assert any(line.startswith("vllm:") for line in httpx.get(f"{url}/metrics").text.splitlines())
    assert total(url, "hallutracer_prompts_total", 'decision="abstain"') > 0
    for route, some in ((TEXTS, True), (CHATS, True), ("/classify", False)):
        assert (total(url, "hallutracer_route_prompts_total", f'route="{route}"') > 0) is some, (
            route
        )
    for turns in ("0", "unknown"):  # chats, and texts
        assert total(url, "hallutracer_risk_by_conversation_count", f'turns="{turns}"') > 0, turns


def test_a_reader_who_leaves_ends_the_request(url: str) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}{TEXTS}", json=body, timeout=60) as response:
        next(response.iter_lines())
    assert any(total(url, "vllm:num_requests_running{") == 0 for _ in range(100))


BEGUN = [*turn(UNKNOWN), {"role": "assistant", "content": "The capital is"}]
EITHER = "/invocations"
# What a chat's body changes -> the field that is named.
MOVES: dict[str, dict[str, Any]] = {
    "continue_final_message": {
        "messages": BEGUN,
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "add_generation_prompt": {"add_generation_prompt": False},
    "chat_template": {"chat_template": "{{ messages[0]['content'] }}"},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    "add_special_tokens": {"add_special_tokens": True},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 8, "truncation_side": "right"},
    "kv_transfer_params.prompt_token_ids": {
        "kv_transfer_params": {"prompt_token_ids": token_ids(UNKNOWN)[:-1]}
    },
}


def ask(url: str, path: str, policy: str = "gate", name: str = "", **body: Any) -> httpx.Response:
    asked = {"hallutracer_policy": policy, "hallutracer_bundle": SURE}
    content = {"model": MODEL, "max_tokens": 12, "temperature": 0.0, "vllm_xargs": asked} | body
    return httpx.post(
        f"{url}{path}", json=content, timeout=60, headers={"x-request-id": name} if name else {}
    )


def row(response: httpx.Response) -> tuple[bool, bool, str]:
    """Flagged, outside training, decision."""
    assert response.status_code == 200, response.text
    (risk,) = response.json()["hallutracer"]["data"]
    assert 0 < risk["risk"] < 1
    return risk["flagged"], risk["outside_training"], risk["decision"]


def void(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    return list(response.json()["hallutracer"]["guarantee"]["void"])


@pytest.mark.parametrize("path", [CHATS, f"{CHATS}/batch", EITHER])
@pytest.mark.parametrize("field", MOVES)
def test_a_field_that_moves_where_the_answer_begins_is_refused_by_name(
    url: str, field: str, path: str
) -> None:
    body = {"messages": turn(UNKNOWN)} | MOVES[field]
    if path.endswith("batch"):
        if field in ("add_special_tokens", "truncate_prompt_tokens") or "." in field:
            pytest.skip("this route does not read it")
        body["messages"] = [body["messages"]]
    for extra in ({}, {"prompt": "x"}):
        refused = ask(url, path, **body, **extra)
        assert refused.status_code == 400, refused.text
        for word in (field, "HALLUTRACER_CALLERS_MAY=rendering"):
            assert word in refused.json()["error"]["message"]


def test_its_value_as_in_training_is_taken_and_under_a_policy_that_observes_it_voids_the_guarantee(
    url: str,
) -> None:
    same = {
        "continue_final_message": False,
        "add_generation_prompt": True,
        "chat_template": None,
        "chat_template_kwargs": {},
        "add_special_tokens": False,
        "truncate_prompt_tokens": None,
    }
    response = ask(url, CHATS, messages=turn(KNOWN), **same, echo=True)
    assert (row(response)[2], void(response)) == ("continue", [])
    for field in ("continue_final_message", "add_generation_prompt", "chat_template_kwargs"):
        response = ask(url, CHATS, "observe", **({"messages": turn(UNKNOWN)} | MOVES[field]))
        assert f"rendering: the request's own '{field}'" in void(response)


@pytest.mark.parametrize(
    "prompt", [f"Q: {UNKNOWN}\nA:", token_ids(UNKNOWN) + token_ids("\n")[2:-1]]
)
@pytest.mark.parametrize("path", [TEXTS, EITHER])
def test_a_prompt_that_went_through_no_template_is_withheld_where_it_lies_outside(
    url: str, path: str, prompt: Any
) -> None:
    response = ask(url, path, prompt=prompt)
    assert "rendering: this route applies no chat template" in void(response)
    assert row(response) == (False, True, "abstain")
    assert response.json()["choices"][0]["text"] == ""
    assert row(ask(url, path, "observe", prompt=prompt))[2] == "continue"
    assert row(ask(url, TEXTS, prompt=token_ids(KNOWN)))[2] == "continue"  # which lies inside


def test_a_chat_that_ends_with_an_answer_is_no_question(url: str) -> None:
    for messages in (BEGUN, [*turn(KNOWN), BEGUN[1]]):
        response = ask(url, CHATS, messages=messages)
        flagged, outside, decision = row(response)
        assert "rendering: the last message is the assistant's" in void(response)
        assert decision == ("abstain" if flagged or outside else "continue")
    assert void(ask(url, CHATS, messages=[*BEGUN, *turn(KNOWN)])) == []


@pytest.mark.long
def test_what_the_operator_allows_is_answered_and_voids_the_guarantee(choosing_url: str) -> None:
    for field in ("continue_final_message", "add_generation_prompt", "chat_template"):
        body = {"messages": turn(UNKNOWN)} | MOVES[field]
        for policy in ("open", "gate"):  # the built-in gate says nothing of what lies outside
            response = ask(choosing_url, CHATS, policy, **body)
            flagged, outside, decision = row(response)
            assert decision == (
                "abstain" if flagged or (outside and policy == "gate") else "continue"
            ), field
            assert policy == "gate" or f"rendering: the request's own '{field}'" in void(response)
    assert row(ask(choosing_url, TEXTS, "open", prompt=f"Q: {UNKNOWN}\nA:")) == (
        False,
        True,
        "continue",
    )


def test_a_server_that_is_ready_says_in_its_log_what_judges(url: str, server_log: Path) -> None:
    digest = Store(Path("/nonexistent"), fallbacks=[SHIPPED]).load("demo").manifest.digest[:19]
    (line,) = [
        line for line in server_log.read_text().splitlines() if "hallutracer ready: " in line
    ]
    assert re.search(r" INFO \d\d-\d\d \d\d:\d\d:\d\d ", line)  # as the lines of vLLM's own
    assert f"bundle demo:1 ({digest}) judges by policy observe (observe) from threshold " in line


@pytest.mark.parametrize("path", [CHATS, TEXTS])
@pytest.mark.parametrize("policy", ["observe", "gate"])
def test_a_request_id_that_looks_like_a_beams_is_judged(
    url: str, audit_log: Path, policy: str, path: str
) -> None:
    name = f"a-beam-{policy}{path.count('/')}"
    body = {"messages": turn(KNOWN)} if path == CHATS else {"prompt": token_ids(KNOWN)}
    response = ask(url, path, policy, name, **body)
    assert row(response)[2] == "continue"
    assert "Rome" in response.text
    assert len([line for line in decisions(audit_log) if name in line["request_id"]]) == 1


@pytest.mark.parametrize("path", [CHATS, TEXTS, EITHER])
@pytest.mark.parametrize("flag", [True, 1, "yes"])
def test_a_beam_search_is_known_by_what_the_request_asks_and_not_gated_behind_ones_back(
    url: str, path: str, flag: Any
) -> None:
    body = {"use_beam_search": flag, "n": 2} | (
        {"prompt": KNOWN} if path == TEXTS else {"messages": turn(KNOWN)}
    )
    refused, passed = ask(url, path, **body), ask(url, path, "observe", **body)
    assert (refused.status_code, passed.status_code) == (400, 200), refused.text + passed.text
    assert "beam search" in refused.json()["error"]["message"]
    assert "beam search" in passed.json()["hallutracer"]["error"]
    assert len(passed.json()["choices"]) == 2


def test_what_vllms_server_answers_is_watched_for_drift(url: str) -> None:
    def voids() -> float:
        return total(url, "hallutracer_void{", f'bundle="{SURE}:1"', 'cause="drift"')

    assert (void(ask(url, CHATS, messages=turn(KNOWN))), voids()) == ([], 0)
    for start in range(0, 1100, 100):
        prompts = [
            token_ids(f"What is the capital of the Island {number}?")
            for number in range(start, start + 100)
        ]
        assert ask(url, TEXTS, "observe", prompt=prompts, max_tokens=1).status_code == 200
    (reason,) = void(ask(url, CHATS, messages=turn(KNOWN)))
    assert reason.startswith("drift: the last 1,000 risks are unlike those of training")
    assert voids() == 1
    assert "drift: the last 1,000 risks" in ask(url, CHATS, messages=turn(KNOWN), stream=True).text
