"""Tools in OpenAI's requests: what is offered, and the calls of earlier turns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, StrictStr

from service.api.request_schema import ForeignModel, at_fault
from service.json_limits import MOST_CHARACTERS, MOST_VALUES, excess, lone_surrogate, size_within
from service.tool_calls import MOST_CHARACTERS as MOST_OF_CALL
from service.tool_calls import MOST_DEPTH, Tools

MOST_TOOLS = 128
Name = Annotated[StrictStr, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
CallId = Annotated[StrictStr, Field(min_length=1, max_length=256)]


def _not_forced(choice: Any) -> Any:
    if choice not in (None, "none", "auto"):
        raise ValueError(
            "'tool_choice' is 'auto' or 'none' here: nothing makes the model call a tool; a schema"
            " that the answer is to have goes into 'response_format' or, of a response,"
            " 'text.format'"
        )
    return choice


ToolChoice = Annotated[Literal["none", "auto"], BeforeValidator(_not_forced)]


def _small(values: dict[str, Any]) -> dict[str, Any]:
    size_within(values, levels=MOST_DEPTH)
    return values


def check_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a tool's JSON schema.  Raises ValueError where it is none of an object, too large or
    nested too deeply."""
    if schema.get("type", "object") != "object":
        raise ValueError("give a JSON schema of type object")
    return _small(schema)


Values = Annotated[dict[str, Any], AfterValidator(_small)]
Parameters = Annotated[dict[str, Any], AfterValidator(check_parameters)]


class Function(ForeignModel):
    """A function that the model may call."""

    ignored = frozenset(("cache_control",))

    name: Name
    description: StrictStr | None = None
    parameters: Parameters | None = Field(None, description="a JSON schema of type object")
    strict: StrictBool | None = Field(
        None, description="taken; nothing makes the model keep to the schema"
    )

    def definition(self) -> dict[str, Any]:
        """Return what the chat template is given; ``strict`` is about decoding, and left out as
        OpenAI's own do."""
        return defined(self.name, self.description, self.parameters)


def defined(
    name: str, description: str | None, parameters: dict[str, Any] | None
) -> dict[str, Any]:
    """Return a function's definition as OpenAI has it, without what is not given."""
    known = {"name": name, "description": description, "parameters": parameters}
    return {
        "type": "function",
        "function": {key: value for key, value in known.items() if value is not None},
    }


class Tool(ForeignModel):
    """A tool on offer."""

    ignored = frozenset(("cache_control",))

    type: Literal["function"]
    function: Function


def _of_object(text: str | None) -> str:
    arguments_of(text)
    return text or ""


class CalledFunction(ForeignModel):
    """What was called, with the arguments' JSON."""

    # as the openai package keeps them, beside their JSON
    ignored = frozenset(("parsed_arguments",))

    name: Name
    arguments: Annotated[StrictStr | None, AfterValidator(_of_object)] = Field(
        None, description="empty: none, of a tool without parameters"
    )


class Call(ForeignModel):
    """A call of an earlier turn; ``index`` is its number in a stream of the answer."""

    ignored = frozenset(("index", "cache_control", "provider_specific_fields", "extra_content"))

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction

    def rendered(self) -> dict[str, Any]:
        """Return it for the chat template."""
        return called(self.id, self.function.name, arguments_of(self.function.arguments))


def called(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a call as chat templates take it: the arguments are an object, not its JSON."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def arguments_of(text: str | None) -> dict[str, Any]:
    """Return a call's arguments; of an empty text none.  Raises ValueError where they are not the
    JSON of an object."""
    if text is None or not text.strip():
        return {}
    if len(text) > MOST_OF_CALL:
        raise ValueError(f"at most {MOST_OF_CALL} characters are taken")
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(f"give the JSON of an object, at most {MOST_DEPTH} levels deep")
    size_within(arguments, levels=MOST_DEPTH)
    if (half := lone_surrogate(arguments)) is not None:
        raise ValueError(f"a text of the object: {half[1]}")
    return arguments


def _few_arguments(turns: Any) -> Any:
    """Raise ValueError where the arguments of earlier calls are too much together; before they are
    parsed.

    One that ``arguments_of`` refuses for its length alone is left to it, which names the call."""
    documents = [
        text.encode("utf-8", "surrogatepass")
        for text in _arguments_in(turns)
        if len(text) <= MOST_OF_CALL
    ]
    if (length := sum(map(len, documents))) > MOST_CHARACTERS:
        raise ValueError(
            f"the arguments of earlier calls have {length} bytes together; at most"
            f" {MOST_CHARACTERS} are taken"
        )
    if (what := excess(*documents, elements=MOST_VALUES)) is not None:
        raise ValueError(f"the arguments of earlier calls have {what} together")
    return turns


FewArguments = BeforeValidator(_few_arguments)


def _arguments_in(turns: Any) -> Iterator[str]:
    """Yield the arguments of a conversation's calls, in OpenAI's forms, however wrong the rest of
    it may be."""
    for turn in turns if isinstance(turns, list) else ():
        calls = turn.get("tool_calls") if isinstance(turn, dict) else None
        for call in (turn, *(calls if isinstance(calls, list) else ())):
            function = call.get("function", call) if isinstance(call, dict) else None
            text = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(text, str):
                yield text


class _Tool(Protocol):
    def definition(self) -> dict[str, Any]: ...


def offered(tools: Sequence[_Tool], *, visible: bool = True, parallel: bool = True) -> Tools | None:
    """Return the tools that the model is told of; None where there are none, or they are not
    ``visible`` to it.

    Raises ValueError where they are too large together, visible or not, and for a name that stands
    twice."""
    definitions = tuple(tool.definition() for tool in tools)
    try:
        # around a schema: a list, a tool and its function
        characters = size_within(definitions, levels=MOST_DEPTH + 3)
    except ValueError as error:
        raise at_fault("tools", f"'tools': {error}, in all tools together") from None
    if not visible or not definitions:
        return None
    seen = set[str]()
    for definition in definitions:
        if (name := definition["function"]["name"]) in seen:
            raise at_fault("tools", f"two tools are called {name!r}")
        seen.add(name)
    return Tools(definitions, parallel, characters)


def check_results(seen: Iterable[tuple[str | None, str]]) -> None:
    """Raise ValueError for a result of a call that no earlier turn made.

    ``seen``: the ids of calls and results in their order, a result with the field that has it."""
    known = set[str]()
    for field, call in seen:
        if field is None:
            known.add(call)
        elif call not in known:
            raise at_fault(
                field, f"{field} is the result of {call!r}, which no earlier turn called"
            )
