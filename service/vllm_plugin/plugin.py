"""The plugin that vLLM loads: adds routes when vLLM builds its app, and loads bundles once its
engine runs."""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import FastAPI, HTTPException
from prometheus_client import REGISTRY
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.lora.utils import get_adapter_absolute_path

from probes_store.errors import BundleError
from service.access.routes import SCORE_ROUTES
from service.api.app import create_app
from service.audit.auditor import Auditor
from service.engines.vllm.engine import VllmEngine
from service.errors import EngineError, HalluTracerError, ProbeReplaced
from service.scoring import Scorer
from service.serving.adapters import Adapters
from service.serving.metrics import Metrics
from service.serving.service import Service
from service.vllm_plugin.generation import judging_generate, observes
from service.vllm_plugin.middleware import RiskNotes
from service.vllm_plugin.model_check import ChatOptions, check_model
from service.vllm_plugin.options import read_options

log = logging.getLogger("hallutracer")
TRIES = 5  # to load, where other API servers of the same engine test theirs at the same time
MEET_S = 0.5  # between questions whether the other API servers are ready
READY_S = 2.0  # between looks at whether this API server is ready, for its series
OWN_PATHS = (SCORE_ROUTES[0], "/v1/bundles", "/health/ready", "/health/live")


class _Endpoint:
    """Our app as a route's endpoint, with the name that vLLM logs at start."""

    __name__ = "hallutracer"

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


class HalluTracerPlugin:
    """A ``vllm.endpoint_plugins`` entry: loaded where VLLM_PLUGINS names ``hallutracer``."""

    name = "hallutracer"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        """Read the options.  Raises HalluTracerError or BundleError where they are wrong."""
        self._options = read_options()
        self._client: Any = None
        self._generate: Any = None  # vLLM's own
        self._engine: VllmEngine
        self._adapters = Adapters(self._options.bundles, get_adapter_absolute_path)
        self._scorers: dict[str, Scorer] = {}  # all, by the reference that was given
        self._models: Any = None  # vLLM's names of models and adapters
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loading: asyncio.Task[None] | None = None
        self._meeting: asyncio.Task[None] | None = None  # with the engine's other API servers
        self._telling: asyncio.Task[None] | None = None  # on ``/metrics`` whether it is ready
        self._chat = ChatOptions()
        self._weights = 0  # how often they had changed when the golden prompts were last replayed
        self.service: Service

    def attach_router(self, app: FastAPI) -> None:
        """Add our routes beside vLLM's own, and a note to each of its completion requests.

        ``/score``, ``/health``, ``/metrics`` and ``/v1/models`` stay vLLM's; our series join its
        ``/metrics``."""
        options = self._options
        settings = self._options.settings
        metrics = Metrics()
        audit = None
        if options.audit_log is not None:
            audit = Auditor(
                options.audit_log, required=options.audit_required, count=metrics.audit_lines
            )
        self.service = service = Service(
            self._load,
            aliases_of=options.store.aliases,
            settings=settings,
            policies=options.policies,
            metrics=metrics,
            audit=audit,
        )
        service_app = create_app(service)
        for path in OWN_PATHS:
            app.router.routes.append(Route(path, _Endpoint(service_app)))
        app.add_middleware(
            RiskNotes,
            metrics=metrics,
            refuses=lambda: not observes(service, {}),
            message_in_content=settings.message_in_content,
        )
        REGISTRY.register(metrics.collector)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Load in the background: vLLM answers at once, our routes after the self-test and the
        golden prompts.

        A server that would never be ready ends, with status 1."""
        if engine_client is None:
            return
        self._client = engine_client
        self._loop = asyncio.get_running_loop()
        self._chat = ChatOptions.of(args)
        self._generate = engine_client.generate
        engine_client.generate = judging_generate(
            self._generate, self.service, lambda: self._engine, self._adapters
        )
        engine_client.add_lora = partial(self._add_lora, engine_client.add_lora)
        self._models = models = state.openai_serving_models
        models.load_lora_adapter = partial(self._load_adapter, models.load_lora_adapter)
        if self._servers > 1:
            self.service.lifecycle.awaited = "other API servers of this engine are still loading"
        self._loading = asyncio.create_task(self._start())
        self._telling = asyncio.create_task(self._tell_readiness())

    @property
    def _servers(self) -> int:
        """Return how many API servers the engine has, which take connections at the same
        address."""
        return int(getattr(getattr(self._client, "engine_core", None), "client_count", 1))

    async def _start(self) -> None:
        lifecycle = self.service.lifecycle
        for _ in range(TRIES):
            lifecycle.error = None
            await lifecycle.start()
            if not isinstance(lifecycle.error, ProbeReplaced):
                break
        if lifecycle.failure is None and self._servers > 1:
            self._meeting = asyncio.create_task(self._meet())
        if lifecycle.failure is None:
            return
        message = (
            f"hallutracer: the server ends, since it would never be ready: {lifecycle.failure}"
        )
        log.critical(message)
        if not self._client.errored:  # else vLLM ends by itself, or was told to
            # With status 1; no other exception of a task ends the event loop.
            raise SystemExit(message)

    async def _tell_readiness(self) -> None:
        """Keep the series ``hallutracer_ready`` as it is, for as long as the server runs.

        A scrape does not ask: ``/metrics`` is vLLM's own, and of several API servers any answers
        for all, from what each last wrote."""
        while True:
            self.service.metrics.ready(self.service.lifecycle.is_ready)
            await asyncio.sleep(READY_S)

    async def _meet(self) -> None:
        """Tell the workers that this API server is ready, and be called so once all of the engine's
        are.

        A probe of readiness reaches any of them, and so would the requests that come after it."""
        client, index = self._client, int(self._client.engine_core.client_index)
        while min(await client.collective_rpc("hallutracer_ready", args=(index,))) < self._servers:
            await asyncio.sleep(MEET_S)
        self.service.lifecycle.awaited = None

    async def _load_adapter(
        self, load: Callable[..., Awaitable[Any]], request: Any, *args: Any
    ) -> Any:
        """Have vLLM ``load`` an adapter that its route is asked for; it would say 500 to what
        ``_add_lora`` refuses."""
        if (loaded := self._models.lora_requests.get(request.lora_name)) is not None:
            try:
                self._adapters.check_place(loaded.lora_int_id, request)
            except EngineError as error:
                raise HTTPException(400, str(error)) from error
        return await load(request, *args)

    async def _add_lora(self, add: Callable[[Any], Awaitable[bool]], lora_request: Any) -> bool:
        """Have vLLM ``add`` an adapter while it runs, and its bundles read it."""
        self._adapters.keep(lora_request)
        added = await add(lora_request)
        assert self._loading is not None
        await asyncio.shield(self._loading)
        if self.service.lifecycle.serves:
            scorers = await asyncio.to_thread(self._read, self._engine, lora_request)
            if scorers:
                await self.service.lifecycle.reload(lambda engine: self._scorers | scorers)
                self._scorers |= scorers
        return added

    def _read(self, engine: VllmEngine, request: Any) -> dict[str, Scorer]:
        try:
            scorers = self._adapters.load(engine, request)
            self.service.catalogue.check_answers_read([*scorers.values()])
            return scorers
        except (HalluTracerError, BundleError) as error:
            log.error("the adapter %s is not read: %s", request.lora_name, error)
            return {}

    def _load(self) -> dict[str, Scorer]:
        assert self._loop is not None
        bundles = self._options.bundles.items()
        arguments = next(bundle for _, bundle in bundles).manifest.chat_template.arguments
        engine = VllmEngine.around(self._client, self._loop, self._generate, arguments)
        self._adapters.forget()
        if arguments or self._chat.template is not None or self._chat.variables:
            check_model(self._client.vllm_config, self._options.bundles.values(), self._chat)
        scorers = {
            name: Scorer(engine, bundle)
            for name, bundle in bundles
            if name not in self._adapters.waiting
        }
        for request in [*self._models.lora_requests.values()]:  # of --lora-modules
            scorers |= self._read(engine, request)
        self._engine = engine
        engine.slots.on_changed = self._replay_soon
        self._scorers = scorers
        return scorers

    def _replay_soon(self) -> None:
        if self._loading is None or self._loading.done():
            self._loading = asyncio.create_task(self._replay())

    async def _replay(self) -> None:
        """Replay the golden prompts once after each change of the weights; what they refuse stays
        unread."""
        weights = (await self._client.collective_rpc("hallutracer_describe"))[0]["weights"]
        if weights == self._weights:
            return
        self._weights, on_prefill = weights, self._engine.on_prefill
        await self._client.reset_prefix_cache()
        try:
            await self.service.lifecycle.reload(lambda _: self._load())
        except Exception as error:  # whatever it is, those of before stay, which read other weights
            log.critical("the weights have changed, and no request is read any more: %s", error)
        else:
            self._engine.on_prefill = on_prefill
            log.warning("the golden prompts were replayed after a change of the weights")
