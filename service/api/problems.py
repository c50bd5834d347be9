"""Every failure as one envelope: {"error": {message, type, param, code}}.  Only here do errors become HTTP."""

from __future__ import annotations

import logging
import re

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from probes_store.errors import BundleError
from service.errors import BodyTooLarge, HalluTracerError, Overloaded

log = logging.getLogger("hallutracer")
_FIELD = re.compile(r"[A-Za-z_]\w*")
_TAGS = ("body", "str", "int", "float")
CODES = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed", 413: BodyTooLarge.code}


def envelope(
    status: int, message: str, code: str, param: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    """The error envelope as a response."""
    kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return JSONResponse(body, status_code=status, headers=headers)


async def _ours(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HalluTracerError)
    headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, Overloaded) else None
    if error.status == 503:
        headers = {"Retry-After": "1"}
    return envelope(error.status, error.message, error.code, error.param, headers)


async def _bundles(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, BundleError)
    return envelope(error.status, str(error), error.code, "bundle")


async def _invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    # A union's branches each report; the one that got deepest into the value is about what the user meant.
    first = max(error.errors(), key=lambda one: len(_place(one["loc"])))
    where = _place(first["loc"])
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "invalid")
        return envelope(400, f"the body is not valid JSON: {reason}", "invalid_json")
    # The offending value is left out on purpose: it may be a prompt.
    message = str(first["msg"]).removeprefix("Value error, ")
    path = ".".join(where)
    return envelope(422, f"{path}: {message}" if path else message, "invalid_request", path or None)


def _place(location: tuple[int | str, ...]) -> list[str]:
    """The path inside the request: pydantic's names of union branches and constraints are not part of it."""
    return [str(part) for part in location if isinstance(part, int) or _FIELD.fullmatch(part) and part not in _TAGS]


async def _http(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = CODES.get(error.status_code, "http_error")
    headers = dict(error.headers) if error.headers else None
    return envelope(error.status_code, str(error.detail), code, headers=headers)


def install(app: FastAPI) -> None:
    """Register the handlers; what none of them takes is ``middleware.RequestFrame``'s."""
    app.add_exception_handler(HalluTracerError, _ours)
    app.add_exception_handler(BundleError, _bundles)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
