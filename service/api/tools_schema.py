"""Tools in OpenAI's requests: what is offered, and the calls of earlier turns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictStr, field_validator

from service.api.request_schema import RequestModel
from service.tool_calls import MOST_CHARACTERS, MOST_DEPTH, Tools, deeper_than

MOST_TOOLS = 128
Name = Annotated[StrictStr, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
CallId = Annotated[StrictStr, Field(min_length=1, max_length=256)]


def _not_forced(found: Any) -> Any:
    if found not in (None, "none", "auto"):
        raise ValueError("'tool_choice' is 'auto' or 'none' here: nothing makes the model call a tool")
    return found


ToolChoice = Annotated[Literal["none", "auto"], BeforeValidator(_not_forced)]


class Function(RequestModel):
    """A function that the model may call."""

    name: Name
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema of type object")
    strict: StrictBool | None = Field(None, description="taken; nothing makes the model keep to the schema")

    @field_validator("parameters")
    @classmethod
    def _schema(cls, found: dict[str, Any] | None) -> dict[str, Any] | None:
        return None if found is None else check_parameters(found)


def check_parameters(found: dict[str, Any]) -> dict[str, Any]:
    """Return a tool's JSON schema.  Raises ValueError where it is none of an object, or nested too deeply."""
    if found.get("type", "object") != "object":
        raise ValueError("give a JSON schema of type object")
    if deeper_than(found, MOST_DEPTH):
        raise ValueError(f"at most {MOST_DEPTH} levels of lists and objects are taken")
    return found


class Tool(RequestModel):
    """A tool on offer."""

    type: Literal["function"]
    function: Function


class CalledFunction(RequestModel):
    """What was called, with the arguments' JSON."""

    name: Name
    arguments: StrictStr

    @field_validator("arguments")
    @classmethod
    def _object(cls, text: str) -> str:
        arguments_of(text)
        return text


class Call(RequestModel):
    """A call of an earlier turn."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction

    def rendered(self) -> dict[str, Any]:
        """Return it for the chat template."""
        return called(self.id, self.function.name, arguments_of(self.function.arguments))


def called(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a call as chat templates take it: the arguments are an object, not its JSON."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def arguments_of(text: str) -> dict[str, Any]:
    """Return a call's arguments.  Raises ValueError where they are not the JSON of an object."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"at most {MOST_CHARACTERS} characters are taken")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or deeper_than(found, MOST_DEPTH):
        raise ValueError(f"give the JSON of an object, at most {MOST_DEPTH} levels deep")
    return found


def offered(functions: Sequence[Function], *, parallel: bool = True) -> Tools | None:
    """Return the tools of a request; None where it has none.  Raises ValueError for a name that stands twice."""
    names = [one.name for one in functions]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two tools are called {twice!r}")
    told = {"name", "description", "parameters"}  # as OpenAI's own templates would be: strict is about decoding
    definitions = [
        {"type": "function", "function": one.model_dump(exclude_none=True, include=told)} for one in functions
    ]
    return Tools(tuple(definitions), parallel) if definitions else None


def check_results(seen: Iterable[tuple[str | None, str]]) -> None:
    """Raise ValueError for a result of a call that no earlier turn made.

    ``seen``: the ids of calls and results in their order, a result with the place it stands at."""
    known = set[str]()
    for place, call in seen:
        if place is None:
            known.add(call)
        elif call not in known:
            raise ValueError(f"{place} is the result of {call!r}, which no earlier turn called")
