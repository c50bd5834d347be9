"""hallutracer serve: validate the bundles, listen, load the model behind /health/ready."""

from __future__ import annotations

import errno
import logging
import shlex
import socket
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli import options as o
from service.cli.loading import bundle_names, engine_options, load_engine, load_scorers, open_store
from service.errors import HalluTracerError
from service.settings import ServiceSettings, env

if TYPE_CHECKING:
    import uvicorn

    from service.api.state import ServiceState

EXAMPLE = (
    '{"prompt": ["What is the capital of Italy?", "What is the capital of the Solomon Islands?"], '
    '"generate": {"max_tokens": 16}}'
)


def serve(
    model: o.Model = None,
    bundle: Annotated[
        list[str] | None,
        typer.Option(help="Bundle to serve, repeatable; the first is the default.", envvar=env("bundle")),
    ] = None,
    store: o.StoreOption = o.STORE_DEFAULT,
    host: Annotated[str, typer.Option(help="Address to listen on.", envvar=env("host"))] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.", envvar=env("port"))] = 8765,
    threshold: o.Threshold = None,
    revision: o.Revision = None,
    dtype: o.DtypeOption = o.Dtype.AUTO,
    device: o.DeviceOption = o.Device.AUTO,
    max_batch_tokens: o.MaxBatchTokens = 8192,
    threads: o.Threads = None,
) -> None:
    """Serve POST /score: a risk for each prompt before its first answer token.

    Listens at once, is ready once the model is loaded and every bundle's golden prompts gave the recorded risks.
    """
    books = open_store(store)
    bundles = [books.load(name) for name in bundle_names(model, bundle or [], all_demo=True)]
    settings = ServiceSettings(host=host, port=port, threshold=threshold)
    listener = _listen(host, port)
    loading = engine_options(model, revision, dtype.value, device.value, max_batch_tokens)
    address = f"http://{_bracketed(host)}:{listener.getsockname()[1]}"

    from service.api.app import create_app
    from service.api.state import ServiceState

    state = ServiceState(
        lambda: load_scorers(load_engine(loading, threads), bundles), books.version_of, settings=settings
    )

    def loaded(state: ServiceState) -> None:
        if state.failure is not None:
            server.should_exit = True
            return
        names = ", ".join(scorer.bundle.reference for scorer in state.scorers)
        identity = state.scorers[0].engine.identity
        typer.echo(f"ready: {identity.model} ({identity.dtype}) read by {names}\n\nTry it:\n")
        typer.echo(f"  curl -s {address}/score -H 'Content-Type: application/json' -d {shlex.quote(EXAMPLE)}\n")
        typer.echo(f"API reference: {address}/openapi.json    Stop: Ctrl-C")

    server = _server(create_app(state, loaded), host, port)
    typer.echo(f"listening on {address}, loading {loading.model} ...")
    server.run(sockets=[listener])
    if state.error is not None:
        raise state.error


def _server(app: object, host: str, port: int) -> uvicorn.Server:
    import uvicorn

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    return uvicorn.Server(uvicorn.Config(app, host=host, port=port, log_level="warning", access_log=False))  # type: ignore[arg-type]


def _listen(host: str, port: int) -> socket.socket:
    """Bind before the model is loaded: a taken port is said at once, not after minutes."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is taken; choose another with --port (0: any free)"
            raise HalluTracerError(message) from None
        raise HalluTracerError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return listener


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
