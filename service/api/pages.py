"""The pages for a browser: the playground at /, the API reference at /docs, and what they load.

Files only: they hold nothing of the model, the bundles or the requests, so they need no key.  What they show comes
from the API, with the key of whoever looks.  Everything is served from here, and the policy in ``HEADERS`` has the
browser refuse the rest: no script inside a page, no request to another host, no frame around it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # asked again each time: an upgrade must not meet yesterday's script
}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HERE = Path(__file__).parent
_SWAGGER = ("swagger-ui-bundle.js", "swagger-ui.css")


@dataclass(frozen=True, slots=True)
class Page:
    """A file and the path it is served at."""

    path: str
    file: Path


@cache
def pages(playground: bool) -> tuple[Page, ...]:
    """All that is served without a key; with or without the playground."""
    found = [Page("/docs", _HERE / "reference" / "index.html"), Page("/docs/icon.svg", _HERE / "reference/icon.svg")]
    found += [Page(f"/docs/{name}", _HERE / "reference" / name) for name in ("reference.css", "reference.js")]
    assets = Path(str(files("fastapi_offline"))) / "static"  # Swagger UI's own files; the package's page has a script
    found += [Page(f"/docs/{name}", assets / name) for name in _SWAGGER]
    if playground:
        folder = _HERE / "playground"
        found.append(Page("/", folder / "index.html"))
        found += [Page(f"/playground/{file.name}", file) for file in sorted(folder.glob("*.*"))]
    return tuple(found)


def routes(playground: bool) -> list[Route]:
    """One route for each page, for GET and HEAD."""
    return [Route(page.path, _endpoint(page), methods=["GET"], include_in_schema=False) for page in pages(playground)]


def _endpoint(page: Page) -> Callable[[Request], Awaitable[Response]]:
    kind = _TYPES[page.file.suffix]

    async def send(_: Request) -> Response:
        return FileResponse(page.file, media_type=kind, headers=HEADERS)

    return send
