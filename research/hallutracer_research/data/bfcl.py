"""BFCL v4 (Berkeley Function-Calling Leaderboard): 2,853 prompts in eleven files; the system texts
are ours.

A substitute for the paper's "Agentic" set, which cannot be identified: results on it are not the
paper's.
``read_bfcl``: the offered functions, then the user's words; labels by the judge ``calls`` of the
model's answer.  Web search is asked closed-book, memory questions have the earlier conversations in
the system text.  ``multi_turn_base`` needs BFCL's simulators; its 200 rows are read, counted and
left out.  ``read_bfcl_answerable``: labels known without decoding, "an offered function fits" (1)
or none does (0): tool-answerability, not hallucination. Group = the row; for live files the middle
number of the id (mostly the same functions); for memory the scenario."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from hallutracer_research.data.files import Rows, SetFiles, Text
from hallutracer_research.documents import Row
from service.data import judges as references

# have gold calls
CALLS = ("simple_python", "multiple", "parallel", "parallel_multiple", "live_simple")
NO_CALL, SOME_CALL = ("irrelevance", "live_irrelevance"), ("live_relevance",)
TEXTS = ("web_search", "memory")  # have gold short answers
SIMULATED = "multi_turn_base"
KINDS = (*CALLS, *NO_CALL, *SOME_CALL, *TEXTS)
ANSWERABLE = {
    "simple_python": 1,
    "multiple": 1,
    "live_simple": 1,
    "live_relevance": 1,
} | dict.fromkeys(NO_CALL, 0)

_OFFER = (
    "You can call the functions listed below. If they can do what the user asks, reply with the"
    " calls only, written [name(argument=value, ...), ...]. If none of them fits, or a value that"
    " is needed is missing, make no call and say so in one sentence.\n\nFunctions, one JSON object"
    " a line:\n{functions}"
)
_CLOSED_BOOK = (
    "Answer from what you know, as shortly as you can: only the name, number or phrase that is"
    " asked for."
)
_MEMORY = (
    "You talked with this user before. Answer as shortly as you can, from what the user said"
    " then:\n\n{talks}"
)


def read_bfcl(files: SetFiles) -> Rows:
    """Return rows (id, messages, answers, group, kind) for generated labels; counts {read,
    multi_turn, repeated}."""
    gold: dict[str, Row] = {}
    for kind in (*CALLS, *TEXTS):
        lines = files.json_lines(f"possible_answer/{_file(kind)}")
        gold[kind] = {str(value.get("id")): value.get("ground_truth") for _, value in lines}
    talks = _conversations(files)

    def row(kind: str, value: Row) -> Row:
        return _row(kind, value, talks) | {"answers": [_expectation(kind, value, gold)]}

    simulated = len(files.json_lines(_file(SIMULATED)))
    rows, counts = _read(files, KINDS, row)
    return rows, {
        "read": counts["read"] + simulated,
        "multi_turn": simulated,
        "repeated": counts["repeated"],
    }


def read_bfcl_answerable(files: SetFiles) -> Rows:
    """Return rows (id, messages, label, group, kind) and counts {read, repeated}; label 1: an
    offered function fits."""
    return _read(
        files, ANSWERABLE, lambda kind, row: _row(kind, row, {}) | {"label": ANSWERABLE[kind]}
    )


def _read(files: SetFiles, kinds: Iterable[str], convert: Callable[[str, Row], Row]) -> Rows:
    """Return the rows of the kinds' files whose conversation no earlier row of their group has, and
    counts."""
    rows = []
    for kind in kinds:
        for number, value in files.json_lines(_file(kind)):
            try:
                rows.append(convert(kind, value))
            except _BadRow as error:
                files.problems.append(f"{_file(kind)} line {number}: {error}")
    distinct: dict[tuple[str, str], Row] = {}
    for row in rows:
        distinct.setdefault((json.dumps(row["messages"]), row["group"]), row)
    return list(distinct.values()), {"read": len(rows), "repeated": len(rows) - len(distinct)}


class _Message(BaseModel):
    role: Literal["system", "user", "assistant"]
    content: Text


class _BadRow(Exception):
    """A malformed row."""


def _file(kind: str) -> str:
    return f"BFCL_v4_{kind}.json"


def _row(kind: str, value: Row, talks: dict[str, str]) -> Row:
    """Return the row without label or answers."""
    identifier, turns = value.get("id"), value.get("question")
    if not isinstance(identifier, str) or not isinstance(turns, list) or len(turns) != 1:
        raise _BadRow("an 'id' and a 'question' of one turn are needed")
    group = identifier
    if kind == "web_search":
        system = _CLOSED_BOOK
    elif kind == "memory":
        if (scenario := str(value.get("scenario"))) not in talks:
            raise _BadRow(f"its scenario {scenario!r} has no file in memory_prereq_conversation")
        system, group = _MEMORY.format(talks=talks[scenario]), f"memory/{scenario}"
    else:
        if not isinstance(functions := value.get("function"), list):
            raise _BadRow("'function' must be a list")
        listed = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
        system = _OFFER.format(functions=listed or "(none)")
        if kind.startswith("live_"):  # B of live_simple_A-B-C
            if len(parts := identifier.split("-")) != 3:
                raise _BadRow(f"id {identifier!r} is not of the form live_..._A-B-C")
            group = f"{kind}/{parts[1]}"
    return {"id": identifier, "messages": _messages(system, turns[0]), "group": group, "kind": kind}


def _messages(system: str, turn: Any) -> list[dict[str, str]]:
    """Return our system text, then the row's own; turns of a role are merged, as most chat
    templates require."""
    messages = [{"role": "system", "content": system}]
    if not isinstance(turn, list) or not turn:
        raise _BadRow("'question' has no messages")
    for message in turn:
        try:
            known = _Message.model_validate(message).model_dump()
        except ValidationError:
            problem = "each message needs a role (system, user, assistant) and a text"
            raise _BadRow(problem) from None
        if messages[-1]["role"] == known["role"]:
            messages[-1]["content"] += f"\n\n{known['content']}"
        else:
            messages.append(known)
    if messages[-1]["role"] != "user":
        raise _BadRow("the last message must be the user's")
    return messages


def _conversations(files: SetFiles) -> dict[str, str]:
    """Return the user's turns of the earlier conversations, by scenario."""
    conversations = {}
    for path in sorted((files.folder / "memory_prereq_conversation").glob("memory_*.json")):
        topics, name = [], f"memory_prereq_conversation/{path.name}"
        for number, value in files.json_lines(name):
            try:
                turns = [message["content"] for turn in value["question"] for message in turn]
                topics.append("\n".join([f"[{value['topic']}]", *(f"- {turn}" for turn in turns)]))
            except (KeyError, TypeError):
                files.problems.append(f"{name} line {number}: 'topic' and 'question' are needed")
        conversations[path.stem.removeprefix("memory_")] = "\n\n".join(topics)
    if not conversations:
        files.problems.append(
            "memory_prereq_conversation has no memory_*.json, which the memory questions need"
        )
    return conversations


def _expectation(kind: str, value: Row, gold: dict[str, Row]) -> str:
    """Return the expectation that the judge ``calls`` checks the answer against."""
    if kind in NO_CALL:
        return references.expectation("no_call")
    if kind in SOME_CALL:
        return references.expectation("some_call")
    truth = gold[kind].get(value["id"])
    if not isinstance(truth, list) or not truth:
        raise _BadRow(f"{value['id']!r} has no gold answer in possible_answer")
    if kind in TEXTS:
        return references.expectation("text", texts=truth)
    return references.expectation(
        "calls", calls=[_specification(call, value["function"]) for call in truth]
    )


def _specification(gold: Any, functions: list[Any]) -> Row:
    """Return a gold call.  An argument is optional if "" is among its values and the function does
    not require it.  Two published rows give some arguments no accepted value; an empty list is
    meant."""
    try:
        ((name, values),) = gold.items()
        arguments = {key: accepted or [[], ""] for key, accepted in values.items()}
        required = next(f["parameters"].get("required", []) for f in functions if f["name"] == name)
        optional = [
            key for key, accepted in arguments.items() if "" in accepted and key not in required
        ]
    except (AttributeError, KeyError, TypeError, ValueError, StopIteration) as error:
        raise _BadRow(
            f"its gold answer {json.dumps(gold)[:80]} is not a call of an offered function"
        ) from error
    return {"name": name, "arguments": arguments, "optional": optional}
