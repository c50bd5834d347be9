"""What no linter knows of the packaging files: that they agree with each other and with the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import typer
import yaml

from service import __version__
from service.cli.main import app
from service.settings import PREFIX, ServiceSettings
from tests.deploy import packaging as p

PORT = str(ServiceSettings.__dataclass_fields__["port"].default)
APP_VARIABLES = {f"{PREFIX}URL"}  # read by deploy/sidecar/rag_app.py, a client and no command of ours
COMMENTED = (".yml", ".yaml", ".example")


@cache
def flags() -> dict[str, dict[str, str]]:
    """Command -> flag -> environment variable, from the parser itself."""
    group: Any = typer.main.get_command(app)

    def walk(path: str, command: Any) -> Iterator[tuple[str, dict[str, str]]]:
        yield path, {opt: str(param.envvar) for param in command.params for opt in param.opts if opt.startswith("--")}
        for name, child in getattr(command, "commands", {}).items():
            yield from walk(f"{path} {name}".strip(), child)

    return dict(walk("", group))


def faults(root: Path) -> list[str]:
    """Everything wrong with the files under ``root``; empty where they agree."""
    found: list[str] = []
    for check in (copies, names, versions, ports, compose_services, mounts, kustomized, workloads, selectors):
        found += check(root)
    return found


def copies(root: Path) -> Iterator[str]:
    """COPY takes what exists and what .dockerignore lets through; everything under a stage's name was made there."""
    rules = [line for line in (root / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    stages = {step.stage for step in p.dockerfile(root)}
    for step in p.dockerfile(root):
        if step.verb != "COPY":
            continue
        words = step.text.split()
        if words[0].startswith("--from="):
            if words[0].removeprefix("--from=") not in stages:
                yield f"COPY {step.text}: no such stage"
            continue
        for source in words[:-1]:
            if not (root / source).exists():
                yield f"COPY {source}: no such file"
            ignored = False
            for rule in rules:  # the last rule that matches decides
                if fnmatch(source, rule.removeprefix("!")):
                    ignored = not rule.startswith("!")
            if ignored:
                yield f"COPY {source}: .dockerignore keeps it out"


def names(root: Path) -> Iterator[str]:
    """Each HALLUTRACER_ variable and each flag of a typed command exists."""
    known = {variable for command in flags().values() for variable in command.values()} | APP_VARIABLES
    texts = [root / "Dockerfile", root / "docker-compose.yml", root / ".env.example"]
    texts += [path for path in (root / "deploy").rglob("*") if path.suffix in (".md", ".yaml")]
    for path in texts:
        text = path.read_text()
        for variable in sorted(set(re.findall(rf"\b{PREFIX}[A-Z0-9_]+\b", text)) - known):
            yield f"{path.relative_to(root)}: {variable} is no flag's variable"
        for typed in re.findall(r"\bhallutracer(?:-gpu)? ((?:serve|score|train|bundle|demo|data)\b[^\n|&;`#]*)", text):
            command = max((name for name in flags() if name and typed.startswith(name)), key=len)
            for flag in re.findall(r"(?<=\s)--[a-z][a-z-]*", typed):
                if flag != "--help" and flag not in flags()[command]:
                    yield f"{path.relative_to(root)}: 'hallutracer {command}' has no {flag}"


def versions(root: Path) -> Iterator[str]:
    """One version everywhere: the label's default and every tag of our image."""
    text = {path: path.read_text() for path in [root / "Dockerfile", root / "docker-compose.yml"]}
    text |= {folder / "kustomization.yaml": "" for folder in p.kustomizations(root)}
    for path in text:
        tags = re.findall(r"(?:hallutracer:|newTag: |ARG VERSION=)(\d[\w.]*)(?:-cuda)?", path.read_text())
        if set(tags) != {__version__}:
            yield f"{path.relative_to(root)}: versions {sorted(set(tags))}, the package is {__version__}"


def ports(root: Path) -> Iterator[str]:
    """Dockerfile, compose, Kubernetes and Prometheus speak of the same port as the command line."""
    steps = p.dockerfile(root)
    yield from _same("Dockerfile EXPOSE", PORT, next(step.text for step in steps if step.verb == "EXPOSE"))
    yield from _same("Dockerfile ENV", PORT, p.environment(root)["HALLUTRACER_PORT"])
    for argument in json.loads(next(step.text for step in steps if step.verb == "HEALTHCHECK").split("CMD ", 1)[1]):
        for number in re.findall(r"'(\d{2,5})'", argument):
            yield from _same("Dockerfile HEALTHCHECK", PORT, number)
    scraped = yaml.safe_load((root / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    services = p.compose(root)["services"]
    for target in [t for job in scraped for static in job.get("static_configs", []) for t in static["targets"]]:
        host, _, port = target.partition(":")
        if host.startswith("hallutracer"):
            yield from _same("prometheus.yml", PORT, port)
        if host != "localhost" and host not in services:
            yield f"prometheus.yml: compose has no service {host}"
    for name in ("hallutracer", "hallutracer-gpu"):
        yield from _same(f"compose {name}", PORT, services[name]["ports"][0].split(":")[-1])
    for folder in p.kustomizations(root):
        for pod in p.pods(p.rendered(folder)):
            notes = pod["metadata"].get("annotations", {})
            for container in p.containers(pod):
                if container.get("args") == ["serve"] and "ports" in container:
                    yield from _same(f"{folder.name} containerPort", PORT, str(p.port_of(container)))
                    yield from _same(f"{folder.name} annotation", PORT, notes.get("prometheus.io/port"))


def compose_services(root: Path) -> Iterator[str]:
    """Loopback only, hardened, and more time to stop than the drain takes."""
    services = p.compose(root)["services"]
    for name, service in services.items():
        shared = service.get("network_mode", "").removeprefix("service:")
        for other in sorted({shared, *service.get("depends_on", {})} - {""} - set(services)):
            yield f"compose {name}: no service {other}"
        for port in service.get("ports", []):
            if not port.startswith("127.0.0.1:"):
                yield f"compose {name}: {port} is published beyond loopback"
        if not service.get("read_only") or service.get("cap_drop") != ["ALL"]:
            yield f"compose {name}: its root is writable or a capability is left"
        if "no-new-privileges:true" not in service.get("security_opt", []):
            yield f"compose {name}: privileges can be gained"
        if re.fullmatch(r"[\w./-]+(:latest)?", service["image"]):
            yield f"compose {name}: the image has no version"
        drain = service.get("environment", {}).get("HALLUTRACER_DRAIN_S")
        if "stop_grace_period" in service and float(service["stop_grace_period"].rstrip("s")) <= float(drain or 0):
            yield f"compose {name}: killed after {service['stop_grace_period']}, drains for {drain} s"


def mounts(root: Path) -> Iterator[str]:
    """What is mounted exists: folders of the checkout, named volumes, secrets; and its files are where others look."""
    compose = p.compose(root)
    for name, service in compose["services"].items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if not ((root / source).exists() if source[0] == "." else source in compose["volumes"]):
                yield f"compose {name}: {source} does not exist"
        for secret in set(service.get("secrets", [])) - set(compose["secrets"]):
            yield f"compose {name}: no secret {secret}"
    grafana = {volume.split(":")[1] for volume in compose["services"]["grafana"]["volumes"]}
    for path in (root / "deploy/grafana/provisioning/dashboards").glob("*.y*ml"):
        for provider in yaml.safe_load(path.read_text())["providers"]:
            if provider["options"]["path"] not in grafana:
                yield f"{path.name}: {provider['options']['path']} is not mounted in compose"
    for path in (root / "deploy/grafana/provisioning/datasources").glob("*.y*ml"):
        for source in yaml.safe_load(path.read_text())["datasources"]:
            if source["type"] == "prometheus" and source["url"] != "http://prometheus:9090":
                yield f"{path.name}: {source['url']} is not compose's Prometheus"


def kustomized(root: Path) -> Iterator[str]:
    """A file that no kustomization names is a file that nobody applies; examples are left out on purpose."""
    for folder in p.kustomizations(root):
        [kustomization] = p.documents(folder / "kustomization.yaml")
        named = {*kustomization["resources"], *(patch.get("path") for patch in kustomization.get("patches", []))}
        generated = {name for config in kustomization.get("configMapGenerator", []) for name in config["files"]}
        yield from (
            f"{folder.name}: {name} does not exist" for name in sorted(generated) if not (folder / name).exists()
        )
        for path in sorted(folder.glob("*.yaml")):
            if path.name not in named | {"kustomization.yaml"} and not path.name.endswith(".example.yaml"):
                yield f"{folder.name}: kustomization.yaml does not name {path.name}"


def workloads(root: Path) -> Iterator[str]:
    """Pods: not root, read-only, no service links, volumes that exist, time to drain."""
    user = next(step.text for step in p.dockerfile(root) if step.verb == "USER")
    for folder in p.kustomizations(root):
        for pod in p.pods(p.rendered(folder)):
            spec, where = pod["spec"], folder.name
            context = spec.get("securityContext", {})
            if not context.get("runAsNonRoot") or f"{context.get('runAsUser')}:{context.get('runAsGroup')}" != user:
                yield f"{where}: runs as another user than the image's {user}"
            if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
                yield f"{where}: no seccomp profile"
            if spec.get("enableServiceLinks") is not False:
                yield f"{where}: service links would overwrite HALLUTRACER_PORT"
            declared = {volume["name"] for volume in spec.get("volumes", [])}
            for container in p.containers(pod):
                name, own = f"{where} {container['name']}", container.get("securityContext", {})
                if (own.get("allowPrivilegeEscalation"), own.get("readOnlyRootFilesystem")) != (False, True):
                    yield f"{name}: privileges or a writable root"
                if own.get("capabilities") != {"drop": ["ALL"]}:
                    yield f"{name}: a capability is left"
                if not {"requests", "limits"} <= set(container.get("resources", {})):
                    yield f"{name}: no resources"
                paths = {mount["name"]: mount["mountPath"] for mount in container.get("volumeMounts", [])}
                yield from (f"{name}: no volume {volume}" for volume in set(paths) - declared)
                variables = p.variables(container)
                for file in (value for value in variables.values() if value.startswith("/")):
                    if str(Path(file).parent) not in paths.values():
                        yield f"{name}: {file} is not mounted"
                sleep = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [0])[-1]
                stopping = float(sleep) + float(variables.get("HALLUTRACER_DRAIN_S", 0))
                if stopping >= spec["terminationGracePeriodSeconds"]:
                    yield f"{name}: killed before it has drained"
                if container.get("args") == ["serve"]:
                    yield from _probes(name, container)


def _probes(name: str, container: p.Document) -> Iterator[str]:
    for probe, route in (("startupProbe", "ready"), ("readinessProbe", "ready"), ("livenessProbe", "live")):
        if f"/health/{route}" not in json.dumps(container.get(probe)):
            yield f"{name}: {probe} does not ask /health/{route}"


def selectors(root: Path) -> Iterator[str]:
    """Every selector finds the pods, the autoscaler its Deployment, the Service its named port, a claim its volume."""
    for folder in p.kustomizations(root):
        found = p.rendered(folder)
        labels = [pod["metadata"]["labels"] for pod in p.pods(found)]
        open_ports = {port["name"] for pod in p.pods(found) for c in p.containers(pod) for port in c.get("ports", [])}
        claims = {item["metadata"]["name"] for item in found if item["kind"] == "PersistentVolumeClaim"}
        for item in found:
            spec, where = item.get("spec", {}), f"{folder.name} {item['kind']}"
            selector = spec.get("podSelector", spec.get("selector", {}))
            wanted = selector.get("matchLabels", selector)
            if wanted and not any(wanted.items() <= label.items() for label in labels):
                yield f"{where}: selects no pod"
            if item["kind"] == "Service" and {port["targetPort"] for port in spec["ports"]} - open_ports:
                yield f"{where}: no container has its port"
            if item["kind"] == "HorizontalPodAutoscaler":
                target = (spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"])
                if target not in {(other["kind"], other["metadata"]["name"]) for other in found}:
                    yield f"{where}: scales {target}, which is not there"
        for pod in p.pods(found):
            for volume in pod["spec"]["volumes"]:
                claim = volume.get("persistentVolumeClaim", {}).get("claimName")
                if claim is not None and claim not in claims:
                    yield f"{folder.name}: no claim {claim}"
                config = volume.get("configMap", {}).get("name")
                if config is not None and config not in p.generated(folder):
                    yield f"{folder.name}: no ConfigMap {config}"


def _same(where: str, expected: str, found: str | None) -> Iterator[str]:
    if found != expected:
        yield f"{where}: port {found}, not {expected}"
