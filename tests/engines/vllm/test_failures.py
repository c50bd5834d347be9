"""What vLLM raises on a request, as this service tells it; without an engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from service.errors import EngineBusy, EngineError, HalluTracerError, Overloaded, RequestError
from tests.engines.vllm.installed import vllm_or_skip

vllm_or_skip()

from vllm import exceptions  # noqa: E402
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError  # noqa: E402

from service.engines.vllm.engine import VllmEngine  # noqa: E402
from service.engines.vllm.launch import log_where_the_program_does  # noqa: E402


def wrapped(cause: Exception) -> Exception:
    """As ``AsyncLLM.generate`` raises what it did not expect."""
    error = EngineGenerateError()
    error.__cause__ = cause
    return error


def raised_by(raised: Exception) -> HalluTracerError:
    """What ``VllmEngine`` makes of an exception of vLLM's ``generate``."""

    async def generate(*_: Any, **__: Any) -> AsyncGenerator[Any, None]:
        raise raised
        yield

    counted = SimpleNamespace(open_continuations=0)
    engine: Any = Mock(
        counters=counted, _request_numbers=count(), _generate=generate, _adapter=None
    )

    async def ask() -> None:
        async for _ in VllmEngine._outputs(engine, [1], None):
            pass

    with pytest.raises(HalluTracerError) as error:
        asyncio.run(ask())
    assert (error.value.__cause__, counted.open_continuations) == (raised, 0)
    return error.value


BUSY, FULL = exceptions.RetryableRequestError("a block was lost"), exceptions.MaxQueuedTokensError()


@pytest.mark.parametrize(
    ("raised", "kind", "status", "retry_after_s"),
    [
        (BUSY, EngineBusy, 503, 1),
        (wrapped(BUSY), EngineBusy, 503, 1),
        (FULL, Overloaded, 429, 1),
        (exceptions.QueueOverflowError(), Overloaded, 429, 1),
        (exceptions.GenerationError("broken"), EngineError, 500, None),
        (RuntimeError("broken"), EngineError, 500, None),
        (wrapped(ValueError("broken")), EngineError, 500, None),
        (EngineDeadError(), EngineError, 500, None),
        (exceptions.VLLMValidationError("no such token"), RequestError, 422, None),
    ],
)
def test_the_status_is_the_one_that_vllm_means(
    raised: Exception, kind: type[HalluTracerError], status: int, retry_after_s: int | None
) -> None:
    error = raised_by(raised)
    assert (type(error), error.status, error.retry_after_s) == (kind, status, retry_after_s)
    assert str(raised.__cause__ or raised) in str(error) or isinstance(raised, EngineDeadError)
    assert error.code == {429: "overloaded", 422: "invalid_request"}.get(status, "engine_error")


@pytest.mark.parametrize("set_up", [True, False])
def test_vllms_messages_go_where_the_program_s_own_go(
    monkeypatch: pytest.MonkeyPatch, set_up: bool
) -> None:
    """The handlers of ``hallutracer serve`` wait for no reader of the log; vLLM's own would."""
    own, theirs = logging.getLogger("vllm"), logging.NullHandler()
    monkeypatch.setattr(own, "handlers", [theirs])
    monkeypatch.setattr(own, "propagate", False)
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()] if set_up else [])
    log_where_the_program_does()
    assert (own.handlers, own.propagate) == (([], True) if set_up else ([theirs], False))
