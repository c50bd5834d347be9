"""POST /v1/messages/count_tokens through the real ``anthropic`` client: what /v1/messages would
read, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import ErrorResponse, MessageTokensCount

from service.access.routes import COUNT_ROUTE, MESSAGES_ROUTE
from tests.api.test_auth import named
from tests.api.test_clients import USER as ASKED
from tests.api.test_clients import anthropic_client as client_of
from tests.api.test_protocols import FIRST
from tests.kit.api import MESSAGES
from tests.running import App, Running, running

TOOLS = MESSAGES.tools
CALL = {"type": "tool_use", "id": "t1", "name": "find", "input": {"q": "Pâris"}}
TURNS = [
    *ASKED,
    {"role": "assistant", "content": [{"type": "text", "text": "Let me look."}, CALL]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "Ann"}]},
]
ASKS: dict[str, dict[str, Any]] = {
    "a question": {"messages": ASKED},
    "a system message": {"messages": ASKED, "system": "Be brief."},
    "blocks of one": {
        "messages": ASKED,
        "system": [{"type": "text", "text": text} for text in ("Be ", "brief.")],
    },
    "tools": {"messages": ASKED, "tools": TOOLS},
    "tools that are not told of": {
        "messages": ASKED,
        "tools": TOOLS,
        "tool_choice": {"type": "none"},
    },
    "calls and results": {"messages": TURNS, "tools": TOOLS},
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("service"), policies=FIRST, callers_may=()) as service:
        service.engine.takes_tools = True
        yield service


def count(service: Running, key: str = "none", **given: Any) -> MessageTokensCount:
    return client_of(service, key).messages.count_tokens(
        **{"model": "scripted", "messages": ASKED} | given
    )


@pytest.mark.parametrize("name", ASKS)
def test_it_is_what_messages_reads(service: Running, name: str) -> None:
    done = (service.engine.counters.prefills, service.metric("hallutracer_prompts_total"))
    found = count(service, **ASKS[name])
    assert found.model_dump() == {"input_tokens": found.input_tokens}
    assert (service.engine.counters.prefills, service.metric("hallutracer_prompts_total")) == done
    read = client_of(service).messages.create(model="scripted", max_tokens=9, **ASKS[name]).usage
    assert found.input_tokens == read.input_tokens + (read.cache_read_input_tokens or 0)


def test_what_is_not_told_to_the_model_counts_nothing(service: Running) -> None:
    counts = {name: count(service, **given).input_tokens for name, given in ASKS.items()}
    assert (
        counts["a question"]
        < counts["a system message"]
        == counts["blocks of one"]
        < counts["tools"]
    )
    assert counts["tools that are not told of"] == counts["a question"]
    assert counts["tools"] < counts["calls and results"]
    same: dict[str, Any] = {
        "thinking": {"type": "disabled"},
        "output_config": {"effort": "low"},
        "cache_control": {"type": "ephemeral"},
        "speed": "standard",
        "extra_body": {"vllm_xargs": {"hallutracer_policy": "observe"}},
    }
    assert count(service, **same).input_tokens == counts["a question"]
    assert count(service, thinking={"type": "adaptive"}).input_tokens == counts["a question"]


def test_more_than_the_context_holds_is_counted(service: Running) -> None:
    long = [{"role": "user", "content": "a" * 5000}]
    assert count(service, messages=long).input_tokens > 5000 > service.engine.identity.max_tokens
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client_of(service).messages.create(model="scripted", max_tokens=9, messages=long)
    with pytest.raises(
        anthropic.BadRequestError, match=r"too long.*shorten the prompt"
    ):  # counting it would be work
        count(service, messages=[{"role": "user", "content": "a" * 70_000}])


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": 9}, "max_tokens"),
        ({"tempreture": 0}, "tempreture"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "'thinking'"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "'find'"),
        ({"tool_choice": {"type": "any"}}, "'tool_choice'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "type"),
    ],
)
def test_what_messages_refuses_is_refused_in_its_words(
    service: Running, given: dict[str, Any], named: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        count(service, extra_body=given)
    error = ErrorResponse.model_validate(refused.value.body).error
    assert error.type == "invalid_request_error"
    assert named in error.message


def test_a_template_that_shows_no_tools_refuses_them_here_too(tmp_path: Path) -> None:
    body = {"model": "scripted", "messages": ASKED, "tools": TOOLS}
    with App(tmp_path).started() as app:
        found = [
            app.client.post(path, json=body | more)
            for path, more in (
                (COUNT_ROUTE, {}),
                (MESSAGES_ROUTE, {"max_tokens": 9}),
            )
        ]
    said = [(one.status_code, one.json()["error"]) for one in found]
    assert said[0] == said[1]
    assert said[0][0] == 400


def test_special_tokens_are_refused_where_they_are_elsewhere(tmp_path: Path) -> None:
    body = {"model": "scripted", "messages": [{"role": "user", "content": "a<|end|>"}]}
    for refuses, status in ((True, 400), (False, 200)):
        with App(tmp_path / str(refuses), refuse_special_tokens=refuses).started() as app:
            assert app.client.post(COUNT_ROUTE, json=body).status_code == status


def test_it_takes_a_key_and_not_what_the_key_may_not_choose(tmp_path: Path) -> None:
    keys = [named("mine"), named("held", policies=("block",))]
    with running(tmp_path, api_keys=keys, callers_may=(), policies=FIRST) as service:
        with pytest.raises(anthropic.AuthenticationError):
            count(service, "other")
        assert httpx.post(service.url + COUNT_ROUTE, json={}).status_code == 401
        assert count(service, "mine").input_tokens == count(service, "held").input_tokens > 0
        with pytest.raises(anthropic.NotFoundError) as refused:
            count(service, "mine", model="other")
        assert ErrorResponse.model_validate(refused.value.body).error.type == "not_found_error"


def test_before_the_model_is_loaded_it_says_so(tmp_path: Path) -> None:
    app = App(tmp_path)  # never started
    found = app.client.post(COUNT_ROUTE, json={"model": "scripted", "messages": ASKED})
    assert (found.status_code, found.json()["error"]["type"]) == (503, "overloaded_error")
