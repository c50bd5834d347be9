"""The app factory.  Everything it needs comes in as arguments; it reads no environment and loads no model itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI

from service import __version__
from service.api import health, problems, score
from service.api.middleware import RequestFrame
from service.api.problems import log
from service.api.state import ServiceState


def create_app(state: ServiceState, on_loaded: Callable[[ServiceState], None] | None = None) -> FastAPI:
    """Build the app around ``state``; ``on_loaded`` is called once loading ended, well or not."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async def load() -> None:
            await state.start()
            if on_loaded is not None:
                on_loaded(state)

        loading = asyncio.create_task(load())
        yield
        if not state.scorers and state.failure is None:
            log.warning("stopping: waiting for the model to finish loading")
        loading.cancel()
        await asyncio.to_thread(state.stop)

    app = FastAPI(
        title="HalluTracer",
        version=__version__,
        summary="The risk that an answer is a hallucination, before its first token.",
        lifespan=lifespan,
    )
    app.state.service = state
    app.add_middleware(RequestFrame, max_body_bytes=state.settings.max_body_bytes)
    problems.install(app)
    app.include_router(score.router)
    app.include_router(health.router)
    return app
