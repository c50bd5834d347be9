"""Errors to HTTP responses, in the envelope of the route's protocol."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from service.api.error_bodies import body_on
from service.api.request_schema import (
    AT_FAULT,
    AnswerRequest,
    Arguments,
    Generate,
    RequestModel,
    ScoreRequest,
)
from service.errors import HalluTracerError, Unauthorized, UnknownEncoding
from service.serving.request_log import log_failure, record_of

_FIELD = re.compile(r"[A-Za-z_]\w*")
# what protocols call a kind of part or of turn; another text may be a prompt and is not repeated
_KIND = re.compile(r"[a-z][a-z_]{0,31}")
CODES = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed"}
NO_ROUTE = (
    "no such route: {path}; this service has /score (also as /v1/risk/score), of OpenAI's API"
    " /v1/chat/completions, /v1/completions, /v1/responses and /v1/models: the base URL of OpenAI's"
    " clients ends in /v1; and of Anthropic's /v1/messages: that of its clients ends before it. "
    " Health checks are /health/live and /health/ready"
)
_PATH_SHOWN = 200  # characters of an unknown path that its error repeats
# Kind of request -> the field that holds others, and what these are.
_INNER: dict[type[RequestModel], tuple[str, type[RequestModel]]] = {
    AnswerRequest: ("vllm_xargs", Arguments),
    ScoreRequest: ("generate", Generate),
}
_OF_TYPES = frozenset(
    (
        "string_type",
        "int_type",
        "float_type",
        "bool_type",
        "list_type",
        "dict_type",
        "model_type",
        "model_attributes_type",
        "none_required",
    )
)
# pydantic's, of an object
_AN_OBJECT = "Input should be a valid dictionary or object to extract fields from"
# What other protocols, and people, call a field -> what it is called here, on whichever route has
# it.
_CALLED = {
    "prompt": ("messages", "input"),
    "messages": ("input", "prompt"),
    **dict.fromkeys(
        ("input", "inputs", "text", "question", "query"), ("prompt", "messages", "input")
    ),
    "system": ("instructions", "messages"),
    "instructions": ("system", "messages"),
    "stop": ("stop_sequences",),
    "stop_sequences": ("stop",),
    "response_format": ("text",),
    **dict.fromkeys(
        (
            "max_tokens",
            "max_completion_tokens",
            "max_output_tokens",
            "max_new_tokens",
            "num_predict",
        ),
        ("max_tokens", "max_output_tokens"),
    ),
    "input_schema": ("tools",),
    "functions": ("tools",),
    "function_call": ("tool_choice",),
}
_SHOULD_BE = "Input should be "  # what pydantic's messages of these begin with
MAX_ERRORS = 100  # of a body's validation errors that are looked at


async def respond(error: HalluTracerError, scope: Scope, receive: Receive, send: Send) -> None:
    """Send an error from plain ASGI middleware."""
    await (await _service_error(Request(scope), error))(scope, receive, send)


def _answer(
    request: Request, status: int, message: str, code: str, param: str | None = None, **headers: str
) -> JSONResponse:
    record = record_of(request)
    record.code = code
    status, body = body_on(record.path, record.request_id, status, message, code, param)
    return JSONResponse(body, status_code=status, headers=headers)


async def _service_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HalluTracerError)
    record = record_of(request)
    log_failure(record.request_id, record.path, error)
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    headers |= {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthorized) else {}
    headers |= {"Accept-Encoding": error.accepted} if isinstance(error, UnknownEncoding) else {}
    return _answer(request, error.status, error.message, error.code, error.param, **headers)


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    if isinstance(error.body, bytes):  # FastAPI parses a body only if it is declared as JSON
        declared = request.headers.get("content-type", "")[:80] or "none"
        message = (
            "send JSON with the header 'Content-Type: application/json'; found Content-Type"
            f" {declared}"
        )
        return _answer(request, 422, message, "invalid_request")
    entries = error.errors()[:MAX_ERRORS]
    first = _most_telling(entries)
    if first["type"] == "json_invalid":
        reason, position = first.get("ctx", {}).get("error", "invalid"), first["loc"][-1]
        reason += f", at character {position + 1}" if isinstance(position, int) and position else ""
        return _answer(request, 400, f"the body is not valid JSON: {reason}", "invalid_json")
    path = param = _field_path(first["loc"])
    # Without the invalid value, which may be a prompt.
    message = _in_words(request, first, entries) if path else _body_problem(first)
    if first["type"] == AT_FAULT:
        param = [*path, first["ctx"]["field"]]
    shown = ".".join(path)
    return _answer(
        request,
        422,
        f"{shown}: {message}" if path else message,
        "invalid_request",
        ".".join(param) or None,
    )


def _most_telling(entries: Sequence[Any]) -> Any:
    """Return the error to tell of: each branch of a union reports one, and one branch was meant.

    That is the branch that took most of the value: whose error is of a list's length alone, or else
    deepest, or else about more than the value's type, or else at a later element of a list.  What
    is missing was meant by what does not exist."""

    def rank(entry: Any) -> tuple[bool, int, bool, int, bool]:
        path = _field_path(entry["loc"])
        element = int(path[-1]) if path and path[-1].isdecimal() else 0
        kind = entry["type"]
        return kind == "too_long", len(path), kind not in _OF_TYPES, element, kind != "missing"

    return max(entries, key=rank)


def _body_problem(error: Any) -> str:
    """Return what is wrong with a body as a whole."""
    if error["type"] == "missing":
        return 'the body is empty: send a JSON object, such as {"prompt": "..."}'
    if error["type"] in _OF_TYPES:
        return 'the body is JSON, and no object: send one, such as {"prompt": "..."}'
    return "no such field" if error["type"] == "extra_forbidden" else _told(error)


def _told(error: Any) -> str:
    return (
        str(error["msg"])
        .removeprefix("Value error, ")
        .replace(_AN_OBJECT, "Input should be an object")
    )


def _in_words(request: Request, error: Any, entries: Sequence[Any]) -> str:
    """Return a field's error; of a union whose branches all ask for another type, each of these.

    Of a field that does not exist, which was meant."""
    path = _field_path(error["loc"])
    if error["type"] in ("model_type", "model_attributes_type") and path[-1:] == ["generate"]:
        return 'expected an object, such as {"max_tokens": 64}'
    if error["type"] in _OF_TYPES:
        same = (
            entry
            for entry in entries
            if entry["type"] in _OF_TYPES and _field_path(entry["loc"]) == path
        )
        first, *further = dict.fromkeys(map(_told, same))
        return " or ".join([first, *(message.removeprefix(_SHOULD_BE) for message in further)])
    if error["type"] == "literal_error" and path[-1:] in (["type"], ["role"]):
        value = error["input"]
        is_kind = isinstance(value, str) and _KIND.fullmatch(value) is not None
        return f"{_told(error)}, not {value!r}" if is_kind else _told(error)
    if error["type"] != "extra_forbidden":
        return _told(error)
    model = _model_of(request)
    kinds = [kind for kind in _INNER if model is not None and issubclass(model, kind)]
    # A name that is none is not in the path.
    if model is None or not kinds or path[-1:] != [str(error["loc"][-1])]:
        return "no such field"
    name, (outer, inner) = path[-1], _INNER[kinds[0]]
    for inner_name in (name, f"hallutracer_{name}"):
        if inner_name in inner.model_fields and len(path) == 1:
            return (
                f'no such field here: put it into {outer}, {{"{outer}": {{"{inner_name}": ...}}}}'
            )
    if path[:-1] not in ([], [outer]):
        return "no such field"
    known = list((inner if path[:-1] else model).model_fields)
    if name == "extra_body":
        return (
            "no such field: what a client takes as extra_body it sends as fields of the request"
            " itself"
        )
    for called in _CALLED.get(name, ()):
        if called in known:
            return f"no such field; it is {called!r} here"
    for close in get_close_matches(name, known, n=1):
        return f"no such field; did you mean {close!r}?"
    return f"no such field; there are {', '.join(known)}"


def _model_of(request: Request) -> type[RequestModel] | None:
    """Return what a route's body is validated by; None where it is no request of ours."""
    field = getattr(request.scope.get("route"), "body_field", None)
    model = None if field is None else field.field_info.annotation
    return model if isinstance(model, type) and issubclass(model, RequestModel) else None


def _field_path(location: tuple[int | str, ...]) -> list[str]:
    """Return the path in the request, without pydantic's names of union branches and
    constraints."""
    tags = ("body", "str", "int", "float", "dict", "none")
    return [
        str(part)
        for part in location
        if isinstance(part, int) or _FIELD.fullmatch(part) and part not in tags
    ]


class Refused(HTTPException):
    """Carries an error of the service out of the reading of a body, where FastAPI makes a plain 400
    of any other."""

    def __init__(self, error: HalluTracerError) -> None:
        super().__init__(error.status, error.message)
        self.error = error


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, Refused):
        return await _service_error(request, error.error)
    assert isinstance(error, HTTPException)
    status, headers = error.status_code, dict(error.headers or {})
    message = NO_ROUTE.format(path=_shown(request.url.path)) if status == 404 else str(error.detail)
    if status == 405:
        allowed = Headers(headers).get("allow", "another method")
        message = f"{request.method} is not for this route; it takes {allowed}"
    return _answer(request, status, message, CODES.get(status, "http_error"), **headers)


def _shown(path: str) -> str:
    """Return a path as an error may repeat it: whole up to a limit, and with nothing that a
    terminal would obey."""
    cut = path[:_PATH_SHOWN] + ("..." if len(path) > _PATH_SHOWN else "")
    return "".join(letter if letter.isprintable() else "?" for letter in cut)


def install(app: FastAPI) -> None:
    """Register the handlers; ``middleware.RequestFrame`` handles all other exceptions."""
    app.add_exception_handler(HalluTracerError, _service_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
