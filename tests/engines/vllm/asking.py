"""Asking a vLLM engine from a test's own thread."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

from service.engines.base import EngineOptions, Update
from service.engines.vllm.engine import VllmEngine


@contextmanager
def loaded(
    model: Path,
    context: int,
    batch: int,
    *,
    eager: bool = True,
    adapter: str | None = None,
    **options: Any,
) -> Iterator[VllmEngine]:
    """An engine of a model on disk, with so many tokens at most in a request and in a step; options
    as of ``VllmEngine.load``."""
    extra = {"enforce_eager": str(eager).lower(), "max_model_len": str(context)}
    extra["max_num_seqs"] = "32"
    choice = EngineOptions(
        str(model), dtype="float32", max_batch_tokens=batch, adapter=adapter, extra=extra
    )
    engine = VllmEngine.load(choice, **options)
    yield engine
    engine.close()


def wait(engine: VllmEngine, work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(work, engine.loop).result(240)


def updates(
    engine: VllmEngine, *request: Any, count: int = 1000, pause: float = 0.0, **options: Any
) -> list[Update]:
    """The first ``count`` updates of an answer, whose generator is then closed; with a ``pause`` in
    seconds after each, in which vLLM adds outputs to the next one."""

    async def take() -> list[Update]:
        received = []
        async with aclosing(engine.answer(*request, **options)) as stream:
            async for update in stream:
                received.append(update)
                if len(received) == count:
                    break
                if pause:
                    await asyncio.sleep(pause)
        return received

    return list(wait(engine, take()))
