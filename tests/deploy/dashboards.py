"""The dashboards as Grafana reads them: panels, their queries with every variable filled in, the metrics they name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from service.judging.drift import Drift
from service.serving.metrics import Metrics
from tests.deploy.prometheus_server import ROOT

FOLDER = ROOT / "deploy" / "grafana" / "dashboards"
FILES = sorted(FOLDER.glob("*.json"))
NAME = re.compile(r"\b(?:hallutracer[_:]|process_)[a-z0-9_:]+")
PROCESS = {
    "process_cpu_seconds_total", "process_max_fds", "process_open_fds", "process_resident_memory_bytes",
    "process_start_time_seconds", "process_virtual_memory_bytes",
}  # fmt: skip
SCRAPED = ("job", "namespace", "instance")  # the scraper's labels, by which every dashboard chooses


@dataclass(frozen=True)
class Query:
    """One target of one panel."""

    dashboard: str
    panel: str
    expression: str
    instant: bool

    def filled(self, model_name: str, bundle: str, window: float) -> str:
        """The expression that Grafana would send: scrapes every second, ``window`` seconds on the screen.

        ``$__rate_interval`` is then four seconds, the least that Grafana takes: four scrape intervals.
        """
        values = {
            "model_name": model_name, "bundle": bundle, "job": "hallutracer", "namespace": ".*", "instance": ".*",
            "__rate_interval": "4s", "__interval": "1s", "__range": f"{round(window)}s",
        }  # fmt: skip
        text = re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda found: values[found[1] or found[2]], self.expression)
        assert "$" not in text
        return text


def load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def panels(board: Any) -> Iterator[Any]:
    """All of them, rows and what is folded into rows included."""
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", [])


def queries() -> list[Query]:
    return [
        Query(path.stem, panel["title"], target["expr"], target["instant"])
        for path in FILES
        for panel in panels(load(path))
        for target in panel.get("targets", [])
    ]


def names(expression: str) -> set[str]:
    """Metrics and recorded series in an expression; a histogram by its own name."""
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in NAME.findall(expression)}


def matchers(expression: str) -> dict[str, set[str]]:
    """Metric -> the labels that the expression selects it by."""
    found: dict[str, set[str]] = {}
    for name, braces in re.findall(rf"({NAME.pattern})(?:{{(.*?)}})?", expression):
        (metric,) = names(name)
        found.setdefault(metric, set()).update(re.findall(r"(\w+)\s*[!=]", braces))
    return found


def grouping(expression: str) -> set[str]:
    """The labels that it sums by."""
    return {label for group in re.findall(r"\bby \((.*?)\)", expression) for label in group.split(", ")}


def ours() -> dict[str, set[str]]:
    """Every metric that the service has, as an expression would name it, with its labels and the scraper's own."""
    metrics = Metrics()
    metrics.bundles([("m", "demo:1", "sha256:ab")])
    metrics.guarantees([("m", "demo:1", 0.1, 0.05)])
    metrics.key("app", withheld=False)
    metrics.rollout("m", "demo:1", "demo:2", ["demo:3"])
    metrics.watched("m", "demo:1", Drift(1000, 900.0, 0.1, 0.1, 0.1, 0.01), ())
    families = list(text_string_to_metric_families(metrics.render()[0].decode()))
    process = {name: set(SCRAPED) for name in PROCESS}  # which prometheus_client has on Linux only
    return process | {
        family.name + ("_total" if family.type == "counter" else ""): set(SCRAPED).union(
            *(sample.labels for sample in family.samples)
        )
        for family in families
    }
