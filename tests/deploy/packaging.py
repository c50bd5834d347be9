"""The packaging files as data, under any root, so that a test can seed a fault in a copy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("Dockerfile", ".dockerignore", ".env.example", "docker-compose.yml", "deploy", "pyproject.toml",
         "constraints.txt", "requirements-hashed.txt", "requirements-torch-cuda.txt",
         "requirements-vllm-cpu.txt", "requirements-vllm-cuda.txt", "README.md", "LICENSE", "hallutracer_start.py",
         "clients")  # fmt: skip
Document = dict[str, Any]
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is eight times as fast


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction of a Dockerfile: ``RUN`` and what follows it, continuation lines joined, in its stage."""

    stage: str
    verb: str
    text: str


def parse(text: str) -> Document:
    """One YAML document."""
    loaded: Document = yaml.load(text, _Loader)  # noqa: S506, a safe loader
    return loaded


def dockerfile(root: Path) -> list[Step]:
    """Every instruction in order; ARG before the first FROM has stage ""."""
    lines = [line for line in (root / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    steps, stage = [], ""
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if not line.strip():
            continue
        verb, text = line.split(maxsplit=1)
        if verb == "FROM":
            stage = text.split()[-1]
        steps.append(Step(stage, verb, text.strip()))
    return steps


def environment(root: Path, target: str = "runtime") -> dict[str, str]:
    """The environment that an image sets: ENV of its stage and of the stages it is built from."""
    steps = dockerfile(root)
    chain = [target]
    stages = {step.stage for step in steps}
    while chain[0] in stages:
        chain.insert(0, next(step.text.split()[0] for step in steps if (step.stage, step.verb) == (chain[0], "FROM")))
    pairs = " ".join(step.text for stage in chain for step in steps if (step.stage, step.verb) == (stage, "ENV"))
    return dict(pair.split("=", 1) for pair in pairs.split())


def compose(root: Path) -> Document:
    """docker-compose.yml with ${NAME:-default} replaced by the default."""
    text = (root / "docker-compose.yml").read_text()
    return parse(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))


def load_all(text: str) -> list[Document]:
    """The YAML documents of a text."""
    return [document for document in yaml.load_all(text, _Loader) if document]


def documents(path: Path) -> list[Document]:
    """The YAML documents of one file."""
    return load_all(path.read_text())


def kustomizations(root: Path) -> list[Path]:
    """Every folder that ``kubectl apply -k`` takes."""
    return sorted(path.parent for path in (root / "deploy").rglob("kustomization.yaml"))


def rendered(folder: Path) -> list[Document]:
    """What the folder's kustomization makes of its resources and strategic merge patches, names and labels aside.

    As much of kustomize as these files use: named things in lists merge, other lists are replaced, null removes.
    """
    [kustomization] = documents(folder / "kustomization.yaml")
    found: list[Document] = []
    for resource in kustomization["resources"]:
        path = folder / resource
        found += rendered(path) if path.is_dir() else documents(path)
    for entry in kustomization.get("patches", []):
        patch = parse(entry["patch"]) if "patch" in entry else documents(folder / entry["path"])[0]
        named = [item for item in found if _identity(item) == _identity(patch)]
        if len(named) != 1:
            raise ValueError(f"{folder.name}: a patch names {_identity(patch)}, of which there are {len(named)}")
        index = found.index(named[0])
        found[index : index + 1] = [] if patch.get("$patch") == "delete" else [_merged(named[0], patch)]
    tags = {image["name"]: image["newTag"] for image in kustomization.get("images", [])}
    for pod in pods(found):
        for container in containers(pod):
            name = container["image"].split(":")[0]
            container["image"] = f"{name}:{tags[name]}" if name in tags else container["image"]
    return found


def generated(folder: Path) -> set[str]:
    """The ConfigMaps that the folder's kustomization makes of files, its bases' too; names without their hash."""
    [kustomization] = documents(folder / "kustomization.yaml")
    names = {config["name"] for config in kustomization.get("configMapGenerator", [])}
    return names.union(*(generated(folder / base) for base in kustomization["resources"] if (folder / base).is_dir()))


def _identity(document: Document) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]


def _merged(base: Any, patch: Any) -> Any:
    if isinstance(base, dict) and isinstance(patch, dict):
        both = {key: _merged(base.get(key), value) for key, value in patch.items() if value is not None}
        return {key: value for key, value in base.items() if key not in patch} | both
    if isinstance(base, list) and isinstance(patch, list) and all("name" in item for item in base + patch):
        new = {item["name"]: item for item in patch}
        old = {item["name"]: item for item in base}
        return [_merged(old[name], new[name]) if name in new else old[name] for name in old] + [
            new[name] for name in new if name not in old
        ]
    return {key: _merged(None, value) for key, value in patch.items()} if isinstance(patch, dict) else patch


def pods(found: list[Document]) -> list[Document]:
    """The pod templates of the Deployments: ``metadata`` and ``spec``."""
    return [document["spec"]["template"] for document in found if document["kind"] == "Deployment"]


def documents_of_examples(root: Path) -> list[Document]:
    """What is applied by hand: every document of the files called *.example.yaml."""
    return [item for path in sorted((root / "deploy").rglob("*.example.yaml")) for item in documents(path)]


def claims(pod: Document) -> set[str]:
    """The claims that a pod mounts."""
    found = [volume.get("persistentVolumeClaim", {}).get("claimName") for volume in pod["spec"].get("volumes", [])]
    return {name for name in found if name is not None}


def containers(pod: Document) -> list[Document]:
    """All of a pod's containers, sidecars too."""
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def variables(container: Document) -> dict[str, str]:
    """A container's plain environment variables; those from a Secret are left out."""
    return {entry["name"]: entry["value"] for entry in container.get("env", []) if "value" in entry}


def port_of(container: Document) -> int | None:
    """The first port a container declares."""
    ports = container.get("ports", [])
    return int(ports[0]["containerPort"]) if ports else None
