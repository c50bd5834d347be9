"""OpenAI's and Anthropic's own clients: answers, streams, keys, and what Anthropic's counts.

What they send beside a question: test_real_clients.py.  Errors, in the form in which the clients
read them: refusals.json, test_auth.py, test_no_token.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.api.protocols import in_anthropics_client, in_openais_client
from tests.api.test_auth import named
from tests.kit.api import MESSAGES, POLICIES, REFUSAL
from tests.running import Running, running, service_of_module

USER: Any = [{"role": "user", "content": "Why?"}]
TEXT = "It is so."
CALL = {"type": "tool_use", "id": "t1", "name": "find", "input": {"q": "Pâris"}}
TURNS = [
    *USER,
    {"role": "assistant", "content": [{"type": "text", "text": "Let me look."}, CALL]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "Ann"}]},
]
# Requests whose tokens are counted.
ASKS: dict[str, dict[str, Any]] = {
    "a question": {"messages": USER},
    "a system message": {"messages": USER, "system": "Be brief."},
    "tools": {"messages": USER, "tools": MESSAGES.tools},
    "calls and results": {"messages": TURNS, "tools": MESSAGES.tools},
}


service = service_of_module(policies=POLICIES, takes_tools=True)


def openai_client(service: Running, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key=key, max_retries=0, timeout=20)


def anthropic_client(service: Running, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=service.url, api_key=key, max_retries=0, timeout=20)


def message(**fields: Any) -> Any:
    """Fields of a message."""
    return {"model": "scripted", "messages": USER, "max_tokens": 50} | fields


@pytest.mark.parametrize("stream", [False, True])
def test_responses_and_messages(service: Running, stream: bool) -> None:
    """Chats: test_forwarding.py, test_formats.py."""
    asked = service.url, "scripted", "Why?", stream
    opened, shut = {"hallutracer_threshold": 1.0}, {"hallutracer_threshold": 0.0}
    assert in_openais_client(*asked, **opened)[:4] == (TEXT, None, None, len(TEXT))
    assert in_openais_client(*asked, **shut)[:4] == ("", REFUSAL, "content_filter", 0)
    assert in_anthropics_client(*asked, **opened)[:3] == (TEXT, "end_turn", len(TEXT))
    assert in_anthropics_client(*asked, **shut)[:3] == (REFUSAL, "refusal", 0)


def test_text_completions(service: Running) -> None:
    completions, opened = openai_client(service).completions, {"hallutracer_threshold": 1.0}
    asked: Any = {"model": "scripted", "prompt": "Why?", "extra_body": {"vllm_xargs": opened}}
    assert completions.create(**asked).choices[0].text == TEXT
    stream = completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == TEXT


def test_each_client_sends_its_key_and_reads_that_another_is_refused(tmp_path: Path) -> None:
    with running(tmp_path, api_keys=[named("mine")]) as service:
        mine, wrong = (anthropic_client(service, key) for key in ("mine", "wrong"))
        with pytest.raises(openai.AuthenticationError):
            openai_client(service, "wrong").models.list()
        with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
            wrong.messages.create(**message())
        with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
            mine.messages.batches.list()
        assert openai_client(service, "mine").models.list().data[0].id == "scripted"
        bearer = anthropic.Anthropic(base_url=service.url, auth_token="mine", max_retries=0)
        for client in (mine, bearer):
            assert client.messages.create(**message()).content


# --- POST /v1/messages/count_tokens; requests of one count: alike.json ---


def count(service: Running, key: str = "none", **given: Any) -> dict[str, int]:
    asked = {"model": "scripted", "messages": USER} | given
    return anthropic_client(service, key).messages.count_tokens(**asked).model_dump()


@pytest.mark.parametrize("name", ASKS)
def test_what_is_counted_is_what_messages_reads_and_nothing_is_read(
    service: Running, name: str
) -> None:
    done = (service.engine.counters.prefills, service.series("prompts_total"))
    counted = count(service, **ASKS[name])
    assert (service.engine.counters.prefills, service.series("prompts_total")) == done
    read = anthropic_client(service).messages.create(**message(**ASKS[name])).usage
    assert counted == {"input_tokens": read.input_tokens + (read.cache_read_input_tokens or 0)}


def test_more_than_the_context_holds_is_counted(service: Running) -> None:
    """Messages refuses it: refusals.json."""
    long = [{"role": "user", "content": "a" * 5000}]
    assert count(service, messages=long)["input_tokens"] > 5000
    longer = [{"role": "user", "content": "a" * 70_000}]  # counting it would be work
    with pytest.raises(anthropic.BadRequestError, match=r"too long.*shorten the prompt"):
        count(service, messages=longer)


def test_a_key_that_is_held_to_a_policy_may_count(tmp_path: Path) -> None:
    held = named("held", policies=("block",))
    with running(tmp_path, api_keys=[held], callers_may=()) as service:
        assert count(service, "held")["input_tokens"] > 0
        with pytest.raises(anthropic.NotFoundError):
            count(service, "held", model="other")
