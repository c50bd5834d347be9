"""What no linter knows of the packaging files: that they agree with each other and with the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from service import __version__
from service.cli.main import make_app
from service.options import Sources, commands_of, options_of
from service.settings import NO_OPTIONS, PREFIX, ServiceSettings, env
from tests.deploy import cluster
from tests.deploy import packaging as p

PORT = str(ServiceSettings.__dataclass_fields__["port"].default)
APP_VARIABLES = {f"{PREFIX}URL"}  # read by deploy/sidecar/rag_app.py, a client and no command of ours
COMMENTED = (".yml", ".yaml", ".example")
PINNED = r"[\w.-]+==[^\s;]+( ; [^;]+?)?( +--hash=sha256:[0-9a-f]{64})+ *"


@cache
def flags() -> dict[str, dict[str, str]]:
    """Command -> flag -> environment variable, from the parser itself."""
    return {"": {}} | {
        " ".join(command): {name: env(argument.name) for argument in options_of(arguments) for name in argument.names}
        for command, arguments in commands_of(make_app(Sources()))
    }


def faults(root: Path) -> list[str]:
    """Everything wrong with the files under ``root``; empty where they agree."""
    found: list[str] = []
    for check in (copies, hashes, names, versions, ports, compose_services, hosts, mounts, typed, *cluster.CHECKS):
        try:
            found += check(root)
        except ValueError as error:  # a patch of nothing: what was found before it stays found
            found.append(str(error))
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


def hashes(root: Path) -> Iterator[str]:
    """pip installs from lists whose every entry has a hash: all but torch's CPU build, which PyPI does not have."""
    torch = "--no-deps --index-url https://download.pytorch.org/whl/cpu --constraint constraints.txt torch"
    for step in p.dockerfile(root):
        made = dict(re.findall(r'echo "([^"]+)" >(\S+)', step.text))
        lists = {name: f"{line}\n" for line, name in made.items()}
        for arguments in re.findall(r"\bpip (?:--python \S+ )?install ([^&]+)", step.text):
            words = arguments.split()
            if "--no-index" in words or words == torch.split():  # our own wheels, built a line before
                continue
            files = [file for flag, file in zip(words, words[1:], strict=False) if flag == "--requirement"]
            if set(words) - {"--no-deps", "--require-hashes", "--requirement", *files} or not files:
                yield f"Dockerfile: 'pip install {arguments.strip()}' takes more than lists"
            if "--require-hashes" not in words:
                yield f"Dockerfile: 'pip install {arguments.strip()}' asks for no hashes"
            for file in files:
                text = lists[file] if file in lists else (root / file).read_text() if (root / file).exists() else ""
                entries = re.sub(r"^#.*|\\\n", "", text, flags=re.MULTILINE).strip().splitlines()
                if not entries:
                    yield f"Dockerfile: {file} names nothing"
                for entry in entries:
                    if not re.fullmatch(PINNED, entry):
                        yield f"{file}: {entry.split()[0]} has no version or no hash"


def names(root: Path) -> Iterator[str]:
    """Each HALLUTRACER_ variable and each flag of a typed command exists."""
    known = {variable for command in flags().values() for variable in command.values()} | APP_VARIABLES | NO_OPTIONS
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
    scraped = p.parse((root / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    services = p.compose(root)["services"]
    for target in [t for job in scraped for static in job.get("static_configs", []) for t in static["targets"]]:
        host, _, port = target.partition(":")
        if host.startswith("hallutracer"):
            yield from _same("prometheus.yml", PORT, port)
        if host != "localhost" and host not in services:
            yield f"prometheus.yml: compose has no service {host}"
    for name in (name for name in services if name.startswith("hallutracer")):
        yield from _same(f"compose {name}", PORT, services[name]["ports"][0].split(":")[-1])
    for folder in p.kustomizations(root):
        for pod in p.pods(p.rendered(folder)):
            for container in p.containers(pod):
                if container.get("args") == ["serve"] and "ports" in container:
                    yield from _same(f"{folder.name} containerPort", PORT, str(p.port_of(container)))


def compose_services(root: Path) -> Iterator[str]:
    """Loopback only, hardened, built here, restarted with what they stand on, given time to drain."""
    services = p.compose(root)["services"]
    for name, service in services.items():
        shared = service.get("network_mode", "").removeprefix("service:")
        for other in sorted({shared, *service.get("depends_on", {})} - {""} - set(services)):
            yield f"compose {name}: no service {other}"
        if shared and not service.get("depends_on", {}).get(shared, {}).get("restart"):
            yield f"compose {name}: is not restarted with {shared}, whose network it shares"
        built = "build" in service and service.get("pull_policy") == "build"
        if service["image"].startswith("hallutracer:") and not built:
            yield f"compose {name}: our image is looked for in a registry"
        target = service["build"]["target"] if built else "cpu"
        if target not in {step.stage for step in p.dockerfile(root)}:
            yield f"compose {name}: the Dockerfile has no target {target}"
        executes = str(service.get("tmpfs", "")).startswith("['/tmp:exec")
        if p.environment(root, target).get("HALLUTRACER_ENGINE") == "vllm" and not executes:
            yield f"compose {name}: vLLM could not load what it compiles"
        if built and service["image"].partition("-")[2] != target.replace("cpu", "", target == "cpu"):
            yield f"compose {name}: {service['image']} is built from the target {target}"
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


def hosts(root: Path) -> Iterator[str]:
    """What is published or has a Service is asked by names that it knows, and not by any."""
    compose = p.compose(root)["services"]
    ours = [name for name in compose if name.startswith("hallutracer")]
    wanted = {f"compose {name}": ({name}, compose[name]["environment"]) for name in ours}
    for folder in p.kustomizations(root):
        found = p.rendered(folder)
        services = [document["metadata"]["name"] for document in found if document["kind"] == "Service"]
        for pod in p.pods(found):
            [container] = pod["spec"]["containers"]
            if container.get("args") == ["serve"]:
                [namespace] = {p.parse((folder / "kustomization.yaml").read_text())["namespace"]}
                names = {end for name in services for end in (name, f"{name}.{namespace}", f"{name}.{namespace}.svc")}
                wanted[folder.name] = names, p.variables(container)
    for where, (names, variables) in wanted.items():
        known = set(variables.get("HALLUTRACER_ALLOWED_HOST", "*").split())
        if "*" in known:
            yield f"{where}: answers to any name"
        for name in sorted((names | {"localhost"}) - known - {"*"}):
            yield f"{where}: does not answer to {name}"


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
        for provider in p.parse(path.read_text())["providers"]:
            if provider["options"]["path"] not in grafana:
                yield f"{path.name}: {provider['options']['path']} is not mounted in compose"
    for path in (root / "deploy/grafana/provisioning/datasources").glob("*.y*ml"):
        for source in p.parse(path.read_text())["datasources"]:
            if source["type"] == "prometheus" and source["url"] != "http://prometheus:9090":
                yield f"{path.name}: {source['url']} is not compose's Prometheus"


def typed(root: Path) -> Iterator[str]:
    """Commands in the README: docker waits longer than the drain, and kubectl's files exist in this checkout."""
    text = (root / "deploy/README.md").read_text()
    drain = ServiceSettings().drain_s
    for line in re.findall(r"^docker run .*-p .*$", text, re.MULTILINE):
        waits = re.search(r"--stop-timeout (\d+)", line)
        if waits is None or float(waits[1]) <= drain:
            yield f"README: '{line}' does not wait for the drain of {drain} s"
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        code = re.sub(r"#.*", "", block)
        for path in re.findall(r"(?: -f | -k |--from-file=)(?:[\w-]+=)?(\S+)", code):
            if not (root / path).exists():
                yield f"README: {path} does not exist"


def _same(where: str, expected: str, found: str | None) -> Iterator[str]:
    if found != expected:
        yield f"{where}: port {found}, not {expected}"
