"""Makes plain ``vllm serve`` read and gate where a bundle is named for it, and refuses front ends without a gate.

vLLM loads ``check`` as a general plugin in each of its processes, before it parses its command line or loads a model.
Its engine's process learns here, too, to end with its parent.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from probes_store.errors import BundleError
from service.callers import is_placeholder
from service.engines.vllm.launch import WORKER
from service.engines.vllm.parent import FOLLOW, follow_parent
from service.engines.vllm.wire import KEY
from service.errors import HalluTracerError
from service.settings import env

NAME = "hallutracer"
GROUPS = ("general", "io_processor", "platform", "stat_logger")  # of vLLM's plugins that load unless others are named


def check() -> None:
    """Raise SystemExit if this process would answer without the guard that its environment asks for."""
    follow_parent()
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name if spec is not None else ""
    if not os.environ.get(env("bundle")) or not is_front_end(module, sys.argv):
        return
    if reason := unguarded(module, sys.argv, os.environ):
        raise SystemExit(f"hallutracer: {env('bundle')} is set, and {reason}")
    os.environ.setdefault(FOLLOW, "1")  # for the processes that this one starts
    name_plugins(os.environ)
    read_by_default()


def is_front_end(module: str, argv: Sequence[str]) -> bool:
    """Whether this process is a server of vLLM's own; hallutracer's commands start vLLM, too.

    ``module`` is the name of the module that runs as a program, "" for a script.
    """
    script = Path(argv[0]).name if argv else ""
    return script == "vllm" or module.startswith("vllm.entrypoints")


def name_plugins(environment: MutableMapping[str, str]) -> None:
    """Have vLLM load the guard: it takes plugins with routes only by name, and then leaves out all that are not named.

    So everything that it would have loaded is named.  Does nothing where the operator has named plugins.
    """
    if "VLLM_PLUGINS" not in environment:
        others = {plugin.name for group in GROUPS for plugin in entry_points(group=f"vllm.{group}_plugins")}
        environment["VLLM_PLUGINS"] = ",".join(sorted(others | {NAME}))


def read_by_default() -> None:
    """Have vLLM start our worker, at the bundles' sites alone, where its command line says nothing else."""
    from vllm.engine.arg_utils import EngineArgs

    from service.engines.vllm.engine import SLOTS
    from service.vllm_plugin.options import read_options

    create = EngineArgs.create_engine_config
    if getattr(create, "reads", False):
        return

    @functools.wraps(create)
    def create_reading(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.worker_cls == "auto":
            self.worker_cls = WORKER
        if KEY not in (self.additional_config or {}):
            try:
                bundles = read_options().bundles.values()
            except (HalluTracerError, BundleError) as error:
                raise SystemExit(f"hallutracer: {error}") from error
            sites = sorted({str(bundle.manifest.readout.site) for bundle in bundles})
            plan = {"sites": sites, "slots": max(SLOTS, len(bundles))}
            self.additional_config = {**(self.additional_config or {}), KEY: plan}
        return create(self, *args, **kwargs)

    create_reading.reads = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_reading


def unguarded(module: str, argv: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Why this front end would answer unguarded; None where it does not."""
    if environment.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        return "vLLM's Rust front end has no risks and no gate; unset VLLM_USE_RUST_FRONTEND"
    if "--grpc" in argv or "grpc_server" in module:
        return "vLLM's gRPC server has no risks and no gate; start it without --grpc"
    if "run-batch" in argv or "run_batch" in module:
        return f"vLLM's batch runner has no risks and no gate; use `hallutracer score`, or unset {env('bundle')}"
    if NAME not in environment.get("VLLM_PLUGINS", NAME).split(","):
        return f"VLLM_PLUGINS does not name the guard; unset it, or add {NAME}"
    if any(is_placeholder(key) for key in (environment.get("VLLM_API_KEY", ""), *_keys(argv))):
        return "vLLM's key (--api-key, VLLM_API_KEY) is an example's placeholder, which everybody knows; make one"
    return None


def _keys(argv: Sequence[str]) -> Iterator[str]:
    """The values of ``--api-key``, of which vLLM takes several."""
    inside = False
    for word in argv:
        flag, _, value = word.partition("=")
        inside = flag.replace("_", "-") == "--api-key" or (inside and not word.startswith("-"))
        if inside:
            yield value or word
