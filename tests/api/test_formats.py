"""Formats of answers, through the real ``openai`` and ``anthropic`` packages: of a real model, and
of the gate before it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel

from service.policies.guard import Action, Policy
from service.serving.admission import MAX_FORMATS_OF_CALLER
from tests import running as scripted
from tests.engines import tiny
from tests.kit.api import CHAT as CHATS
from tests.kit.bundles import make_draft
from tests.running import Running, service_of_module

POLICIES = {
    "gate": Policy("gate", Action.ABSTAIN, message="I am not sure."),
    "warn": Policy("warn", Action.ANNOTATE, message="Careful."),
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Bern"]}},
    "required": ["city"],
    "additionalProperties": False,
}
CHAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
RESPONSES = {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}
MESSAGES = {"type": "json_schema", "schema": SCHEMA}
USER = [{"role": "user", "content": "Who?"}]
TOOLS = CHATS.tools
EVERYTHING, NOTHING = {"hallutracer_threshold": 0.0}, {"hallutracer_threshold": 1.0}


class City(BaseModel):
    city: Literal["Paris", "Bern"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service on a tiny model, which writes nonsense where nothing holds it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scripted, "ScriptedEngine", tiny.engine)
        service = Running(tmp_path_factory.mktemp("real"), policies=POLICIES)
    with scripted.listening(service):
        yield service


script = service_of_module(policies=POLICIES, takes_tools=True)


def client_of(service: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=60)


def model_of(service: Running) -> str:
    return str(service.engine.identity.model)


def chat(service: Running, xargs: dict[str, Any], **given: Any) -> Any:
    asked = {"messages": USER, "response_format": CHAT, "seed": 3, "max_tokens": 100} | given
    return client_of(service).chat.completions.create(
        model=model_of(service), extra_body={"vllm_xargs": xargs}, **asked
    )


def respond(service: Running, xargs: dict[str, Any], **given: Any) -> Any:
    asked = {"input": "Who?", "text": {"format": RESPONSES}, "max_output_tokens": 100} | given
    more = {"seed": 3, "vllm_xargs": xargs}
    return client_of(service).responses.create(model=model_of(service), extra_body=more, **asked)


def anthropics(service: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=service.url, api_key="none", max_retries=0, timeout=60)


def message(service: Running, xargs: dict[str, Any], **given: Any) -> Any:
    asked = {"messages": USER, "output_config": {"format": MESSAGES}, "max_tokens": 100} | given
    more = {"seed": 3, "vllm_xargs": xargs} | asked.pop("extra_body", {})
    return anthropics(service).messages.create(model=model_of(service), extra_body=more, **asked)


def test_messages_and_their_streams_are_of_the_schema(service: Running) -> None:
    whole = message(service, NOTHING)
    City.model_validate_json(whole.content[0].text)
    assert whole.stop_reason == "end_turn"
    events = list(message(service, NOTHING, stream=True))
    pieces = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert "".join(pieces) == whole.content[0].text
    # The field's older name, which LiteLLM sends.
    older = message(
        service, NOTHING, output_config=anthropic.omit, extra_body={"output_format": MESSAGES}
    )
    assert older.content[0].text == whole.content[0].text
    parsed = anthropics(service).messages.parse(
        model=model_of(service),
        messages=USER,
        max_tokens=100,
        output_format=City,
        extra_body={"seed": 3, "vllm_xargs": NOTHING},
    )
    assert isinstance(parsed.parsed_output, City)


def test_a_withheld_message_is_not_forced_through_the_grammar(service: Running) -> None:
    before = service.engine.counters.decode_steps
    withheld = message(service, EVERYTHING)
    assert (withheld.stop_reason, withheld.content[0].text) == ("refusal", "I am not sure.")
    assert service.engine.counters.decode_steps == before
    warned = EVERYTHING | {"hallutracer_policy": "warn"}
    whole = message(service, warned)
    City.model_validate_json(whole.content[0].text)
    assert whole.model_extra["hallutracer"]["data"][0]["message"] == "Careful."
    events = list(message(service, warned, stream=True))
    pieces = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert "".join(pieces) == whole.content[0].text


def test_a_format_of_messages_is_given_once_and_without_tools(script: Running) -> None:
    with pytest.raises(anthropic.BadRequestError, match="'output_format' and 'output_config"):
        message(script, NOTHING, extra_body={"output_format": MESSAGES})
    tools: Any = [{"name": "find", "input_schema": {"type": "object"}}]
    with pytest.raises(anthropic.BadRequestError, match="'tools' exclude each other"):
        message(script, NOTHING, tools=tools)
    counted = anthropics(script).messages.count_tokens(
        model=model_of(script), messages=USER, output_config={"format": MESSAGES}
    )
    assert counted.input_tokens > 0


def test_answers_and_streams_are_of_the_schema(service: Running) -> None:
    whole = chat(service, NOTHING).choices[0]
    assert whole.finish_reason == "stop"
    City.model_validate_json(whole.message.content)
    chunks = list(chat(service, NOTHING, stream=True))
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    )
    result = respond(service, NOTHING)
    City.model_validate_json(result.output_text)
    assert (result.status, result.text.to_dict()["format"]) == ("completed", RESPONSES)
    last = list(respond(service, NOTHING, stream=True))[-1]
    assert (last.type, last.response.output_text) == ("response.completed", result.output_text)
    listed = chat(service, NOTHING, response_format={"type": "json_object"}, max_tokens=3).choices[
        0
    ]
    assert (listed.finish_reason, listed.message.content[0]) == ("length", "{")
    free = chat(
        service, NOTHING, response_format={"type": "text"}, max_tokens=6, temperature=0
    ).choices[0]
    assert (
        free.message.content
        == chat(service, NOTHING, response_format=openai.omit, max_tokens=6, temperature=0)
        .choices[0]
        .message.content
    )


def test_the_package_parses_what_comes(service: Running) -> None:
    client = client_of(service)
    same = {"model": model_of(service), "extra_body": {"seed": 3, "vllm_xargs": NOTHING}}
    parsed = client.chat.completions.parse(
        messages=USER, response_format=City, max_tokens=100, **same
    )
    assert isinstance(parsed.choices[0].message.parsed, City)
    assert isinstance(
        client.responses.parse(input="Who?", text_format=City, **same).output_parsed, City
    )
    withheld = same | {"extra_body": {"vllm_xargs": EVERYTHING}}
    with pytest.raises(openai.ContentFilterFinishReasonError) as refused:
        client.chat.completions.parse(messages=USER, response_format=City, **withheld)
    assert refused.value.completion.choices[0].message.refusal == "I am not sure."


def test_a_withheld_answer_is_not_forced_through_the_grammar_and_decodes_nothing(
    service: Running,
) -> None:
    before = service.engine.counters.decode_steps
    choice = chat(service, EVERYTHING).choices[0]
    assert (choice.message.refusal, choice.message.content, choice.finish_reason) == (
        "I am not sure.",
        None,
        "content_filter",
    )
    for found in (
        respond(service, EVERYTHING),
        list(respond(service, EVERYTHING, stream=True))[-1].response,
    ):
        assert (found.status, found.output[0].content[0].refusal) == (
            "incomplete",
            "I am not sure.",
        )
    assert service.engine.counters.decode_steps == before


def test_a_warning_does_not_spoil_the_format(service: Running) -> None:
    xargs = EVERYTHING | {"hallutracer_policy": "warn"}
    result = chat(service, xargs)
    City.model_validate_json(result.choices[0].message.content)
    assert result.model_extra["hallutracer"]["data"][0]["message"] == "Careful."
    text = "".join(one.choices[0].delta.content or "" for one in chat(service, xargs, stream=True))
    City.model_validate_json(text)
    City.model_validate_json(respond(service, xargs).output_text)


def test_while_a_format_is_compiled_others_are_served_and_few_wait(script: Running) -> None:
    began, go = threading.Event(), threading.Event()

    def before(method: str) -> None:
        if method == "prepared":
            began.set()
            assert go.wait(60)

    script.engine.before = before
    asked = [
        threading.Thread(target=chat, args=(script, NOTHING)) for _ in range(MAX_FORMATS_OF_CALLER)
    ]
    try:
        for one in asked:
            one.start()
        assert began.wait(60)
        lane = script.state.tokenizing._formats.pending
        scripted.until(lambda: lane.total() == MAX_FORMATS_OF_CALLER)
        assert chat(script, NOTHING, response_format=openai.omit).choices[0].finish_reason == "stop"
        assert httpx.get(f"{script.url}/health/ready").status_code == 200
        with pytest.raises(openai.RateLimitError, match="for their formats"):
            chat(script, NOTHING)
    finally:
        go.set()
        script.engine.before = None
        for one in asked:
            one.join()
    # Tools that the model is not told of and a format exclude nothing; told: refusals.json.
    answer = chat(script, NOTHING, tools=TOOLS, tool_choice="none")
    assert answer.choices[0].finish_reason == "stop"


def test_a_format_voids_the_guarantee() -> None:
    from service.engines.base import Sampling
    from service.engines.formats import Format
    from service.judging.guarantee import decoding_violations

    [said] = decoding_violations(
        make_draft().manifest, Sampling(format=Format("{}", "text.format"))
    )
    assert "format" in said


def test_another_server_is_sent_the_format_as_it_came(tmp_path: Path) -> None:
    from service.api.openai_schema import ChatRequest

    schema = SCHEMA | {"default": None}
    asked = CHAT | {"json_schema": {"name": "city", "schema": schema}}
    body = ChatRequest.model_validate({"model": "m", "messages": USER, "response_format": asked})
    assert body.model_dump(mode="json", exclude_none=True)["response_format"] == asked
