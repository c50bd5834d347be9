"""What a service can be used without.  Each annex is a folder here, which the rest of the package
never imports.

``ANNEXES`` is the list.  Without its line an annex is left out: what it adds is gone, and
everything else stays as it is.  The folder's ``ANNEX`` says what it adds, by import paths of the
form ``module:attribute``: they are imported where they are needed, and listing them imports
nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

ANNEXES = (
    "service.annexes.doctor",
    "service.annexes.hub",
    "service.annexes.guardrails",
    "service.annexes.feedback",
    "service.annexes.traces",
)


@dataclass(frozen=True, kw_only=True)
class Annex:
    """What one annex adds."""

    name: str
    # import path of a dataclass of further options of `serve`, whose method ``hooks`` returns,
    # for each field of ``service.serving.service.Service`` that the annex fills, what makes it
    options: str = ""
    # name -> import path of its function or group, and what the list of commands says of it
    commands: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    # a group of the core -> import path of a group's help and commands, which join it
    groups: Mapping[str, str] = field(default_factory=dict)
    after: str = ""  # the command of the core that its own commands follow where all are listed
    # its command -> another, whose table of a configuration file holds for it, after its own
    tables: Mapping[str, str] = field(default_factory=dict)
    routers: tuple[str, ...] = ()  # import paths of FastAPI routers
    prompt_routes: tuple[str, ...] = ()  # paths of those routes that read prompts
    score_routes: tuple[str, ...] = ()  # further ones for which a key needs the scope "score"
    # path -> import path of what makes its errors' bodies of status and message, where they are not
    # OpenAI's
    error_bodies: Mapping[str, str] = field(default_factory=dict)


def annexes() -> tuple[Annex, ...]:
    """Return what each of ``ANNEXES`` adds, in their order."""
    return tuple(import_module(name).ANNEX for name in ANNEXES)


def imported(path: str) -> Any:
    """Return what an import path ``module:attribute`` names."""
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)
