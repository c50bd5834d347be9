"""Every failure as one envelope: {"error": {message, type, param, code}}.  Only here do errors become HTTP."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from probes_store.errors import BundleError
from service.errors import BodyTooLarge, HalluTracerError, Overloaded

log = logging.getLogger("hallutracer")
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
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "invalid")
        return envelope(400, f"the body is not valid JSON: {reason}", "invalid_json")
    # The offending value is left out on purpose: it may be a prompt.
    message = str(first["msg"]).removeprefix("Value error, ")
    path = ".".join(where)
    return envelope(422, f"{path}: {message}" if path else message, "invalid_request", path or None)


async def _http(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = CODES.get(error.status_code, "http_error")
    headers = dict(error.headers) if error.headers else None
    return envelope(error.status_code, str(error.detail), code, headers=headers)


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    log.error("unhandled error on %s", request.url.path, exc_info=error)
    return envelope(500, "an internal error; the server's log has the details", "internal_error")


def install(app: FastAPI) -> None:
    """Register the handlers."""
    app.add_exception_handler(HalluTracerError, _ours)
    app.add_exception_handler(BundleError, _bundles)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unexpected)
