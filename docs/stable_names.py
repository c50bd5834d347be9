"""Write docs/stable_names.txt: the names that docs/stability.md promises to keep.  Run it after a
name was added.

A name that goes, or is renamed, breaks the promise: a test says so, and the next release is a major
one."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path

import hallutracer
import hallutracer_client
from service.cli.main import RESEARCH, make_app
from service.options import Sources, commands_of, options_of
from service.serving import metrics
from service.settings import NO_OPTIONS, env
from service.vllm_plugin.options import PluginVariables

TARGET = Path(__file__).parent / "stable_names.txt"


def client() -> Iterator[str]:
    """Each public name of the client; of its classes the fields, methods and parameters."""
    for name in hallutracer_client.__all__:
        yield name
        found = getattr(hallutracer_client, name)
        ours = [
            kind
            for kind in getattr(found, "__mro__", ())
            if kind.__module__.startswith("hallutracer_client")
        ]
        for member in {member for kind in ours for member in (*vars(kind), *kind.__annotations__)}:
            made = member == "__init__" and not dataclasses.is_dataclass(
                found
            )  # else its fields say the same
            if member.startswith("_") and not made:
                continue
            value = inspect.getattr_static(found, member, None)
            yield f"{name}.{member}"
            if inspect.isfunction(value):
                yield from (
                    f"{name}.{member}({parameter})"
                    for parameter in [*inspect.signature(value).parameters][1:]
                )


def series() -> Iterator[str]:
    """Each metric with its labels."""
    for name, _, labels, _, _ in metrics._SERIES:
        yield f"hallutracer_{name}{{{','.join(labels)}}}"


def options() -> Iterator[str]:
    """Each command and its options.  A variable and a key of the configuration file follow from an
    option's name."""
    for path, arguments in commands_of(make_app(Sources())):
        if path not in RESEARCH and path[:1] not in RESEARCH:
            yield " ".join(path)
            yield from (
                " ".join((*path, name)) for one in options_of(arguments) for name in one.names
            )


def plugin() -> Iterator[str]:
    """Each variable of the vLLM plugin."""
    yield from NO_OPTIONS
    yield from (env(field.name) for field in dataclasses.fields(PluginVariables))


def names() -> set[str]:
    """Every name, with its kind before it."""
    kinds = {
        "client": client,
        "python": lambda: hallutracer.__all__,
        "metric": series,
        "command": options,
        "plugin": plugin,
    }
    return {f"{kind} {name}" for kind, found in kinds.items() for name in found()}


if __name__ == "__main__":
    TARGET.write_text("\n".join(sorted(names())) + "\n", encoding="utf-8")
