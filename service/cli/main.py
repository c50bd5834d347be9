"""hallutracer: the commands, and how errors become one readable line and an exit status."""

from __future__ import annotations

import inspect
import io
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from cyclopts import (
    App,
    CycloptsError,
    MissingArgumentError,
    Parameter,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from probes_store.errors import BundleError
from service import __version__
from service.annexes import annexes, imported
from service.cli.options import UsageError
from service.cli.output import print_line
from service.errors import HalluTracerError
from service.options import Common, Sources, one_line

HELP = (
    "The risk that an LLM's answer is a hallucination, before it decodes the first answer"
    " token.\n\nA probe in every layer reads the last prompt token; the mean over depth becomes a"
    " risk.  Without --model every command uses SmolLM2 where `make run` has installed it, else the"
    " embedded demo model.\n\nOptions come from the command line, then the environment (--max-queue"
    " is HALLUTRACER_MAX_QUEUE), then the TOML file that --config names.  --help-all shows also the"
    " options that --help leaves out, and every variable."
)
HELP_ALL = "--help-all"
HELP_FLAGS = ("-h", "--help", HELP_ALL)
MANY_OPTIONS = frozenset({"serve"})  # commands whose --help shows the everyday ones
COMMANDS: Mapping[
    str, tuple[str, str]
] = {  # name -> module:attribute, and what the list of commands says of it
    "serve": (
        "service.cli.serve:serve",
        "Serve POST /score: a risk for each prompt before its first answer token.",
    ),
    "try": (
        "service.cli.held_out:held_out",
        (
            "See what the risk is worth: held-out questions of the bundle, answered by the"
            " model and sorted by risk."
        ),
    ),
    "score": (
        "service.cli.score:score",
        "Score questions, or a JSONL file of them, before anything is decoded.",
    ),
    "train": (
        "service.cli.train:train",
        "Train a probe bundle on your own model and publish it.",
    ),
    "guarantee": (
        "service.cli.train:guarantee",
        (
            "Give a bundle a threshold with a guarantee, and publish it as the bundle's next"
            " version."
        ),
    ),
    "recalibrate": (
        "service.cli.train:recalibrate",
        (
            "Recalibrate a bundle's risk for the base rate of your traffic, and publish it as"
            " the bundle's next version."
        ),
    ),
    "bundle": (
        "service.cli.bundle:COMMANDS",
        "Look at, check, publish and fetch probe bundles.",
    ),
    "demo": (
        "service.cli.held_out:DEMO_COMMANDS",
        "The demonstration model: what it is and its questions.",
    ),
    "keys": ("service.cli.records:KEYS_COMMANDS", "Named keys of the service: make, list."),
    "audit": ("service.cli.records:AUDIT_COMMANDS", "The audit log of --audit-log."),
}
"""Imported where they are asked for: all together they take a second, and the list of commands none
of them.  ``own_commands`` has those of the annexes as well."""
# entry points of other distributions: name -> a function, or a group's help and commands
GROUP = "hallutracer.commands"
RESEARCH = (("evaluate",), ("diagnose",), ("data",), ("demo", "build"), ("demo", "retrieval"))
"""The commands of hallutracer-research."""
RESEARCH_HELP: Mapping[str, str] = {
    "data": "Turn public sets into training rows.",
    "demo": "The demonstration model: what it is, its questions, how it is built.",
    "diagnose": (
        "Check the paper's claims on your own labelled trajectories: is the depth mean enough, and"
        " why."
    ),
    "evaluate": (
        "Put HalluTracer and the baselines on the same rows of your model, and write a report."
    ),
}


def own_commands() -> dict[str, tuple[str, str]]:
    """Return COMMANDS, and the commands of the annexes in between."""
    commands = list(COMMANDS.items())
    for annex in annexes():
        if annex.commands:
            index = [name for name, _ in commands].index(annex.after) + 1
            commands[index:index] = annex.commands.items()
    return dict(commands)


def installed(only: str | None = None) -> dict[str, Any]:
    """Return what is behind each command, or behind one: its function, or a group's help and
    commands.

    Ours, and those of distributions with entry points of GROUP; groups are joined by name."""
    commands = {
        name: imported(path) for name, (path, _) in own_commands().items() if only in (None, name)
    }
    for annex in annexes():
        for name, path in annex.groups.items():
            if name in commands:
                help, own = commands[name]
                commands[name] = (help, own | imported(path)[1])
    for point in _points():
        if only not in (None, point.name):
            continue
        try:
            entry = point.load()
        except (
            ImportError
        ):  # half installed, or for another release: what serves is not held up by it
            continue
        if isinstance(group := commands.get(point.name), tuple):
            entry = (entry[0], group[1] | entry[1])
        commands[point.name] = entry
    return commands


def _points() -> list[EntryPoint]:
    return sorted(entry_points(group=GROUP), key=lambda point: point.name)


def _listed(typed: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the command that is typed, "" where there is none, and the help of each other
    command."""
    helps = {name: help for name, (_, help) in own_commands().items()}
    for point in _points():
        helps[point.name] = RESEARCH_HELP.get(
            point.name, f"A command of {point.dist.name if point.dist else point.value}."
        )
    command = next((word for word in typed if word in helps), "")
    helps.pop(command, None)
    return command, helps


def make_app(
    sources: Sources, *, whole_help: bool = True, typed: Sequence[str] | None = None
) -> App:
    """Return the command line, with ``sources`` for what it leaves open; ``whole_help``: with all
    options.

    ``typed``: its words; only the command that they name is imported."""
    app = App(
        name="hallutracer",
        help=HELP,
        help_format="plaintext",
        help_flags=HELP_FLAGS,
        default_parameter=None if whole_help else Parameter(show_env_var=False),
        version=f"hallutracer {__version__}",
        version_flags=("--version",),
        config=[sources],
        result_action="return_value",
    )
    chosen, listed = (None, {}) if typed is None else _listed(typed)
    for name, entry in installed(chosen).items():
        if isinstance(entry, tuple):
            title, commands = entry
            app.command(
                group := App(name=name, help=title, help_flags=HELP_FLAGS, version_flags=())
            )
            for child, function in commands.items():
                group.command(function, name=child, help=_paragraphs(function), version_flags=())
        else:
            shown = Parameter(show=False) if name in MANY_OPTIONS and not whole_help else None
            app.command(
                entry, name=name, help=_paragraphs(entry), version_flags=(), default_parameter=shown
            )
    for name, help in listed.items():
        app.command(App(name=name, help=help, help_flags=HELP_FLAGS, version_flags=()))
    sources.root = (lambda: app) if typed is None else (lambda: make_app(Sources()))
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exit 0 done, 1 the work failed, 2 the command line was wrong, 130
    interrupted."""
    for stream in (
        sys.stdout,
        sys.stderr,
    ):  # questions and answers are in any script, whatever the locale can write
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() not in (
            "utf-8",
            "utf8",
        ):
            stream.reconfigure(encoding="utf-8")
    # Without a home that can be written it works all the same, and tells of its folders in two
    # lines.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    sources = Sources()
    typed = sys.argv[1:] if arguments is None else arguments
    try:
        command, bound, _ = make_app(sources, whole_help=HELP_ALL in typed, typed=typed).parse_args(
            typed, exit_on_error=False, print_error=False
        )
        common = bound.arguments.get("common", Common())
        if common.print_config:
            print_line(sources.effective())
        else:
            if "common" in bound.signature.parameters:  # a command of ours, not --help
                bound.arguments["common"] = replace(common, warnings=sources.unknown())
            command(*bound.args, **bound.kwargs)
    except CycloptsError as error:
        _fail(one_line(error) + _cure(error, typed), 2)
    except UsageError as error:
        _fail(str(error), 2)
    except (HalluTracerError, BundleError) as error:
        _fail(str(error), 1)
    except BrokenPipeError:  # the reader of a pipe, such as head, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        _fail(f"{error.strerror or error}: {error.filename or ''}".rstrip(": "), 1)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    sys.exit(0)


def _cure(error: CycloptsError, typed: Sequence[str]) -> str:
    """Return what to do about a wrong command line, behind the error; "" where the error says
    it."""
    if isinstance(error, UnknownCommandError):
        return _hint(typed)
    if isinstance(error, MissingArgumentError) and tuple(typed[:1]) == ("train",):
        return "  For example: hallutracer train --model ./my-model"
    if isinstance(error, UnknownOptionError) and "-" in typed:
        return "  Standard input is read where an option names it, such as --input -"
    if isinstance(error, UnusedCliTokensError):
        return (
            "  What an option takes follows its name, such as --model demo; a value with spaces is"
            " put in quotes"
        )
    return ""


def _hint(typed: Sequence[str]) -> str:
    """Return how to get the command of ``RESEARCH`` that was asked for and is not installed; ""
    where none."""
    known: set[tuple[str, ...]] = set()
    for name, entry in installed(next(iter(typed), "")).items():
        known |= {(name,)} | (
            {(name, child) for child in entry[1]} if isinstance(entry, tuple) else set()
        )
    absent = [
        " ".join(words)
        for words in RESEARCH
        if tuple(typed[: len(words)]) == words and words not in known
    ]
    return (
        f".  {absent[0]!r} comes with hallutracer-research: pip install ./research"
        if absent
        else ""
    )


def _fail(message: str, status: int) -> None:
    sys.stderr.write(f"error: {message}\n")
    sys.exit(status)


def _paragraphs(function: Callable[..., None]) -> str:
    """A docstring with each paragraph in one line, to be wrapped anew; indented ones, such as
    examples, as they are."""
    parts = (inspect.getdoc(function) or "").split("\n\n")
    return "\n\n".join(
        part if part.startswith(" ") else " ".join(part.split("\n")) for part in parts
    )
