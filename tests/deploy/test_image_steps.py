"""What the image would run, run without a container engine: install steps, health checks, environment, entry points."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import cyclopts
import pytest
from packaging.requirements import Requirement

from service.cli.main import make_app
from service.cli.running import known_hosts
from service.options import Sources
from service.policies.policy import read_policies
from service.settings import ServiceSettings
from tests.deploy import packaging as p
from tests.local_server import answer, listening
from tests.running import App
from tests.serve_process import PATHS

HEALTH = json.loads(next(s.text for s in p.dockerfile() if s.verb == "HEALTHCHECK").split("CMD ", 1)[1])
RAG = p.compose()["services"]["rag"]
GUARD, RAG_POD = p.containers(p.pods(p.documents(p.ROOT / "deploy/sidecar/sidecar.yaml"))[0])
CHECKS: dict[str, list[str]] = {
    "image": HEALTH,
    "compose rag": RAG["healthcheck"]["test"][1:],
    **{f"guard {name}": GUARD[name]["exec"]["command"] for name in ("startupProbe", "readinessProbe", "livenessProbe")},
}


def install(tmp_path: Path, edit: tuple[str, str] | None = None) -> Path:
    """The stage ``app`` of the Dockerfile, its own commands with other folders; returns the folder of the package."""
    build = tmp_path / "build"
    build.mkdir()
    steps = [step for step in p.dockerfile() if step.stage in ("venv", "app")]
    for source in (word for step in steps if step.verb == "COPY" for word in step.text.split()[:-1]):
        path = p.ROOT / source
        if path.is_dir():
            shutil.copytree(path, build / source, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        else:
            shutil.copy(path, build / source)
    if edit is not None:
        text = (build / "pyproject.toml").read_text()
        assert edit[0] in text
        (build / "pyproject.toml").write_text(text.replace(*edit))
    for step in steps:
        if step.verb != "RUN" or "setuptools==" in step.text:  # the one download; its pin has a test of its own
            continue
        command = re.sub(r"/(opt/venv|opt/app|wheels)\b", lambda match: f"{tmp_path}/{match[1]}", step.text)
        command = re.sub(r"(?<![\w/-])pip (?=wheel|--python)", f"{sys.executable} -m pip ", command)
        command = re.sub(r"^python ", f"{sys.executable} ", command)
        done = subprocess.run(["sh", "-ec", command], cwd=build, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return tmp_path / "opt/app"


def data_files(root: Path) -> set[str]:
    """The files that are no code but must be in the package: demo model, its facts, shipped bundles, type markers."""
    patterns = ("service/demo/assets/**/*", "probes_store/shipped/**/*", "*/py.typed")
    return {str(path.relative_to(root)) for pattern in patterns for path in root.glob(pattern) if path.is_file()}


@pytest.mark.long
def test_the_install_steps_give_a_working_command(tmp_path: Path) -> None:
    package = install(tmp_path)
    assert data_files(package) == data_files(p.ROOT) | {"hallutracer_client/py.typed"}
    assert {"service/py.typed", "probes_store/py.typed"} <= data_files(package)
    installed = {path.name for path in package.iterdir()}
    assert installed >= {
        "hallutracer", "service", "probes_store", "hallutracer_start.py", "hallutracer_client", "bin"
    }  # fmt: skip
    assert not (package / "tests").exists()
    command = package / "bin" / "hallutracer"
    assert command.read_text().startswith(f"#!{tmp_path}/opt/venv/bin/python")
    # The dependencies are this environment's; the package comes first on the path, as in the image.
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{package}:{Path(cyclopts.__file__).parents[1]}",
        "HALLUTRACER_STORE": str(tmp_path / "empty"),
    }
    listed = subprocess.run([command, "bundle", "list", "--json"], env=environment, cwd="/", capture_output=True)
    assert listed.returncode == 0, listed.stderr
    assert b"demo-fused" in listed.stdout
    where = [f"{tmp_path}/opt/venv/bin/python", "-c", "import service; print(service.__file__)"]
    found = subprocess.run(where, env=environment, cwd="/", capture_output=True, check=True)
    assert found.stdout.decode().startswith(str(package))


@pytest.mark.long
def test_package_data_that_is_not_declared_is_missed(tmp_path: Path) -> None:
    package = install(tmp_path, edit=('"demo/assets/**/*"', '"no-such-file"'))
    assert "service/demo/assets/hallutracer-demo/model.safetensors" in data_files(p.ROOT) - data_files(package)


def test_the_pinned_build_backend_is_one_that_the_project_accepts() -> None:
    [pin] = re.findall(r"setuptools==([\d.]+)", (p.ROOT / "Dockerfile").read_text())
    [wanted] = tomllib.loads((p.ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert Requirement(wanted).specifier.contains(pin)


@contextmanager
def answering(status: int, body: bytes = b'{"status":"ok","guard":true}') -> Iterator[tuple[int, list[str]]]:
    """A server that gives one answer to everything; its port and the paths it was asked for."""
    asked: list[str] = []

    def say(request: BaseHTTPRequestHandler, _: bytes) -> None:
        asked.append(request.path)
        answer(request, status, body if status == 200 else b'{"error":{}}')

    with listening(say) as address:
        yield int(address.rpartition(":")[2]), asked


def run_check(command: list[str], port: int) -> int:
    """The check's exit status with our Python, against ``port``; a proxy in the environment must not matter."""
    arguments = [sys.executable if word == "python" else re.sub(r"(?<=', )\d{4}", str(port), word) for word in command]
    environment = os.environ | {"HALLUTRACER_PORT": str(port), "HTTP_PROXY": "http://127.0.0.1:9", "no_proxy": ""}
    return subprocess.run(arguments, env=environment, capture_output=True, check=False).returncode


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False), (404, False)])
def test_a_health_check_tells_ready_from_not(name: str, status: int, healthy: bool) -> None:
    with answering(status) as (port, asked):
        assert (run_check(CHECKS[name], port) == 0) == healthy
    route = "/health/live" if "liveness" in name else "/health" if "rag" in name else "/health/ready"
    assert asked == [route]


def test_the_rag_app_is_not_healthy_without_its_guard() -> None:
    for guard, healthy in ((True, True), (False, False)):
        said = json.dumps({"status": "ok", "guard": guard}).encode()
        with answering(200, said) as (port, _):
            assert (run_check(CHECKS["compose rag"], port) == 0) == healthy


def test_nobody_listening_is_not_healthy() -> None:
    with answering(200) as (port, _):
        pass
    assert all(run_check(command, port) != 0 for command in CHECKS.values())


def environments() -> dict[str, dict[str, str]]:
    """The variables of every service that runs ``hallutracer serve``, on top of the image's."""
    services = p.compose()["services"]
    names = [name for name in services if name.startswith("hallutracer") or name == "guard"]
    found = {n: p.environment(services[n]["build"]["target"]) | services[n]["environment"] for n in names}
    found["sidecar guard"] = p.environment("cpu") | p.variables(GUARD)
    return found


ENVIRONMENTS = environments()


def parsed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str]) -> dict[str, Any]:
    """``serve``'s options as its own parser reads them; a path inside the image stands for an empty file here."""
    for name in [name for name in os.environ if name.startswith("HALLUTRACER_")]:
        monkeypatch.delenv(name)
    here = tmp_path / "file"
    here.touch()
    for name, value in variables.items():
        if name.startswith("HALLUTRACER_"):
            monkeypatch.setenv(name, str(here) if value.startswith(("/etc/", "/run/")) else value)
    sources = Sources()
    make_app(sources).parse_args(["serve"], exit_on_error=False, print_error=False)
    return sources.values()


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_serve_takes_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    options = parsed(monkeypatch, tmp_path, ENVIRONMENTS[name])
    assert options["port"] == 8765
    assert options["host"] == ("127.0.0.1" if "guard" in name else "0.0.0.0")
    assert options["store"] == "/var/lib/hallutracer/probes"
    assert options["drain_s"] == 30
    keyed = not name.startswith("hallutracer")
    assert options.get("engine", "transformers") == ("vllm" if "vllm" in name else "transformers")
    assert (options["api_key_file"] is not None) == keyed
    if name in ("hallutracer-gpu", "hallutracer-vllm"):  # nothing set in .env: the demo model, on the GPU
        assert options["model"] is None
        assert not options["bundle"]


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_who_is_answered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """Probes and scrapes by address, callers by the Service's name, the health check; and no page of a foreign site."""
    options = parsed(monkeypatch, tmp_path, ENVIRONMENTS[name])
    settings = ServiceSettings(host=options["host"], allowed_hosts=options["allowed_host"])
    service = "localhost" if "guard" in name else name if name.startswith("hallutracer") else "hallutracer"
    with App(tmp_path, names=["tiny"], allowed_hosts=known_hosts(settings, keyed=True)).started() as app:
        for host in ("127.0.0.1", "localhost", "10.1.2.3", "[fd00::7]", service):
            for asked in (host, f"{host}:8765"):
                assert app.client.get("/metrics", headers={"host": asked}).status_code == 200, asked
        for host in ("evil.example", "evil.example:8765", "hallutracer.evil.example"):
            for path in ("/metrics", "/health/ready"):
                assert app.client.get(path, headers={"host": host}).status_code == 421, host


def test_what_service_links_would_have_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(cyclopts.CoercionError, match="HALLUTRACER_PORT.* int"):
        parsed(monkeypatch, tmp_path, {"HALLUTRACER_PORT": "tcp://10.0.0.7:8765"})


def test_the_rag_app_is_started_alike_and_reads_what_it_is_given() -> None:
    assert RAG["entrypoint"] == RAG_POD["command"]
    source = (p.ROOT / "deploy/sidecar/rag_app.py").read_text()
    given = set(RAG["environment"]) | set(p.variables(RAG_POD))
    assert given == {name for name in given if f'environ.get("{name}"' in source}
    imported = subprocess.run(
        [sys.executable, "-c", "import sys, uvicorn; uvicorn.Config(sys.argv[1]).load()", RAG["entrypoint"][1]],
        cwd=p.ROOT / "deploy/sidecar", env=os.environ | {"PYTHONPATH": f"{PATHS}:."}, capture_output=True, text=True,
    )  # fmt: skip
    assert imported.returncode == 0, imported.stderr
    routes = re.findall(r'@app\.get\("([^"]+)"\)', source)
    assert RAG_POD["readinessProbe"]["httpGet"]["path"] in routes
    assert any(f"'{route}'" in RAG["healthcheck"]["test"][-1] for route in routes)


def test_the_shipped_policies_are_policies(tmp_path: Path) -> None:
    [values] = p.documents(p.ROOT / "deploy/helm/hallutracer/values.yaml")
    (path := tmp_path / "policies.toml").write_text(values["policies"])
    assert {"support", "strict"} <= set(read_policies(path).named)
