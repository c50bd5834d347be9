"""Formats of answers: of a real model in each protocol and through the real ``openai`` and
``anthropic`` packages, and of the gate before it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from service.api.openai_schema import ChatRequest
from service.engines.base import Sampling
from service.engines.formats import Format
from service.judging.guarantee import decoding_violations
from service.serving.admission import MAX_FORMATS_OF_CALLER
from tests import running as scripted
from tests.api.test_clients import anthropic_client, openai_client
from tests.engines import tiny
from tests.kit.api import (
    CHAT,
    EVERYTHING,
    MESSAGES,
    NOTHING,
    POLICIES,
    REFUSAL,
    RESPONSES,
    Wire,
    note_of,
    request_of,
    stream_events,
)
from tests.kit.bundles import make_draft
from tests.running import Running, service_of_module

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Bern"]}},
    "required": ["city"],
    "additionalProperties": False,
}
NAMED = {"name": "city", "schema": SCHEMA, "strict": True}
OF_CHATS = {"type": "json_schema", "json_schema": NAMED}
OF_RESPONSES = {"type": "json_schema"} | NAMED
OF_MESSAGES = {"type": "json_schema", "schema": SCHEMA}
# How each protocol asks for the format.  LiteLLM sends the last one's older name.
FORMATS: dict[str, tuple[Wire, dict[str, Any]]] = {
    "chat": (CHAT, {"response_format": OF_CHATS}),
    "responses": (RESPONSES, {"text": {"format": OF_RESPONSES}}),
    "messages": (MESSAGES, {"output_config": {"format": OF_MESSAGES}}),
    "messages, by the older name": (MESSAGES, {"output_format": OF_MESSAGES}),
}
EACH = pytest.mark.parametrize("name", FORMATS)
USER: Any = [{"role": "user", "content": "Who?"}]


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


def ask(service: Running, name: str = "chat", status: int = 200, **options: Any) -> httpx.Response:
    """Ask by ``request_of``'s options for an answer of the format, unless they name another."""
    wire, format_fields = FORMATS[name]
    model = {"model": service.engine.identity.model}
    body = request_of(wire, USER, **{"tokens": 100, "chosen": NOTHING} | options)
    response = httpx.post(service.url + wire.route, json=format_fields | body | model, timeout=60)
    assert response.status_code == status, response.text
    return response


def text_of(wire: Wire, response: httpx.Response) -> str:
    """The answer's text, whole or of a stream."""
    if response.headers["content-type"] == "application/json":
        document = response.json()
        if wire is CHAT:
            return str(document["choices"][0]["message"]["content"])
        content = document["output"][0]["content"] if wire is RESPONSES else document["content"]
        return str(content[0]["text"])
    pieces = list[str]()
    for event in stream_events(response.text):
        if wire is CHAT and event != "[DONE]":
            pieces.append(event["choices"][0]["delta"].get("content") or "")
        elif wire is RESPONSES and event["type"] == "response.output_text.delta":
            pieces.append(event["delta"])
        elif wire is MESSAGES and event["type"] == "content_block_delta":
            pieces.append(event["delta"]["text"])
    return "".join(pieces)


@EACH
def test_answers_and_streams_are_of_the_schema(service: Running, name: str) -> None:
    wire, _ = FORMATS[name]
    for chosen, warned in ((NOTHING, False), (EVERYTHING | {"policy": "warn"}, True)):
        whole = ask(service, name, chosen=chosen)
        text = text_of(wire, whole)
        City.model_validate_json(text)
        assert any(f'"{end}"' in whole.text for end in ("stop", "completed", "end_turn"))
        assert ("message" in note_of(whole.json())["data"][0]) is warned
        assert text_of(wire, ask(service, name, chosen=chosen, stream=True)) == text
        assert wire is not RESPONSES or whole.json()["text"]["format"] == OF_RESPONSES


@EACH
def test_a_withheld_answer_is_not_forced_through_the_grammar_and_decodes_nothing(
    service: Running, name: str
) -> None:
    before = service.engine.counters.decode_steps
    for stream in (False, True):
        assert f'"{REFUSAL}"' in ask(service, name, chosen=EVERYTHING, stream=stream).text
    assert service.engine.counters.decode_steps == before


def test_other_formats_of_chats(service: Running) -> None:
    listed = ask(service, response_format={"type": "json_object"}, tokens=3)
    assert text_of(CHAT, listed)[0] == "{"
    assert '"length"' in listed.text
    texts = [
        text_of(CHAT, ask(service, response_format=form, tokens=6))
        for form in ({"type": "text"}, None)
    ]
    assert texts[0] == texts[1]


def test_the_packages_parse_what_comes(service: Running) -> None:
    client, model = openai_client(service), service.engine.identity.model
    opened, shut = (
        {"model": model, "extra_body": {"seed": 3, "vllm_xargs": {"hallutracer_threshold": at}}}
        for at in (1.0, 0.0)
    )
    chat: Any = {"messages": USER, "response_format": City, "max_tokens": 100}
    parsed = client.chat.completions.parse(**chat, **opened)
    assert isinstance(parsed.choices[0].message.parsed, City)
    response = client.responses.parse(input="Who?", text_format=City, **opened)
    assert isinstance(response.output_parsed, City)
    with pytest.raises(openai.ContentFilterFinishReasonError) as refused:
        client.chat.completions.parse(**chat, **shut)
    assert refused.value.completion.choices[0].message.refusal == REFUSAL
    message = anthropic_client(service).messages.parse(
        messages=USER, max_tokens=100, output_format=City, **opened
    )
    assert isinstance(message.parsed_output, City)


def test_a_format_of_messages_is_given_once_and_without_tools(script: Running) -> None:
    twice = ask(script, "messages", 400, output_format=OF_MESSAGES)
    assert "'output_format' and 'output_config" in twice.text
    assert "'tools' exclude each other" in ask(script, "messages", 400, tools=MESSAGES.tools).text
    counted = anthropic_client(script).messages.count_tokens(
        model="scripted", messages=USER, output_config={"format": OF_MESSAGES}
    )
    assert counted.input_tokens > 0


def test_while_a_format_is_compiled_others_are_served_and_few_wait(script: Running) -> None:
    began, go = threading.Event(), threading.Event()

    def before(method: str) -> None:
        if method == "prepared":
            began.set()
            assert go.wait(60)

    script.engine.before = before
    waiting = [threading.Thread(target=ask, args=(script,)) for _ in range(MAX_FORMATS_OF_CALLER)]
    try:
        for thread in waiting:
            thread.start()
        assert began.wait(60)
        lane = script.state.tokenizing._formats.pending
        scripted.until(lambda: lane.total() == MAX_FORMATS_OF_CALLER)
        ask(script, response_format=None)
        assert httpx.get(f"{script.url}/health/ready").status_code == 200
        assert "for their formats" in ask(script, status=429).text
    finally:
        go.set()
        script.engine.before = None
        for thread in waiting:
            thread.join()
    # Tools that the model is not told of and a format exclude nothing; told: refusals.json.
    ask(script, tools=CHAT.tools, tool_choice="none")


def test_a_format_voids_the_guarantee() -> None:
    sampling = Sampling(format=Format("{}", "text.format"))
    [reason] = decoding_violations(make_draft().manifest, sampling)
    assert "format" in reason


def test_another_server_is_sent_the_format_as_it_came() -> None:
    asked = OF_CHATS | {"json_schema": {"name": "city", "schema": SCHEMA | {"default": None}}}
    body = ChatRequest.model_validate({"model": "m", "messages": USER, "response_format": asked})
    assert body.model_dump(mode="json", exclude_none=True)["response_format"] == asked
