"""The three distributions as a release builds them, installed outside the checkout, and used."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cyclopts
import httpx
import pytest

from service import __version__
from tests.kit.packaging import ROOT
from tests.serve_process import CLIENT, ServeProcess, inherited

pytestmark = pytest.mark.long

# Distribution -> its folder, and the packages that it has.
PROJECTS = {
    "hallutracer": (ROOT, ("hallutracer", "hallutracer_start.py", "probes_store", "service")),
    "hallutracer_client": (CLIENT, ("hallutracer_client",)),
    "hallutracer_research": (ROOT / "research", ("hallutracer_research",)),
}
ITALY = "What is the capital of Italy?"
ENTRIES = """
from importlib.metadata import entry_points, version
for group in ("vllm.endpoint_plugins", "vllm.general_plugins"):
    [hook] = [one for one in entry_points(group=group) if one.dist.name == "hallutracer"]
    print(group, hook.value, hook.load().__module__)
print(*(version(name) for name in ("hallutracer", "hallutracer-client", "hallutracer-research")))
import hallutracer, hallutracer_client, hallutracer_start, probes_store, service
import hallutracer_research
modules = (hallutracer, hallutracer_client, hallutracer_start, probes_store, service)
print(*(module.__file__ for module in modules))
"""
ASK = """
import sys
from hallutracer_client import Client
with Client(sys.argv[1]) as client:
    print(client.bundles().data[0].name, client.score(prompt=sys.argv[2]).only.risk)
"""


@dataclass(frozen=True)
class Installed:
    """The built files, and an environment with the wheels; its dependencies are this
    environment's."""

    built: Path
    python: Path
    home: Path  # an empty folder

    def command(self, name: str) -> Path:
        return self.python.parent / name

    def run(self, *command: str | Path) -> str:
        """What a program prints that is started away from the checkout, without a variable of
        ours."""
        environment = inherited() | {"HOME": str(self.home)}
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(
            command, cwd=self.home, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("release")
    built, home, venv = folder / "dist", folder / "home", folder / "venv"
    home.mkdir()
    for name, (project, packages) in PROJECTS.items():
        (source := folder / "source" / name).mkdir(parents=True)
        for path in (
            *(project / package for package in packages),
            *(file for file in project.iterdir() if file.is_file()),
        ):
            if path.is_dir():
                shutil.copytree(path, source / path.name, ignore=shutil.ignore_patterns("*.pyc"))
            else:
                shutil.copy(path, source)
        if (project / "tests").exists():  # of which setuptools would put such files into the sdist
            (source / "tests").mkdir()
            (source / "tests" / "test_one.py").touch()
        # As make dist, without a fresh environment to build in: nothing is fetched.
        build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", built, source]
        done = subprocess.run(build, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (packages,) = (venv / "lib").glob("python3*/site-packages")
    (packages / "dependencies.pth").write_text(f"{Path(cyclopts.__file__).parents[1]}\n")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        venv / "bin" / "python",
        "install",
        "--quiet",
        "--no-deps",
    ]
    # Also where the borrowed folder, or PYTHONPATH, has the checkout itself in the same version.
    subprocess.run(
        [*pip, "--no-index", "--ignore-installed", *sorted(built.glob("*.whl"))], check=True
    )
    return Installed(built, venv / "bin" / "python", home)


@pytest.fixture(scope="module")
def served(installed: Installed) -> Iterator[ServeProcess]:
    with ServeProcess(
        "--model",
        "demo",
        program=[installed.command("hallutracer")],
        folder=installed.home,
        HOME=str(installed.home),
        PYTHONPATH="",
        HALLUTRACER_THREADS="1",
    ) as service:
        yield service


def files_of(project: Path, packages: tuple[str, ...]) -> set[str]:
    """Every file of the packages in the checkout, caches left out."""
    paths = [path for name in packages for path in ((project / name).rglob("*"), [project / name])]
    files = {path for group in paths for path in group if path.is_file() and path.suffix != ".pyc"}
    return {str(path.relative_to(project)) for path in files}


@pytest.mark.parametrize("name", PROJECTS)
def test_a_wheel_has_every_file_of_its_packages_and_no_other(
    installed: Installed, name: str
) -> None:
    project, packages = PROJECTS[name]
    [wheel] = installed.built.glob(f"{name}-*.whl")
    assert wheel.name == f"{name}-{__version__}-py3-none-any.whl"
    info = f"{name}-{__version__}.dist-info/"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"{info}METADATA").decode()
    assert {item for item in names if not item.startswith(info)} == files_of(project, packages)
    assert {f"{item}/py.typed" for item in packages if not item.endswith(".py")} <= names
    assert f"{info}licenses/LICENSE" in names
    assert "License-Expression: Apache-2.0" in metadata
    if name == "hallutracer":
        wanted = (
            "service/api/playground/index.html",
            "service/demo/assets/hallutracer-demo/model.safetensors",
            "probes_store/shipped/smollm2/1/probes.safetensors",
        )
        assert set(wanted) <= names
    if name == "hallutracer_research":
        assert f"Requires-Dist: hallutracer=={__version__}\n" in metadata


@pytest.mark.parametrize("name", PROJECTS)
def test_an_sdist_has_what_the_wheel_is_made_of_and_no_tests(
    installed: Installed, name: str
) -> None:
    with tarfile.open(installed.built / f"{name}-{__version__}.tar.gz") as archive:
        names = {item.name.partition("/")[2] for item in archive.getmembers() if item.isfile()}
    assert files_of(*PROJECTS[name]) | {"LICENSE", "README.md", "pyproject.toml"} <= names
    assert not [item for item in names if item.startswith("tests/") or "__pycache__" in item]


def test_commands_and_entry_points_are_those_of_the_wheels(installed: Installed) -> None:
    assert (
        installed.run(installed.command("hallutracer"), "--version")
        == f"hallutracer {__version__}\n"
    )
    assert "--url URL" in installed.run(installed.command("hallutracer-mcp"), "--help")
    assert "--suite" in installed.run(installed.command("hallutracer"), "evaluate", "--help")
    first, second, versions, places = installed.run(installed.python, "-c", ENTRIES).splitlines()
    assert first == "vllm.endpoint_plugins hallutracer_start:load_vllm hallutracer_start"
    assert second == "vllm.general_plugins hallutracer_start:check_vllm hallutracer_start"
    assert set(versions.split()) == {__version__}
    assert all(path.startswith(str(installed.python.parents[1])) for path in places.split())


def test_it_serves_the_demo_model_and_the_client_asks_it(
    installed: Installed, served: ServeProcess
) -> None:
    asked = {"prompt": ITALY, "generate": {"max_tokens": 8}}
    answer = httpx.post(f"{served.url}/v1/risk/score", json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    [row] = answer.json()["data"]
    assert 0 < row["risk"] < 1
    assert "Rome" in row["completion"]["text"]
    page = httpx.get(served.url)
    assert page.headers["content-type"].startswith("text/html")
    for path in re.findall(r'(?:src|href)="(/?playground/[^"]+)"', page.text):
        assert httpx.get(f"{served.url}/{path.lstrip('/')}").status_code == 200, path
    assert httpx.get(f"{served.url}/docs/swagger-ui-bundle.js").status_code == 200
    assert httpx.get(f"{served.url}/openapi.json").json()["info"]["version"] == __version__
    name, risk = installed.run(installed.python, "-c", ASK, served.url, ITALY).split()
    assert name == "demo"
    assert float(risk) == pytest.approx(row["risk"], abs=1e-6)
    listed = json.loads(installed.run(installed.command("hallutracer"), "bundle", "list", "--json"))
    assert "smollm2" in json.dumps(listed)
