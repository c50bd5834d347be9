"""The packaging files agree with the command line and with what the image runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import cyclopts
import kubernetes_validate
import pytest

from service import __version__
from service.cli.running import known_hosts
from service.engines.vllm.launch import WORKER
from service.policies.policy import read_policies
from service.settings import NO_OPTIONS, PREFIX, ServiceSettings
from tests.command_line import ended
from tests.kit import packaging as p
from tests.kit.local_server import answer, listening
from tests.running import App
from tests.serve_process import PATHS

KUBERNETES = ("1.29", "1.37")  # native sidecars came on by default in 1.29
MANIFESTS = [
    p.ROOT / "deploy/sidecar/sidecar.yaml",
    p.ROOT / "deploy/helm/copy-bundle.example.yaml",
]
PINNED = r"[\w.-]+==[^\s;]+( ; [^;]+?)?( +--hash=sha256:[0-9a-f]{64})+ *"
TORCH = (
    "--no-deps --index-url https://download.pytorch.org/whl/cpu --constraint constraints.txt torch"
)
TEXTS = [p.ROOT / name for name in ("Dockerfile", "docker-compose.yml", ".env.example")]
TEXTS += [
    path
    for path in (p.ROOT / "deploy").rglob("*")
    if path.suffix in (".md", ".yaml") and "templates" not in path.parts
]
SERVICES = p.compose()["services"]
WALK = p.ROOT / "deploy" / "walk"
HEALTH = json.loads(
    next(s.text for s in p.dockerfile() if s.verb == "HEALTHCHECK").split("CMD ", 1)[1]
)
RAG = SERVICES["rag"]
GUARD, RAG_POD = p.containers(p.pods(p.documents(MANIFESTS[0]))[0])
CHECKS: dict[str, list[str]] = {
    "image": HEALTH,
    "compose rag": RAG["healthcheck"]["test"][1:],
    **{
        f"guard {name}": GUARD[name]["exec"]["command"]
        for name in ("startupProbe", "readinessProbe", "livenessProbe")
    },
}


def schema_errors(documents: list[p.Document], version: str) -> list[str]:
    """What Kubernetes' own schemas say, unknown fields included."""
    errors = []
    for document in documents:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            errors.append(f"{document['kind']} {error.path}: {error.message}")
    return errors


@pytest.mark.parametrize("version", KUBERNETES)
def test_manifests_fit_kubernetes_schemas(version: str) -> None:
    assert [schema_errors(p.documents(path), version) for path in MANIFESTS] == [[], []]
    wrong = MANIFESTS[0].read_text().replace("enableServiceLinks:", "enableServiceLink:")
    assert schema_errors(p.load_all(wrong), version)


def test_recipes_for_platforms_name_the_worker_and_the_variables() -> None:
    """KServe's own resources and the stack's chart are not here: deploy/platforms/README.md says
    what was checked."""
    recipes = sorted((p.ROOT / "deploy/platforms").glob("*.yaml"))
    assert [path.stem for path in recipes] == ["kserve", "production-stack", "ray-serve"]
    for path in recipes:
        for text in re.split(r"^---$", path.read_text(), flags=re.MULTILINE):
            engine = "kind: InferenceService" not in text  # it has its runtime's
            assert (WORKER in text) == engine
            assert all(
                (f"{PREFIX}{name}" in text) == engine for name in ("BUNDLE", "POLICY", "STORE")
            )
    runtime, _, llm = p.documents(recipes[0])
    for spec in (
        {name: runtime["spec"][name] for name in ("containers", "volumes")},
        llm["spec"]["template"],
    ):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": spec}
        assert [schema_errors([pod], version) for version in KUBERNETES] == [[], []]


def installs() -> Iterator[tuple[list[str], list[str]]]:
    """The words of each pip install of the Dockerfile, and the entries of the lists that it
    reads."""
    for step in p.dockerfile():
        made = {name: f"{line}\n" for line, name in re.findall(r'echo "([^"]+)" >(\S+)', step.text)}
        for arguments in re.findall(r"\bpip (?:--python \S+ )?install ([^&]+)", step.text):
            words = arguments.split()
            files = [
                file
                for flag, file in zip(words, words[1:], strict=False)
                if flag == "--requirement"
            ]
            text = "".join(
                made[file] if file in made else (p.ROOT / file).read_text() for file in files
            )
            yield words, re.sub(r"^#.*|\\\n", "", text, flags=re.MULTILINE).strip().splitlines()


def test_pip_installs_from_lists_whose_every_entry_has_a_hash() -> None:
    """All but torch's CPU build, which PyPI does not have, and our own wheels, built a line
    before."""
    listed = [
        (words, entries)
        for words, entries in installs()
        if words != TORCH.split() and "--no-index" not in words
    ]
    assert listed
    for words, entries in listed:
        assert "--require-hashes" in words
        names = {
            file for flag, file in zip(words, words[1:], strict=False) if flag == "--requirement"
        }
        assert set(words) <= {"--no-deps", "--require-hashes", "--requirement"} | names, words
        assert entries
        assert [entry for entry in entries if not re.fullmatch(PINNED, entry)] == []


def test_each_variable_and_each_flag_of_a_typed_command_exists() -> None:
    known = {
        variable for command in p.flags().values() for variable in command.values()
    } | NO_OPTIONS
    for text in (path.read_text() for path in TEXTS):
        assert set(re.findall(rf"\b{PREFIX}[A-Z0-9_]+\b", text)) <= known | {
            f"{PREFIX}URL"
        }  # the RAG app's own
        for typed in re.findall(
            r"\bhallutracer(?:-gpu)? ((?:serve|score|train|bundle|demo|data)\b[^\n|&;`#]*)", text
        ):
            command = max((name for name in p.flags() if name and typed.startswith(name)), key=len)
            assert set(re.findall(r"(?<=\s)--[a-z][a-z-]*", typed)) - {"--help"} <= set(
                p.flags()[command]
            ), typed
        for file in re.findall(r"(?: -f |--values |--from-file=)(?:[\w-]+=)?(deploy/\S+)", text):
            assert (p.ROOT / file).exists(), file


def test_one_version_one_port_and_a_longer_stop_than_the_drain() -> None:
    for path in (p.ROOT / "Dockerfile", p.ROOT / "docker-compose.yml", MANIFESTS[0]):
        tags = re.findall(r"(?:hallutracer:|ARG VERSION=)(\d[\w.]*)(?:-cuda)?", path.read_text())
        assert set(tags) == {__version__}, path
    port = str(ServiceSettings().port)
    assert [step.text for step in p.dockerfile() if step.verb == "EXPOSE"] == [port]
    assert p.environment()["HALLUTRACER_PORT"] == port
    scraped = p.documents(p.ROOT / "deploy/prometheus/prometheus.yml")[0]["scrape_configs"]
    configs = [config for job in scraped for config in job["static_configs"]]
    targets = [target for config in configs for target in config["targets"]]
    assert f"hallutracer:{port}" in targets
    assert {target.partition(":")[0] for target in targets} - {"localhost"} <= set(SERVICES)
    readme = (p.ROOT / "deploy/README.md").read_text()
    lines = re.findall(r"^docker run .*-p .*$", readme, re.MULTILINE)
    assert lines
    for line in lines:
        assert float(re.findall(r"--stop-timeout (\d+)", line)[0]) > ServiceSettings().drain_s


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_of_compose_is_hardened_on_loopback_and_drains(name: str) -> None:
    service = SERVICES[name]
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert "no-new-privileges:true" in service["security_opt"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    assert not re.fullmatch(r"[\w./-]+(:latest)?", service["image"])
    if service["image"].startswith("hallutracer:"):
        assert service["pull_policy"] == "build"  # no registry has it
        target = service["build"]["target"]
        assert service["image"].partition("-")[2] == target.replace("cpu", "", target == "cpu")
        if p.environment(target).get("HALLUTRACER_ENGINE") == "vllm":
            # vLLM loads from there what it compiles.
            assert str(service["tmpfs"]).startswith("['/tmp:exec")
    if shared := service.get("network_mode", "").removeprefix("service:"):
        assert service["depends_on"][shared]["restart"]
    if name.startswith("hallutracer"):
        environment = service["environment"]
        assert service["ports"][0].endswith(":8765")
        grace = float(service["stop_grace_period"].rstrip("s"))
        assert grace > float(environment["HALLUTRACER_DRAIN_S"])
        assert set(environment["HALLUTRACER_ALLOWED_HOST"].split()) == {"localhost", name}


# --- what the image would run ---


def install(tmp_path: Path) -> Path:
    """The stage ``app`` of the Dockerfile, its own commands with other folders; returns the folder
    of the package."""
    build = tmp_path / "build"
    build.mkdir()
    steps = [step for step in p.dockerfile() if step.stage in ("venv", "app")]
    for source in (
        word for step in steps if step.verb == "COPY" for word in step.text.split()[:-1]
    ):
        path = p.ROOT / source
        if path.is_dir():
            shutil.copytree(
                path, build / source, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
            )
        else:
            shutil.copy(path, build / source)
    for step in steps:
        if (
            step.verb != "RUN" or "setuptools==" in step.text
        ):  # the one download; its pin has a test of its own
            continue
        command = re.sub(
            r"/(opt/venv|opt/app|wheels)\b", lambda match: f"{tmp_path}/{match[1]}", step.text
        )
        command = re.sub(r"(?<![\w/-])pip (?=wheel|--python)", f"{sys.executable} -m pip ", command)
        command = re.sub(r"^python ", f"{sys.executable} ", command)
        done = subprocess.run(
            ["sh", "-ec", command], cwd=build, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    return tmp_path / "opt/app"


def data_files(root: Path) -> set[str]:
    """The files that are no code but must be in the package: demo model, its facts, shipped
    bundles, type markers."""
    patterns = ("service/demo/assets/**/*", "probes_store/shipped/**/*", "*/py.typed")
    return {
        str(path.relative_to(root))
        for pattern in patterns
        for path in root.glob(pattern)
        if path.is_file()
    }


@pytest.mark.long
def test_the_install_steps_give_a_working_command(tmp_path: Path) -> None:
    package = install(tmp_path)
    assert data_files(package) == data_files(p.ROOT) | {"hallutracer_client/py.typed"}
    packages = {"hallutracer", "service", "probes_store", "hallutracer_client"}
    installed = {path.name for path in package.iterdir()}
    assert installed >= packages | {"hallutracer_start.py", "bin"}
    assert not (package / "tests").exists()
    command = package / "bin" / "hallutracer"
    assert command.read_text().startswith(f"#!{tmp_path}/opt/venv/bin/python")
    # The dependencies are this environment's; the package comes first on the path, as in the image.
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{package}:{Path(cyclopts.__file__).parents[1]}",
        "HALLUTRACER_STORE": str(tmp_path / "empty"),
    }
    listed = subprocess.run(
        [command, "bundle", "list", "--json"], env=environment, cwd="/", capture_output=True
    )
    assert listed.returncode == 0, listed.stderr
    assert b"demo-fused" in listed.stdout
    where = [f"{tmp_path}/opt/venv/bin/python", "-c", "import service; print(service.__file__)"]
    imported = subprocess.run(where, env=environment, cwd="/", capture_output=True, check=True)
    assert imported.stdout.decode().startswith(str(package))


@contextmanager
def answering(
    status: int, body: bytes = b'{"status":"ok","guard":true}'
) -> Iterator[tuple[int, list[str]]]:
    """A server that gives one answer to everything; its port and the paths it was asked for."""
    asked: list[str] = []

    def say(request: BaseHTTPRequestHandler, _: bytes) -> None:
        asked.append(request.path)
        answer(request, status, body if status == 200 else b'{"error":{}}')

    with listening(say) as address:
        yield int(address.rpartition(":")[2]), asked


def run_check(command: list[str], port: int) -> int:
    """The check's exit status with our Python, against ``port``; a proxy in the environment must
    not matter."""
    arguments = [
        sys.executable if word == "python" else re.sub(r"(?<=', )\d{4}", str(port), word)
        for word in command
    ]
    environment = os.environ | {
        "HALLUTRACER_PORT": str(port),
        "HTTP_PROXY": "http://127.0.0.1:9",
        "no_proxy": "",
    }
    return subprocess.run(arguments, env=environment, capture_output=True, check=False).returncode


@pytest.mark.parametrize("name", CHECKS)
def test_a_health_check_tells_ready_from_not(name: str) -> None:
    route = (
        "/health/live" if "liveness" in name else "/health" if "rag" in name else "/health/ready"
    )
    for status in (200, 503):
        with answering(status) as (port, asked):
            assert (run_check(CHECKS[name], port) == 0) == (status == 200)
        assert asked == [route]
    assert run_check(CHECKS[name], port) != 0  # nobody listens
    if "rag" in name:
        with answering(200, b'{"status":"ok","guard":false}') as (port, _):
            assert run_check(CHECKS[name], port) != 0


def environments() -> dict[str, dict[str, str]]:
    """The variables of every service that runs ``hallutracer serve``, on top of the image's."""
    names = [name for name in SERVICES if name.startswith("hallutracer") or name == "guard"]
    by_name = {
        n: p.environment(SERVICES[n]["build"]["target"]) | SERVICES[n]["environment"] for n in names
    }
    by_name["sidecar guard"] = p.environment("cpu") | p.variables(GUARD)
    return by_name


ENVIRONMENTS = environments()


def parsed(tmp_path: Path, variables: dict[str, str]) -> dict[str, Any]:
    """``serve``'s options as its own parser reads them; a path inside the image stands for an empty
    file here."""
    (here := tmp_path / "file").touch()
    return p.served(
        {
            name: str(here) if value.startswith(("/etc/", "/run/")) else value
            for name, value in variables.items()
        }
    )


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_serve_takes_the_environment_and_answers_to_its_names(tmp_path: Path, name: str) -> None:
    """Probes and scrapes by address, callers by the Service's name, the health check; and no page
    of a foreign site."""
    options = parsed(tmp_path, ENVIRONMENTS[name])
    expected = {
        "port": 8765,
        "host": "127.0.0.1" if "guard" in name else "0.0.0.0",
        "drain_s": 30,
        "store": "/var/lib/hallutracer/probes",
        "engine": "vllm" if "vllm" in name else "transformers",
    }
    assert {key: options[key] for key in expected} == expected
    assert (options["api_key_file"] is not None) == (not name.startswith("hallutracer"))
    if name in (
        "hallutracer-gpu",
        "hallutracer-vllm",
    ):  # nothing set in .env: the demo model, on the GPU
        assert (options["model"], options["bundle"]) == (None, ())
    settings = ServiceSettings(host=options["host"], allowed_hosts=options["allowed_host"])
    service = "localhost" if "guard" in name else name
    with App(
        tmp_path, names=["tiny"], allowed_hosts=known_hosts(settings, keyed=True)
    ).started() as app:
        for host in ("127.0.0.1", "localhost:8765", "10.1.2.3", "[fd00::7]:8765", service):
            assert app.client.get("/metrics", headers={"host": host}).status_code == 200, host
        for host in ("evil.example:8765", "hallutracer.evil.example"):
            for path in ("/metrics", "/health/ready"):
                assert app.client.get(path, headers={"host": host}).status_code == 421, host
    with pytest.raises(
        cyclopts.CoercionError, match="HALLUTRACER_PORT.* int"
    ):  # what service links would have done
        parsed(tmp_path, {"HALLUTRACER_PORT": "tcp://10.0.0.7:8765"})


def test_the_rag_app_is_started_alike_and_reads_what_it_is_given() -> None:
    assert RAG["entrypoint"] == RAG_POD["command"]
    source = (p.ROOT / "deploy/sidecar/rag_app.py").read_text()
    given = set(RAG["environment"]) | set(p.variables(RAG_POD))
    assert given == {name for name in given if f'environ.get("{name}"' in source}
    code = "import sys, uvicorn; uvicorn.Config(sys.argv[1]).load()"
    imported = subprocess.run(
        [sys.executable, "-c", code, RAG["entrypoint"][1]],
        cwd=p.ROOT / "deploy/sidecar",
        env=os.environ | {"PYTHONPATH": f"{PATHS}:."},
        capture_output=True,
        text=True,
    )
    assert imported.returncode == 0, imported.stderr
    routes = re.findall(r'@app\.get\("([^"]+)"\)', source)
    assert RAG_POD["readinessProbe"]["httpGet"]["path"] in routes
    assert any(f"'{route}'" in RAG["healthcheck"]["test"][-1] for route in routes)


def test_the_shipped_policies_are_policies(tmp_path: Path) -> None:
    [values] = p.documents(p.ROOT / "deploy/helm/hallutracer/values.yaml")
    (path := tmp_path / "policies.toml").write_text(values["policies"])
    assert {"support", "strict"} <= set(read_policies(path).named)


# --- deploy/walk ---


def walk(script: str, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script of the walk, with this checkout's hallutracer; no variable of ours is inherited."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HALLUTRACER_", "AWS_"))
    }
    command = ["bash", str(WALK / script), *map(str, arguments)]
    return subprocess.run(
        command, env=inherited | variables, capture_output=True, text=True, check=False
    )


def test_the_walk_names_a_missing_program_and_leaves_what_is_not_its_own_alone(
    tmp_path: Path,
) -> None:
    """The walk itself takes minutes: deploy/walk/walk.log."""
    (programs := tmp_path / "bin").mkdir()
    for name in ("bash", "dirname", "ls", "mkdir"):
        (programs / name).symlink_to(str(shutil.which(name)))
    missing = walk("walk.sh", tmp_path / "walk", PATH=str(programs), HOME=str(tmp_path))
    ended(missing, 1, "FAILED: hallutracer is missing")
    (mine := tmp_path / "mine.txt").write_text("mine")
    ended(walk("walk.sh", tmp_path), 1, "has something else in it")
    assert mine.read_text() == "mine"
    for arguments in (["--keep"], ["--kep", "x"], ["--keep", "x", "y"]):
        ended(walk("in_clean_root.sh", *arguments), 2, "--keep FOLDER")
