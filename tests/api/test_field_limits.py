"""Every text, list, object and free JSON of every request has a limit: its own, or a check's that
is named."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from hallutracer_client.client import AsyncClient
from hallutracer_client.mcp import make_server
from service.annexes import annexes
from service.api.app import ROUTERS
from service.api.request_schema import Reference, RequestModel
from tests.kit.tables import cells

# Check -> the fields of requests that it bounds, where the field itself has no limit of length.
# What a body may hold is counted by ``json_limits.excess``; these count what is done with a field:
# tokens, prompts, values to walk.
# Of prompts it is how many; each then by ``check_length``, or as token ids by ``check_prompts``.
BOUNDED_BY = """
    service.engines.checks:check_length | Message.content ChatMessage.content ChatMessage.refusal
    service.engines.checks:check_length | TextPart.text TextPart.refusal InputPart.text
    service.engines.checks:check_length | InputPart.refusal InputItem.content InputItem.output
    service.engines.checks:check_length | ResponsesRequest.input ResponsesRequest.instructions
    service.engines.checks:check_length | MessagesRequest.system CountRequest.system Block.content
    service.engines.checks:check_length | AnthropicMessage.content Block.text TextBlock.text
    service.api.asking:ScoringRequest.check | ScoreRequest.prompt ScoreRequest.input_ids
    service.api.asking:ScoringRequest.check | TextRequest.prompt
    service.api.tools_schema:check_parameters | Function.parameters ResponsesTool.parameters
    service.api.tools_schema:check_parameters | MessagesTool.input_schema
    service.api.tools_schema:offered | Function.description ResponsesTool.description
    service.api.tools_schema:offered | MessagesTool.description
    service.api.tools_schema:arguments_of | CalledFunction.arguments InputItem.arguments
    service.json_limits:size_within | Block.input
    probes_store.records:template_arguments | ChatRequest.chat_template_kwargs
    probes_store.records:template_arguments | ResponsesRequest.chat_template_kwargs
    probes_store.records:template_arguments | MessagesRequest.chat_template_kwargs
    service.api.formats_schema:asked_format | ChatRequest.response_format TextConfig.format
    service.api.formats_schema:asked_schema | OutputConfig.format MessagesRequest.output_format
    service.api.formats_schema:asked_schema | CountRequest.output_format
    """
# Module in which an annex has routes -> the same of its requests.  What ``check_readable`` knows is
# not read: a call with any of it is refused; nor are further fields of a guard.
BOUNDED_OF_ANNEXES = {
    "service.annexes.guardrails.guardrail_routes": """
    service.api.asking:ScoringRequest.check | ClassifyRequest.inputs GuardrailRequest.texts
    service.annexes.guardrails.guarding:conversation | GuardrailRequest.structured_messages
    service.annexes.guardrails.guarding:check_readable | GuardrailRequest.images
    service.annexes.guardrails.guarding:check_readable | GuardrailRequest.tools
    service.annexes.guardrails.guarding:check_readable | GuardrailRequest.tool_calls
    service.json_limits:excess | GuardrailRequest.*
    """,
    "service.annexes.guardrails.detector_routes": """
    service.api.asking:ScoringRequest.check | ContentsRequest.contents
    service.annexes.guardrails.guarding:conversation | ChatDetectorRequest.messages
    service.annexes.guardrails.guarding:check_readable | ChatDetectorRequest.tools
    """,
}


def checks() -> list[list[str]]:
    """Each check, and the fields that it bounds."""
    modules = {path.partition(":")[0] for annex in annexes() for path in annex.routers}
    tables = [BOUNDED_BY, *(BOUNDED_OF_ANNEXES.get(module, "") for module in sorted(modules))]
    return cells("\n".join(tables))


CHECKS = checks()
_REPEATED = re.compile(r"\^\[[^\]]+\]\{\d+,\d+\}\$")  # a pattern that bounds the length


def unbounded(schema: dict[str, Any]) -> set[str]:
    """Model.field of a JSON schema and of all that it refers to, where no limit is known; Model.*:
    further fields."""
    fields = set[str]()
    for name, model in {schema["title"]: schema, **schema.get("$defs", {})}.items():
        if "properties" not in model and model.get("type") != "object":
            continue  # an enum, say
        fields |= {
            f"{name}.{field}"
            for field, kind in model.get("properties", {}).items()
            if any(_open(kind))
        }
        if model.get("additionalProperties") is not False:
            fields.add(f"{name}.*")
    return fields


def _open(kind: dict[str, Any]) -> Iterator[str]:
    """Yield the types within a field's schema that may be of any length."""
    if several := kind.get("anyOf") or kind.get("oneOf") or kind.get("allOf"):
        for one in several:
            yield from _open(one)
    elif kind.keys() & {"$ref", "enum", "const"} or kind.get("type") in (
        "integer",
        "number",
        "boolean",
        "null",
    ):
        return
    elif kind.get("type") == "string":
        if "maxLength" not in kind and not _REPEATED.fullmatch(kind.get("pattern", "")):
            yield "string"
    elif kind.get("type") == "array":
        if "maxItems" not in kind:
            yield "array"
        yield from _open(kind.get("items", {}))
    else:
        yield "anything"


def bodies() -> dict[str, type[BaseModel]]:
    """The model of each route's body."""
    routes: list[Any] = [route for router in ROUTERS for route in router.routes]
    fields = {route.path: getattr(route, "body_field", None) for route in routes}
    return {
        path: field.field_info.annotation for path, field in fields.items() if field is not None
    }


def schemas() -> dict[str, dict[str, Any]]:
    """The schema of each body, and of the arguments of our MCP server's tools."""
    found = {path: model.model_json_schema() for path, model in bodies().items()}
    for tool in asyncio.run(make_server(AsyncClient("http://127.0.0.1")).list_tools()):
        found[tool.name] = tool.input_schema
    return found


def test_every_field_of_every_request_has_a_limit() -> None:
    assert {
        "/score",
        "/v1/responses",
        "/v1/messages",
        "/v1/feedback",
        "/classify",
        "hallucination_risk",
    } <= set(schemas())
    # Further arguments of a tool are dropped by the MCP library.
    without = set[str]().union(*map(unbounded, schemas().values())) - {
        "hallucination_riskArguments.*"
    }
    bounded = [field for _, fields in CHECKS for field in fields.split()]
    assert without - set(bounded) == set(), (
        "give them a max_length, or name the check that bounds them in BOUNDED_BY"
    )
    assert set(bounded) - without == set(), "these have a limit of their own, or are gone"
    assert len(bounded) == len(set(bounded))


@pytest.mark.parametrize("check", sorted({check for check, _ in CHECKS}))
def test_a_check_that_is_named_is_there(check: str) -> None:
    module, _, name = check.partition(":")
    value: Any = import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    assert callable(value)


class Inner(RequestModel):
    kept: Reference
    forgotten: str


class Made(RequestModel):
    """What somebody may add one day, with and without a limit."""

    text: str
    short: Annotated[str, Field(max_length=9)]
    named: Annotated[str, Field(pattern=r"^[a-z]{1,64}$")]
    any_length: Annotated[str, Field(pattern=r"^[a-z]+$")]
    either: int | str | None = None
    either_short: int | Annotated[str, Field(max_length=9)] | None = None
    numbers: list[int]
    few_numbers: Annotated[list[int], Field(max_length=9)]
    few_texts: Annotated[list[str], Field(max_length=9)]
    few_short_texts: Annotated[list[Annotated[str, Field(max_length=9)]], Field(max_length=9)]
    few_inner: Annotated[list[Inner], Field(max_length=9)]
    mapping: dict[str, int]
    anything: Any
    number: float
    flag: bool = False


class Further(BaseModel):
    model_config = ConfigDict(extra="ignore")

    flag: bool = False


def test_a_new_field_without_a_limit_is_noticed() -> None:
    names = ("text", "any_length", "either", "numbers", "few_texts", "mapping", "anything")
    assert unbounded(Made.model_json_schema()) == {f"Made.{name}" for name in names} | {
        "Inner.forgotten"
    }
    assert unbounded(Further.model_json_schema()) == {"Further.*"}
