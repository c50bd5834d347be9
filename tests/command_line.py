"""``hallutracer`` commands in this process: what a user types, without importing torch anew for
each command."""

from __future__ import annotations

import functools
import io
import os
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


def one_line_says(arguments: tuple[str, ...], status: int, word: str) -> None:
    """The command ends with ``status``; all it prints is one line on stderr, with ``word``."""
    done = hallutracer(*arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert word in done.stderr
