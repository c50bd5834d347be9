"""Refuses the front ends of vLLM that the plugin cannot guard, where a bundle is named for it.

vLLM loads ``check`` as a general plugin in each of its processes, before it loads a model.  Its engine's process learns
here, too, to end with its parent.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from service.engines.vllm.parent import FOLLOW, follow_parent
from service.settings import env

NAME = "hallutracer"


def check() -> None:
    """Raise SystemExit if this process would answer without the guard that its environment asks for."""
    follow_parent()
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if reason := unguarded(spec.name if spec is not None else "", sys.argv, os.environ):
        raise SystemExit(f"hallutracer: {env('bundle')} is set, and {reason}")
    if os.environ.get(env("bundle")):
        os.environ.setdefault(FOLLOW, "1")  # for the processes that this one starts


def unguarded(module: str, argv: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Why a process would answer unguarded; None where it does not, or where no bundle is named.

    ``module`` is the name of the module that runs as a program, "" for a script.
    """
    script = Path(argv[0]).name if argv else ""
    if not environment.get(env("bundle")) or not (script == "vllm" or module.startswith("vllm.entrypoints")):
        return None  # hallutracer's own commands start vLLM, too
    if environment.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        return "vLLM's Rust front end has no risks and no gate; unset VLLM_USE_RUST_FRONTEND"
    if "--grpc" in argv or "grpc_server" in module:
        return "vLLM's gRPC server has no risks and no gate; start it without --grpc"
    if "run-batch" in argv or "run_batch" in module:
        return f"vLLM's batch runner has no risks and no gate; use `hallutracer score`, or unset {env('bundle')}"
    if NAME not in environment.get("VLLM_PLUGINS", "").split(","):
        return f"vLLM loads the guard only where VLLM_PLUGINS names it; set VLLM_PLUGINS={NAME}"
    return None
