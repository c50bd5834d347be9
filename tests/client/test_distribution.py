"""hallutracer-client in a fresh environment: small, without our server, beside an app with a
``service`` of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import hallutracer_client
from service import __version__
from tests.kit.pages import blocks
from tests.serve_process import CLIENT, ROOT, ServeProcess, inherited

PROJECT = tomllib.loads((CLIENT / "pyproject.toml").read_text())["project"]


def test_it_requires_two_libraries_and_the_server_not_it() -> None:
    names = [re.split(r"[<>=]", line)[0] for line in PROJECT["dependencies"]]
    assert (names, PROJECT["requires-python"]) == (["httpx", "pydantic"], ">=3.10")
    assert set(PROJECT["optional-dependencies"]) == {"langchain", "llamaindex", "haystack", "mcp"}
    assert PROJECT["scripts"] == {"hallutracer-mcp": "hallutracer_client.mcp:main"}
    server = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not any(line.startswith("hallutracer-client") for line in server["dependencies"])
    for folder in (CLIENT, ROOT / "research"):  # each is built from its own folder alone
        assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert hallutracer_client.__version__ == __version__


def pythons() -> list[str]:
    """This Python, and 3.10 where there is one."""
    results = [sys.executable]
    for path in os.environ["PATH"].split(os.pathsep):
        other = shutil.which("python3.10", path=path)
        if other and subprocess.run([other, "--version"], capture_output=True).returncode == 0:
            return [*results, other]
    return results


def clean() -> dict[str, str]:
    """The environment without this checkout on its path, where pip would find the client as
    installed already."""
    return {name: value for name, value in inherited().items() if name != "PYTHONPATH"}


class Fresh:
    """A fresh environment with our client's wheel and what it requires, and an app's folder."""

    def __init__(self, folder: Path, python: str) -> None:
        source, self.app = folder / "source", folder / "app"
        shutil.copytree(
            CLIENT, source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
        )
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        wheel = [
            *pip,
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--wheel-dir",
            folder,
            source,
        ]
        subprocess.run(wheel, check=True, capture_output=True)
        subprocess.run([python, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        self.python = folder / "venv" / "bin" / "python"
        (built,) = folder.glob("*.whl")
        install = [*pip, "--python", self.python, "install", "--quiet", "--retries", "1", built]
        done = subprocess.run(install, env=clean(), capture_output=True, text=True)
        if done.returncode != 0:
            strict = os.environ.get("HALLUTRACER_REQUIRE_CLIENTS") == "1"
            (pytest.fail if strict else pytest.skip)(
                f"httpx and pydantic could not be fetched: {done.stderr[-500:]}"
            )
        (self.packages,) = (folder / "venv" / "lib").glob("python3*/site-packages")
        (self.app / "service").mkdir(parents=True)
        (self.app / "service" / "__init__.py").write_text("OWNER = 'the app'\n")

    def run(self, code: str) -> str:
        """What ``code`` prints as a program in the app's folder."""
        (self.app / "main.py").write_text(code)
        done = subprocess.run(
            [self.python, "main.py"], cwd=self.app, env=clean(), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(params=pythons(), ids=lambda python: Path(python).name)
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Fresh:
    return Fresh(tmp_path, request.param)


def test_it_is_small_brings_no_server_and_runs_beside_an_apps_own_service(
    fresh: Fresh, demo_service: ServeProcess
) -> None:
    size = sum(path.stat().st_size for path in fresh.packages.rglob("*") if path.is_file())
    assert size < 30e6, f"{size / 1e6:.1f} MB"
    tops = {path.name for path in fresh.packages.iterdir()}
    assert tops.isdisjoint({"service", "probes_store", "torch", "numpy", "tests"})
    assert (fresh.packages / "hallutracer_client" / "py.typed").is_file()
    assert not (fresh.python.parent / "hallutracer").exists()
    (metadata,) = fresh.packages.glob("hallutracer_client-*.dist-info")
    assert next(metadata.rglob("LICENSE")).is_file()
    assert "License-Expression: Apache-2.0" in (metadata / "METADATA").read_text()

    (example,) = [block for block in blocks(CLIENT / "README.md") if block.language == "python"]
    code = example.text.replace("http://127.0.0.1:8765", demo_service.url)
    lines = fresh.run(
        f"import service\n{code}\nprint(service.OWNER)\n"
        + f"""
import asyncio
from hallutracer_client import AsyncClient, Generate

async def main() -> None:
    async with AsyncClient({demo_service.url!r}) as client:
        generate = Generate(max_tokens=16)
        prompt = "What is the capital of Italy?"
        async with client.stream(prompt=prompt, generate=generate) as answer:
            print("".join([piece async for piece in answer]))

asyncio.run(main())
"""
    ).splitlines()
    assert re.fullmatch(r"0\.90\d* abstain", lines[0])
    assert lines[1:] == [" It is Beijing.", "the app", " It is Rome."]
