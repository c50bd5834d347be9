"""The adapters with the real libraries, beside a real service on the demo model: HALLUTRACER_URL.

test_libraries.py runs these with the environment of clients/requirements.txt."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from haystack import Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.components.joiners import BranchJoiner
from haystack.dataclasses import ChatMessage as HaystackMessage
from haystack.dataclasses import ImageContent, ToolCall
from haystack.utils import Secret
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from llama_index.core import PromptTemplate
from llama_index.core.base.llms.types import ChatMessage, ImageBlock
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.openai_like import OpenAILike

from hallutracer_client import Client, TransportError, Withheld
from hallutracer_client.haystack import RiskGate
from hallutracer_client.langchain import RiskGuard, RiskMiddleware, conversation
from hallutracer_client.llamaindex import GuardedLLM
from tests.kit.tables import cells

URL, NOWHERE = os.environ["HALLUTRACER_URL"], "http://127.0.0.1:9"
KNOWN, UNKNOWN = "What is the capital of Italy?", "What is the capital of the Solomon Islands?"
REFUSED = "I am not sure."
UNGATED = {
    "vllm_xargs": {"hallutracer_policy": "observe"}
}  # the model behind the guard answers everything

# the models, which answer both questions

LANGCHAIN: Any = ChatOpenAI(
    model="any", base_url=f"{URL}/v1", api_key="none", temperature=0, extra_body=UNGATED
)  # type: ignore[arg-type]
LLAMAINDEX = OpenAILike(
    model="any",
    api_base=f"{URL}/v1",
    api_key="none",
    context_window=4096,
    is_chat_model=True,
    temperature=0,
    additional_kwargs={"extra_body": UNGATED},
)
PROMPT = ChatPromptTemplate.from_messages([("human", "{question}")])


@pytest.fixture
def client() -> Iterator[Client]:
    with Client(URL) as client:
        yield client


def chat(question: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=question)]


def pipeline(client: Client, **options: Any) -> Pipeline:
    made = Pipeline()
    made.add_component(
        "prompt",
        ChatPromptBuilder([HaystackMessage.from_user("{{question}}")], required_variables="*"),
    )
    made.add_component("gate", RiskGate(str(client._base_url), **options))
    made.add_component(
        "llm",
        OpenAIChatGenerator(
            Secret.from_token("none"),
            api_base_url=f"{URL}/v1",
            generation_kwargs={"temperature": 0, "extra_body": UNGATED},
        ),
    )
    made.add_component("answers", BranchJoiner(list[HaystackMessage]))
    for sender, receiver in (
        ("prompt.prompt", "gate.messages"),
        ("gate.messages", "llm.messages"),
        ("llm.replies", "answers"),
        ("gate.replies", "answers"),
    ):
        made.connect(sender, receiver)
    return made


def by_haystack(client: Client, question: str, how: str = "run", **options: Any) -> Any:
    made, given = pipeline(client, **options), {"prompt": {"question": question}}
    run = made.run_async if how == "run_async" else made.run
    result: Any = run(given, include_outputs_from={"llm", "gate"})
    result = asyncio.run(result) if how == "run_async" else result
    answer = result["answers"]["value"][0]
    assert 0 <= result["gate"]["risk"] <= 1
    assert ("llm" in result) is (answer.meta["finish_reason"] != "content_filter")
    return answer.text, answer.meta


def by_langchain(client: Client, question: Any, how: str = "invoke", **options: Any) -> Any:
    guarded = RiskGuard(client, **options).before(LANGCHAIN)
    if how == "stream":
        return "".join(chunk.content for chunk in guarded.stream(question)), None
    answer: Any = (
        asyncio.run(guarded.ainvoke(question)) if how == "ainvoke" else guarded.invoke(question)
    )
    return answer.content, answer.response_metadata | answer.additional_kwargs


def by_agent(client: Client, question: str, how: str = "invoke", before: Any = ()) -> Any:
    agent = create_agent(LANGCHAIN, middleware=[RiskMiddleware(client)])
    state: Any = {"messages": [*before, HumanMessage(question)]}
    result: Any = getattr(agent, how)(state)
    *_, last = (asyncio.run(result) if how == "ainvoke" else result)["messages"]
    return last.content, last.response_metadata | last.additional_kwargs


def by_llamaindex(client: Client, question: str, how: str = "chat", **options: Any) -> Any:
    llm = GuardedLLM(LLAMAINDEX, client, **options)
    ask = getattr(llm, how)(chat(question) if how.endswith("chat") else question)

    async def last() -> Any:
        found = await ask
        return [one async for one in found][-1] if "stream" in how else found

    response = (
        asyncio.run(last()) if how.startswith("a") else list(ask)[-1] if "stream" in how else ask
    )
    if "hallutracer" in response.additional_kwargs:  # what stands for a withheld answer
        assert response.delta == (response.additional_kwargs["refusal"] or "")
    return (
        response.message.content if how.endswith("chat") else response.text
    ), response.additional_kwargs


CALLS = [
    AIMessage("", tool_calls=[{"name": "f", "args": {}, "id": "1"}]),
    ToolMessage("4", tool_call_id="1"),
]
ASKS: dict[str, Callable[..., Any]] = {
    "haystack": by_haystack,
    "langchain": by_langchain,
    "agent": by_agent,
    "llamaindex": by_llamaindex,
}
WAYS = cells(
    """
    haystack | run
    haystack | run_async
    langchain | invoke
    langchain | ainvoke
    langchain | stream
    agent | invoke
    agent | ainvoke
    llamaindex | chat
    llamaindex | complete
    llamaindex | stream_chat
    llamaindex | stream_complete
    llamaindex | achat
    llamaindex | acomplete
    llamaindex | astream_chat
    llamaindex | astream_complete
    """
)


@pytest.mark.parametrize(("framework", "how"), WAYS)
def test_the_known_is_answered_the_unknown_refused_and_without_its_guard_nothing(
    client: Client, framework: str, how: str
) -> None:
    ask = partial(ASKS[framework], how=how)
    assert "Rome" in ask(client, KNOWN)[0]
    text, told = ask(client, UNKNOWN)
    assert text == REFUSED
    if told is not None:  # a stream's chunks do not have it
        assert (told["finish_reason"], told["refusal"]) == ("content_filter", REFUSED)
        assert told["hallutracer"]["decision"] == "abstain"
    with (
        Client(NOWHERE, max_retries=0) as nobody,
        pytest.raises(Exception, match="cannot connect") as failed,
    ):
        ask(nobody, KNOWN)
    causes = [failed.value, failed.value.__cause__, failed.value.__context__]
    assert any(isinstance(cause, TransportError) for cause in causes)


def test_what_an_agent_s_tools_said_is_left_out(client: Client) -> None:
    assert by_agent(client, UNKNOWN, before=CALLS)[0] == REFUSED


@pytest.mark.parametrize("ask", [by_haystack, by_langchain, by_llamaindex])
def test_policy_and_threshold_are_the_requests(client: Client, ask: Callable[..., Any]) -> None:
    assert ask(client, UNKNOWN, policy="observe")[0].strip() not in (
        "",
        REFUSED,
    )  # the model alone answers it
    assert ask(client, UNKNOWN, threshold=1.0)[0] != REFUSED
    assert ask(client, KNOWN, threshold=0.0)[0] == REFUSED
    assert ask(client, UNKNOWN, policy="block")[0] == ""


# What cannot be scored, by how each adapter is asked.
UNSCORED: dict[Callable[..., Any], list[Any]] = {
    lambda _, *turns: RiskGate(URL).run([HaystackMessage.from_user(KNOWN), *turns]): [
        HaystackMessage.from_tool("4", origin=ToolCall("f", {})),
        HaystackMessage.from_assistant(tool_calls=[ToolCall("f", {})]),
        HaystackMessage.from_user(content_parts=["Why?", ImageContent("aGk=", "image/png")]),
    ],
    lambda client, *turns: RiskGuard(client).invoke([HumanMessage(KNOWN), *turns]): [
        *CALLS,
        HumanMessage([{"type": "image_url", "image_url": {"url": "data:,"}}]),
    ],
    lambda client, *turns: GuardedLLM(LLAMAINDEX, client).chat([*chat(KNOWN), *turns]): [
        ChatMessage(role="tool", content="4"),
        ChatMessage(role="user", blocks=[ImageBlock(url="http://localhost/x.png")]),
        ChatMessage(role="assistant", content="", additional_kwargs={"tool_calls": [{}]}),
    ],
}


@pytest.mark.parametrize("adapter", UNSCORED)
def test_what_cannot_be_scored_does_not_pass(client: Client, adapter: Callable[..., Any]) -> None:
    for message in UNSCORED[adapter]:
        with pytest.raises(ValueError, match="cannot be scored"):
            adapter(client, message)


# Haystack


def test_a_pipeline_is_written_and_read_without_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GUARD_KEY", "s3cret-s3cret-s3cret")
    made = Pipeline()
    made.add_component(
        "gate", RiskGate(URL, api_key=Secret.from_env_var("GUARD_KEY"), threshold=0.5)
    )
    text = made.dumps()
    assert "s3cret" not in text
    again = Pipeline.loads(text, allowed_modules=["hallutracer_client.haystack"])
    assert again.get_component("gate").to_dict() == made.get_component("gate").to_dict()
    assert set(again.run({"gate": {"messages": [HaystackMessage.from_user(UNKNOWN)]}})["gate"]) == {
        "replies",
        "risk",
    }
    plain = RiskGate(URL)
    assert set(plain.run([HaystackMessage.from_user(KNOWN)])) == {"messages", "risk"}
    assert RiskGate.from_dict(plain.to_dict()).to_dict() == plain.to_dict()


# LangChain


def test_a_chain_goes_on_or_raises_and_a_fallback_takes_over(client: Client) -> None:
    chain = PROMPT | RiskGuard(client) | LANGCHAIN
    known, unknown = {"question": KNOWN}, {"question": UNKNOWN}
    for ask in (
        lambda: chain.invoke(unknown),
        lambda: asyncio.run(chain.ainvoke(unknown)),
        lambda: list(chain.stream(unknown)),
    ):
        with pytest.raises(Withheld) as withheld:
            ask()
        assert withheld.value.risk.risk > withheld.value.risk.threshold
    first, second = chain.batch([known, unknown], return_exceptions=True)
    assert "Rome" in first.content
    assert isinstance(second, Withheld)
    retrieval = PROMPT | (lambda prompt: AIMessage("looked up"))
    other = chain.with_fallbacks([retrieval], exceptions_to_handle=(Withheld,))
    assert other.invoke(unknown).content == "looked up"


def test_what_is_sent_is_the_conversation(client: Client) -> None:
    turns = [
        SystemMessage("Be brief."),
        HumanMessage([{"type": "text", "text": "Why "}, "so?"]),
        AIMessage("So."),
        AIMessage("", additional_kwargs={"refusal": "No."}),
        ("user", "Why?"),
    ]
    roles = ("system", "user", "assistant", "assistant", "user")
    texts = ("Be brief.", "Why so?", "So.", "No.", "Why?")
    assert conversation(turns) == [
        {"role": role, "content": text} for role, text in zip(roles, texts, strict=True)
    ]
    assert by_langchain(client, [("human", UNKNOWN)])[0] == REFUSED


# LlamaIndex


class Passages(BaseRetriever):
    def __init__(self, *texts: str) -> None:
        super().__init__()
        self.texts = texts

    def _retrieve(self, query_bundle: Any) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(text=text), score=1.0) for text in self.texts]


def test_engines_ask_with_their_passages_and_their_history(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    score = client.score
    monkeypatch.setattr(
        client, "score", lambda **options: asked.append(options) or score(**options)
    )
    short = {
        "text_qa_template": PromptTemplate("{context_str}\n{query_str}")
    }  # the tiny model holds 256 tokens
    for threshold, passage, question in (
        (0.0, "Honiara is the capital.", UNKNOWN),
        (1.0, "Rome is it.", KNOWN),
    ):
        llm = GuardedLLM(LLAMAINDEX, client, threshold=threshold)
        engine = RetrieverQueryEngine.from_args(Passages(passage), llm=llm, **short)
        assert (str(engine.query(question)) == REFUSED) is (threshold == 0.0)
        message = str(asked.pop()["messages"])
        assert passage in message
        assert question in message
    chatting = SimpleChatEngine.from_defaults(llm=GuardedLLM(LLAMAINDEX, client))
    assert str(chatting.chat(UNKNOWN)) == REFUSED
    chatting.chat(KNOWN)  # the refusal is a turn that can be sent again


def test_it_raises_where_asked_to_and_calls_no_tools(client: Client) -> None:
    llm = GuardedLLM(LLAMAINDEX, client, raises=True)
    with pytest.raises(Withheld):
        llm.stream_complete(UNKNOWN)
    assert "Rome" in llm.complete(KNOWN).text
    assert (llm.metadata.is_function_calling_model, llm.metadata.context_window) == (False, 4096)
