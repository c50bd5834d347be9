"""Every failure as one envelope: {"error": {message, type, param, code}}.  Only here do errors become HTTP."""

from __future__ import annotations

import re

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from probes_store.errors import BundleError
from service.api.request_log import record_of
from service.errors import BodyTooLarge, BodyTooSlow, HalluTracerError, Unauthorized

_FIELD = re.compile(r"[A-Za-z_]\w*")
_TAGS = ("body", "str", "int", "float")
CODES = {
    400: "invalid_json",
    404: "not_found",
    405: "method_not_allowed",
    **{error.status: error.code for error in (BodyTooSlow, BodyTooLarge)},
}
MOST_SEEN = 100  # of one body's errors


def error_body(status: int, message: str, code: str, param: str | None = None) -> dict[str, object]:
    """The error envelope."""
    kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def respond(error: HalluTracerError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with one of our errors from plain ASGI."""
    await (await _ours(Request(scope), error))(scope, receive, send)


def _answer(
    request: Request,
    status: int,
    message: str,
    code: str,
    param: str | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    record_of(request).code = code
    return JSONResponse(error_body(status, message, code, param), status_code=status, headers=headers)


async def _ours(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HalluTracerError)
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return _answer(request, error.status, error.message, error.code, error.param, headers)


async def _bundles(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, BundleError)
    return _answer(request, error.status, str(error), error.code, "bundle")


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    # A union's branches each report; the one that got deepest into the value is about what the user meant.
    first = max(error.errors()[:MOST_SEEN], key=lambda one: len(_place(one["loc"])))
    where = _place(first["loc"])
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "invalid")
        return _answer(request, 400, f"the body is not valid JSON: {reason}", "invalid_json")
    # The offending value is left out on purpose: it may be a prompt.
    message = str(first["msg"]).removeprefix("Value error, ")
    path = ".".join(where)
    return _answer(request, 422, f"{path}: {message}" if path else message, "invalid_request", path or None)


def _place(location: tuple[int | str, ...]) -> list[str]:
    """The path inside the request: pydantic's names of union branches and constraints are not part of it."""
    return [str(part) for part in location if isinstance(part, int) or _FIELD.fullmatch(part) and part not in _TAGS]


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = CODES.get(error.status_code, "http_error")
    headers = dict(error.headers) if error.headers else None
    return _answer(request, error.status_code, str(error.detail), code, headers=headers)


def install(app: FastAPI) -> None:
    """Register the handlers; what none of them takes is ``middleware.RequestFrame``'s."""
    app.add_exception_handler(HalluTracerError, _ours)
    app.add_exception_handler(BundleError, _bundles)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
