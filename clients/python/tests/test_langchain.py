from __future__ import annotations

import asyncio

import pytest
from conftest import KNOWN, UNGATED, UNKNOWN
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

from hallutracer_client import Client, TransportError, Withheld
from hallutracer_client.langchain import RiskGuard, RiskMiddleware, conversation


@pytest.fixture
def model(url: str) -> ChatOpenAI:
    return ChatOpenAI(model="any", base_url=f"{url}/v1", api_key="none", temperature=0, extra_body=UNGATED)  # type: ignore[arg-type]


def test_the_model_alone_answers_both(model: ChatOpenAI) -> None:
    assert "Rome" in model.invoke(KNOWN).content
    assert model.invoke(UNKNOWN).content.strip() not in ("", "I am not sure.")  # type: ignore[union-attr]


def test_a_chain_goes_on_or_raises(client: Client, model: ChatOpenAI) -> None:
    chain = ChatPromptTemplate.from_messages([("human", "{question}")]) | RiskGuard(client) | model
    assert "Rome" in chain.invoke({"question": KNOWN}).content
    with pytest.raises(Withheld) as withheld:
        chain.invoke({"question": UNKNOWN})
    assert withheld.value.risk.risk > withheld.value.risk.threshold
    with pytest.raises(Withheld):
        asyncio.run(chain.ainvoke({"question": UNKNOWN}))
    assert "Rome" in asyncio.run(chain.ainvoke({"question": KNOWN})).content
    with pytest.raises(Withheld):
        list(chain.stream({"question": UNKNOWN}))
    known, unknown = chain.batch([{"question": KNOWN}, {"question": UNKNOWN}], return_exceptions=True)
    assert "Rome" in known.content
    assert isinstance(unknown, Withheld)


def test_a_fallback_takes_over_what_is_withheld(client: Client, model: ChatOpenAI) -> None:
    retrieval = ChatPromptTemplate.from_messages([("human", "{question}")]) | (lambda prompt: AIMessage("looked up"))
    chain = (ChatPromptTemplate.from_messages([("human", "{question}")]) | RiskGuard(client) | model).with_fallbacks(
        [retrieval], exceptions_to_handle=(Withheld,)
    )
    assert chain.invoke({"question": UNKNOWN}).content == "looked up"
    assert "Rome" in chain.invoke({"question": KNOWN}).content


@pytest.mark.parametrize("form", [str, lambda text: [HumanMessage(text)], lambda text: [("human", text)]])
def test_before_a_model_it_answers_with_the_message(client: Client, model: ChatOpenAI, form: object) -> None:
    guarded = RiskGuard(client).before(model)
    refused = guarded.invoke(form(UNKNOWN))  # type: ignore[operator]
    assert refused.content == "I am not sure."
    assert refused.additional_kwargs["refusal"] == "I am not sure."
    assert refused.response_metadata["finish_reason"] == "content_filter"
    assert refused.response_metadata["hallutracer"]["decision"] == "abstain"
    assert "Rome" in guarded.invoke(form(KNOWN)).content  # type: ignore[operator]
    assert "Rome" in "".join(chunk.content for chunk in guarded.stream(form(KNOWN)))  # type: ignore[operator]
    assert "Rome" in asyncio.run(guarded.ainvoke(form(KNOWN))).content  # type: ignore[operator]
    assert "".join(chunk.content for chunk in guarded.stream(form(UNKNOWN))) == "I am not sure."  # type: ignore[operator]


def test_policy_and_threshold_are_the_requests(client: Client) -> None:
    assert RiskGuard(client, policy="observe").invoke(UNKNOWN) == UNKNOWN
    assert RiskGuard(client, threshold=1.0).invoke(UNKNOWN) == UNKNOWN
    with pytest.raises(Withheld):
        RiskGuard(client, threshold=0.0).invoke(KNOWN)
    assert RiskGuard(client, policy="block").before(lambda _: "never").invoke(UNKNOWN).content == ""  # type: ignore[arg-type]


def test_no_guard_no_answer(nobody: Client, model: ChatOpenAI) -> None:
    for chain in (RiskGuard(nobody) | model, RiskGuard(nobody).before(model)):
        with pytest.raises(TransportError):
            chain.invoke(KNOWN)


def test_what_is_sent_is_the_conversation() -> None:
    turns = [SystemMessage("Be brief."), HumanMessage([{"type": "text", "text": "Why "}, "so?"]), AIMessage("So."),
             AIMessage("", additional_kwargs={"refusal": "No."}), ("user", "Why?")]  # fmt: skip
    assert conversation(turns) == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why so?"},
        {"role": "assistant", "content": "So."}, {"role": "assistant", "content": "No."},
        {"role": "user", "content": "Why?"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    "message",
    [
        ToolMessage("4", tool_call_id="1"),
        HumanMessage([{"type": "image_url", "image_url": {"url": "data:,"}}]),
        AIMessage("", tool_calls=[{"name": "f", "args": {}, "id": "1"}]),
    ],
)
def test_what_cannot_be_scored_does_not_pass(client: Client, message: object) -> None:
    with pytest.raises(ValueError, match="cannot be scored"):
        RiskGuard(client).invoke([HumanMessage(KNOWN), message])  # type: ignore[list-item]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_agent_ends_before_it_starts(client: Client, model: ChatOpenAI, asynchronous: bool) -> None:
    agent = create_agent(model, middleware=[RiskMiddleware(client)])

    def ask(question: str) -> list[object]:
        state = {"messages": [{"role": "user", "content": question}]}
        return (asyncio.run(agent.ainvoke(state)) if asynchronous else agent.invoke(state))["messages"]  # type: ignore[arg-type]

    *_, last = ask(UNKNOWN)
    assert (last.content, last.response_metadata["finish_reason"]) == ("I am not sure.", "content_filter")  # type: ignore[attr-defined]
    *_, last = ask(KNOWN)
    assert "Rome" in last.content  # type: ignore[attr-defined]


def test_an_agents_tools_are_left_out(client: Client, model: ChatOpenAI) -> None:
    agent = create_agent(model.bind(), middleware=[RiskMiddleware(client)])  # type: ignore[arg-type]
    calls = [AIMessage("", tool_calls=[{"name": "f", "args": {}, "id": "1"}]), ToolMessage("4", tool_call_id="1")]
    state = {"messages": [*calls, HumanMessage(UNKNOWN)]}
    assert agent.invoke(state)["messages"][-1].content == "I am not sure."  # type: ignore[arg-type]


def test_an_agent_without_its_guard_does_not_answer(nobody: Client, model: ChatOpenAI) -> None:
    with pytest.raises(TransportError):
        create_agent(model, middleware=[RiskMiddleware(nobody)]).invoke({"messages": [("user", KNOWN)]})  # type: ignore[arg-type]
