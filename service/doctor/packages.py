"""Python and the packages: are they there, and in versions that this release works with?"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from ctypes.util import find_library
from importlib.metadata import PackageNotFoundError, requires, version

from service import __version__
from service.doctor.findings import Finding, fail, ok, warn

OURS = "hallutracer"


def check_packages() -> Iterator[Finding]:
    """Each requirement of the installed distribution, extras aside."""
    from packaging.requirements import Requirement

    yield ok("python", f"{sys.version.split()[0]}, {sys.executable}")
    try:
        wanted = [Requirement(text) for text in requires(OURS) or ()]
        installed = version(OURS)
    except PackageNotFoundError:
        yield warn("packages", "hallutracer runs from a checkout that is not installed", "pip install --editable .")
        return
    if installed != __version__:
        yield warn("packages", f"hallutracer {installed} is installed, and {__version__} runs", "pip install . again")
    wrong, count = [], 0
    for requirement in wanted:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        count += 1
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            wrong.append(fail("packages", f"{requirement.name} is missing", f"pip install '{requirement}'"))
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            cure = f"pip install '{requirement.name}{requirement.specifier}'"
            wrong.append(fail("packages", f"{requirement.name} {found}, wanted {requirement.specifier}", cure))
    yield from wrong
    if not wrong:
        yield ok("packages", f"hallutracer {__version__} and the {count} packages that it needs")


def check_engine(engine: str, ranks: int) -> Iterator[Finding]:
    """The engine that was asked for, and what vLLM loads by name."""
    if engine == "transformers":
        yield ok("engine", f"transformers {version('transformers')}, torch {version('torch')}")
        return
    from service.engines.vllm.launch import VERSION, check_installed

    check_installed()
    yield ok("engine", f"vLLM {VERSION}, torch {version('torch')}")
    if "+cpu" in version("torch") and find_library("numa") is None:
        yield fail("engine", "vLLM on a CPU loads libnuma.so.1, which is not here", "apt-get install libnuma1")
    if not any(map(shutil.which, ("g++", "gcc", "clang", "cc"))):
        yield fail("engine", "vLLM compiles at its first start, and there is no C++ compiler", "apt-get install g++")
    if ranks > 1:
        free = shutil.disk_usage("/dev/shm").free
        if free < 1 << 30:
            found = f"/dev/shm has {free / 2**20:.0f} MiB, and {ranks} processes meet there"
            yield warn("engine", found, "docker run --shm-size 8g, or an emptyDir of medium Memory")


def check_extras(postgres: bool) -> Iterator[Finding]:
    """Packages that one option alone needs."""
    if postgres and importlib.util.find_spec("psycopg") is None:
        yield fail("feedback", "PostgreSQL needs psycopg", "pip install 'hallutracer[postgres]'")
