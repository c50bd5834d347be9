"""What a chat template is given: turns, tools, calls of tools, and results; and whether it shows
them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from service.engines.thoughts import spoken
from service.errors import RequestError

Message = Mapping[str, Any]  # role, content, and of a tool's turns what OpenAI has beside them
ToolDefinition = Mapping[str, Any]  # as OpenAI has it


def texts_in(value: Any) -> Iterator[str]:
    """Yield every text of a JSON value, however deep, the keys of its objects too."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            pending += [*item, *item.values()]
        elif isinstance(item, list | tuple):
            pending += item


def replaced(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with every text of it changed, the keys of its objects too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): replaced(inner, change) for key, inner in value.items()}
    return (
        [replaced(inner, change) for inner in value] if isinstance(value, list | tuple) else value
    )


def message_with(message: Message, change: Callable[[str], str]) -> dict[str, Any]:
    """Return a message with every text of it changed, its role excepted."""
    return {
        key: inner if key == "role" else replaced(inner, change) for key, inner in message.items()
    }


def check_messages(messages: Sequence[Message]) -> None:
    """Raise RequestError for the first message that no template can take."""
    for number, message in enumerate(messages):
        for field in ("role", "content"):
            if not isinstance(message, Mapping) or not isinstance(message.get(field), str):
                raise RequestError(
                    f"message {number} needs {field!r} as a string", param="messages"
                )


def check_shown(
    render: Callable[[Sequence[Message], Sequence[ToolDefinition]], str],
    messages: Sequence[Message],
    tools: Sequence[ToolDefinition],
) -> None:
    """Raise RequestError where a template leaves out a tool, a call or a result, which nobody would
    notice.

    It is rendered once more with marks in their places, whatever else the template makes of
    them."""
    # mark -> what would be left out, and in which field it came
    marks: dict[str, tuple[str, str]] = {}

    def mark(what: str, param: str) -> str:
        name = f"shown{len(marks)}here"
        marks[name] = what, param
        return name

    def named(function: Mapping[str, Any], what: str, param: str) -> dict[str, Any]:
        return {**function, "name": mark(what, param)}

    offered = [{**tool, "function": named(tool["function"], "tools", "tools")} for tool in tools]
    turns = []
    for number, message in enumerate(messages):
        turn, where = dict(message), f"messages.{number}"
        if turn["role"] == "tool":
            turn["content"] = mark("results of tools", f"{where}.content")
        if calls := turn.get("tool_calls"):
            param = f"{where}.tool_calls"
            written = [named(call["function"], "calls of tools", param) for call in calls]
            for function in written:
                function["arguments"] = {mark("calls of tools", param): ""}
            turn["tool_calls"] = [
                call | {"function": inner} for call, inner in zip(calls, written, strict=True)
            ]
        turns.append(turn)
    text = render(turns, offered) if marks else ""
    for name, (what, param) in marks.items():
        if name not in text:
            raise RequestError(
                f"{param!r}: this model's chat template has no place for {what}, and would leave"
                " them out: send none, or serve a model whose template takes them",
                param=param,
            )


def turns_left_out(
    render: Callable[[Sequence[Message], Sequence[ToolDefinition]], str], roles: Sequence[str]
) -> tuple[int, ...]:
    """Return which turns of a conversation of these roles a template leaves out, whatever they say.

    It is rendered with marks in their places.  What it refuses with marks alone is not told."""
    marks = [f"turn{number}here" for number in range(len(roles))]
    turns = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
    try:
        text = render(turns, ()).lower()  # some write all in capitals
    except RequestError:
        return ()
    return tuple(number for number, mark in enumerate(marks) if mark not in text)


def check_turns(text: str, turns: Sequence[Message], left_out: Sequence[int]) -> None:
    """Raise RequestError for the first turn that a template left out, or cut short, when it made
    ``text`` of them.

    ``left_out``: which ones ``turns_left_out`` names.  What a tool says and what stands beside
    calls of tools is not looked for: ``check_shown`` looks for results and calls."""
    contents = {
        number: turn["content"].strip()
        for number, turn in enumerate(turns)
        if turn["content"].strip() and turn["role"] != "tool" and not turn.get("tool_calls")
    }
    if missing := contents.keys() & set(left_out):
        raise _left_out(min(missing), turns[min(missing)]["role"], "")
    times = Counter(contents.values())
    # of each text once: a long conversation may repeat one, and a template may write all otherwise
    counted = {content: text.count(content) for content in times}
    changed = [number for number, content in contents.items() if counted[content] < times[content]]
    plain = _without_spaces(text) if changed else ""
    for number in changed:
        content, role = contents[number], turns[number]["role"]
        if not _is_shown(text, plain, role, content, times[content]):
            raise _left_out(number, role, "a part of ")


def _left_out(number: int, role: str, part: str) -> RequestError:
    return RequestError(
        f"this model's chat template leaves out {part}messages.{number}, of the role {role!r}: say"
        " it in a turn that the template takes, or serve a model whose template takes it",
        param=f"messages.{number}",
    )


def _without_spaces(text: str) -> str:
    return "".join(text.split()).lower()


def _is_shown(text: str, plain: str, role: str, content: str, times: int) -> bool:
    """Return whether a text, also ``plain``, holds a turn's content so often in other spacing or
    capitals, as JSON, or, of an answer, without its thought."""
    words = spoken(content) if role == "assistant" else content
    if not words:
        return True
    as_json = json.dumps(words, ensure_ascii=False)[1:-1]
    return max(text.count(as_json), plain.count(_without_spaces(words))) >= times
