"""deploy/walk: the scripts lint and refuse what they cannot do.  The walk takes minutes, see deploy/walk/walk.log."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.prometheus_server import ROOT

BIN = Path(sys.executable).parent
WALK = ROOT / "deploy" / "walk"
SCRIPTS = [ROOT / ".ci" / "run", *sorted((ROOT / "deploy").rglob("*.sh"))]


def shellcheck(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BIN / "shellcheck", path], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_lint(script: Path) -> None:
    done = shellcheck(script)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("fault", ["rm -rf $1/*", "for x in y; do echo", "cd /tmp; ls"])
def test_shellcheck_sees_a_fault(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "walk.sh"
    path.write_text((WALK / "walk.sh").read_text().replace("set -euo pipefail\n", f"{fault}\n", 1))
    done = shellcheck(path)
    assert done.returncode != 0
    assert "SC" in done.stdout


def walk(script: str, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script of the walk, with this checkout's hallutracer; no variable of ours is inherited."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HALLUTRACER_", "AWS_"))}
    command = ["bash", str(WALK / script), *map(str, arguments)]
    return subprocess.run(command, env=kept | variables, capture_output=True, text=True, check=False)


def test_a_program_that_is_missing_is_named(tmp_path: Path) -> None:
    for name in ("bash", "dirname", "ls", "mkdir"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    done = walk("walk.sh", tmp_path / "walk", PATH=str(tmp_path), HOME=str(tmp_path))
    assert done.returncode == 1
    assert "FAILED: hallutracer is missing" in done.stdout


def test_a_folder_that_has_something_else_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    done = walk("walk.sh", tmp_path)
    assert done.returncode == 1
    assert "has something else in it" in done.stdout
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("arguments", [["--keep"], ["--kep", "x"], ["--keep", "x", "y"]])
def test_a_wrong_option_starts_nothing(arguments: list[str]) -> None:
    done = walk("in_clean_root.sh", *arguments)
    assert done.returncode == 2
    assert "--keep FOLDER" in done.stdout + done.stderr
