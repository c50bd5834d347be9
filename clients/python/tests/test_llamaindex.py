from __future__ import annotations

import asyncio
from typing import Any

import pytest
from conftest import KNOWN, UNGATED, UNKNOWN
from llama_index.core import PromptTemplate
from llama_index.core.base.llms.types import ChatMessage, ImageBlock
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.openai_like import OpenAILike

from hallutracer_client import Client, TransportError, Withheld
from hallutracer_client.llamaindex import GuardedLLM

REFUSED = "I am not sure."


@pytest.fixture
def model(url: str) -> OpenAILike:
    return OpenAILike(model="any", api_base=f"{url}/v1", api_key="none", context_window=4096, is_chat_model=True,
                      temperature=0, additional_kwargs={"extra_body": UNGATED})  # fmt: skip


@pytest.fixture
def llm(model: OpenAILike, client: Client) -> GuardedLLM:
    return GuardedLLM(model, client)


def chat(question: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=question)]


def test_the_model_alone_answers_both(model: OpenAILike) -> None:
    assert "Rome" in model.complete(KNOWN).text
    assert model.complete(UNKNOWN).text.strip() not in ("", REFUSED)


async def collected(stream: Any) -> list[Any]:
    return [one async for one in await stream]


def test_every_way_of_asking_is_guarded(llm: GuardedLLM) -> None:
    def ask(question: str) -> list[str]:
        async def later() -> list[str]:
            return [
                (await llm.achat(chat(question))).message.content or "",
                (await llm.acomplete(question)).text,
                (await collected(llm.astream_chat(chat(question))))[-1].message.content,
                (await collected(llm.astream_complete(question)))[-1].text,
            ]

        return [
            llm.chat(chat(question)).message.content or "",
            llm.complete(question).text,
            list(llm.stream_chat(chat(question)))[-1].message.content or "",
            list(llm.stream_complete(question))[-1].text,
            *asyncio.run(later()),
        ]

    assert ask(UNKNOWN) == [REFUSED] * 8
    assert all("Rome" in answer for answer in ask(KNOWN))


def test_a_refusal_says_so(llm: GuardedLLM) -> None:
    for response in (llm.chat(chat(UNKNOWN)), llm.complete(UNKNOWN)):
        assert response.additional_kwargs["finish_reason"] == "content_filter"
        assert response.additional_kwargs["refusal"] == REFUSED
        assert response.additional_kwargs["hallutracer"]["decision"] == "abstain"
        assert response.delta == REFUSED
    assert not llm.metadata.is_function_calling_model
    assert llm.metadata.context_window == 4096


class Passages(BaseRetriever):
    def __init__(self, *texts: str) -> None:
        super().__init__()
        self.texts = texts

    def _retrieve(self, query_bundle: Any) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(text=text), score=1.0) for text in self.texts]


def test_a_query_engine_asks_with_its_passages(model: OpenAILike, client: Client) -> None:
    asked: list[Any] = []
    score = client.score
    client.score = lambda **options: asked.append(options) or score(**options)  # type: ignore[func-returns-value,method-assign]
    llm = GuardedLLM(model, client, threshold=0.0)
    short = {"text_qa_template": PromptTemplate("{context_str}\n{query_str}")}  # the tiny model holds 256 tokens
    engine = RetrieverQueryEngine.from_args(Passages("Honiara is the capital."), llm=llm, **short)
    assert str(engine.query(UNKNOWN)) == REFUSED
    said = str(asked[0]["messages"] or asked[0]["prompt"])
    assert "Honiara is the capital" in said
    assert UNKNOWN in said
    llm = GuardedLLM(model, client, threshold=1.0)
    opened = RetrieverQueryEngine.from_args(Passages("Rome is the capital."), llm=llm, **short)
    assert str(opened.query(KNOWN)) not in ("", REFUSED)


def test_a_chat_engine_asks_with_its_history(llm: GuardedLLM) -> None:
    engine = SimpleChatEngine.from_defaults(llm=llm)
    assert str(engine.chat(UNKNOWN)) == REFUSED
    assert isinstance(str(engine.chat(KNOWN)), str)  # the refusal is a turn that can be sent again


def test_it_raises_where_asked_to(model: OpenAILike, client: Client) -> None:
    llm = GuardedLLM(model, client, raises=True)
    for ask in (lambda: llm.chat(chat(UNKNOWN)), lambda: llm.complete(UNKNOWN), lambda: llm.stream_complete(UNKNOWN)):
        with pytest.raises(Withheld):
            ask()
    assert "Rome" in llm.complete(KNOWN).text


def test_no_guard_no_answer(model: OpenAILike, nobody: Client) -> None:
    llm = GuardedLLM(model, nobody)
    with pytest.raises(TransportError):
        llm.complete(KNOWN)
    with pytest.raises(TransportError):
        asyncio.run(llm.achat(chat(KNOWN)))


@pytest.mark.parametrize(
    "message",
    [
        ChatMessage(role="tool", content="4"),
        ChatMessage(role="user", blocks=[ImageBlock(url="http://localhost/x.png")]),
        ChatMessage(role="assistant", content="", additional_kwargs={"tool_calls": [{}]}),
    ],
)
def test_what_cannot_be_scored_does_not_pass(llm: GuardedLLM, message: ChatMessage) -> None:
    with pytest.raises(ValueError, match="cannot be scored"):
        llm.chat([*chat(KNOWN), message])
