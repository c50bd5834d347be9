"""A request's body as JSON: in UTF-8, without a key twice, without half characters, and with only
so many values.

Python's parser and validation hold the event loop, and make garbage collection walk all that they
have made.  So what a body may hold is counted in its bytes first, and a long one is parsed and
validated in a thread."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from service.api.auth import caller_of
from service.api.error_handlers import Refused
from service.errors import BodyTooLarge
from service.json_limits import excess, lone_surrogate
from service.serving.admission import OneAtATime

# Bytes of a body up to which it is parsed and validated on the event loop: a schema of so many
# takes two milliseconds, a longer one so much that a burst of a caller's requests would hold up the
# health checks.
INLINE = 4096
# that read long bodies: they share one interpreter, so more would only hold up the event loop
MOST_THREADS = 2
MOST_KEY_CHARACTERS = 4096  # a key may be repeated in an error
MOST_DIGITS = 100  # of a whole number: the time to read one grows with their square
_DIGITS_AS_9 = bytes(0x39 if code in b"0123456789" else 0x20 for code in range(256))
_LONG_NUMBER = b"9" * (MOST_DIGITS + 1)  # or so many digits in a text
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # also of a whole pair


class _Invalid(HTTPException):
    """Carries a validation error past FastAPI, which turns any other exception of a parser into a
    plain 400."""

    def __init__(self, error: RequestValidationError) -> None:
        super().__init__(422)
        self.error = error


class JsonRoute(APIRoute):
    """A route whose body is read by ``parse``, and a long one validated in a thread, too.

    With ``takes_surrogates`` it is read by ``parse_repaired``, and ``request.state.unreadable`` is
    the refusal of texts that are no Unicode, or None."""

    takes_surrogates = False

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler for another request class."""
        handle = super().get_route_handler()
        field = self.body_field
        repairs = self.takes_surrogates

        def parsed(request: Request, body: bytes) -> Any:
            if not repairs:
                return parse(body)
            value, request.state.unreadable = parse_repaired(body)
            return value

        def validated(request: Request, body: bytes) -> Any:
            value = parsed(request, body)
            if field is None or value is None:  # of nothing FastAPI says that it is missing
                return value
            model, errors = field.validate(value, loc=("body",))
            if errors:
                raise _Invalid(RequestValidationError(errors, body=value))
            return model  # FastAPI's own validation takes it as it is

        class JsonRequest(Request):
            async def json(self) -> Any:
                body = await self.body()
                if len(body) <= INLINE:
                    return parsed(self, body)
                caller = caller_of(self, self.app.state.service).name
                bodies: OneAtATime = self.app.state.long_bodies
                return await bodies.run(caller, lambda: validated(self, body))

        async def handle_json(request: Request) -> Response:
            try:
                return await handle(JsonRequest(request.scope, request.receive))
            except _Invalid as invalid:
                raise invalid.error from None

        return handle_json


def parse(body: bytes) -> Any:
    """Return a body's value.

    Raises json.JSONDecodeError, and HTTPException for what a parser would take and nobody can have
    meant."""
    value = _loaded(body)
    if (problem := _surrogate(body, value)) is not None:
        raise problem
    return value


def parse_repaired(body: bytes) -> tuple[Any, HTTPException | None]:
    """Return a body's value, with "?" for each half of a surrogate pair, and what ``parse`` would
    refuse of it.

    Raises as ``parse`` does for all else."""
    value = _loaded(body)
    problem = _surrogate(body, value)
    if problem is not None:
        value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    return value, problem


def _surrogate(body: bytes, value: Any) -> _Invalid | None:
    half = lone_surrogate(value) if _SURROGATE.search(body) else None
    return None if half is None else _invalid(half[1], *half[0])


def _loaded(body: bytes) -> Any:
    if (what := excess(body)) is not None:
        raise Refused(BodyTooLarge(f"the body has {what}"))
    if not body.strip():
        raise json.JSONDecodeError("it is empty: send an object", "", 0)
    if body.startswith(codecs.BOM_UTF8):
        raise json.JSONDecodeError(
            "it begins with a byte order mark: send UTF-8 without one", "", 0
        )
    try:
        # Translated: an expression looks at 4 MB for 65 ms, and no other thread runs meanwhile;
        # this takes a tenth.
        whole_number = _few_digits if _LONG_NUMBER in body.translate(_DIGITS_AS_9) else None
        value = json.loads(
            body.decode("utf-8"), object_pairs_hook=_distinct, parse_int=whole_number
        )
    except UnicodeDecodeError as error:
        raise json.JSONDecodeError(f"not UTF-8, at byte {error.start}", "", 0) from None
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None
    return value


def _few_digits(number: str) -> int:
    if len(number) > MOST_DIGITS:
        raise json.JSONDecodeError(
            f"a number has {len(number)} digits; at most {MOST_DIGITS} are taken", "", 0
        )
    return int(number)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Two readers of a body with a key twice may each see another value: what was checked may not
    be what is used."""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise json.JSONDecodeError("an object has the same key twice", "", 0)
    if (longest := max(map(len, content), default=0)) > MOST_KEY_CHARACTERS:
        raise _invalid(f"a key has {longest} characters; at most {MOST_KEY_CHARACTERS} are taken")
    return content


def _invalid(message: str, *path: str | int) -> _Invalid:
    error = {"type": "value_error", "loc": ("body", *path), "msg": message}
    return _Invalid(RequestValidationError([error]))
