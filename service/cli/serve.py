"""hallutracer serve: validate the bundles, listen, load the model behind /health/ready."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli import options as o
from service.cli.access import load_keys, load_policies
from service.cli.listening import in_url, listen, make_server
from service.cli.loading import bundle_names, engine_options, load_engine, load_scorers, open_store
from service.cli.reload import on_hangup
from service.policies import DEFAULT_MESSAGE
from service.settings import ServiceSettings, env

if TYPE_CHECKING:
    from service.serving.state import ServiceState

DEFAULTS = ServiceSettings()
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
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    max_batch_tokens: o.MaxBatchTokens = None,
    threads: o.Threads = None,
    engine: o.Engine = "transformers",
    tensor_parallel_size: o.TensorParallel = 1,
    pipeline_parallel_size: o.PipelineParallel = 1,
    engine_arg: o.EngineArg = None,
    policy: Annotated[
        str,
        typer.Option(help="What happens to a flagged prompt where a request names no policy.", envvar=env("policy")),
    ] = DEFAULTS.policy,
    policies: Annotated[
        Path | None,
        typer.Option(
            help="TOML file of named policies: [name] action = observe|abstain|block, threshold, message.",
            envvar=env("policies"),
            dir_okay=False,
        ),
    ] = None,
    abstain_message: Annotated[
        str, typer.Option(help="What an abstaining policy says instead of an answer.", envvar=env("abstain-message"))
    ] = DEFAULT_MESSAGE,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Bearer key, repeatable; guards every route but health and metrics.  Default: none is asked for.",
            envvar=env("api-key"),
            show_default=False,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File of bearer keys, one a line; keeps them out of 'ps'.", envvar=env("api-key-file")),
    ] = None,
    protect_metrics: Annotated[
        bool, typer.Option("--protect-metrics", help="Ask for a key on /metrics too.", envvar=env("protect-metrics"))
    ] = False,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin whose pages may call the service, repeatable.  Default: none.",
            envvar=env("cors-origin"),
            show_default=False,
        ),
    ] = None,
    max_queue: Annotated[
        int, typer.Option(min=1, help="Prompts that may wait; more get 429.", envvar=env("max-queue"))
    ] = DEFAULTS.max_queue,
    max_wait_ms: Annotated[
        float,
        typer.Option(min=0.0, max=1000.0, help="How long a batch waits for company.", envvar=env("max-wait-ms")),
    ] = DEFAULTS.max_wait_ms,
    deadline_s: Annotated[
        float, typer.Option(min=0.001, help="Longest time of one request; then 504.", envvar=env("deadline-s"))
    ] = DEFAULTS.deadline_s,
    drain_s: Annotated[
        float,
        typer.Option(min=0.0, help="After SIGTERM or Ctrl-C, how long requests may finish.", envvar=env("drain-s")),
    ] = DEFAULTS.drain_s,
    max_prompts: Annotated[
        int, typer.Option(min=1, help="Prompts in one request.", envvar=env("max-prompts"))
    ] = DEFAULTS.max_prompts,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Ceiling on a request's generate.max_tokens.", envvar=env("max-new-tokens"))
    ] = DEFAULTS.max_new_tokens,
    max_kv_tokens: Annotated[
        int,
        typer.Option(min=1, help="Prompt and answer tokens of all answers under way.", envvar=env("max-kv-tokens")),
    ] = DEFAULTS.max_kv_tokens,
    max_body_bytes: Annotated[
        int, typer.Option(min=1024, help="Largest request body.", envvar=env("max-body-bytes"))
    ] = DEFAULTS.max_body_bytes,
) -> None:
    """Serve POST /score: a risk for each prompt before its first answer token.

    Listens at once, is ready once the model is loaded and every bundle's golden prompts gave the recorded risks.
    stdout is for people; stderr has one JSON line per request, which never holds a prompt.
    With --engine vllm, SIGHUP looks the bundles up again and swaps them without a pause.

    \b
    hallutracer serve --policy observe                 watch /metrics before you gate
    hallutracer serve --engine vllm --model ./my-model --bundle my-probe@production
    hallutracer serve --model ./my-model --bundle my-probe --host 0.0.0.0 --api-key-file keys.txt
    """
    books = open_store(store)
    names = bundle_names(model, bundle or [], all_demo=True)
    bundles = [books.load(name) for name in names]
    settings = ServiceSettings(
        host=host,
        port=port,
        max_body_bytes=max_body_bytes,
        max_prompts=max_prompts,
        max_new_tokens=max_new_tokens,
        max_kv_tokens=max_kv_tokens,
        max_queue=max_queue,
        max_wait_ms=max_wait_ms,
        deadline_s=deadline_s,
        drain_s=drain_s,
        threshold=threshold,
        policy=policy,
        api_keys=load_keys(api_key or [], api_key_file),
        protect_metrics=protect_metrics,
        cors_origins=tuple(cors_origin or []),
    )
    if protect_metrics and not settings.api_keys:
        raise typer.BadParameter("needs --api-key or --api-key-file", param_hint="--protect-metrics")
    known = load_policies(policies, abstain_message, policy)
    listener = listen(host, port)
    loading = engine_options(
        model,
        revision,
        dtype,
        device,
        max_batch_tokens,
        engine,
        tensor_parallel_size,
        pipeline_parallel_size,
        engine_arg,
    )
    address = f"http://{in_url(host)}:{listener.getsockname()[1]}"

    from service.api.app import create_app
    from service.serving.state import ServiceState

    state = ServiceState(
        lambda: load_scorers(load_engine(loading, threads, bundles=bundles), bundles),
        books.version_of,
        settings,
        known,
    )

    def loaded(state: ServiceState) -> None:
        if state.failure is not None:
            server.should_exit = True
            return
        read_by = ", ".join(scorer.bundle.reference for scorer in state.scorers)
        identity = state.scorers[0].engine.identity
        typer.echo(f"ready: {identity.model} ({identity.dtype}) read by {read_by}\n\nTry it:\n")
        typer.echo(f"  curl -s {address}/score -H 'Content-Type: application/json' -d {shlex.quote(EXAMPLE)}\n")
        typer.echo(f"API reference: {address}/openapi.json    Stop: Ctrl-C")

        if loading.engine == "vllm":
            on_hangup(state, lambda engine: load_scorers(engine, [books.load(name) for name in names]))

    def broken() -> None:
        server.should_exit = True  # with status 1, so that whoever supervises the service starts it again

    state.on_broken = broken
    server = make_server(create_app(state, loaded), settings)
    typer.echo(f"listening on {address}, loading {loading.model} ...")
    # uvicorn raises the signal that ended it once more: a service that drained as it was told has not failed.
    signal.signal(signal.SIGTERM, lambda *_: None)
    server.run(sockets=[listener])
    if state.error is not None:
        raise state.error
