"""POST /v1/messages/count_tokens through the real ``anthropic`` client: what /v1/messages would
read, and no more.  Requests of one count: alike.json; refused ones: refusals.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import ErrorResponse, MessageTokensCount

from service.access.routes import COUNT_ROUTE
from tests.api.test_auth import named
from tests.api.test_clients import USER as ASKED
from tests.api.test_clients import anthropic_client as client_of
from tests.api.test_protocols import FIRST
from tests.kit.api import MESSAGES, check_error
from tests.running import App, Running, running, service_of_module

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
    "tools": {"messages": ASKED, "tools": TOOLS},
    "calls and results": {"messages": TURNS, "tools": TOOLS},
}


service = service_of_module(policies=FIRST, callers_may=(), takes_tools=True)


def count(service: Running, key: str = "none", **given: Any) -> MessageTokensCount:
    return client_of(service, key).messages.count_tokens(
        **{"model": "scripted", "messages": ASKED} | given
    )


@pytest.mark.parametrize("name", ASKS)
def test_it_is_what_messages_reads(service: Running, name: str) -> None:
    done = (service.engine.counters.prefills, service.metric("hallutracer_prompts_total"))
    result = count(service, **ASKS[name])
    assert result.model_dump() == {"input_tokens": result.input_tokens}
    assert (service.engine.counters.prefills, service.metric("hallutracer_prompts_total")) == done
    read = client_of(service).messages.create(model="scripted", max_tokens=9, **ASKS[name]).usage
    assert result.input_tokens == read.input_tokens + (read.cache_read_input_tokens or 0)


def test_more_than_the_context_holds_is_counted(service: Running) -> None:
    long = [{"role": "user", "content": "a" * 5000}]
    assert count(service, messages=long).input_tokens > 5000 > service.engine.identity.max_tokens
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client_of(service).messages.create(model="scripted", max_tokens=9, messages=long)
    with pytest.raises(
        anthropic.BadRequestError, match=r"too long.*shorten the prompt"
    ):  # counting it would be work
        count(service, messages=[{"role": "user", "content": "a" * 70_000}])


def test_it_takes_a_key_and_not_what_the_key_may_not_choose(tmp_path: Path) -> None:
    keys = [named("mine"), named("held", policies=("block",))]
    with running(tmp_path, api_keys=keys, callers_may=(), policies=FIRST) as service:
        assert count(service, "mine").input_tokens == count(service, "held").input_tokens > 0
        with pytest.raises(anthropic.NotFoundError) as refused:
            count(service, "mine", model="other")
        assert ErrorResponse.model_validate(refused.value.body).error.type == "not_found_error"


def test_before_the_model_is_loaded_it_says_so(tmp_path: Path) -> None:
    app = App(tmp_path)  # never started
    answer = app.client.post(COUNT_ROUTE, json={"model": "scripted", "messages": ASKED})
    check_error(answer, 503, type="overloaded_error")
