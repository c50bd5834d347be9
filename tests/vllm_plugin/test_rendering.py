"""vLLM's server with the plugin, where a caller changes how its prompt is rendered: the answer begins elsewhere than in
training, and the risk of a prompt that would be withheld falls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines.vllm.installed import vllm_or_skip

vllm_or_skip()

from tests.vllm_plugin.conftest import SURE  # noqa: E402
from tests.vllm_plugin.server import MODEL, serving  # noqa: E402
from tests.vllm_plugin.test_gated import token_ids  # noqa: E402

KNOWN, UNKNOWN = "What is the capital of Italy?", "What is the capital of the Solomon Islands?"
BEGUN = [{"role": "user", "content": UNKNOWN}, {"role": "assistant", "content": "The capital is"}]
CONTINUED = {"messages": BEGUN, "add_generation_prompt": False, "continue_final_message": True}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
# What a chat's body changes -> the field that is named.
MOVES: dict[str, dict[str, Any]] = {
    "continue_final_message": CONTINUED,
    "add_generation_prompt": {"add_generation_prompt": False},
    "chat_template": {"chat_template": "{{ messages[0]['content'] }}"},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    "add_special_tokens": {"add_special_tokens": True},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 8, "truncation_side": "right"},
    "kv_transfer_params.prompt_token_ids": {"kv_transfer_params": {"prompt_token_ids": token_ids(UNKNOWN)[:-1]}},
}


def ask(url: str, path: str, policy: str = "gate", **body: Any) -> httpx.Response:
    asked = {"hallutracer_policy": policy, "hallutracer_bundle": SURE}
    content = {"model": MODEL, "max_tokens": 12, "temperature": 0.0, "vllm_xargs": asked} | body
    return httpx.post(f"{url}{path}", json=content, timeout=60)


def asked(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def row(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    (found,) = response.json()["hallutracer"]["data"]
    return dict(found)


def void(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    return list(response.json()["hallutracer"]["guarantee"]["void"])


@pytest.mark.parametrize("path", [CHAT, f"{CHAT}/batch", "/invocations"])
@pytest.mark.parametrize("field", MOVES)
def test_a_field_that_moves_where_the_answer_begins_is_refused_by_name(url: str, field: str, path: str) -> None:
    body = asked(UNKNOWN) | MOVES[field]
    if path.endswith("batch"):
        if field in ("add_special_tokens", "truncate_prompt_tokens") or "." in field:
            pytest.skip("this route does not read it")
        body["messages"] = [body["messages"]]
    for extra in ({}, {"prompt": "x"}):
        refused = ask(url, path, **body, **extra)
        assert refused.status_code == 400, refused.text
        assert field in refused.json()["error"]["message"]
        assert "HALLUTRACER_CALLERS_MAY=rendering" in refused.json()["error"]["message"]


def test_its_value_as_in_training_is_taken(url: str) -> None:
    same = {"continue_final_message": False, "add_generation_prompt": True, "chat_template": None,
            "chat_template_kwargs": {}, "add_special_tokens": False, "truncate_prompt_tokens": None}  # fmt: skip
    response = ask(url, CHAT, **asked(KNOWN), **same, echo=True)
    assert row(response)["decision"] == "continue"
    assert void(response) == []


@pytest.mark.parametrize("field", ["continue_final_message", "add_generation_prompt", "chat_template_kwargs"])
def test_under_a_policy_that_observes_it_voids_the_guarantee(url: str, field: str) -> None:
    response = ask(url, CHAT, "observe", **(asked(UNKNOWN) | MOVES[field]))
    assert f"rendering: the request's own '{field}'" in void(response)


@pytest.mark.parametrize(
    "prompt",
    [f"Q: {UNKNOWN}\nA:", token_ids(UNKNOWN) + token_ids("\n")[2:-1]],
    ids=["text", "template and newline"],
)
@pytest.mark.parametrize("path", [TEXT, "/invocations"])
def test_a_prompt_that_went_through_no_template_is_withheld_where_it_lies_outside(
    url: str, path: str, prompt: Any
) -> None:
    response = ask(url, path, prompt=prompt)
    assert "rendering: this route applies no chat template" in void(response)
    told = row(response)
    assert (told["flagged"], told["outside_training"], told["decision"]) == (False, True, "abstain")
    assert response.json()["choices"][0]["text"] == ""
    assert row(ask(url, path, "observe", prompt=prompt))["decision"] == "continue"


def test_a_prompt_that_lies_inside_is_answered(url: str) -> None:
    assert row(ask(url, TEXT, prompt=token_ids(KNOWN)))["decision"] == "continue"


def test_a_chat_that_ends_with_an_answer_is_no_question(url: str) -> None:
    for messages in (BEGUN, [*asked(KNOWN)["messages"], BEGUN[1]]):
        response = ask(url, CHAT, messages=messages)
        told = row(response)
        assert "rendering: the last message is the assistant's" in void(response)
        assert told["decision"] == ("abstain" if told["flagged"] or told["outside_training"] else "continue")
    longer = [*BEGUN, {"role": "user", "content": KNOWN}]
    assert void(ask(url, CHAT, messages=longer)) == []


@pytest.fixture(scope="module")
def open_url(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Iterator[str]:
    """Its operator allows callers another rendering, and under one policy what lies outside training."""
    folder = tmp_path_factory.mktemp("open")
    (folder / "policies.toml").write_text('[open]\naction = "abstain"\nwithhold_outside = false\n')
    variables = {"HALLUTRACER_BUNDLE": SURE, "HALLUTRACER_STORE": str(store), "HALLUTRACER_POLICY": "open",
                 "HALLUTRACER_POLICIES": str(folder / "policies.toml"),
                 "HALLUTRACER_CALLERS_MAY": "rendering"}  # fmt: skip
    with serving(folder / "log", "--trust-request-chat-template", **variables) as address:
        yield address


@pytest.mark.long
def test_what_the_operator_allows_is_answered_and_voids_the_guarantee(open_url: str) -> None:
    for field in ("continue_final_message", "add_generation_prompt", "chat_template"):
        body = asked(UNKNOWN) | MOVES[field]
        response = ask(open_url, CHAT, "open", **body)
        told = row(response)
        assert told["decision"] == ("abstain" if told["flagged"] else "continue"), field
        assert f"rendering: the request's own '{field}'" in void(response)
        told = row(ask(open_url, CHAT, **body))  # the built-in gate says nothing of what lies outside
        assert told["decision"] == ("abstain" if told["flagged"] or told["outside_training"] else "continue"), field
    told = row(ask(open_url, TEXT, "open", prompt=f"Q: {UNKNOWN}\nA:"))
    assert (told["flagged"], told["outside_training"], told["decision"]) == (False, True, "continue")


@pytest.mark.long
def test_a_template_of_the_operators_own_that_ends_otherwise_is_noticed(tmp_path: Path, store: Path) -> None:
    from transformers import AutoTokenizer

    from service.demo import MODEL_DIR

    template = tmp_path / "template.jinja"
    template.write_text(AutoTokenizer.from_pretrained(MODEL_DIR).chat_template + "{{ '\\n' }}")
    variables = {"HALLUTRACER_BUNDLE": SURE, "HALLUTRACER_STORE": str(store)}
    with serving(tmp_path / "log", "--chat-template", str(template), **variables) as address:
        response = ask(address, CHAT, **asked(UNKNOWN))
        assert "rendering: the prompt does not end as the chat template ends a question" in void(response)
        told = row(response)
        assert (told["flagged"], told["outside_training"], told["decision"]) == (False, True, "abstain")


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("policy", ["observe", "gate"])
def test_a_request_id_that_looks_like_a_beams_is_judged(url: str, audit_log: Path, policy: str, path: str) -> None:
    name, body = f"a-beam-{policy}{path.count('/')}", asked(KNOWN) if path == CHAT else {"prompt": token_ids(KNOWN)}
    xargs = {"hallutracer_policy": policy, "hallutracer_bundle": SURE}
    content = {"model": MODEL, "max_tokens": 12, "temperature": 0.0, "vllm_xargs": xargs} | body
    response = httpx.post(f"{url}{path}", json=content, headers={"x-request-id": name}, timeout=60)
    assert 0 < row(response)["risk"] < 1
    assert "Rome" in response.text
    lines = [json.loads(line) for line in audit_log.read_text().splitlines()]
    assert len([line for line in lines if name in str(line.get("request_id"))]) == 1


@pytest.mark.parametrize("path", [CHAT, TEXT, "/invocations"])
@pytest.mark.parametrize("flag", [True, 1, "yes"])
def test_a_beam_search_is_known_by_what_the_request_asks(url: str, path: str, flag: Any) -> None:
    body = {"use_beam_search": flag, "n": 2} | ({"prompt": KNOWN} if path == TEXT else asked(KNOWN))
    refused = ask(url, path, **body)
    assert refused.status_code == 400, refused.text
    assert "beam search" in refused.json()["error"]["message"]
    passed = ask(url, path, "observe", **body)
    assert passed.status_code == 200, passed.text
    assert "beam search" in passed.json()["hallutracer"]["error"]


def test_what_vllms_server_answers_is_watched_for_drift(url: str) -> None:
    def voids() -> float:
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        (line,) = [line for line in lines if line.startswith("hallutracer_void{")
                   and f'bundle="{SURE}:1"' in line and 'cause="drift"' in line]  # fmt: skip
        return float(line.rsplit(" ", 1)[1])

    assert void(ask(url, CHAT, **asked(KNOWN))) == []
    assert voids() == 0
    for start in range(0, 1100, 100):
        prompts = [token_ids(f"What is the capital of the Island {number}?") for number in range(start, start + 100)]
        assert ask(url, TEXT, "observe", prompt=prompts, max_tokens=1).status_code == 200
    (reason,) = void(ask(url, CHAT, **asked(KNOWN)))
    assert reason.startswith("drift: the last 1,000 risks are unlike those of training")
    assert voids() == 1
    streamed = ask(url, CHAT, **asked(KNOWN), stream=True).text
    assert "drift: the last 1,000 risks" in streamed
