"""The oldest and the newest transformers of the range pass the tests of what runs on it, without a
warning."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.parity import versions
from tests.serve_process import PATHS

ROOT = Path(__file__).parents[2]
# The embedded engine, ``hallutracer.load`` and training, whatever model they are given.
TESTS = (
    "tests/engines/transformers",
    "tests/engines/test_families.py",
    "tests/library",
    "tests/trainer/test_run.py",
)


def test_the_range_is_what_is_tested() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    [taken] = [
        requirement.specifier
        for requirement in map(Requirement, wanted)
        if requirement.name == "transformers"
    ]
    oldest, newest = map(Version, versions.TRANSFORMERS)
    assert taken == SpecifierSet(
        f">={oldest.major}.{oldest.minor},<{newest.major}.{newest.minor + 1}"
    )
    assert oldest <= Version(versions.PINS["transformers"]) <= newest
    ends = f"{oldest.major}.{oldest.minor} to {newest.major}.{newest.minor}"
    assert f"pip takes transformers {ends}," in (ROOT / "docs/install.md").read_text()


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize("version", versions.TRANSFORMERS)
def test_another_version_passes_the_tests_of_the_engine(version: str) -> None:
    """What transformers has deprecated, it names in a FutureWarning at each call: here that is an
    error."""
    packages = versions.packages_of(f"transformers-{version}")
    assert versions.not_met(packages) == []
    path = os.pathsep.join([str(packages), PATHS])
    environment = os.environ | {"PYTHONPATH": path, "TESTED_PACKAGES": str(packages)}
    asked = [sys.executable, "-c", "import transformers; print(transformers.__version__)"]
    ran = subprocess.run(
        asked, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == version
    tests = [
        sys.executable,
        "-m",
        "pytest",
        "--numprocesses",
        "0",
        "-W",
        "error::FutureWarning",
        *TESTS,
    ]
    done = subprocess.run(
        tests, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
