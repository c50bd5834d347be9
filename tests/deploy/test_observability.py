"""Prometheus' files, the dashboards and the cluster's scrape: by themselves, and with a real
service and Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from service.judging.drift import Drift
from service.serving.judgement import CAUSES
from service.serving.metrics import STATUS_OF, Metrics
from tests.deploy.test_helm import rendered
from tests.deploy.test_packaging import MANIFESTS
from tests.kit import packaging as p
from tests.kit.prometheus import OURS, ROOT, binary, configuration, promtool, running
from tests.running import running as service_running
from tests.running import until

RULES = sorted((OURS / "rules").glob("*.yml"))
BOARDS = {
    path.stem: json.loads(path.read_text())
    for path in (ROOT / "deploy/grafana/dashboards").glob("*.json")
}
BOARD = pytest.mark.parametrize("name", sorted(BOARDS))
NAME = re.compile(r"\b(?:hallutracer[_:]|process_)[a-z0-9_:]+")
SCRAPED = {"job", "namespace", "instance"}  # the scraper's labels, by which every dashboard chooses
PROCESS = {
    f"process_{name}"
    for name in (
        "cpu_seconds_total",
        "max_fds",
        "open_fds",
        "resident_memory_bytes",
        "start_time_seconds",
        "virtual_memory_bytes",
    )
}
RUNBOOKS = (ROOT / "docs" / "runbooks.md").read_text(encoding="utf-8")


def configured(name: str) -> Any:
    return yaml.safe_load((OURS / name).read_text())


def rules(kind: str) -> list[dict[str, Any]]:
    files = [yaml.safe_load(path.read_text()) for path in RULES]
    return [
        rule
        for file in files
        for group in file["groups"]
        for rule in group["rules"]
        if kind in rule
    ]


class Query(NamedTuple):
    """One target of one panel."""

    dashboard: str
    panel: str
    expression: str


def panels(board: Any) -> Iterator[Any]:
    """All of them, rows and what is folded into rows included."""
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", [])


QUERIES = [
    Query(name, panel["title"], target["expr"])
    for name in sorted(BOARDS)
    for panel in panels(BOARDS[name])
    for target in panel.get("targets", [])
]


def names(expression: str) -> set[str]:
    """Metrics and recorded series in an expression; a histogram by its own name."""
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in NAME.findall(expression)}


def grouping(expression: str) -> set[str]:
    """The labels that it sums by."""
    return {
        label for group in re.findall(r"\bby \((.*?)\)", expression) for label in group.split(", ")
    }


def ours() -> dict[str, set[str]]:
    """Every metric that the service has, as an expression would name it, with its labels and the
    scraper's own."""
    metrics = Metrics()
    metrics.bundles([("m", "demo:1", "sha256:ab")])
    metrics.guarantees([("m", "demo:1", 0.1, 0.05)])
    metrics.key("app", withheld=False)
    metrics.rollout("m", "demo:1", "demo:2", ["demo:3"])
    metrics.watched("m", "demo:1", Drift(1000, 900.0, 0.1, 0.1, 0.1, 0.01), ())
    labels_of = dict.fromkeys(PROCESS, SCRAPED)  # which prometheus_client has on Linux only
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels_of[name] = SCRAPED.union(*(sample.labels for sample in family.samples))
    return labels_of


# --- the files by themselves ---


def test_a_cure_names_flags_that_serve_has() -> None:
    for path in (*RULES, *(ROOT / "deploy/grafana/dashboards").glob("*.json")):
        assert set(re.findall(r"(?<!-)--[a-z][a-z-]+", path.read_text())) <= set(
            p.flags()["serve"]
        ), path


def test_an_alert_is_tested_and_leads_to_its_runbook_and_to_a_panel_of_what_it_reads() -> None:
    """MyST and GitHub make the anchor of a heading from its lower-case letters; tests/docs builds
    the page."""
    tests = yaml.safe_load((OURS / "rules" / "tests" / "alerts.yml").read_text())["tests"]
    fired = str(
        [
            row["labels"]
            for test in tests
            for item in test["promql_expr_test"]
            for row in item["exp_samples"]
        ]
    )
    headings = set(re.findall(r"^## (HalluTracer\w+)$", RUNBOOKS, re.MULTILINE))
    made_of = {rule["record"]: names(rule["expr"]) for rule in rules("record")}
    boards = {board["uid"]: board for board in BOARDS.values()}

    def read(expression: str) -> set[str]:
        return names(expression).union(*(made_of.get(name, set()) for name in names(expression)))

    assert headings == {rule["alert"] for rule in rules("alert")}
    for rule in rules("alert"):
        name, notes = rule["alert"], rule["annotations"]
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert {"summary", "description"} <= set(notes)
        assert f'alertname="{name}"' in fired
        assert notes["runbook_url"] == f"docs/runbooks.md#{name.lower()}"
        panel_at = re.fullmatch(r"/d/([\w-]+)\?viewPanel=(\d+)", notes["dashboard_url"])
        assert panel_at, name
        [panel] = [item for item in panels(boards[panel_at[1]]) if item["id"] == int(panel_at[2])]
        shown = set().union(*(read(target["expr"]) for target in panel["targets"]))
        assert shown & (
            {"hallutracer_ready"} if name == "HalluTracerDown" else read(rule["expr"])
        ), (name, panel)


def test_no_rule_and_no_share_on_a_dashboard_mixes_services() -> None:
    """One of many that fails whole must not vanish in the average of all."""
    shares = [
        query.expression
        for query in QUERIES
        if " / " in query.expression or "histogram_quantile" in query.expression
    ]
    for expression in [rule["expr"] for rule in rules("expr")] + shares:
        labels = [
            by
            for by in re.findall(r"\b(?:by|on) \((.*?)\)", expression)
            if not by.startswith("job, namespace")
        ]
        assert labels == [], expression
        aggregations = re.findall(
            r"\b(?:sum|min|max|count|avg)\b(?! by \(job, namespace)", expression
        )
        assert aggregations == [], expression


def test_every_cause_of_a_void_guarantee_has_a_text_and_a_cure() -> None:
    [rule] = [rule for rule in rules("alert") if rule["alert"] == "HalluTracerPromiseVoid"]
    named = re.findall(r'eq \$labels\.cause\s+"(\w+)"', rule["annotations"]["description"])
    assert [*named, "golden"] == list(CAUSES)  # the last is the template's else
    runbook = RUNBOOKS.split("## HalluTracerPromiseVoid")[1].split("\n## ")[0]
    assert [cause for cause in CAUSES if f"- `{cause}`" not in runbook] == []


def test_expressions_read_metrics_and_labels_that_exist_and_every_metric_is_on_a_panel() -> None:
    known = ours() | {rule["record"]: grouping(rule["expr"]) for rule in rules("record")}
    for expression in [rule["expr"] for rule in rules("expr")] + [
        query.expression for query in QUERIES
    ]:
        used = re.findall(rf"({NAME.pattern})(?:{{(.*?)}})?", expression)
        for name, braces in used:
            (metric,) = names(name)
            assert set(re.findall(r"(\w+)\s*[!=]", braces)) <= known[metric], expression
            assert grouping(expression) <= known[metric] | {"le"}, expression
        assert used or "up{" in expression, expression
    assert [query for query in QUERIES if not names(query.expression)] == []
    assert set(ours()) - set().union(*(names(query.expression) for query in QUERIES)) == set()


def squares(panel: Any) -> Iterator[tuple[int, int]]:
    """What it takes of the grid."""
    at = panel["gridPos"]
    for x in range(at["w"]):
        for y in range(at["h"]):
            yield at["x"] + x, at["y"] + y


@BOARD
def test_a_dashboard_is_well_formed(name: str) -> None:
    """Panels fill the grid without overlap, those that are seen at once and those of each row once
    it is opened."""
    board = BOARDS[name]
    every_panel = list(panels(board))
    assert board["schemaVersion"] >= 39
    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", board["uid"])
    assert (
        len({panel["id"] for panel in every_panel})
        == len({panel["title"] for panel in every_panel})
        == len(every_panel)
    )
    assert {
        item["type"] for item in board["templating"]["list"] if item["name"] == "datasource"
    } == {"datasource"}
    for panel in (panel for panel in every_panel if panel["type"] != "row"):
        assert panel["description"]
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert {source["uid"] for source in sources} == {"${datasource}"}
        options = panel["options"].get("yAxis", {}) | panel["fieldConfig"]["defaults"]
        assert "unit" in options or panel["type"] in {"table", "heatmap"}, panel["title"]
    for group in (
        board["panels"],
        *(panel["panels"] for panel in board["panels"] if panel.get("panels")),
    ):
        taken = [square for panel in group for square in squares(panel)]
        rows = {y for _, y in taken}
        assert sorted(taken) == [(x, y) for x in range(24) for y in range(min(rows), max(rows) + 1)]


@BOARD
def test_a_dropdown_holds_for_every_panel_and_no_expression_fixes_a_job(name: str) -> None:
    offered = {
        item["name"] for item in BOARDS[name]["templating"]["list"] if item["type"] == "query"
    }
    assert offered == SCRAPED | ({"model_name", "bundle"} if name == "risk" else set())
    for query in (query for query in QUERIES if query.dashboard == name):
        used = {
            item
            for pair in re.findall(r"\$(?:\{(\w+)\}|(\w+))", query.expression)
            for item in pair
            if item
        }
        assert {name for name in used if not name.startswith("__")} == offered, query.panel
        assert not re.search(r'\bjob\s*=\s*"', query.expression), query.panel


def test_dashboards_link_to_each_other() -> None:
    uids = {board["uid"] for board in BOARDS.values()}
    assert len(uids) == len(BOARDS) == 3
    for board in BOARDS.values():
        assert {link["url"].removeprefix("/d/") for link in board["links"]} == uids - {board["uid"]}


def test_the_configurations_agree_with_rules_and_datasource() -> None:
    for name in ("prometheus.yml", "kubernetes.yml"):
        jobs = {job["job_name"] for job in configured(name)["scrape_configs"]}
        assert {
            job for rule in rules("expr") for job in re.findall(r'job="(\w+)"', rule["expr"])
        } == jobs
        assert {
            path for pattern in configured(name)["rule_files"] for path in OURS.glob(pattern)
        } == set(RULES)
    (source,) = p.documents(ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml")[0][
        "datasources"
    ]
    assert (
        source["jsonData"]["timeInterval"]
        == configured("prometheus.yml")["global"]["scrape_interval"]
    )


def test_the_error_share_counts_every_code_that_is_ours() -> None:
    """A code that is new, in service/errors.py or elsewhere, must be sorted into the rule or left
    out of it here."""
    [rule] = [
        rule
        for rule in rules("record")
        if rule["record"] == "hallutracer:server_errors:ratio_rate5m"
    ]
    [listed] = re.findall(r'hallutracer_errors_total\{code=~"([a-z_|]+)"\}', rule["expr"])
    assert listed.split("|") == sorted(code for code, status in STATUS_OF.items() if status >= 500)


# --- everything together ---


def test_a_real_prometheus_scrapes_a_real_service_and_reads_every_rule_and_panel(
    tmp_path: Path,
) -> None:
    binary("prometheus")
    with service_running(tmp_path / "store", names=["tiny"], policy="observe") as service:
        config = configuration(tmp_path / "prometheus", service.url.removeprefix("http://"))
        with running(config, tmp_path / "tsdb") as prometheus:
            assert service.post(prompt=["a", "b"], threshold=0.0).json()["data"][0]["flagged"]
            counted = "sum(hallutracer_prompts_total{bundle='tiny:1'})"
            until(lambda: prometheus.query(counted, time.time()) == {"{}": 2.0})
            assert list(prometheus.query('up{job="hallutracer"}', time.time()).values()) == [1.0]
            loaded = prometheus.get("rules")["groups"]
            rule_of = {rule["name"]: rule for group in loaded for rule in group["rules"]}
            assert rule_of.keys() == {rule.get("record") or rule["alert"] for rule in rules("expr")}
            assert {
                name: rule.get("lastError")
                for name, rule in rule_of.items()
                if rule.get("lastError")
            } == {}
            values = {
                "__rate_interval": "4s",
                "__interval": "1s",
                "__range": "6s",
                "job": "hallutracer",
            }
            for query in QUERIES:
                filled = re.sub(
                    r"\$(?:\{(\w+)\}|(\w+))",
                    lambda f: values.get(f[1] or f[2], ".*"),
                    query.expression,
                )
                prometheus.query(filled, time.time())  # which fails for what Prometheus cannot read


# --- deploy/prometheus/kubernetes.yml: its relabelling, run by promtool on the pods that the chart
# makes ---

META = "__meta_kubernetes_pod_"
NAMESPACE = "hallutracer"


def targets(pod: p.Document, phase: str = "Running") -> list[dict[str, Any]]:
    """What pod discovery lists: one target per container port, one for a container without
    ports."""
    labels = {
        f"{META}label_{re.sub(r'[^a-zA-Z0-9]', '_', key)}": v
        for key, v in pod["metadata"]["labels"].items()
    }
    labels |= {
        f"{META}name": "the-pod",
        f"{META}phase": phase,
        "__meta_kubernetes_namespace": NAMESPACE,
    }
    listed = []
    for container in p.containers(pod):
        for port in container.get("ports", [{}]):
            address = f"10.0.0.7:{port['containerPort']}" if port else "10.0.0.7"
            named = {f"{META}container_port_name": port["name"]} if port else {}
            listed.append({"targets": [address], "labels": labels | named})
    return listed


def scraped(folder: Path, discovered: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The labels of the targets that our file leaves, the discovery replaced by what it would find.

    Distributions build Prometheus without it; what Prometheus keeps to itself is left out."""
    shutil.copytree(OURS / "rules", folder / "rules")
    loaded = configured("kubernetes.yml")
    [job] = loaded["scrape_configs"]
    [discovery] = job.pop("kubernetes_sd_configs")
    assert discovery == {"role": "pod", "namespaces": {"names": [NAMESPACE]}}
    job["static_configs"] = discovered
    path = folder / "kubernetes.yml"
    path.write_text(yaml.safe_dump(loaded))
    done = promtool("check", "service-discovery", "--timeout=2s", path, "hallutracer")
    assert done.returncode == 0, done.stderr
    left = [target["labels"] for target in json.loads(done.stdout) if target["labels"]]
    assert all(labels["__metrics_path__"] == "/metrics" for labels in left)
    return list(map(without_internal, left))


def without_internal(labels: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in labels.items() if not name.startswith("__")}


def test_the_service_is_scraped_once_under_the_name_that_the_alerts_look_for(
    tmp_path: Path,
) -> None:
    [pod] = p.pods(list(rendered()))
    expected = {
        "job": "hallutracer",
        "instance": "10.0.0.7:8765",
        "pod": "the-pod",
        "namespace": NAMESPACE,
    }
    assert scraped(tmp_path, targets(pod)) == [expected]
    assert not any(
        note.startswith("prometheus.io/") for note in pod["metadata"].get("annotations", {})
    )


def workload_of(manifest: Path) -> p.Document:
    kinds = ("Pod", "Deployment")
    [workload] = [item for item in p.documents(manifest) if item["kind"] in kinds]
    return workload


def test_no_other_pod_is_scraped_and_none_that_has_ended(tmp_path: Path) -> None:
    [service] = p.pods(list(rendered()))
    deployment, helper = map(workload_of, MANIFESTS)
    [rag] = p.pods([deployment])
    others = (
        targets(helper) + targets(rag) + targets(service, "Failed") + targets(service, "Succeeded")
    )
    assert len(others) >= 5
    assert scraped(tmp_path, others) == []
