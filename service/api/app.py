"""The FastAPI application, built from a ``Service``.  Reads no environment and loads no model itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from service import __version__
from service.api import (
    catalogue,
    error_handlers,
    feedback_routes,
    guardrail_routes,
    health,
    openai_routes,
    score,
)
from service.api.auth import BearerKeys, KnownHosts
from service.api.body import LoadShedder
from service.api.forwarding import Forwarder
from service.api.middleware import RequestFrame
from service.api.pages import pages, routes
from service.serving.service import Service

EXPOSED_HEADERS = ["x-request-id", "x-queue-time", "x-inference-time", "x-total-time", "retry-after",
                   "x-hallutracer-bundle", "x-hallutracer-risk", "x-hallutracer-decision"]  # fmt: skip


def create_app(service: Service, on_loaded: Callable[[], None] | None = None) -> FastAPI:
    """Build the app around ``service``; ``on_loaded`` is called when loading has succeeded or failed."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async def load() -> None:
            await service.lifecycle.start()
            if on_loaded is not None:
                on_loaded()

        loading, watching = asyncio.create_task(load()), asyncio.create_task(service.access.watch())
        yield
        loading.cancel()
        watching.cancel()
        await app.state.forwarder.close()
        await asyncio.to_thread(service.stop)

    app = FastAPI(
        title="HalluTracer",
        version=__version__,
        summary="The risk that an answer is a hallucination, before its first token.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own pages load scripts from the internet
        redoc_url=None,
    )
    app.state.service = service
    app.state.forwarder = Forwarder(service.metrics)
    settings = service.settings
    app.add_middleware(LoadShedder, service=service)
    # Middleware added last is outermost: a 401 still has a request id, a log line and CORS headers.
    app.add_middleware(
        BearerKeys,
        keys=service.access.keys,
        protect_metrics=settings.protect_metrics,
        pages=[page.path for page in pages(settings.playground)],
    )
    if service.access.keys.closed:
        _declare_keys(app, settings.protect_metrics)
    if settings.allowed_hosts and "*" not in settings.allowed_hosts:
        app.add_middleware(KnownHosts, hosts=settings.allowed_hosts)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "x-api-key", "content-type", "x-request-id"],
            expose_headers=EXPOSED_HEADERS,
        )
    app.add_middleware(
        RequestFrame,
        max_body_bytes=settings.max_body_bytes,
        body_seconds=settings.deadline_s,
        metrics=service.metrics,
        tracing=service.tracing,
    )
    error_handlers.install(app)
    for router in (
        score.router, openai_routes.router, guardrail_routes.router, feedback_routes.router, catalogue.router,
        health.admin, health.router,
    ):  # fmt: skip
        app.include_router(router)
    app.router.routes += routes(settings.playground)
    return app


def _declare_keys(app: FastAPI, protect_metrics: bool) -> None:
    """Declare in the OpenAPI document which routes need a key."""
    build = app.openapi

    def openapi() -> dict[str, Any]:
        document = build()
        document.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, operations in document["paths"].items():
            if not path.startswith("/health") and (protect_metrics or path != "/metrics"):
                for operation in operations.values():
                    operation["security"] = [{"key": []}]
        return document

    app.openapi = openapi  # type: ignore[method-assign]
