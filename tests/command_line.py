"""``hallutracer`` commands in this process: what a user types, without importing torch anew for
each command."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from unittest.mock import patch

import pytest

from service.cli.main import main
from service.options import Sources, commands_of

ROOT = Path(__file__).parents[1]
# Looking through all installed distributions is a third of a command's time; they stay the same.
_commands: Any = import_module("service.cli.main")
_commands.entry_points = functools.cache(_commands.entry_points)


@functools.cache
def every_command() -> list[tuple[Any, Any]]:
    """Each command with its arguments, which a variable of another command is looked up in: to read
    them takes half a second."""
    return list(commands_of(_commands.make_app(Sources())))


def hallutracer(*arguments: str, stdin: str = "", **variables: str) -> CompletedProcess[str]:
    """Run a command to its end.  Of our variables it sees only ``variables``, and the demo model as
    default."""
    out = io.StringIO()
    err = io.StringIO()
    status = 0
    commands = every_command()
    others = {
        name: value for name, value in os.environ.items() if not name.startswith("HALLUTRACER_")
    }
    with (
        patch.dict(os.environ, others | {"HALLUTRACER_MODEL": "demo"} | variables, clear=True),
        patch("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")),
        patch("sys.argv", ["hallutracer", *arguments]),
        patch("service.options.commands_of", lambda _: commands),
        chdir(ROOT),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 1
    return CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def run(*arguments: str) -> int:
    """Run a command in this process's own environment; return its exit status."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def ended(done: CompletedProcess[str], status: int, *words: str) -> str:
    """A program has ended with ``status``, and the words are in what it printed; its standard
    output."""
    printed = done.stdout + done.stderr
    assert done.returncode == status, printed
    assert [word for word in words if word not in printed] == [], printed
    return done.stdout


def one_line_says(command: str | Sequence[str], status: int, *words: str) -> str:
    """The command ends with ``status``; all it prints is one line on stderr, with the words: it is
    returned.

    ``command``: its words, or a text in which spaces separate them."""
    done = hallutracer(*(command.split() if isinstance(command, str) else command))
    assert ended(done, status, *words) == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr
