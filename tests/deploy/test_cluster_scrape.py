"""deploy/prometheus/kubernetes.yml: its relabelling, run by promtool on the pods that the chart makes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy import packaging as p
from tests.deploy.prometheus_server import OURS, promtool
from tests.deploy.test_helm import GPU, rendered
from tests.deploy.test_packaging import MANIFESTS

META = "__meta_kubernetes_pod_"
NAMESPACE = "hallutracer"


def targets(pod: p.Document, phase: str = "Running") -> list[dict[str, Any]]:
    """What pod discovery lists: one target per container port, one for a container without ports."""
    labels = {f"{META}label_{re.sub(r'[^a-zA-Z0-9]', '_', key)}": v for key, v in pod["metadata"]["labels"].items()}
    labels |= {f"{META}name": "the-pod", f"{META}phase": phase, "__meta_kubernetes_namespace": NAMESPACE}
    found = []
    for container in p.containers(pod):
        for port in container.get("ports", [{}]):
            address = f"10.0.0.7:{port['containerPort']}" if port else "10.0.0.7"
            named = {f"{META}container_port_name": port["name"]} if port else {}
            found.append({"targets": [address], "labels": labels | named})
    return found


def configuration(folder: Path, found: list[dict[str, Any]], edit: tuple[str, str] = ("", "")) -> Path:
    """Ours, the discovery replaced by what it would find: distributions build Prometheus without it."""
    shutil.copytree(OURS / "rules", folder / "rules")
    text = (OURS / "kubernetes.yml").read_text()
    assert edit[0] in text
    loaded = yaml.safe_load(text.replace(*edit))
    [job] = loaded["scrape_configs"]
    [discovery] = job.pop("kubernetes_sd_configs")
    assert discovery == {"role": "pod", "namespaces": {"names": [NAMESPACE]}}
    job["static_configs"] = found
    path = folder / "kubernetes.yml"
    path.write_text(yaml.safe_dump(loaded))
    return path


def scraped(folder: Path, found: list[dict[str, Any]], edit: tuple[str, str] = ("", "")) -> list[dict[str, str]]:
    """The labels of the targets that are left, without what Prometheus keeps to itself."""
    done = promtool("check", "service-discovery", "--timeout=2s", configuration(folder, found, edit), "hallutracer")
    assert done.returncode == 0, done.stderr
    kept = [target["labels"] for target in json.loads(done.stdout) if target["labels"]]
    assert all(labels["__metrics_path__"] == "/metrics" for labels in kept)
    return [{name: value for name, value in labels.items() if not name.startswith("__")} for labels in kept]


def test_promtool_accepts_all_but_the_discovery(tmp_path: Path) -> None:
    done = promtool("check", "config", configuration(tmp_path, []))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("files", [(), (GPU,)])
def test_the_service_is_scraped_once_under_the_name_that_the_alerts_look_for(
    tmp_path: Path, files: tuple[Path, ...]
) -> None:
    [pod] = p.pods(list(rendered(*files)))
    expected = {"job": "hallutracer", "instance": "10.0.0.7:8765", "pod": "the-pod", "namespace": NAMESPACE}
    assert scraped(tmp_path, targets(pod)) == [expected]
    assert not any(note.startswith("prometheus.io/") for note in pod["metadata"].get("annotations", {}))


def others() -> list[dict[str, Any]]:
    """The pods that are not the service, and two of its own that have ended."""
    [service] = p.pods(list(rendered()))
    [[helper], [rag]] = [
        [item for item in p.documents(path) if item["kind"] in ("Pod", "Deployment")] for path in reversed(MANIFESTS)
    ]
    [rag] = p.pods([rag])
    return targets(helper) + targets(rag) + targets(service, "Failed") + targets(service, "Succeeded")


def test_no_other_pod_is_scraped(tmp_path: Path) -> None:
    assert len(others()) >= 5
    assert scraped(tmp_path, others()) == []


@pytest.mark.parametrize(
    "edit", [("regex: hallutracer;http", "regex: .*;http"), ("Succeeded|Failed", "Succeeded"), ("drop", "keep")]
)
def test_a_looser_rule_would_scrape_them(tmp_path: Path, edit: tuple[str, str]) -> None:
    assert scraped(tmp_path, others(), edit)


@pytest.mark.parametrize(
    "edit", [("hallutracer;http", "hallutracer;web"), ("label_app_kubernetes_io_name", "label_app")]
)
def test_a_rule_that_misses_the_service_is_seen(tmp_path: Path, edit: tuple[str, str]) -> None:
    [pod] = p.pods(list(rendered()))
    assert scraped(tmp_path, targets(pod), edit) == []
