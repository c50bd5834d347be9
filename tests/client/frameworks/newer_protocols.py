"""SDKs that speak the Responses API or Anthropic's Messages, beside a real service on the demo
model: HALLUTRACER_URL.

An answer that continues arrives, whole and streamed; of a withheld one nothing does, and it is a
refusal in the SDK's own words.  test_libraries.py runs these with the environment of
clients/requirements.txt."""

import asyncio
import os
import tomllib
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import httpx
import litellm
import pytest
from agents import (
    Agent,
    ModelBehaviorError,
    ModelRefusalError,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
)
from agents import set_tracing_disabled as no_traces
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI

URL = os.environ["HALLUTRACER_URL"]
KNOWN, UNKNOWN = "What is the capital of Italy?", "What is the capital of the Solomon Islands?"
ANSWER, REFUSED, MODEL = " It is Rome.", "I am not sure.", "demo"
OBSERVE = {"vllm_xargs": {"hallutracer_policy": "observe"}}
LOOP = asyncio.new_event_loop()  # one for all: the Agents SDK keeps its connections
no_traces(True)


@pytest.fixture(scope="module")
def withheld() -> str:
    """What the model would have said; the same for the known question is its answer."""

    def said(question: str) -> str:
        turns = [{"role": "user", "content": question}]
        body = {"model": MODEL, "messages": turns, "temperature": 0} | OBSERVE
        answer = httpx.post(f"{URL}/v1/chat/completions", json=body).raise_for_status().json()
        return str(answer["choices"][0]["message"]["content"])

    assert said(KNOWN) == ANSWER
    return said(UNKNOWN).strip().removeprefix("It is ").rstrip(".")


@dataclass
class Found:
    """What an SDK makes of an answer; ``risk`` where it can be read, ``all`` of what it gives."""

    text: str
    why: str | None  # it was withheld, in the protocol's words
    risk: float | None
    all: str


# --- one function for each SDK ---


def risk_of(note: Any) -> float:
    return float(note["data"][0]["risk"])


def responses_model(**more: Any) -> Any:
    return ChatOpenAI(
        model=MODEL,
        base_url=f"{URL}/v1",
        api_key="none",
        temperature=0,
        use_responses_api=True,
        include_response_headers=True,
        **more,
    )  # type: ignore[arg-type]


def messages_model(**more: Any) -> Any:
    return ChatAnthropic(
        model=MODEL, base_url=URL, api_key="none", temperature=0, max_tokens=40, **more
    )  # type: ignore[call-arg]


def langchain(model: Any, asked: Any, stream: bool) -> Any:
    """The answer, or the sum of its pieces."""
    return reduce(add, model.stream(asked)) if stream else model.invoke(asked)


def langchain_responses(asked: Any, stream: bool, **more: Any) -> Found:
    result = langchain(responses_model(**more), asked, stream)
    metadata = result.response_metadata
    why = (metadata.get("incomplete_details") or {}).get("reason")
    refusals = "".join(part["refusal"] for part in result.content if part["type"] == "refusal")
    return Found(
        result.text or refusals, why, float(metadata["headers"]["x-hallutracer-risk"]), repr(result)
    )


def langchain_messages(asked: Any, stream: bool, **more: Any) -> Found:
    result = langchain(messages_model(**more), asked, stream)
    metadata = result.response_metadata
    why = None if metadata["stop_reason"] == "end_turn" else metadata["stop_reason"]
    return Found(
        result.text, why, None if stream else risk_of(metadata["hallutracer"]), repr(result)
    )


def litellm_responses(asked: Any, stream: bool, model: str = "openai/gpt-4o", **more: Any) -> Found:
    result: Any = litellm.responses(
        model=model,
        api_base=f"{URL}/v1",
        api_key="none",
        input=asked,
        temperature=0,
        stream=stream,
        **more,
    )
    events = list(result) if stream else []
    response = events[-1].response if stream else result
    parts = [part for item in response.output for part in item.content]
    text = "".join(getattr(part, "text", None) or getattr(part, "refusal", "") for part in parts)
    first = events[0].response if stream else response
    why = None if response.incomplete_details is None else response.incomplete_details.reason
    return Found(text, why, risk_of(first.hallutracer), repr([result, *events]))


def litellm_without_a_known_model(asked: Any, stream: bool) -> Found:
    """LiteLLM then asks for a whole answer and makes the events itself."""
    return litellm_responses(asked, stream, "openai/hallutracer")


def litellm_messages(asked: Any, stream: bool, **more: Any) -> Found:
    turns = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    result: Any = litellm.completion(
        model=f"anthropic/{MODEL}",
        api_base=URL,
        api_key="none",
        messages=turns,
        temperature=0,
        max_tokens=40,
        stream=stream,
        **more,
    )
    if stream:
        chunks = list(result)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        why, risk = chunks[-1].choices[0].finish_reason, None
    else:
        chunks = []
        text = result.choices[0].message.content
        why = result.choices[0].finish_reason
        risk = float(result._hidden_params["additional_headers"]["llm_provider-x-hallutracer-risk"])
    return Found(text, None if why == "stop" else why, risk, repr([result, *chunks]))


CLIENT = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


def agent_of(**more: Any) -> Any:
    settings = ModelSettings(temperature=0, **more)
    return Agent(
        name="Assistant", model=OpenAIResponsesModel(MODEL, CLIENT), model_settings=settings
    )


def agents_sdk(asked: Any, stream: bool, **more: Any) -> Found:
    agent = agent_of(**more)

    async def whole() -> Found:
        try:
            found = await Runner.run(agent, asked)
        except ModelRefusalError as error:
            return Found(error.refusal, "refused", None, repr(error.run_data))
        return Found(found.final_output, None, None, repr(found.raw_responses))

    async def streamed() -> Found:
        """Where a stream ends as incomplete the SDK raises what it raises for any model that broke
        off."""
        found = Runner.run_streamed(agent, asked)
        events = []
        why = None
        try:
            async for event in found.stream_events():
                events.append(event)
        except ModelBehaviorError as error:
            why = "refused" if "content_filter" in str(error) else str(error)
        raw: list[Any] = [event.data for event in events if event.type == "raw_response_event"]
        kinds = ("response.output_text.delta", "response.refusal.delta")
        text = "".join(event.delta for event in raw if event.type in kinds)
        assert why or found.final_output == text
        return Found(text, why, risk_of(raw[0].response.hallutracer), repr(events))

    return LOOP.run_until_complete(streamed() if stream else whole())


WHY = {
    langchain_responses: "content_filter",
    langchain_messages: "refusal",
    litellm_responses: "content_filter",
    litellm_without_a_known_model: "content_filter",
    litellm_messages: "content_filter",
    agents_sdk: "refused",
}

# Where the risk is in the answer, and the SDK drops it: docs/apps.md says so.
DROPS_THE_RISK = {(langchain_messages, True), (litellm_messages, True), (agents_sdk, False)}

# --- the gate, in each ---


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", WHY)
def test_an_answer_arrives_and_of_a_withheld_one_nothing(
    ask: Any, stream: bool, withheld: str
) -> None:
    answer = ask(KNOWN, stream)
    assert (answer.text, answer.why) == (ANSWER, None)
    assert (answer.risk is None) is ((ask, stream) in DROPS_THE_RISK)
    assert answer.risk is None or 0 < answer.risk < 0.3
    answer = ask(UNKNOWN, stream)
    assert (answer.text, answer.why) == (REFUSED, WHY[ask])
    assert answer.risk is None or answer.risk > 0.3
    assert withheld not in answer.all


@pytest.mark.parametrize("stream", [False, True])
def test_the_check_would_find_a_token(stream: bool, withheld: str) -> None:
    in_body: dict[str, Any] = {"extra_body": OBSERVE}
    for ask, more in (
        (langchain_responses, in_body),
        (langchain_messages, {"model_kwargs": in_body}),
        (litellm_responses, in_body),
        (litellm_messages, OBSERVE),
        (agents_sdk, in_body),
    ):
        answer = ask(UNKNOWN, stream, **more)  # type: ignore[operator]
        assert answer.why is None
        assert withheld in answer.all


# Options of each SDK; the reasoning that two of them ask for is not there.
CHANGES_NOTHING = tomllib.loads(
    """
    [agents_sdk]
    store = false
    metadata = {a = "b"}
    parallel_tool_calls = true
    truncation = "disabled"
    response_include = ["reasoning.encrypted_content"]
    verbosity = "low"
    include_usage = true

    [langchain_responses]
    store = false
    include = ["reasoning.encrypted_content"]
    truncation = "disabled"
    service_tier = "auto"
    reasoning = {effort = "low"}
    verbosity = "low"
    metadata = {a = "b"}

    [langchain_messages]
    thinking = {type = "disabled"}
    metadata = {a = "b"}
    stop_sequences = ["\\n\\n"]

    [litellm_responses]
    store = false
    include = ["reasoning.encrypted_content"]
    parallel_tool_calls = true
    user = "me"
    metadata = {a = "b"}
    truncation = "disabled"
    service_tier = "auto"

    [litellm_messages]
    metadata = {user_id = "me"}
    user = "me"
    stream_options = {include_usage = true}
    """
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", [ask for ask in WHY if ask.__name__ in CHANGES_NOTHING])
def test_what_changes_nothing_is_taken(ask: Any, stream: bool) -> None:
    assert ask(KNOWN, stream, **CHANGES_NOTHING[ask.__name__]).text == ANSWER


# --- a turn after an answer, and one after a refusal ---


def test_turns_go_back_as_they_came() -> None:
    answered = LOOP.run_until_complete(Runner.run(agent_of(), KNOWN)).to_input_list()
    assert agents_sdk([*answered, {"role": "user", "content": KNOWN}], stream=False).text
    for model, ask in (
        (responses_model(), langchain_responses),
        (messages_model(), langchain_messages),
    ):
        for question in (KNOWN, UNKNOWN):
            answer: AIMessage = model.invoke(question)
            turns = [
                SystemMessage("Be brief."),
                HumanMessage(question),
                answer,
                HumanMessage(KNOWN),
            ]
            assert ask(turns, stream=False).text


def test_a_count_before_the_call() -> None:
    model = messages_model()
    read = model.invoke(KNOWN).usage_metadata["input_tokens"]
    assert model.get_num_tokens_from_messages([HumanMessage(KNOWN)]) == read
