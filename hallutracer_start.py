"""Where HalluTracer's programs begin, under a name that no app has; ``service`` is one that many
have.

A folder on PYTHONPATH, or the one that ``python -m`` was started in, may hold another ``service``.
In a process of our own, ours goes first.  In a process of others, vLLM's, their path stays as it
is, and nothing is answered unguarded. Imports nothing but the standard library before that is
settled.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.vllm_plugin.plugin import HalluTracerPlugin

HERE = Path(__file__).resolve().parent  # site-packages, or the checkout
CURE = (
    "Give HalluTracer an environment of its own (a venv, pipx, uv tool, a container) and start it"
    " without that folder on PYTHONPATH; an app asks it over HTTP, with hallutracer-client."
)


def main() -> None:
    """The ``hallutracer`` command.  Raises SystemExit."""
    ours_first()
    from service.cli import main as command

    command()


def check_vllm() -> None:
    """What vLLM calls in each of its processes: see ``service.vllm_plugin.front_end``.  Raises
    SystemExit."""
    broken = None
    if (found := stranger()) is not None:
        broken = _taken(found)
    else:
        try:
            from service.vllm_plugin.front_end import check

            check()
        except Exception as error:
            broken = f"the guard cannot be loaded: {type(error).__name__}: {error}"
    if broken and (variable := _asking()):  # else it is vLLM inside an app that wants no risks
        # vLLM loads plugins once: a program that goes on, and tries again, would have an engine
        # without us.
        if plugins := sys.modules.get("vllm.plugins"):
            plugins.plugins_loaded = False  # type: ignore[attr-defined]
        raise SystemExit(f"hallutracer: {variable} is set, and {broken}")


def _asking() -> str | None:
    """Return a variable that asks for the guard: ``service.vllm_plugin.options`` cannot be had to
    read them."""
    observes = os.environ.get("HALLUTRACER_POLICY") == "observe"
    names = ["BUNDLE"] if observes else ["BUNDLE", "POLICY", "POLICIES", "THRESHOLD"]
    if os.environ.get("HALLUTRACER_AUDIT_REQUIRED", "").lower() in ("yes", "y", "1", "true", "t"):
        names.append("AUDIT_REQUIRED")
    variables = (f"HALLUTRACER_{name}" for name in names)
    return next(filter(os.environ.get, variables), None)


def load_vllm() -> HalluTracerPlugin:
    """The plugin, as vLLM asks for it.  Raises SystemExit, since vLLM starts without a plugin that
    fails otherwise."""
    if (found := stranger()) is not None:
        raise SystemExit(f"hallutracer: {_taken(found)}")
    from service.vllm_plugin import load

    return load()


def ours_first() -> None:
    """Make ``import service`` find the package beside this file, here and in processes started from
    here.

    Raises SystemExit where another one has been imported already, or was installed over ours.
    """
    if stranger() is not None:
        sys.path.insert(0, str(HERE))  # multiprocessing hands the path on
    if (found := stranger()) is not None:
        raise SystemExit(f"hallutracer: {_taken(found)}")
    import service

    if not (service.__doc__ or "").startswith("HalluTracer"):
        raise SystemExit(
            f"hallutracer: {HERE / 'service'} is not HalluTracer's any more: another distribution"
            f" has installed a package named 'service' over it.  {CURE}"
        )


def check_import() -> None:
    """For ``import hallutracer`` in a process of others.  Raises ImportError."""
    if (found := stranger()) is not None:
        raise ImportError(_taken(found))


def stranger() -> str | None:
    """Where ``import service`` leads to if that is not the package beside this file."""
    loaded = sys.modules.get("service")
    spec = find_spec("service") if loaded is None else loaded.__spec__
    folders = [] if spec is None else list(spec.submodule_search_locations or [str(spec.origin)])
    if [Path(folder).resolve() for folder in folders] == [HERE / "service"]:
        return None
    return ", ".join(folders) or "nowhere"


def _taken(found: str) -> str:
    return f"'import service' leads to {found}, not to HalluTracer's package in {HERE}.  {CURE}"


if __name__ == "__main__":
    main()
