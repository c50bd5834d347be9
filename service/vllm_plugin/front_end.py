"""Gives every vLLM engine the gate its environment asks for, and ends one that would answer
without.

vLLM loads ``check`` as a general plugin, in each process of any program, before it makes an
engine's configuration, an engine or a worker.  A configuration can say that a gate is in front of
its engine (GATED): HalluTracer's own engine does, and vLLM's own server, to which our plugin adds
the gate.  Any other engine gets the gate in its core (``engine_gate``), for which its workers must
be ours; with others it gets no executor. An engine's process learns here, too, to end with its
parent."""

from __future__ import annotations

import functools
import logging
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from importlib.metadata import entry_points
from types import FrameType
from typing import Any, NoReturn

from probes_store.errors import BundleError
from service.access.callers import is_placeholder
from service.engines.vllm.launch import FOLLOW, WORKER, follow_parent
from service.engines.vllm.wire import GATED, KEY
from service.errors import HalluTracerError
from service.settings import PREFIX, env
from service.vllm_plugin.model_check import (
    chat_options,
    check_model,
    model_option,
    short_name_problem,
)
from service.vllm_plugin.options import PluginOptions, missing_bundle, read_options, unread

log = logging.getLogger("hallutracer")
NAME = "hallutracer"
RAY_PREFIXES = (  # of the variables that vLLM hands to its Ray workers
    "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
)
# of vLLM's plugins that load unless others are named
GROUPS = ("general", "io_processor", "platform", "stat_logger")
# module and function: what starts the engine of vLLM's own server, or another node's part of it
SERVERS = {
    ("vllm.entrypoints.launchers.api_server.entry", "run_server_worker"),
    ("vllm.entrypoints.cli.serve", "run_multi_api_server"),
    ("vllm.entrypoints.cli.serve", "run_headless"),
}


def check() -> None:
    """Have this process gate vLLM's own server and start no ungated engine, where a bundle or a
    gate is asked for."""
    follow_parent()
    if not (_asked() or missing_bundle(os.environ) or unread(os.environ)):
        return
    if reason := short_name_problem(
        model_option(sys.argv)
    ):  # vLLM may ask for it before there is an engine
        _end(reason)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCore, EngineCoreProc
    from vllm.v1.executor.abstract import Executor

    create = EngineArgs.create_engine_config
    choose = Executor.get_class
    make = Executor.__init__
    make_core, run = EngineCore.__init__, EngineCoreProc.run_engine_core
    if getattr(create, "gates", False):
        return
    prefixes = os.environ.get(RAY_PREFIXES, "").split(",")
    os.environ[RAY_PREFIXES] = ",".join(filter(None, dict.fromkeys([*prefixes, PREFIX])))

    @functools.wraps(create)
    def create_gated(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _gated(self):
            return create(self, *args, **kwargs)
        log_beside_vllm()
        if not _asked():
            _refuse_missing_bundle()
            if line := unread(os.environ):
                log.warning("hallutracer: %s", line)
            return create(self, *args, **kwargs)
        if served := in_server(sys._getframe()) and not _in_rust(os.environ):
            if reason := unguarded(sys.argv, os.environ):
                _end(reason)
            name_plugins(os.environ)
        os.environ.setdefault(FOLLOW, "1")  # for the processes that this one starts
        options = _options()
        read_by_default(self, options, {GATED: served})
        if reason := short_name_problem(self.model):
            _end(reason)
        config = create(self, *args, **kwargs)
        # The gate in a core has one bundle, for every request.
        bundles = list(options.bundles.values())[: None if served else 1]
        try:
            check_model(config, bundles, chat_options(sys._getframe()))
        except (HalluTracerError, BundleError) as error:
            _end(str(error))
        return config

    # An executor's class is chosen in the process that starts an engine, and the executor is made
    # in the engine's.
    @functools.wraps(choose)
    def choose_gated(vllm_config: Any) -> Any:
        _refuse(vllm_config)
        return choose(vllm_config)

    @functools.wraps(make)
    def make_gated(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        _refuse(vllm_config)
        make(self, vllm_config, *args, **kwargs)

    @functools.wraps(make_core)
    def make_core_gated(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        make_core(self, vllm_config, *args, **kwargs)
        _open(self)

    # A core that a Ray actor makes from a configuration of another process loads plugins when it is
    # half made.
    def opened(call: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(call)
        def open_and_call(self: Any, *args: Any, **kwargs: Any) -> None:
            _open(self)
            call(self, *args, **kwargs)

        return open_and_call

    create_gated.gates = True  # type: ignore[attr-defined]
    note_renderings()
    EngineArgs.create_engine_config, EngineCore.__init__ = create_gated, make_core_gated
    EngineCore.add_request = opened(EngineCore.add_request)
    EngineCoreProc.run_engine_core = staticmethod(run_core)
    for kind in (EngineCoreProc, DPEngineCoreProc):
        kind.run_busy_loop = opened(kind.run_busy_loop)
    _own[:] = [run]
    Executor.get_class, Executor.__init__ = staticmethod(choose_gated), make_gated


def note_renderings() -> None:
    """Have vLLM's renderer, through which the chats of all its routes go, say what it makes of
    them."""
    from vllm.renderers import BaseRenderer

    render = BaseRenderer.render_chat_async

    @functools.wraps(render)
    async def render_noted(
        self: Any, conversations: Any, chat_params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        from service.vllm_plugin.note import rendered  # which an engine's process needs not load

        chats, prompts = await render(self, conversations, chat_params, *args, **kwargs)
        rendered(chats, prompts, chat_params.chat_template_kwargs.get("tools") or ())
        return chats, prompts

    BaseRenderer.render_chat_async = render_noted


_own: list[Callable[..., None]] = []  # vLLM's main function of a core's process


def run_core(*args: Any, **kwargs: Any) -> None:
    """Be the main function of a core's process, where vLLM itself would load plugins when the core
    is half made."""
    check()
    _own[0](*args, **kwargs)


def _open(core: Any) -> None:
    """Put the gate into a core that is to judge, once; later open it again where the weights have
    changed."""
    if _gated(core.vllm_config):
        return
    if hasattr(core, "hallutracer_open"):
        if core.hallutracer_open is not None:
            core.hallutracer_open.open_again()
        return
    if not _asked():
        if missing_bundle(os.environ) is not None:
            core.shutdown()
            _refuse_missing_bundle()
        core.hallutracer_open = None
        return
    from service.vllm_plugin.engine_gate import open_gate

    log_beside_vllm()
    core.hallutracer_open = None  # the self-test's own requests pass
    try:
        core.hallutracer_open = open_gate(core, read_options())
    except BaseException as error:
        del core.hallutracer_open
        if isinstance(error, (HalluTracerError, BundleError)):
            core.shutdown()
            _end(str(error))
        raise


def _refuse(config: Any) -> None:
    if not _asked():
        if not _gated(config):
            _refuse_missing_bundle()
    elif reason := open_engine(config):
        _end(reason)


def _refuse_missing_bundle() -> None:
    if reason := missing_bundle(os.environ):
        _exit(reason)


def _asked() -> bool:
    return bool(os.environ.get(env("bundle")))


def _options() -> PluginOptions:
    try:
        return read_options()
    except (HalluTracerError, BundleError) as error:
        _exit(str(error))


def _end(reason: str) -> NoReturn:
    _exit(f"{env('bundle')} is set, and {reason}")


def _exit(reason: str) -> NoReturn:
    message = f"hallutracer: {reason}"
    log_beside_vllm()
    # With time and level, and from a thread, too: SystemExit is silent off the main thread.
    log.critical(message)
    raise SystemExit(message)


def in_server(frame: FrameType | None) -> bool:
    """Return whether vLLM's own server is among the callers of ``frame``."""
    while frame is not None:
        # also where it runs as a program
        module = getattr(frame.f_globals.get("__spec__"), "name", "")
        if (module, frame.f_code.co_name) in SERVERS:
            return True
        frame = frame.f_back
    return False


def name_plugins(environment: MutableMapping[str, str]) -> None:
    """Have vLLM load the guard, by naming all plugins, where the operator has named none.

    It takes those with routes only by name, and then leaves out all that are not named."""
    if "VLLM_PLUGINS" not in environment:
        names = {NAME}
        for group in GROUPS:
            names |= entry_points(group=f"vllm.{group}_plugins").names
        environment["VLLM_PLUGINS"] = ",".join(sorted(names))


class _BesideVllm(logging.Handler):
    """Writes as vLLM does, with its time and level, where the program itself has set up no log."""

    def emit(self, record: logging.LogRecord) -> None:
        """Hand the record to vLLM's handlers, and to Python's last resort where it has none."""
        if logging.getLogger().handlers:
            return  # they get it, too
        last = [] if logging.lastResort is None else [logging.lastResort]
        for handler in logging.getLogger("vllm").handlers or last:
            if record.levelno >= handler.level:
                handler.handle(record)


def log_beside_vllm() -> None:
    """Have this process log from INFO on, into vLLM's log."""
    if not any(isinstance(handler, _BesideVllm) for handler in log.handlers):
        log.addHandler(_BesideVllm())
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)


def _gated(config: Any) -> bool:
    """Return whether a configuration, or its arguments, says that a gate is in front of its
    engine."""
    additional = config.additional_config
    return isinstance(additional, dict) and additional.get(GATED) is True


def read_by_default(arguments: Any, options: PluginOptions, marks: Mapping[str, bool]) -> None:
    """Have vLLM start our worker, at the bundles' sites alone, where its command line says nothing
    else."""
    from service.engines.vllm.engine import slots_for

    if arguments.worker_cls == "auto":
        arguments.worker_cls = WORKER
    additional = {**(arguments.additional_config or {}), **marks}
    if KEY not in additional:
        bundles = options.bundles.values()
        # What nothing decides by is not read, since it costs each step of an answer; the gate in a
        # core reads none.
        answers = marks.get(GATED, False) and any(
            policy.reads_answers_for for policy in options.policies.named.values()
        )
        sites = sorted({str(bundle.manifest.readout.site) for bundle in bundles})
        plan = {"sites": sites, "slots": slots_for(bundles, answers=answers)}
        additional[KEY] = plan | ({"answers": True} if answers else {})
    arguments.additional_config = additional


def _in_rust(environment: Mapping[str, str]) -> bool:
    """Return whether vLLM's server answers with its Rust front end, which loads no plugin."""
    return environment.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0")


def unguarded(argv: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Return why vLLM's own server would answer unguarded; None where it does not."""
    if NAME not in environment.get("VLLM_PLUGINS", NAME).split(","):
        return f"VLLM_PLUGINS does not name the guard; unset it, or add {NAME}"
    if any(is_placeholder(key) for key in (environment.get("VLLM_API_KEY", ""), *_keys(argv))):
        return (
            "vLLM's key (--api-key, VLLM_API_KEY) is an example's placeholder, which everybody"
            " knows; make one"
        )
    return None


def _keys(argv: Sequence[str]) -> list[str]:
    """Return the values of ``--api-key``, of which vLLM takes several."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(
        "--api-key", "--api_key", dest="keys", nargs="*", action="extend", default=[]
    )
    return parser.parse_known_args(argv)[0].keys  # type: ignore[no-any-return]


def open_engine(config: Any) -> str | None:
    """Return why the engine of this ``VllmConfig`` would answer unguarded; None where it does
    not."""
    worker = config.parallel_config.worker_cls
    if worker != WORKER:
        from vllm.utils.import_utils import resolve_obj_by_qualname

        from service.engines.vllm.worker import Worker

        if not issubclass(resolve_obj_by_qualname(worker), Worker):
            return (
                f"--worker-cls {worker} does not read the model; leave it out, or derive that class"
                f" from {WORKER}"
            )
    return None
