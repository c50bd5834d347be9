"""Runs scripts, then tests, in one process, so that big libraries are imported once: prints their
outputs as JSON.

    python run_scripts.py SCRIPTS TESTS URL [URL ..]

For each address {script: [output, error]}; then "tests": [output, exit status] of the files in the
folder TESTS, at the first address.  Both read HALLUTRACER_URL.  It runs in .venv-clients.  Without
TESTS ("") it needs no pytest."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import runpy
import ssl
import sys
import traceback
from pathlib import Path
from typing import Any

# Every client reads all certificates, as in tests/conftest.py: here, too, they are read once.
ssl.create_default_context = functools.cache(ssl.create_default_context)  # type: ignore[assignment]


def run(script: Path) -> tuple[str, str]:
    """What a script prints, and its traceback if it fails."""
    out, error = io.StringIO(), ""
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except BaseException:
            error = traceback.format_exc()
    return out.getvalue(), error


def test(folder: str) -> tuple[str, int]:
    """What pytest prints, and its exit status."""
    import pytest

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        options = [
            "-q",
            "-p",
            "no:cacheprovider",
            "-c",
            os.devnull,
            "--rootdir",
            folder,
            "--noconftest",
        ]
        status = pytest.main([*options, *map(str, sorted(Path(folder).glob("*.py")))])
    return out.getvalue(), int(status)


def main(scripts: str, tests: str, *urls: str) -> None:
    found: dict[str, Any] = {}
    for url in urls:
        os.environ["HALLUTRACER_URL"] = url
        found[url] = {script.name: run(script) for script in sorted(Path(scripts).glob("*.py"))}
    os.environ["HALLUTRACER_URL"] = urls[0]
    if tests:
        found["tests"] = test(tests)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
