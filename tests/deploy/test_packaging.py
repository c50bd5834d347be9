"""The packaging files: real linters, and that they agree with the command line and keep what must be kept."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from service import __version__
from service.settings import NO_OPTIONS, PREFIX, ServiceSettings
from tests.deploy import packaging as p

BIN = Path(sys.executable).parent
KUBERNETES = ("1.29", "1.37")  # native sidecars came on by default in 1.29
MANIFESTS = [p.ROOT / "deploy/sidecar/sidecar.yaml", p.ROOT / "deploy/helm/copy-bundle.example.yaml"]
PINNED = r"[\w.-]+==[^\s;]+( ; [^;]+?)?( +--hash=sha256:[0-9a-f]{64})+ *"
TORCH = "--no-deps --index-url https://download.pytorch.org/whl/cpu --constraint constraints.txt torch"
TEXTS = [p.ROOT / name for name in ("Dockerfile", "docker-compose.yml", ".env.example")]
TEXTS += [
    path for path in (p.ROOT / "deploy").rglob("*") if path.suffix in (".md", ".yaml") and "templates" not in path.parts
]
SERVICES = p.compose()["services"]


def lint(tool: str, *arguments: str, text: str) -> subprocess.CompletedProcess[str]:
    """Runs a linter of the ``test`` extra; a missing one is an error, not a skip."""
    return subprocess.run([BIN / tool, *arguments], input=text, capture_output=True, text=True, check=False)


def hadolint(text: str) -> subprocess.CompletedProcess[str]:
    return lint("hadolint", "--no-color", "--failure-threshold", "style", "-", text=text)


def schema_errors(found: list[p.Document], version: str) -> list[str]:
    """What Kubernetes' own schemas say, unknown fields included."""
    errors = []
    for document in found:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            errors.append(f"{document['kind']} {error.path}: {error.message}")
    return errors


def test_hadolint_accepts_the_dockerfile_and_sees_a_fault() -> None:
    text = (p.ROOT / "Dockerfile").read_text()
    done = hadolint(text)
    assert done.returncode == 0, done.stdout + done.stderr
    done = hadolint(f"{text}RUN cd /tmp\n")
    assert done.returncode != 0
    assert re.search(r":\d+", done.stdout + done.stderr)  # a finding with its line, not a tool that did not start


@pytest.mark.parametrize(("old", "new", "status"), [("", "", 0), ("read_only: true", "readonly: true", 1)])
def test_compose_file_fits_the_compose_specification(old: str, new: str, status: int) -> None:
    text = (p.ROOT / "docker-compose.yml").read_text().replace(old, new)
    done = lint(
        "check-jsonschema", "--builtin-schema", "vendor.compose-spec", "--default-filetype", "yaml", "-", text=text
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert new.partition(":")[0] in done.stdout


def test_compose_reads_the_file() -> None:
    """A second opinion where this machine has Docker's plugin; the schema covers the same file."""
    if not shutil.which("docker") or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        pytest.skip("docker compose is not installed: Docker's compose plugin, 2.17 or newer")
    profiles = [f"--profile={name}" for name in ("gpu", "sidecar", "vllm", "vllm-cpu")]
    done = subprocess.run(["docker", "compose", *profiles, "config"], cwd=p.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(yaml.safe_load(done.stdout)["services"]) == set(SERVICES)


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_fit_kubernetes_schemas(path: Path, version: str) -> None:
    assert schema_errors(p.documents(path), version) == []
    wrong = path.read_text().replace("enableServiceLinks: false", "enableServiceLink: false")
    assert schema_errors(p.load_all(wrong), version)


def installs() -> Iterator[tuple[list[str], list[str]]]:
    """The words of each pip install of the Dockerfile, and the entries of the lists that it reads."""
    for step in p.dockerfile():
        made = {name: f"{line}\n" for line, name in re.findall(r'echo "([^"]+)" >(\S+)', step.text)}
        for arguments in re.findall(r"\bpip (?:--python \S+ )?install ([^&]+)", step.text):
            words = arguments.split()
            files = [file for flag, file in zip(words, words[1:], strict=False) if flag == "--requirement"]
            text = "".join(made[file] if file in made else (p.ROOT / file).read_text() for file in files)
            yield words, re.sub(r"^#.*|\\\n", "", text, flags=re.MULTILINE).strip().splitlines()


def test_pip_installs_from_lists_whose_every_entry_has_a_hash() -> None:
    """All but torch's CPU build, which PyPI does not have, and our own wheels, built a line before."""
    listed = [(words, entries) for words, entries in installs() if words != TORCH.split() and "--no-index" not in words]
    assert listed
    for words, entries in listed:
        assert "--require-hashes" in words
        names = {file for flag, file in zip(words, words[1:], strict=False) if flag == "--requirement"}
        assert set(words) <= {"--no-deps", "--require-hashes", "--requirement"} | names, words
        assert entries
        assert [entry for entry in entries if not re.fullmatch(PINNED, entry)] == []


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_each_variable_and_each_flag_of_a_typed_command_exists(path: Path) -> None:
    known = {variable for command in p.flags().values() for variable in command.values()} | NO_OPTIONS
    text = path.read_text()
    assert set(re.findall(rf"\b{PREFIX}[A-Z0-9_]+\b", text)) <= known | {f"{PREFIX}URL"}  # the RAG app's own
    for typed in re.findall(r"\bhallutracer(?:-gpu)? ((?:serve|score|train|bundle|demo|data)\b[^\n|&;`#]*)", text):
        command = max((name for name in p.flags() if name and typed.startswith(name)), key=len)
        assert set(re.findall(r"(?<=\s)--[a-z][a-z-]*", typed)) - {"--help"} <= set(p.flags()[command]), typed
    for file in re.findall(r"(?: -f |--values |--from-file=)(?:[\w-]+=)?(deploy/\S+)", text):
        assert (p.ROOT / file).exists(), file


def test_one_version_everywhere() -> None:
    for path in (p.ROOT / "Dockerfile", p.ROOT / "docker-compose.yml", MANIFESTS[0]):
        tags = re.findall(r"(?:hallutracer:|ARG VERSION=)(\d[\w.]*)(?:-cuda)?", path.read_text())
        assert set(tags) == {__version__}, path


def test_the_image_and_prometheus_speak_of_the_same_port() -> None:
    port = str(ServiceSettings().port)
    assert [step.text for step in p.dockerfile() if step.verb == "EXPOSE"] == [port]
    assert p.environment()["HALLUTRACER_PORT"] == port
    scraped = p.documents(p.ROOT / "deploy/prometheus/prometheus.yml")[0]["scrape_configs"]
    targets = [target for job in scraped for static in job["static_configs"] for target in static["targets"]]
    assert f"hallutracer:{port}" in targets
    assert {target.partition(":")[0] for target in targets} - {"localhost"} <= set(SERVICES)


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
            assert str(service["tmpfs"]).startswith("['/tmp:exec")  # vLLM loads from there what it compiles
    if shared := service.get("network_mode", "").removeprefix("service:"):
        assert service["depends_on"][shared]["restart"]
    if name.startswith("hallutracer"):
        environment = service["environment"]
        assert service["ports"][0].endswith(":8765")
        assert float(service["stop_grace_period"].rstrip("s")) > float(environment["HALLUTRACER_DRAIN_S"])
        assert set(environment["HALLUTRACER_ALLOWED_HOST"].split()) == {"localhost", name}


def test_docker_run_of_the_readme_waits_for_the_drain() -> None:
    lines = re.findall(r"^docker run .*-p .*$", (p.ROOT / "deploy/README.md").read_text(), re.MULTILINE)
    assert lines
    for line in lines:
        assert float(re.findall(r"--stop-timeout (\d+)", line)[0]) > ServiceSettings().drain_s
