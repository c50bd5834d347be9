from __future__ import annotations

import asyncio
from typing import Any

import pytest
from conftest import KNOWN, UNGATED, UNKNOWN
from haystack import Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.components.joiners import BranchJoiner
from haystack.dataclasses import ChatMessage, ImageContent, ToolCall
from haystack.utils import Secret

from hallutracer_client import TransportError
from hallutracer_client.haystack import RiskGate


def pipeline(url: str, **options: Any) -> Pipeline:
    made = Pipeline()
    made.add_component("prompt", ChatPromptBuilder([ChatMessage.from_user("{{question}}")], required_variables="*"))
    made.add_component("gate", RiskGate(url, **options))
    made.add_component("llm", OpenAIChatGenerator(
        Secret.from_token("none"), api_base_url=f"{url}/v1", generation_kwargs={"temperature": 0, "extra_body": UNGATED}
    ))  # fmt: skip
    made.add_component("answers", BranchJoiner(list[ChatMessage]))
    made.connect("prompt.prompt", "gate.messages")
    made.connect("gate.messages", "llm.messages")
    made.connect("llm.replies", "answers")
    made.connect("gate.replies", "answers")
    return made


def ask(made: Pipeline, question: str) -> tuple[ChatMessage, bool]:
    """The answer, and whether the generator ran."""
    found = made.run({"prompt": {"question": question}}, include_outputs_from={"llm", "gate"})
    assert 0 <= found["gate"]["risk"] <= 1
    return found["answers"]["value"][0], "llm" in found


def test_a_generator_runs_only_where_the_risk_allows(url: str) -> None:
    made = pipeline(url)
    answer, ran = ask(made, KNOWN)
    assert ran
    assert "Rome" in (answer.text or "")
    answer, ran = ask(made, UNKNOWN)
    assert not ran
    assert (answer.text, answer.meta["finish_reason"]) == ("I am not sure.", "content_filter")
    assert answer.meta["hallutracer"]["decision"] == "abstain"
    answer, ran = ask(pipeline(url, policy="observe"), UNKNOWN)
    assert ran
    assert answer.text != "I am not sure."
    assert not ask(pipeline(url, threshold=0.0), KNOWN)[1]
    assert ask(pipeline(url, policy="block"), UNKNOWN)[0].text == ""


def test_it_has_one_of_its_two_outputs(url: str) -> None:
    gate = RiskGate(url)
    assert set(gate.run([ChatMessage.from_user(KNOWN)])) == {"messages", "risk"}
    assert set(gate.run([ChatMessage.from_user(UNKNOWN)])) == {"replies", "risk"}


def test_async_pipelines(url: str) -> None:
    found = asyncio.run(pipeline(url).run_async({"prompt": {"question": UNKNOWN}}, include_outputs_from={"llm"}))
    assert found["answers"]["value"][0].text == "I am not sure."
    assert "llm" not in found


def test_no_guard_no_answer() -> None:
    with pytest.raises(Exception, match="cannot connect") as failed:
        ask(pipeline("http://127.0.0.1:9"), KNOWN)
    causes = [failed.value, failed.value.__cause__, failed.value.__context__]
    assert any(isinstance(cause, TransportError) for cause in causes)


def test_a_pipeline_is_written_and_read_without_its_key(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GUARD_KEY", "s3cret-s3cret-s3cret")
    made = Pipeline()
    made.add_component("gate", RiskGate(url, api_key=Secret.from_env_var("GUARD_KEY"), threshold=0.5))
    text = made.dumps()
    assert "s3cret" not in text
    again = Pipeline.loads(text, allowed_modules=["hallutracer_client.haystack"])
    gate = again.get_component("gate")
    assert gate.to_dict() == made.get_component("gate").to_dict()
    assert again.run({"gate": {"messages": [ChatMessage.from_user(UNKNOWN)]}})["gate"]["replies"]
    plain = RiskGate(url)
    assert RiskGate.from_dict(plain.to_dict()).to_dict() == plain.to_dict()


@pytest.mark.parametrize(
    "message",
    [
        ChatMessage.from_tool("4", origin=ToolCall("f", {})),
        ChatMessage.from_assistant(tool_calls=[ToolCall("f", {})]),
        ChatMessage.from_user(content_parts=["Why?", ImageContent("aGk=", "image/png")]),
    ],
)
def test_what_cannot_be_scored_does_not_pass(url: str, message: ChatMessage) -> None:
    with pytest.raises(ValueError, match="cannot be scored"):
        RiskGate(url).run([ChatMessage.from_user(KNOWN), message])
