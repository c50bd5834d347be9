"""``hallutracer`` commands in this process: what a user types, without importing torch anew for
each command."""

from __future__ import annotations

import io
import os
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import patch

import pytest

from service.cli.main import main

ROOT = Path(__file__).parents[1]


def hallutracer(*arguments: str, stdin: str = "", **variables: str) -> CompletedProcess[str]:
    """Run a command to its end.  Of our variables it sees only ``variables``, and the demo model as
    default."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("HALLUTRACER_")
    }
    with (
        patch.dict(os.environ, kept | {"HALLUTRACER_MODEL": "demo"} | variables, clear=True),
        patch("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")),
        patch("sys.argv", ["hallutracer", *arguments]),
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
