"""The FastAPI application, built from a ``Service``.  Reads no environment and loads no model
itself.

The pages for a browser, the playground at / and the API reference at /docs, hold nothing of the
model, the bundles or the requests, so they need no key: what they show comes from the API, with the
key of whoever looks.  Everything is served from here, and the policy in ``HEADERS`` has the browser
refuse the rest: no script inside a page, no request to another host, no frame around it."""

from __future__ import annotations

import asyncio
import gzip
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from service import __version__
from service.annexes import annexes, imported
from service.api import (
    catalogue,
    error_handlers,
    health,
    messages_routes,
    openai_routes,
    responses_routes,
    score,
)
from service.api.auth import BearerKeys
from service.api.encodings import EncodedBodies
from service.api.forwarding import Forwarder
from service.api.json_body import MOST_THREADS
from service.api.middleware import LoadShedder, RequestFrame
from service.serving.admission import OneAtATime
from service.serving.service import Service

# A new route is a module with a ``router``, named here or by its annex.
ROUTERS = (
    score.router,
    openai_routes.router,
    responses_routes.router,
    messages_routes.router,
    *(imported(path) for annex in annexes() for path in annex.routers),
    catalogue.router,
    catalogue.admin,
    health.router,
)
EXPOSED_HEADERS = [
    "x-request-id",
    "x-queue-time",
    "x-inference-time",
    "x-total-time",
    "retry-after",
    "x-hallutracer-bundle",
    "x-hallutracer-risk",
    "x-hallutracer-decision",
]
# of /docs, where there is a playground
LINK_BACK = '<nav aria-label="Elsewhere"><a href="./">Playground</a></nav>\n'
HEADERS = {
    "content-security-policy": (
        "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # asked again each time: an upgrade must not meet yesterday's script
    "cache-control": "no-cache",
    "vary": "accept-encoding",
}
_GZIP = re.compile(r"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))", re.IGNORECASE)
_PIECE = 64 * 1024  # bytes of a page that are sent at once
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


def create_app(service: Service, on_loaded: Callable[[], None] | None = None) -> FastAPI:
    """Build the app around ``service``; ``on_loaded`` is called when loading has succeeded or
    failed."""

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
        app.state.long_bodies.close()
        await asyncio.to_thread(service.stop)

    app = FastAPI(
        title="HalluTracer",
        summary="The risk that an answer is a hallucination, before its first token.",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,  # FastAPI's pages load foreign scripts
    )
    app.state.service, app.state.forwarder = service, Forwarder(service.metrics)
    app.state.long_bodies = OneAtATime("body", MOST_THREADS)
    settings, keys = service.settings, service.access.keys
    files_of_pages = pages(settings.playground)
    app.add_middleware(LoadShedder, service=service)
    app.add_middleware(EncodedBodies, service=service)
    # Middleware added last is outermost: a 401 still has a request id, a log line and CORS headers.
    hosts = () if "*" in settings.allowed_hosts else settings.allowed_hosts
    app.add_middleware(
        BearerKeys,
        keys=keys,
        protect_metrics=settings.protect_metrics,
        pages=files_of_pages,
        hosts=hosts,
    )
    if keys.closed:
        _declare_keys(app, settings.protect_metrics)
    if settings.cors_origins:
        # The origins are the operator's choice; whatever headers its pages' clients send of their
        # own are allowed.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            # Chrome asks where a public page's request goes to a private address
            allow_private_network=True,
            expose_headers=EXPOSED_HEADERS,
        )
    app.add_middleware(RequestFrame, service=service)
    error_handlers.install(app)
    # Not ``include_router``, which makes every route and its models anew: a tenth of a second.
    for router in ROUTERS:
        app.router.routes.extend(router.routes)
    if "/" not in files_of_pages:
        # a balancer asks there for the service's health, by OPTIONS (``health.plain_check``)
        app.router.routes.append(Route("/", _absent, methods=["GET"], include_in_schema=False))
    for path, file in files_of_pages.items():
        without = LINK_BACK if path == "/docs" and not settings.playground else ""
        app.router.routes.append(
            Route(path, _page(file, without), methods=["GET"], include_in_schema=False)
        )
    return app


def _declare_keys(app: FastAPI, protect_metrics: bool) -> None:
    """Declare in the OpenAPI document which routes need a key."""
    build = app.openapi

    def openapi() -> dict[str, Any]:
        document = build()
        document.setdefault("components", {})["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"}
        }
        for path, operations in document["paths"].items():
            if not path.startswith("/health") and (protect_metrics or path != "/metrics"):
                for operation in operations.values():
                    operation["security"] = [{"key": []}]
        return document

    app.openapi = openapi  # type: ignore[method-assign]


@cache
def pages(playground: bool) -> Mapping[str, Path]:
    """Return path -> file of all that is served without a key; with or without the playground."""
    here = Path(__file__).parent
    # its files; the package's own page has an inline script
    swagger = Path(str(files("fastapi_offline"))) / "static"
    files_of_pages = {"/docs": here / "reference" / "index.html"}
    files_of_pages |= {
        f"/docs/{name}": here / "reference" / name
        for name in ("icon.svg", "reference.css", "reference.js")
    }
    files_of_pages |= {
        f"/docs/{name}": swagger / name for name in ("swagger-ui-bundle.js", "swagger-ui.css")
    }
    if playground:
        folder = here / "playground"
        files_of_pages |= {"/": folder / "index.html"}
        files_of_pages |= {f"/playground/{file.name}": file for file in sorted(folder.glob("*.*"))}
    return files_of_pages


def _page(file: Path, without: str) -> Callable[[Request], Any]:
    async def send(request: Request) -> Response:
        if without:
            return HTMLResponse(
                file.read_text(encoding="utf-8").replace(without, ""), headers=HEADERS
            )
        if not _GZIP.search(request.headers.get("accept-encoding", "")):
            return FileResponse(file, media_type=_TYPES[file.suffix], headers=HEADERS)
        content = await asyncio.to_thread(_compressed, file)
        headers = HEADERS | {"content-encoding": "gzip", "content-length": str(len(content))}
        sent = b"" if request.method == "HEAD" else content
        return StreamingResponse(_pieces(sent), media_type=_TYPES[file.suffix], headers=headers)

    return send


@cache
def _compressed(file: Path) -> bytes:
    return gzip.compress(file.read_bytes(), mtime=0)


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    """Yield a page piece by piece: of a reader that takes none only one is held."""
    for start in range(0, len(content), _PIECE):
        yield content[start : start + _PIECE]


async def _absent(_: Request) -> Response:
    raise HTTPException(404)
