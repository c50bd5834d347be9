"""Tools in chats: a turn of nothing but calls is no answer; of anything else that is withheld no token leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from service.api.tools_schema import Function, offered
from service.engines.base import Sampling
from service.engines.scheduler import Scheduled
from service.engines.transformers.engine import EngineOptions, TransformersEngine
from service.policies.guard import Action, Policy
from service.scoring import RiskReport, Scorer
from tests.api.test_answer_risk import two_parts
from tests.api.test_openai_routes import EVERYTHING, NOTHING, ask, client_of, risks
from tests.api.test_recheck import all_flagged
from tests.engines import tiny
from tests.engines.tool_template import ADD, CALL, FORCED, SECRET, TOOL_TEMPLATE
from tests.matching import matching_bundle
from tests.running import App, Running, running, until

FIND: dict[str, Any] = {"name": "find", "description": "Looks it up.",
                        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}  # fmt: skip
TOOLS = [{"type": "function", "function": FIND}, {"type": "function", "function": {"name": "add", "strict": True}}]
USER = {"role": "user", "content": "Who?"}
GATE = Policy("gate", Action.ABSTAIN, message="I am not sure.")
POLICIES = {
    "gate": GATE, "strict": replace(GATE, name="strict", tools="gate"), "block": Policy("block", Action.BLOCK),
    "fetch": Policy("fetch", Action.RETRIEVE, message="Fetch."),
    "warn": Policy("warn", Action.ANNOTATE, message="Careful."),
}  # fmt: skip


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("service"), policies=POLICIES) as service:
        service.engine.takes_tools = True
        yield service


def calls_of(found: Any, answer: str, service: Running, **given: Any) -> Any:
    service.engine.answer = answer
    return ask(service, found, **{"messages": [USER], "tools": TOOLS, "max_tokens": 300} | given)


def told(found: Any) -> tuple[str, list[tuple[str, str]], str, list[dict[str, Any]]]:
    """The text, the calls, the finish reason and the risks of an answer or of a stream."""
    if not isinstance(found, list):
        (choice,) = found.choices
        calls = [(one.function.name, one.function.arguments) for one in choice.message.tool_calls or ()]
        return choice.message.content or "", calls, choice.finish_reason, risks(found)
    deltas = [chunk.choices[0].delta for chunk in found]
    calls = [one for delta in deltas for one in delta.tool_calls or ()]
    assert [one.index for one in calls] == list(range(len(calls)))
    assert len({one.id for one in calls}) == len(calls)
    text = "".join(delta.content or "" for delta in deltas)
    return (
        text,
        [(one.function.name, one.function.arguments) for one in calls],
        found[-1].choices[0].finish_reason,
        risks(found[0]),
    )


def both(xargs: Any, answer: str, service: Running, **given: Any) -> Iterator[Any]:
    """The answer, and the stream."""
    yield calls_of(xargs, answer, service, **given)
    yield list(calls_of(xargs, answer, service, stream=True, **given))


@pytest.mark.parametrize("policy", ["gate", "block", "fetch"])
def test_a_turn_of_nothing_but_calls_is_given_whatever_its_risk(service: Running, policy: str) -> None:
    before = service.metric("hallutracer_tool_calls_let_through_total")
    for found in both(EVERYTHING | {"hallutracer_policy": policy}, f"{CALL}\n{ADD}\n", service):
        text, calls, ended, (row,) = told(found)
        assert (text, calls, ended) == ("", [("find", '{"q": "Pâris"}'), ("add", "{}")], "tool_calls")
        assert (row["decision"], row["flagged"], row["tool_call"]) == ("continue", True, True)
        assert "message" not in row
    assert service.metric("hallutracer_tool_calls_let_through_total") == before + 2


def test_a_call_has_an_id_of_its_own_and_no_content(service: Running) -> None:
    first, other = (calls_of(EVERYTHING, CALL, service).choices[0].message for _ in range(2))
    assert first.content is None
    assert first.tool_calls[0].id.startswith("call_")
    assert first.tool_calls[0].id != other.tool_calls[0].id


HOSTILE = {
    "text": f"It is {SECRET}.",
    "text before": f"{SECRET}! {CALL}",
    "text behind": f"{CALL} {SECRET}",
    "text between": f"{CALL}{SECRET}{ADD}",
    "another tool": CALL.replace("find", SECRET),
    "another key": CALL.replace('"arguments"', f'"answer": "{SECRET}", "arguments"'),
    "no object": f'<tool_call>{{"name": "find", "arguments": "{SECRET}"}}</tool_call>',
    "no JSON": f"<tool_call>{SECRET}</tool_call>",
    "nested": f"<tool_call>{SECRET}{CALL}</tool_call>",
    "in the mark": f"<tool_call {SECRET}>{CALL}",
    "white space": " \n" * 40,
    "nothing": "",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_of_anything_else_no_token_leaves(service: Running, name: str) -> None:
    for policy, said in (("gate", "I am not sure."), ("block", None)):
        for found in both(EVERYTHING | {"hallutracer_policy": policy}, HOSTILE[name], service):
            text, calls, ended, (row,) = told(found)
            assert (text, calls, ended) == ("", [], "content_filter")
            assert (row["decision"], "tool_call" in row) == ({"gate": "abstain"}.get(policy, policy), False)
            raw = json.dumps([one.model_dump() for one in found] if isinstance(found, list) else found.model_dump())
            assert SECRET not in raw
            assert (said is None) == ("I am not sure." not in raw)


def test_a_call_that_is_cut_is_withheld(service: Running) -> None:
    for most in (20, len(CALL.encode()) - 1):
        for found in both(EVERYTHING, CALL, service, max_tokens=most):
            assert told(found)[:3] == ("", [], "content_filter")
    for found in both(EVERYTHING, CALL + ADD, service, max_tokens=len(CALL.encode())):
        assert told(found)[:3] == ("", [], "content_filter"), "nobody knows what would have followed"
    for found in both(EVERYTHING, CALL, service, stop=["</tool_call>"]):
        assert told(found)[:3] == ("", [], "content_filter")


def test_a_held_answer_ends_as_soon_as_it_is_no_call(service: Running) -> None:
    before, service.engine.sleep_s = service.engine.counters.decode_steps, 0.01
    try:
        calls_of(EVERYTHING, " <tool" + "x" * 200, service)
        until(lambda: service.engine.counters.open_continuations == 0)
    finally:
        service.engine.sleep_s = 0.0
    assert service.engine.counters.decode_steps - before < 100


def test_a_policy_can_gate_calls_too(service: Running) -> None:
    before = service.engine.counters.decode_steps
    for found in both(EVERYTHING | {"hallutracer_policy": "strict"}, CALL, service):
        assert told(found)[:3] == ("", [], "content_filter")
    assert service.engine.counters.decode_steps == before, "withheld before it is decoded"
    for found in both(NOTHING | {"hallutracer_policy": "strict"}, CALL, service):
        assert told(found)[:3] == ("", [("find", '{"q": "Pâris"}')], "tool_calls")


def test_an_answer_under_the_threshold_goes_on_with_its_calls_beside_its_text(service: Running) -> None:
    for answer, text, names in (
        (f"Let me look.\n{CALL}\n{ADD}", "Let me look.", ["find", "add"]), (CALL, "", ["find"]),
        ("It is so.", "It is so.", []), (f"So: {CALL[:-3]}", f"So: {CALL[:-3]}", []),
        ("a <tool_call>b</tool_call>", "a <tool_call>b</tool_call>", []),
    ):  # fmt: skip
        for found in both(NOTHING, answer, service):
            said, calls, ended, (row,) = told(found)
            assert (said, [name for name, _ in calls], ended) == (text, names, "tool_calls" if names else "stop")
            assert "tool_call" not in row, "nothing was held"
    for found in both(NOTHING, CALL + ADD, service, parallel_tool_calls=False):
        assert told(found)[1] == [("find", '{"q": "Pâris"}')]
    for found in both(NOTHING | {"hallutracer_threshold": 0.0, "hallutracer_policy": "warn"}, CALL, service):
        assert told(found)[:2] == ("Careful.\n\n", [("find", '{"q": "Pâris"}')])


def test_a_stream_flows_until_a_call_begins(service: Running) -> None:
    chunks = list(calls_of(NOTHING, f"Let me <b> look.\n{CALL}", service, stream=True))
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    assert len(texts) > 5
    assert "".join(texts) == "Let me <b> look."


def test_tools_calls_and_results_are_rendered_and_scored(service: Running) -> None:
    made = calls_of(NOTHING, CALL, service).choices[0].message
    turns = [USER, made, {"role": "tool", "content": "Ann", "tool_call_id": made.tool_calls[0].id}]
    found = calls_of(EVERYTHING, "It is Ann.", service, messages=turns)
    assert told(found)[2] == "content_filter", "the turn after a result is gated as any"
    definitions = [{"type": "function", "function": FIND}, {"type": "function", "function": {"name": "add"}}]
    call = {"id": made.tool_calls[0].id, "type": "function", "function": {"name": "find", "arguments": {"q": "Pâris"}}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "Ann"}]
    ids = service.engine.render_chat(messages, definitions)
    assert found.usage.prompt_tokens == len(ids)
    [row] = service.post(input_ids=ids, threshold=0).json()["data"]
    assert risks(found)[0]["risk"] == row["risk"]
    without = calls_of(NOTHING, CALL, service, tool_choice="none")
    assert told(without)[:3] == (CALL, [], "stop"), "a model that is told of no tools calls none"
    assert without.usage.prompt_tokens == len(service.engine.render_chat([USER]))


def turn(**changes: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    return {"messages": [USER, {"role": "assistant", "tool_calls": [call | changes]}, RESULT]}


RESULT = {"role": "tool", "tool_call_id": "c1", "content": "Ann"}


def tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "find"} | function}]}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "find"}}}, "tool_choice"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "'find'"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0"),
        ({"tools": TOOLS * 65}, "128"),
        (tool(name="a b"), "name"), (tool(name=""), "name"), (tool(returns={}), "returns"),
        (tool(parameters=[]), "parameters"), (tool(parameters={"type": "string"}), "JSON schema of type object"),
        (tool(parameters={"a": json.loads("[" * 40 + "]" * 40)}), "levels"),
        (turn(function={"name": "find", "arguments": "[]"}), "JSON of an object"),
        (turn(function={"name": "find", "arguments": "{"}), "JSON of an object"),
        (turn(function={"name": "find", "arguments": '{"a":' * 20_000}), "characters"),
        (turn(function={"name": "find", "arguments": '{"a":' * 5_000 + "1" + "}" * 5_000}), "JSON of an object"),
        (turn(function={"name": "find", "arguments": json.dumps({"q": "x" * 2**20})}), "characters"),
        (turn(function={"name": "find", "arguments": {}}), "arguments"),
        (turn(id="c2"), "no earlier turn called"),
        ({"messages": [RESULT, *turn()["messages"]]}, "no earlier turn called"),
        ({"messages": [USER | {"tool_calls": turn()["messages"][1]["tool_calls"]}]}, "assistant"),
        ({"messages": [USER | {"tool_call_id": "c1"}]}, "tool_call_id"),
        ({"messages": [*turn()["messages"][:2], {"role": "tool", "content": "Ann"}]}, "tool_call_id"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_name(service: Running, given: dict[str, Any], named: str) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        client_of(service).chat.completions.create(**{"model": "scripted", "messages": [USER]} | given)
    assert named in str(refused.value.body), refused.value.body


def test_where_the_template_takes_no_tools_they_are_refused(service: Running) -> None:
    service.engine.takes_tools = False
    try:
        for given, param in (({"tools": TOOLS}, "tools"), (turn(), "messages.1.tool_calls")):
            with pytest.raises(openai.UnprocessableEntityError) as refused:
                client_of(service).chat.completions.create(**{"model": "scripted", "messages": [USER]} | given)
            assert (refused.value.param, "no place for" in refused.value.message) == (param, True)
        assert told(calls_of(NOTHING, "It is so.", service, tool_choice="none"))[0] == "It is so."
    finally:
        service.engine.takes_tools = True


def test_callers_may_not_choose_a_policy_that_lets_calls_through(tmp_path: Path) -> None:
    with App(tmp_path, callers_may=(), policies=POLICIES, policy="strict").started() as app:
        for policy, status in (("gate", 403), ("block", 403), ("strict", 200)):
            assert app.client.post("/score", json={"prompt": "one", "policy": policy}).status_code == status


AGAIN = {
    "again": replace(GATE, name="again", recheck=True), "stops": replace(GATE, name="stops", stop_at=0.01),
    "again-strict": replace(GATE, name="again-strict", recheck=True, tools="gate"),
    "stops-strict": replace(GATE, name="stops-strict", stop_at=0.01, tools="gate"),
}  # fmt: skip


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service whose bundle flags every answer by its own tokens."""
    folder = tmp_path_factory.mktemp("reading")
    with running(folder, names=(), add=[all_flagged], policies=AGAIN, policy="observe") as service:
        service.engine.takes_tools = True
        yield service


def test_a_call_has_no_risk_of_its_own_unless_calls_are_gated(reading: Running) -> None:
    for policy in ("again", "stops"):
        for found in both(NOTHING | {"hallutracer_policy": policy}, CALL, reading):
            text, calls, ended, (row,) = told(found)
            assert (text, [name for name, _ in calls], ended) == ("", ["find"], "tool_calls")
            assert "answer_risk" not in row
        for answer in (f"So. {CALL}", f"{CALL} So.", f"<tool_call>{SECRET}</tool_call>"):
            for found in both(NOTHING | {"hallutracer_policy": policy}, answer, reading):
                text, calls, ended, _ = told(found)
                assert (calls, ended) == ([], "content_filter")
                assert len(text) <= 4
    for policy in ("again-strict", "stops-strict"):
        for found in both(NOTHING | {"hallutracer_policy": policy}, CALL, reading):
            text, calls, ended, _ = told(found)
            assert (calls, ended) == ([], "content_filter")


def test_text_that_was_held_while_it_might_be_a_call_is_given(tmp_path: Path) -> None:
    stops = replace(GATE, stop_at=1.0)
    with running(tmp_path, names=(), add=[two_parts], policies={"gate": stops}) as service:
        service.engine.takes_tools = True
        for answer in (" <tool_box> it is", "  <tool", f"{CALL[:30]}"):
            for found in both(NOTHING, answer, service):
                assert told(found)[:3] == (answer, [], "stop")


@pytest.mark.parametrize("name", FORCED)
def test_a_real_model_s_call_is_given_and_its_answer_is_not(tmp_path: Path, name: str) -> None:
    """Its output layer is made to write the text; everything else is the embedded engine's own."""
    tokenizer, (text, is_call) = tiny.tokenizer(template=TOOL_TEMPLATE), FORCED[name]
    model = tiny.model("llama")
    model.config.max_position_embeddings = tokenizer.model_max_length = 512
    engine = TransformersEngine(model, tokenizer, options=EngineOptions(model="tiny-llama"))
    served = Scheduled(engine)
    scorer, tools = (
        Scorer(served, matching_bundle(engine, tmp_path)),
        offered([Function(name="find"), Function(name="add")]),
    )
    assert tools is not None
    written = [*tokenizer(text, add_special_tokens=False)["input_ids"], tiny.EOS]
    steps = iter(written)

    def write(_: object, __: object, logits: Any) -> Any:
        logits[:, -1] = -1e4
        logits[:, -1, next(steps)] = 1e4
        return logits

    prompt = scorer.render(messages=[USER], tools=tools.definitions)
    forcing = model.get_output_embeddings().register_forward_hook(write)

    async def run() -> list[tuple[RiskReport, str]]:
        sampling = Sampling(max_tokens=200)
        return [(report, update.piece) async for report, update in
                scorer.run(prompt, GATE.at(0.0), sampling, tools=tools)]  # fmt: skip

    try:
        steps_seen = asyncio.run(run())
    finally:
        forcing.remove()
        served.close()
    report, pieces = steps_seen[-1][0], "".join(piece for _, piece in steps_seen)
    assert (report.tool_call, report.held, report.verdict.flagged) == (is_call, False, True)
    assert (report.decision, pieces) == (("continue", text) if is_call else ("abstain", ""))
    assert all(piece == "" for _, piece in steps_seen[:-1])
    if name == "text":
        assert next(steps, None) is not None, "the engine was stopped"
