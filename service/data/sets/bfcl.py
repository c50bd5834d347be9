"""BFCL v4 (Berkeley Function-Calling Leaderboard): 2,853 prompts in the eleven files used here.

Our stand-in for agentic prompts: the paper's "Agentic" set cannot be identified, and results here are not the paper's.

``read_bfcl``: the prompt is a system text with the offered functions and the user's words, t* its last token; the label
is the read model's own answer, judged (``calls``): hallucinated is a call where no function fits, none where one does,
a wrong function or argument, or a short answer that holds no accepted one.  Web search is asked closed-book, and in the
memory questions the earlier talks stand in the system text (up to about 90,000 characters): BFCL has tools for both.
``multi_turn_base`` can only be judged by BFCL's simulators; its 200 rows are read, counted and left out.

``read_bfcl_answerable``: labels known without decoding, "an offered function fits" (1) against "none fits" (0).  That
is tool-answerability, not hallucination.

Group = the row, for live files the middle number of the id (such rows mostly offer the same functions), for memory
the scenario.  Kind = file.  The system texts are ours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from service.data.sets import references
from service.data.sets.files import Row, json_lines
from service.errors import DataError

CALLS = ("simple_python", "multiple", "parallel", "parallel_multiple", "live_simple")  # gold calls
NO_CALL, SOME_CALL = ("irrelevance", "live_irrelevance"), ("live_relevance",)
TEXTS = ("web_search", "memory")  # gold short answers
SIMULATED = "multi_turn_base"
KINDS = (*CALLS, *NO_CALL, *SOME_CALL, *TEXTS)
ANSWERABLE = {"simple_python": 1, "multiple": 1, "live_simple": 1, "live_relevance": 1} | dict.fromkeys(NO_CALL, 0)
ROWS = 2_853
ANSWERABLE_ROWS = 1_998  # 874 with a fitting function, 1,124 without

_OFFER = (
    "You can call the functions listed below. If they can do what the user asks, reply with the calls only, written "
    "[name(argument=value, ...), ...]. If none of them fits, or a value that is needed is missing, make no call and "
    "say so in one sentence.\n\nFunctions, one JSON object a line:\n{functions}"
)
_CLOSED_BOOK = "Answer from what you know, as shortly as you can: only the name, number or phrase that is asked for."
_MEMORY = "You talked with this user before. Answer as shortly as you can, from what the user said then:\n\n{talks}"


def read_bfcl(folder: Path) -> tuple[list[Row], dict[str, int]]:
    """Rows (id, messages, answers, group, kind) for generated labels, and counts {read, multi_turn, repeated}.

    Raises:
        DataError: a file is missing, or a row is not what the set has.
    """
    problems: list[str] = []
    read = []
    for kind in KINDS:
        gold = _gold(folder, kind, problems) if kind in CALLS or kind in TEXTS else {}
        talks = _talks(folder, problems) if kind == "memory" else {}
        for number, value in json_lines(folder, _file(kind), problems):
            try:
                row = _row(kind, value, talks)
                row["answers"] = [_expectation(kind, value, gold)]
            except _BadRow as error:
                problems.append(f"{_file(kind)} line {number}: {error}")
                continue
            read.append(row)
    simulated = len(json_lines(folder, _file(SIMULATED), problems))
    if problems:
        raise DataError(str(folder), problems)
    rows, repeated = _once(read)
    return rows, {"read": len(read) + simulated, "multi_turn": simulated, "repeated": repeated}


def read_bfcl_answerable(folder: Path) -> tuple[list[Row], dict[str, int]]:
    """Rows (id, messages, label, group, kind) and counts {read, repeated}; label 1: an offered function fits.

    Raises:
        DataError: a file is missing, or a row is not what the set has.
    """
    problems: list[str] = []
    read = []
    for kind, label in ANSWERABLE.items():
        for number, value in json_lines(folder, _file(kind), problems):
            try:
                read.append(_row(kind, value, {}) | {"label": label})
            except _BadRow as error:
                problems.append(f"{_file(kind)} line {number}: {error}")
    if problems:
        raise DataError(str(folder), problems)
    rows, repeated = _once(read)
    return rows, {"read": len(read), "repeated": repeated}


class _BadRow(Exception):
    """What is wrong with one row."""


def _file(kind: str) -> str:
    return f"BFCL_v4_{kind}.json"


def _row(kind: str, value: Row, talks: dict[str, str]) -> Row:
    """The row without label or answers."""
    identifier, turns = value.get("id"), value.get("question")
    if not isinstance(identifier, str) or not isinstance(turns, list) or len(turns) != 1:
        raise _BadRow("an 'id' and a 'question' of one turn are needed")
    group = identifier
    if kind == "web_search":
        system = _CLOSED_BOOK
    elif kind == "memory":
        scenario = str(value.get("scenario"))
        if scenario not in talks:
            raise _BadRow(f"its scenario {scenario!r} has no file in memory_prereq_conversation")
        system, group = _MEMORY.format(talks=talks[scenario]), f"memory/{scenario}"
    else:
        functions = value.get("function")
        if not isinstance(functions, list):
            raise _BadRow("'function' must be a list")
        listed = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
        system = _OFFER.format(functions=listed or "(none)")
        if kind.startswith("live_"):
            group = f"{kind}/{_middle(identifier)}"
    return {"id": identifier, "messages": _messages(system, turns[0]), "group": group, "kind": kind}


def _middle(identifier: str) -> str:
    """B of ``live_simple_A-B-C``."""
    parts = identifier.split("-")
    if len(parts) != 3:
        raise _BadRow(f"id {identifier!r} is not of the form live_..._A-B-C")
    return parts[1]


def _messages(system: str, turn: Any) -> list[dict[str, str]]:
    """Our system text, the row's own system text after it, and turns that alternate, as most templates demand."""
    messages = [{"role": "system", "content": system}]
    if not isinstance(turn, list) or not turn:
        raise _BadRow("'question' has no messages")
    for message in turn:
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if role not in ("system", "user", "assistant") or not isinstance(content, str) or not content.strip():
            raise _BadRow("each message needs a role (system, user, assistant) and a text")
        if messages[-1]["role"] == role:
            messages[-1]["content"] += f"\n\n{content}"
        else:
            messages.append({"role": role, "content": content})
    if messages[-1]["role"] != "user":
        raise _BadRow("the last message must be the user's")
    return messages


def _gold(folder: Path, kind: str, problems: list[str]) -> dict[str, Any]:
    """Gold answers by row id."""
    name = f"possible_answer/{_file(kind)}"
    return {str(value.get("id")): value.get("ground_truth") for _, value in json_lines(folder, name, problems)}


def _talks(folder: Path, problems: list[str]) -> dict[str, str]:
    """What the user said in each scenario's earlier conversations, by scenario."""
    talks = {}
    names = sorted(path.name for path in (folder / "memory_prereq_conversation").glob("memory_*.json"))
    for name in names:
        said = []
        for number, value in json_lines(folder, f"memory_prereq_conversation/{name}", problems):
            try:
                turns = [message["content"] for turn in value["question"] for message in turn]
                said.append("\n".join([f"[{value['topic']}]", *(f"- {turn}" for turn in turns)]))
            except (KeyError, TypeError):
                problems.append(f"memory_prereq_conversation/{name} line {number}: 'topic' and 'question' are needed")
        talks[name.removeprefix("memory_").removesuffix(".json")] = "\n\n".join(said)
    if not names:
        problems.append("memory_prereq_conversation has no memory_*.json: the memory questions need the earlier talks")
    return talks


def _expectation(kind: str, value: Row, gold: dict[str, Any]) -> str:
    """What a right answer does, for the judge ``calls``."""
    if kind in NO_CALL:
        return references.expectation("no_call")
    if kind in SOME_CALL:
        return references.expectation("some_call")
    truth = gold.get(value["id"])
    if not isinstance(truth, list) or not truth:
        raise _BadRow(f"{value['id']!r} has no gold answer in possible_answer")
    if kind in TEXTS:
        return references.expectation("text", texts=truth)
    return references.expectation("calls", calls=[_specified(one, value["function"]) for one in truth])


def _specified(gold: Any, functions: list[Any]) -> dict[str, Any]:
    """A gold call; an argument may be left out where "" is among its values and the function does not require it.

    Two published rows give some arguments no value at all, which no call could meet: an empty list is meant.
    """
    try:
        ((name, values),) = gold.items()
        arguments = {key: accepted or [[], ""] for key, accepted in values.items()}
        required = next(one["parameters"].get("required", []) for one in functions if one["name"] == name)
        optional = [key for key, accepted in arguments.items() if "" in accepted and key not in required]
    except (AttributeError, KeyError, TypeError, ValueError, StopIteration) as error:
        raise _BadRow(f"its gold answer {json.dumps(gold)[:80]} is no call of an offered function") from error
    return {"name": name, "arguments": arguments, "optional": optional}


def _once(rows: list[Row]) -> tuple[list[Row], int]:
    """Rows whose conversation no earlier row of their group has, and how many others there were."""
    kept: dict[tuple[str, str], Row] = {}
    for row in rows:
        kept.setdefault((json.dumps(row["messages"]), row["group"]), row)
    return [*kept.values()], len(rows) - len(kept)
