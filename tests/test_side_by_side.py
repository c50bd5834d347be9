"""The server's package in one environment with an app that has a package named ``service``, as a
wheel and editable."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import cyclopts
import pytest

from tests.serve_process import ROOT, inherited

DEPENDENCIES = Path(cyclopts.__file__).parents[
    1
]  # this environment's: only the package is installed anew
HOOKS = """
from importlib.metadata import entry_points
for group in ("vllm.general_plugins", "vllm.endpoint_plugins"):
    hooks = entry_points(group=group)
    hook = next(hook for hook in hooks if hook.value.startswith("hallutracer_start:"))
    try:
        print(group, hook.load()())
    except SystemExit as error:
        print(group, "ends:", error)
import service
print(service.OWNER)
"""
CHILDREN = """
import multiprocessing
from importlib.util import find_spec

if __name__ == "__main__":
    import hallutracer_start
    hallutracer_start.ours_first()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(find_spec, ["service"]).origin)
"""
VERSION = "import hallutracer; print(hallutracer.__version__)"


class Side:
    """An environment with the package in it, and the folder of an app."""

    def __init__(self, folder: Path, form: str) -> None:
        self.app, venv, source = folder / "app", folder / "venv", folder / "checkout"
        self.python, self.command = venv / "bin" / "python", venv / "bin" / "hallutracer"
        source.mkdir()
        for name in ("pyproject.toml", "README.md", "LICENSE", "hallutracer_start.py"):
            shutil.copy(ROOT / name, source)
        for name in ("hallutracer", "service", "probes_store"):
            shutil.copytree(
                ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
        (packages,) = (venv / "lib").glob("python3*/site-packages")
        (packages / "dependencies.pth").write_text(f"{DEPENDENCIES}\n")
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(self.python),
            "install",
            "--quiet",
            "--no-deps",
        ]
        kind = ["--editable"] if form == "editable" else []
        done = subprocess.run(
            [*pip, "--no-build-isolation", *kind, source], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        self.home = source if form == "editable" else packages
        (self.app / "service").mkdir(parents=True)
        (self.app / "service" / "__init__.py").write_text("OWNER = 'the app'\n")
        (self.app / "main.py").write_text(
            "import service\nimport service.model\nprint(service.OWNER)\n"
        )
        (self.app / "service" / "model.py").touch()

    def run(self, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """In the app's folder, by its Python where no program is given, without variables of ours
        or of this run."""
        environment = (
            inherited() | {"HALLUTRACER_STORE": str(self.app)} | variables
        )  # which holds no bundle
        if "PYTHONPATH" not in variables:
            environment.pop("PYTHONPATH", None)
        command = command if isinstance(command[0], Path) else (self.python, *command)
        return subprocess.run(
            command, cwd=self.app, env=environment, capture_output=True, text=True, timeout=120
        )


@pytest.fixture(scope="module", params=["wheel", "editable"])
def side(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Side:
    return Side(tmp_path_factory.mktemp(request.param), request.param)


def test_the_app_keeps_its_own(side: Side) -> None:
    ours = "import hallutracer_start, probes_store, service; print(service.OWNER)"
    for command in (("main.py",), ("-c", ours)):
        done = side.run(*command)
        assert (done.returncode, done.stdout) == (0, "the app\n"), done.stderr


def test_the_command_finds_ours(side: Side) -> None:
    for given in ("", ".", str(side.app)):
        done = side.run(side.command, "--version", PYTHONPATH=given)
        assert done.stdout.startswith("hallutracer "), done.stderr
    done = side.run("-m", "hallutracer_start", "bundle", "list", "--json", PYTHONPATH=str(side.app))
    assert "demo-fused" in done.stdout, done.stderr


def test_processes_that_it_starts_find_ours_too(side: Side) -> None:
    (side.app / "children.py").write_text(CHILDREN)
    done = side.run("children.py", PYTHONPATH=str(side.app))
    assert done.stdout.strip() == str(side.home / "service" / "__init__.py"), done.stderr


WHEEL = pytest.mark.parametrize(
    "side", ["wheel"], indirect=True
)  # where the other form cannot differ


@WHEEL
def test_what_vllm_loads_leaves_an_app_alone_and_never_fails_open(side: Side) -> None:
    done = side.run("-c", HOOKS, HALLUTRACER_POLICY="observe")
    general, endpoint, owner = done.stdout.splitlines()
    assert (general, owner) == ("vllm.general_plugins None", "the app"), done.stderr
    bundle = side.run(
        "-c", HOOKS, HALLUTRACER_BUNDLE="demo", HALLUTRACER_POLICY="observe"
    ).stdout.splitlines()
    gate = side.run("-c", HOOKS, HALLUTRACER_POLICY="gate").stdout.splitlines()
    for said in (endpoint, *bundle[:2], *gate[:2]):
        for words in (
            "ends: hallutracer:",
            f"leads to {side.app / 'service'}",
            "environment of its own",
        ):
            assert words in said


def test_the_python_api_names_it_also_where_another_one_is_imported_already(side: Side) -> None:
    done = side.run("-c", "import hallutracer")
    assert f"ImportError: 'import service' leads to {side.app / 'service'}" in done.stderr
    there = side.run("-c", VERSION, PYTHONPATH=str(side.home))
    assert (done.returncode, there.returncode) == (
        1,
        1,
    )  # the folder that Python was started in still comes first
    elsewhere = side.run("-P", "-c", VERSION)
    assert (elsewhere.returncode, bool(elsewhere.stdout.strip())) == (0, True), elsewhere.stderr
    done = side.run("-c", "import service, hallutracer_start; hallutracer_start.main()")
    assert done.returncode == 1
    assert (
        f"leads to {side.app / 'service'}, not to HalluTracer's package in {side.home}"
        in done.stderr
    )
    assert "Traceback" not in done.stderr


@WHEEL
def test_a_package_installed_over_ours_is_named(side: Side) -> None:
    init = side.home / "service" / "__init__.py"
    kept = init.read_text()
    init.write_text("OWNER = 'another distribution'\n")
    try:
        done = side.run(side.command, "--version")
    finally:
        init.write_text(kept)
        os.utime(init)
    assert done.returncode == 1
    assert f"{init.parent} is not HalluTracer's any more" in done.stderr
    assert side.run(side.command, "--version").stdout.startswith("hallutracer ")
