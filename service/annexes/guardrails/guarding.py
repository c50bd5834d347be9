"""What the guardrail routes share: they are asked before a call, of which some cannot be read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import Request, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from service.api.json_body import JsonRoute
from service.api.openai_schema import ChatMessage
from service.api.reply import json_response
from service.errors import EmptyPrompt, RequestError
from service.policies.guard import Action, Decision, Policy
from service.scoring import RiskReport


class GuardRoute(JsonRoute):
    """A route that is asked about prompts which go elsewhere, and that answers about those, too,
    that cannot be read.

    ``request.state.unreadable`` is the refusal of a body with texts that are no Unicode, or None;
    the route raises it where its policy withholds."""

    takes_surrogates = True


class CannotRead(Exception):
    """The call holds what no risk can be read from."""


@contextmanager
def unread(policy: Policy, request: Request) -> Iterator[None]:
    """Check a call in the block: where the policy observes, what is wrong with it raises
    CannotRead, for it passes."""
    refusal: HTTPException | None = request.state.unreadable
    if refusal is not None and policy.action.withholds:
        raise refusal
    if refusal is not None:
        raise CannotRead("the call cannot be read: a text of it is not well-formed Unicode")
    try:
        yield
    except RequestError as error:
        if policy.action.withholds:
            raise
        raise CannotRead(f"the call cannot be read: {error.message}") from None


@contextmanager
def unread_prompts() -> Iterator[None]:
    """Raise CannotRead in the block where a prompt is too long or empty, or the chat template
    refuses it."""
    try:
        yield
    except RequestError as error:
        raise CannotRead(f"a prompt cannot be read: {error.message}") from None


def require_policy_without_answers(policy: Policy) -> None:
    """Raise RequestError for a policy that changes answers, or decides by them."""
    does = "reads" if policy.reads_answers_for else ""
    if policy.action is Action.ANNOTATE:
        does = "annotates"
    if does:
        raise RequestError(
            f"policy {policy.name!r} {does} answers, and this route sees none", param="policy"
        )


def check_readable(**beside: Any) -> None:
    """Raise CannotRead for anything that stands beside a chat's messages, by name."""
    for name, value in beside.items():
        if value:
            raise CannotRead(f"the call has {name}, from which no risk can be read")


def conversation(messages: Sequence[Mapping[str, Any]], field: str) -> list[dict[str, str]]:
    """Return a chat's messages.  Raises CannotRead, and EmptyPrompt for none."""
    try:
        turns = [ChatMessage.model_validate(message) for message in messages]
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise CannotRead(f"a message cannot be read, at {where or 'its role or content'}") from None
    if any(message.tool_calls or message.role == "tool" for message in turns):
        raise CannotRead(
            "a message is a call of a tool or its result: without the tools it cannot be read"
        )
    if not turns:
        raise EmptyPrompt(f"{field!r} is empty", param=field)
    return [message.rendered() for message in turns]


def withheld(report: RiskReport) -> bool:
    """Return whether an answer to a prompt that is only scored would not be given."""
    return report.decision is not Decision.CONTINUE


def sent(content: Any, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response."""
    return json_response(json.dumps(content, ensure_ascii=False), headers)
