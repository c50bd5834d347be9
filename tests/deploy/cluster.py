"""Checks of the Kubernetes manifests that no linter makes: pods, selectors, claims, network policies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tests.deploy import packaging as p


def kustomized(root: Path) -> Iterator[str]:
    """A file that no kustomization names is never applied; examples are left out on purpose."""
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
    """Pods: not root, read-only, no service links, volumes that exist, time to drain; pods of the examples too."""
    user = next(step.text for step in p.dockerfile(root) if step.verb == "USER")
    found = [(folder.name, pod) for folder in p.kustomizations(root) for pod in p.pods(p.rendered(folder))]
    found += [(pod["metadata"]["name"], pod) for pod in p.documents_of_examples(root) if pod["kind"] == "Pod"]
    for where, pod in found:
        spec = pod["spec"]
        context = spec.get("securityContext", {})
        if not context.get("runAsNonRoot") or f"{context.get('runAsUser')}:{context.get('runAsGroup')}" != user:
            yield f"{where}: runs as another user than the image's {user}"
        if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{where}: no seccomp profile"
        if spec.get("enableServiceLinks") is not False:
            yield f"{where}: service links would overwrite HALLUTRACER_PORT"
        declared = {volume["name"] for volume in spec.get("volumes", [])}
        for container in p.containers(pod):
            yield from _container(f"{where} {container['name']}", container, declared)
            if container.get("args") == ["serve"]:
                yield from _probes(f"{where} {container['name']}", container)
            yield from _engine(f"{where} {container['name']}", container)
            if _stopping(container) >= spec["terminationGracePeriodSeconds"]:
                yield f"{where} {container['name']}: killed before it has drained"


def _container(name: str, container: p.Document, declared: set[str]) -> Iterator[str]:
    own = container.get("securityContext", {})
    if (own.get("allowPrivilegeEscalation"), own.get("readOnlyRootFilesystem")) != (False, True):
        yield f"{name}: privileges or a writable root"
    if own.get("capabilities") != {"drop": ["ALL"]}:
        yield f"{name}: a capability is left"
    if not {"requests", "limits"} <= set(container.get("resources", {})):
        yield f"{name}: no resources"
    paths = {mount["name"]: mount["mountPath"] for mount in container.get("volumeMounts", [])}
    yield from (f"{name}: no volume {volume}" for volume in set(paths) - declared)
    for file in (value for value in p.variables(container).values() if value.startswith("/")):
        if str(Path(file).parent) not in paths.values():
            yield f"{name}: {file} is not mounted"


def _engine(name: str, container: p.Document) -> Iterator[str]:
    """The image's engine is the one that is asked for, and a model is spread over as many GPUs as the pod gets."""
    variables, limits = p.variables(container), container.get("resources", {}).get("limits", {})
    vllm = variables.get("HALLUTRACER_ENGINE") == "vllm"
    if vllm != container["image"].endswith("-vllm"):
        yield f"{name}: the image {container['image']} has another engine"
    spread = int(variables.get("HALLUTRACER_TENSOR_PARALLEL_SIZE", 1))
    if vllm and spread * int(variables.get("HALLUTRACER_PIPELINE_PARALLEL_SIZE", 1)) != limits.get("nvidia.com/gpu"):
        yield f"{name}: {limits.get('nvidia.com/gpu')} GPUs, and a model that wants another number"
    if spread > 1 and "/dev/shm" not in {mount["mountPath"] for mount in container.get("volumeMounts", [])}:
        yield f"{name}: vLLM's processes have 64 MiB to meet in"


def _stopping(container: p.Document) -> float:
    """Seconds that a container may take to stop: what its preStop sleeps, and its drain."""
    sleep = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [0])[-1]
    return float(sleep) + float(p.variables(container).get("HALLUTRACER_DRAIN_S", 0))


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
            yield from (f"{folder.name}: no claim {claim}" for claim in sorted(p.claims(pod) - claims))
            for volume in pod["spec"]["volumes"]:
                config = volume.get("configMap", {}).get("name")
                if config is not None and config not in p.generated(folder):
                    yield f"{folder.name}: no ConfigMap {config}"


def reachable(root: Path) -> Iterator[str]:
    """Every pod that listens has a network policy, and a claim that an example fills is one that a pod uses."""
    used: set[str] = set()
    for folder in p.kustomizations(root):
        found = p.rendered(folder)
        policies = [item["spec"]["podSelector"]["matchLabels"] for item in found if item["kind"] == "NetworkPolicy"]
        for pod in p.pods(found):
            labels = pod["metadata"]["labels"]
            if not any(wanted.items() <= labels.items() for wanted in policies):
                yield f"{folder.name}: no network policy for its pods"
            used |= p.claims(pod)
    for pod in (item for item in p.documents_of_examples(root) if item["kind"] == "Pod"):
        yield from (f"{pod['metadata']['name']}: no pod uses the claim {name}" for name in p.claims(pod) - used)


CHECKS = (kustomized, workloads, selectors, reachable)
